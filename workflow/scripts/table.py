"""Rule table: what came of all cases."""

from pathlib import Path

from stage import logged

from crystalllm.config import Job
from crystalllm.study import table


def main(snakemake):
    done = Path(snakemake.output.done)
    with logged(snakemake.log[0]):
        # Those of other cases are of a table that this one replaces.
        for kind in ("table", "all-ran"):
            for marker in done.parent.glob(f"{kind}-*"):
                marker.unlink()
        found = table.table(
            [
                table.Row(*case, summary=Path(summary), job=Job.model_validate(job))
                for case, job, summary in zip(
                    snakemake.params.cases,
                    snakemake.params.jobs,
                    snakemake.input.summaries,
                    strict=True,
                )
            ]
        )
        table.write(
            found,
            snakemake.params.infeasible,
            tsv=Path(snakemake.output.table),
            text=Path(snakemake.output.text),
            infeasible_tsv=Path(snakemake.output.infeasible),
        )


main(snakemake)  # noqa: F821
