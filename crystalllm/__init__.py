"""Study a distributed training job at its intended logical scale on a few devices."""

from __future__ import annotations

__version__ = "0.1.0"


def step() -> None:
    """Marks the beginning of an iteration, for programs whose optimizer steps don't.

    Does nothing outside of `python -m crystalllm run`, so that a program may
    keep the call when it runs on the cluster.
    """
    from crystalllm import marks

    marks.mark(by_hand=True)
