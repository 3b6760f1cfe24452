"""Rules reproduce_<name>: one measurement, as `python -m crystalllm bench NAME` makes it."""

import importlib
import json
from pathlib import Path

from stage import logged

from crystalllm import artifacts


def main(snakemake):
    with logged(snakemake.log[0]):
        importlib.import_module(f"crystalllm.bench.{snakemake.params.bench}").main()
    # The last line is the result.
    last = Path(snakemake.log[0]).read_text().strip().splitlines()[-1]
    text = json.dumps(json.loads(last), indent=2) + "\n"
    artifacts.write_atomically(Path(snakemake.output.found), text.encode())


main(snakemake)  # noqa: F821
