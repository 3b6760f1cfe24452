"""Rule planning_share: every n-th slice of one pass."""

from pathlib import Path

from stage import job_of, logged, say

from crystalllm import planning
from crystalllm.study import stages


def main(snakemake):
    job, options = job_of(snakemake), snakemake.params.options
    folder = Path(snakemake.output.share).parents[1]
    with logged(snakemake.log[0]):
        request = stages.planning_request(job, options, capture=folder / "capture")
        planning.run_share(
            job,
            folder / "planning",
            **request,
            number=int(snakemake.wildcards.number),
            share=(int(snakemake.wildcards.share), options["shards"]),
            say=say,
        )


main(snakemake)  # noqa: F821
