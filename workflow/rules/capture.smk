# Reads: the job, its program. Writes: results/<job>/capture. Needs a GPU: no (device: cpu).


rule capture:
    """Runs ranks of a job one after another, and keeps what they communicate."""
    input:
        native=rules.build.output.native,
        program=program,
        pieces=branch(is_sharded, then=shards, otherwise=[]),
    output:
        structure=f"{RESULTS}/{{job}}/capture/structure.json",
        calls=f"{RESULTS}/{{job}}/capture/calls.parquet",
        call_times=f"{RESULTS}/{{job}}/capture/call_times.parquet",
        events=f"{RESULTS}/{{job}}/capture/events.parquet",
        event_times=f"{RESULTS}/{{job}}/capture/event_times.parquet",
        ranks=f"{RESULTS}/{{job}}/capture/ranks.parquet",
        groups=f"{RESULTS}/{{job}}/capture/groups.parquet",
        splits=f"{RESULTS}/{{job}}/capture/splits.parquet",
        payloads=f"{RESULTS}/{{job}}/capture/payloads.parquet",
        nodes=f"{RESULTS}/{{job}}/capture/nodes.parquet",
        edges=f"{RESULTS}/{{job}}/capture/edges.parquet",
    log:
        f"{RESULTS}/{{job}}/logs/capture.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/capture.tsv"
    threads: ALONE
    resources:
        mem_mb=8000,
        runtime=minutes("capture"),
    params:
        job=job,
        options=options("capture"),
        library=sources.library_digest("capture"),
    message:
        "Capturing {wildcards.job}"
    script:
        "../scripts/capture.py"


rule capture_shard:
    """A part of the ranks of a job, where its capture is spread over several runs."""
    input:
        native=rules.build.output.native,
        program=program,
    output:
        piece=temp(directory(f"{RESULTS}/{{job}}/shards/{{shard}}")),
    log:
        f"{RESULTS}/{{job}}/logs/capture-{{shard}}.log",
    benchmark:
        f"{RESULTS}/{{job}}/benchmarks/capture-{{shard}}.tsv"
    threads: ALONE
    resources:
        mem_mb=8000,
        runtime=minutes("capture"),
    params:
        job=job,
        options=options("capture"),
        library=sources.library_digest("capture"),
    message:
        "Capturing shard {wildcards.shard} of {wildcards.job}"
    script:
        "../scripts/capture_shard.py"
