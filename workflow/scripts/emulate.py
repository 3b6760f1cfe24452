"""Rule emulate: ranks of interest run for real against the replay of all others."""

from pathlib import Path

from stage import job_of, logged

from crystalllm.emulate import emulate
from crystalllm.sandbox.show import show_summary
from crystalllm.study import stages


def main(snakemake):
    out = Path(snakemake.output.summary).parent
    what_if = snakemake.input.get("what_if")
    with logged(snakemake.log[0]):
        request = stages.emulate_request(
            snakemake.params.options,
            cluster=snakemake.params.cluster,
            nccl_tests=snakemake.params.nccl_tests,
            what_if=Path(what_if) if what_if else None,
        )
        found = emulate(
            job_of(snakemake),
            out,
            captured=out.parent,
            durations=Path(snakemake.input.profile),
            **request,
        )
        show_summary(found, out)


main(snakemake)  # noqa: F821
