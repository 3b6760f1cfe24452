# Reads: the sources below nccl/. Writes: build/, and a list of what was built. Needs a GPU: no.


rule build:
    """Compiles the native extension and the replay engine, unless they are there."""
    output:
        native=f"{RESULTS}/.build/native.json",
    log:
        f"{RESULTS}/.build/native.log",
    benchmark:
        f"{RESULTS}/.build/native.tsv"
    threads: ALONE
    resources:
        mem_mb=4000,
        runtime=30,
    params:
        sources=sources.native_digest(),
    message:
        "Building the native extension (a minute or two the first time)"
    script:
        "../scripts/build.py"
