"""Rule planning: slices of a job run for real, and leave its runtime profile."""

import shutil
from pathlib import Path

from stage import job_of, logged, say

from crystalllm import planning
from crystalllm.planning.show import show_summary
from crystalllm.study import stages


def main(snakemake):
    job = job_of(snakemake)
    out = Path(snakemake.output.summary).parent
    with logged(snakemake.log[0]):
        request = stages.planning_request(
            job, snakemake.params.options, capture=out.parent / "capture", measure_in=out
        )
        show_summary(planning.planning(job, out, **request, say=say), out)
        if not snakemake.params.keep:
            shutil.rmtree(planning.work_folder(out))


main(snakemake)  # noqa: F821
