# Reads: results/<job>/capture, its cluster. Writes: results/<job>/planning. Needs a GPU: no (cpu).

# Its content decides whether a capture is another one; the tables beside it hold times as well,
# which are never the same.
STRUCTURE = f"{RESULTS}/{{job}}/capture/structure.json"


checkpoint plan:
    """Which ranks will run together. Planning waits to see whether this has changed."""
    input:
        structure=STRUCTURE,
    output:
        plan=f"{RESULTS}/{{job}}/plan/plan.json",
    log:
        f"{RESULTS}/{{job}}/logs/plan.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/plan.tsv"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=10,
    params:
        job=job,
        cluster=cluster,
        options=options("planning"),
        library=sources.library_digest("planning"),
    message:
        "Choosing what to measure of {wildcards.job}"
    script:
        "../scripts/plan.py"


rule planning_share:
    """A part of the slices of one pass, where passes are spread over several runs."""
    input:
        plan=plan_of,
        before=shares_before,
    output:
        share=temp(touch(f"{RESULTS}/{{job}}/shares/{{number}}-{{share}}")),
    log:
        f"{RESULTS}/{{job}}/logs/planning-{{number}}-{{share}}.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/planning-{{number}}-{{share}}.tsv"
    threads: ALONE
    resources:
        mem_mb=8000,
        runtime=minutes("planning"),
    params:
        job=job,
        cluster=cluster,
        options=options("planning"),
        library=sources.library_digest("planning"),
    message:
        "Measuring share {wildcards.share} of pass {wildcards.number} of {wildcards.job}"
    script:
        "../scripts/planning_share.py"


rule planning:
    """Measures what ranks of every role take, in slices that run for real."""
    input:
        plan=plan_of,
        shares=planning_shares,
    output:
        summary=f"{RESULTS}/{{job}}/planning/planning.json",
        plan=f"{RESULTS}/{{job}}/planning/plan.json",
        profile=f"{RESULTS}/{{job}}/planning/profile.parquet",
        slices=f"{RESULTS}/{{job}}/planning/slices.parquet",
    log:
        f"{RESULTS}/{{job}}/logs/planning.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/planning.tsv"
    threads: ALONE
    resources:
        mem_mb=8000,
        runtime=minutes("planning"),
    params:
        job=job,
        cluster=cluster,
        options=options("planning"),
        keep=STUDY.keep_measurements,
        library=sources.library_digest("planning"),
    message:
        "Measuring {wildcards.job}: ranks of every role run, the others are replayed"
    script:
        "../scripts/planning.py"
