"""Rule capture: ranks of a job run one after another, or pieces of that are joined."""

import time
from pathlib import Path

from stage import job_of, logged, say

from crystalllm.capture import capture, merge


def main(snakemake):
    job, options = job_of(snakemake), snakemake.params.options
    out = Path(snakemake.output.structure).parent
    with logged(snakemake.log[0]):
        if snakemake.input.get("pieces"):
            merge(job, [Path(piece) for piece in snakemake.input.pieces], out)
            return
        capture(
            job,
            out,
            strategy=options["strategy"],
            num_checks=options["checks"],
            limit_s=options["limit_s"],
            parallel=snakemake.threads,
            progress=Progress(),
        )


class Progress:
    """Says how far it is, every few seconds."""

    def __init__(self):
        self._said_at = 0.0

    def __call__(self, done, total):
        if done == total or time.monotonic() > self._said_at + 5:
            say(f"captured {done} of {total} ranks")
            self._said_at = time.monotonic()


if __name__ == "__main__":
    main(snakemake)  # noqa: F821
