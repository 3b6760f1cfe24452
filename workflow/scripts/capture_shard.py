"""Rule capture_shard: every n-th rank of a job."""

from pathlib import Path

from capture import Progress
from stage import job_of, logged

from crystalllm.capture import capture


def main(snakemake):
    options = snakemake.params.options
    with logged(snakemake.log[0]):
        capture(
            job_of(snakemake),
            Path(snakemake.output.piece),
            shard=(int(snakemake.wildcards.shard), options["shards"]),
            limit_s=options["limit_s"],
            parallel=snakemake.threads,
            progress=Progress(),
        )


main(snakemake)  # noqa: F821
