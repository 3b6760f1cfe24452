"""Rules report_<job>: pictures and tables of one emulation."""

from pathlib import Path

from stage import logged

from crystalllm.config import load_cluster
from crystalllm.report import pages


def main(snakemake):
    name = snakemake.params.cluster
    with logged(snakemake.log[0]):
        case = pages.Case(
            Path(snakemake.input.summary).parent, Path(snakemake.input.structure).parent
        )
        cluster = load_cluster(name) if name is not None else None
        pages.write(case, Path(snakemake.output.page).parent, cluster=cluster)


main(snakemake)  # noqa: F821
