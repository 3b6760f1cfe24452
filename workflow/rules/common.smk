# Which cases there are, and what their rules ask about them. Reads config/, starts nothing.
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

from snakemake.exceptions import WorkflowError

from crystalllm import study
from crystalllm.arguments import BENCHES
from crystalllm.config import ABOUT
from crystalllm.errors import UserError
from crystalllm.report import OVERVIEW as OF_ALL
from crystalllm.report import PICTURES, QUESTIONS
from crystalllm.run import Program
from crystalllm.study import outlook, sources
from crystalllm.study.model import CONFIG, Study

try:
    STUDY = study.parse_study(config, CONFIG)
    CASES, INFEASIBLE = study.cases(STUDY)
    for _case in CASES:
        Program(command=_case.job.command())  # is there
    OUTLOOK = outlook.outlook(CASES, STUDY.results)
    outlook.check(OUTLOOK, STUDY.results)
except UserError as error:
    raise WorkflowError(str(error)) from None

RESULTS = str(STUDY.results)
STARTED = time.time()
OVERVIEW = f"{RESULTS}/report"
# Their names say which cases they are of: where a checkpoint is to come, Snakemake compares
# neither times nor names nor parameters of inputs, and only an output that is missing counts.
_ASKED_FOR = json.dumps([[case.folder, case.run] for case in CASES])
_DIGEST = hashlib.sha256(_ASKED_FOR.encode()).hexdigest()[:12]
TABLED = f"{RESULTS}/.build/table-{_DIGEST}"
ALL_RAN = f"{RESULTS}/.build/all-ran-{_DIGEST}"
OF_FOLDER = {case.folder: case for case in reversed(CASES)}
OF_RUN = {(case.folder, case.run): case for case in CASES}
FOLDERS = list(OF_FOLDER)
CLEAN = {folder: "clean_" + "_".join(Path(folder).parts) for folder in FOLDERS}
REPORT = {
    at: "report_" + "_".join([*Path(at[0]).parts, *at[1].split("_")[1:]])
    for at in OF_RUN
}
SEVERAL_NODES = [f for f in FOLDERS if OF_FOLDER[f].options.emulate.nodes > 1]
ONE_NODE = [f for f in FOLDERS if f not in SEVERAL_NODES]
# Times are measured there: they take the machine for themselves.
ALONE = workflow.cores or 1


def any_of(folders):
    """Pattern of a wildcard that is one of these."""
    return "|".join(map(re.escape, folders)) or "^$"


container: STUDY.container


wildcard_constraints:
    job=any_of(FOLDERS),
    run="emulate[^/]*",
    number=r"\d+",
    shard=r"\d+",
    share=r"\d+",


def program(wildcards):
    """The files of a job's program, with the modules that it imports from beside it."""
    command = OF_FOLDER[wildcards.job].job.command()
    return [
        os.path.relpath(path)
        for path in sources.program_files(Program(command=command))
    ]


def job(wildcards):
    """What decides what a job's ranks do; its cluster does not, nor what it is worth."""
    return OF_FOLDER[wildcards.job].job.model_dump(mode="json", exclude=set(ABOUT))


def about(case):
    """What a report says of a job besides."""
    return case.job.model_dump(mode="json", exclude={"cluster"})


def cluster(wildcards):
    """The cluster that a job is planned for."""
    return OF_FOLDER[wildcards.job].job.cluster


def options(stage):
    """How a stage runs, as configured."""

    def of_job(wildcards):
        return getattr(OF_FOLDER[wildcards.job].options, stage).model_dump(mode="json")

    return of_job


def plan_of(wildcards):
    """The job's plan, once it is known whether it is another one than before."""
    return checkpoints.plan.get(job=wildcards.job).output.plan


def summaries(wildcards):
    """Of all cases, once it is known which of them run again."""
    for folder in FOLDERS:
        checkpoints.plan.get(job=folder)
    return [f"{RESULTS}/{case.folder}/{case.run}/summary.json" for case in CASES]


def run_of(wildcards):
    """The case of one emulation."""
    return OF_RUN[wildcards.job, wildcards.run]


def shards(wildcards):
    """The pieces of a capture that is spread over several runs."""
    num = OF_FOLDER[wildcards.job].options.capture.shards
    return collect(
        rules.capture_shard.output.piece,
        job=wildcards.job,
        shard=range(num),
        allow_missing=True,
    )


def is_sharded(wildcards):
    return OF_FOLDER[wildcards.job].options.capture.shards > 1


def planning_shares(wildcards):
    """All shares of a planning that is spread over several runs: of all its passes."""
    num_passes = OF_FOLDER[wildcards.job].options.planning.passes
    return shares_of_pass(wildcards.job, num_passes)


def shares_before(wildcards):
    """Those that a share needs: of the pass before."""
    return shares_of_pass(wildcards.job, int(wildcards.number) - 1)


def shares_of_pass(folder, number):
    """Of one pass; none of pass 0, which are first estimates."""
    num = OF_FOLDER[folder].options.planning.shards
    if num == 1 or number == 0:
        return []
    return collect(
        rules.planning_share.output.share, job=folder, number=number, share=range(num)
    )


def of_emulation(key):
    """A value of `emulate` as configured, as a resource."""
    return lambda w: getattr(OF_FOLDER[w.job].options.emulate, key)


def minutes(stage):
    """How long a stage may take, by what it took before or an estimate: for a scheduler."""

    def of_job(wildcards, attempt):
        return attempt * outlook.minutes(OUTLOOK, wildcards.job, stage)

    return of_job


def pages(case):
    """Folder of a case's pictures."""
    return f"{RESULTS}/{case.folder}/report/{case.run}"


def shown(case, name):
    """A picture or table as Snakemake's report shows it."""
    kind = "svg" if name in PICTURES else "html"
    return report(
        f"{pages(case)}/{name}.{kind}",
        caption=os.path.abspath(f"{pages(case)}/{name}.rst"),
        category=f"{case.folder} ({case.run})",
        labels={"question": QUESTIONS[name]},
    )


def shown_of_all(kind):
    """The picture or table of all cases, likewise."""
    return report(
        f"{OVERVIEW}/overview.{kind}",
        caption=os.path.abspath(f"{OVERVIEW}/overview.rst"),
        category="All cases",
        labels={"question": OF_ALL, "as": {"svg": "picture", "html": "table"}[kind]},
    )


def print_results():
    """The table of results, at the end of a run that has made it."""
    path = Path(RESULTS) / "table.txt"
    if path.exists() and path.stat().st_mtime >= STARTED:
        print(path.read_text())


if workflow.is_main_process:
    # A marker that says otherwise goes: without it everything is looked at again.
    if not all(
        (STUDY.results / c.folder / c.run / "summary.json").exists() for c in CASES
    ):
        Path(TABLED).unlink(missing_ok=True)
        Path(ALL_RAN).unlink(missing_ok=True)
    print(outlook.text(OUTLOOK, INFEASIBLE), file=sys.stderr)


onstart:
    # Before anything runs; a dry run shows what would be submitted.
    if SEVERAL_NODES:
        raise WorkflowError(
            "An emulation over several nodes cannot run yet. "
            f"Key emulate: nodes of {', '.join(SEVERAL_NODES)}. "
            "Set it to 1, or look at what would be submitted with --dry-run."
        )
