"""Rules report_<job>: pictures and tables of one emulation."""

from pathlib import Path

from stage import job_of, logged

from crystalllm.report import pages


def main(snakemake):
    with logged(snakemake.log[0]):
        case = pages.Case(
            Path(snakemake.input.summary).parent,
            Path(snakemake.input.structure).parent,
            job_of(snakemake),
        )
        pages.write(case, Path(snakemake.output.page).parent)


main(snakemake)  # noqa: F821
