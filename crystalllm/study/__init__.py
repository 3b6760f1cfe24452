"""Studies: the jobs and sweeps that somebody wants to see through all stages.

`config/config.yaml` says which; a sweep (`config/sweeps/NAME.yaml`) is one job with
some of its values varied. Whatever places the stages' runs on machines reads from here
what there is to run: this package starts nothing, and knows no workflow engine.
"""

from __future__ import annotations

from crystalllm.study.model import Study, Sweep, load_study, parse_study
from crystalllm.study.points import Case, Infeasible, cases

__all__ = ["Case", "Infeasible", "Study", "Sweep", "cases", "load_study", "parse_study"]
