# Reads: summaries of all runs. Writes: results/table.*, infeasible.tsv, report/ of each job and
# of all. Needs a GPU: no.


rule table:
    """What came of all cases, in one table."""
    input:
        # By name as well: a function that asks for plans stops at the first that is to come,
        # and a dry run would not show the others.
        plans=collect(rules.plan.output.plan, job=FOLDERS),
        summaries=summaries,
    output:
        table=f"{RESULTS}/table.tsv",
        text=f"{RESULTS}/table.txt",
        infeasible=f"{RESULTS}/infeasible.tsv",
        done=touch(TABLED),
    log:
        f"{RESULTS}/.build/table.log",
    localrule: True
    params:
        cases=[[case.folder, case.run, case.sweep, case.values] for case in CASES],
        jobs=[about(case) for case in CASES],
        infeasible=[[one.sweep, one.values, one.reason] for one in INFEASIBLE],
        library=sources.library_digest("table"),
    message:
        "Putting the results together"
    script:
        "../scripts/table.py"


rule verdict:
    """Fails if a run has ended in a way that is no result; the table is there all the same."""
    input:
        table=rules.table.output.table,
        tabled=rules.table.output.done,
    output:
        done=touch(ALL_RAN),
    log:
        f"{RESULTS}/.build/verdict.log",
    localrule: True
    message:
        "Looking whether all runs have a result"
    script:
        "../scripts/verdict.py"


# A rule for each case, since captions are files of their own, which say the case's numbers.
for _case in CASES:

    rule:
        name:
            REPORT[_case.folder, _case.run]
        input:
            summary=f"{RESULTS}/{_case.folder}/{_case.run}/summary.json",
            structure=f"{RESULTS}/{_case.folder}/capture/structure.json",
        output:
            page=f"{pages(_case)}/index.html",
            pictures=[shown(_case, name) for name in QUESTIONS],
            captions=[f"{pages(_case)}/{name}.rst" for name in QUESTIONS],
        log:
            f"{RESULTS}/{_case.folder}/logs/report-{_case.run}.log",
        localrule: True
        params:
            job=about(_case),
            cluster=_case.cluster or _case.job.cluster,
            library=sources.library_digest("report"),
        message:
            f"Drawing {_case.folder} ({_case.run})"
        script:
            "../scripts/report.py"


rule overview:
    """All cases side by side, and the front page of the report."""
    input:
        table=rules.table.output.table,
        tabled=rules.table.output.done,
    output:
        page=f"{OVERVIEW}/index.html",
        front=f"{OVERVIEW}/front.rst",
        caption=f"{OVERVIEW}/overview.rst",
        shown=[shown_of_all(kind) for kind in ("svg", "html")],
    log:
        f"{RESULTS}/.build/overview.log",
    localrule: True
    params:
        pages=[[f"{RESULTS}/{case.folder}/{case.run}", pages(case)] for case in CASES],
        library=sources.library_digest("report"),
    message:
        "Drawing all cases"
    script:
        "../scripts/overview.py"


onsuccess:
    print_results()


onerror:
    print_results()


for _folder in FOLDERS:

    rule:
        name:
            CLEAN[_folder]
        log:
            f"{RESULTS}/.build/clean.log",
        localrule: True
        params:
            folder=f"{RESULTS}/{_folder}",
            of_all=[TABLED, ALL_RAN],
        message:
            "Removing {params.folder}"
        shell:
            "rm -rfv {params.folder:q} {params.of_all:q} >{log:q}"
