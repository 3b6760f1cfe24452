# Reads: results/<job>/capture and planning. Writes: results/<job>/<run>. Needs a GPU: no (cpu).


rule emulate:
    """Runs the ranks of interest for real; outcomes are results, out of memory among them."""
    input:
        plan=plan_of,
        profile=rules.planning.output.profile,
        what_if=lambda w: run_of(w).what_if or [],
    output:
        summary=f"{RESULTS}/{{job}}/{{run}}/summary.json",
    log:
        f"{RESULTS}/{{job}}/logs/{{run}}.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/{{run}}.tsv"
    wildcard_constraints:
        job=any_of(ONE_NODE),
    threads: ALONE
    resources:
        mem_mb=8000,
        runtime=minutes("emulate"),
    params:
        job=job,
        cluster=lambda w: run_of(w).cluster,
        options=options("emulate"),
        nccl_tests=lambda w: options("planning")(w)["nccl_tests"],
        library=sources.library_digest("emulate"),
    message:
        "Emulating {wildcards.job} ({wildcards.run})"
    script:
        "../scripts/emulate.py"


# One job step over all nodes, in which a torchrun agent per node starts the ranks.
use rule emulate as emulate_on_nodes with:
    wildcard_constraints:
        job=any_of(SEVERAL_NODES),
    resources:
        mem_mb=8000,
        runtime=minutes("emulate"),
        mpi="srun",
        nodes=of_emulation("nodes"),
        tasks=of_emulation("nodes"),
        tasks_per_gpu=0,
        gres=of_emulation("gres"),
    message:
        "Emulating {wildcards.job} ({wildcards.run}) on {resources.nodes} nodes with {resources.gres}"
