"""Checkpoint plan: which ranks will run together, and for how long."""

from pathlib import Path

from stage import job_of, logged

from crystalllm import artifacts, planning
from crystalllm.planning.show import show_explanation
from crystalllm.study import stages


def main(snakemake):
    job = job_of(snakemake)
    capture = Path(snakemake.input.structure).parent
    plan = Path(snakemake.output.plan)
    with logged(snakemake.log[0]):
        request = stages.planning_request(job, snakemake.params.options, capture=capture)
        found = planning.explain(job, capture.parent / "planning", **request)
        show_explanation(found, as_json=False)
        # Nothing of it is a time: it stays the same when a capture is repeated.
        artifacts.write_atomically(plan, stages.plan_text(found).encode())


main(snakemake)  # noqa: F821
