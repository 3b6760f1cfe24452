# Reads: the library. Writes: results/reproduce/*.json, the numbers that README.md and docs/ quote
# (docs/reproduce.md says which are where). Needs a GPU: no.


# A rule for each measurement: one of them is what somebody wants to see again.
for _bench in BENCHES:

    rule:
        name:
            f"reproduce_{_bench}"
        input:
            # Compiled before anything is timed.
            built=rules.build.output.native,
        output:
            found=f"{RESULTS}/reproduce/{_bench}.json",
        log:
            f"{RESULTS}/reproduce/{_bench}.log",
        benchmark:
            f"{RESULTS}/reproduce/{_bench}.tsv"
        threads: ALONE
        resources:
            mem_mb=8000,
            runtime=120,
        params:
            bench=_bench,
            library=sources.library_digest(f"bench {_bench}"),
        message:
            f"Measuring again: bench {_bench}"
        script:
            "../scripts/reproduce.py"
