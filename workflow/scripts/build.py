"""Rule build: the native extension and the replay engine's library."""

import json
from pathlib import Path

from stage import logged

from crystalllm import artifacts, native


def main(snakemake):
    with logged(snakemake.log[0]):
        built = {
            "extension": str(native.build(echo=True)),
            "replay": str(native.replay_library(echo=True)),
        }
        text = json.dumps(built, indent=2) + "\n"
        artifacts.write_atomically(Path(snakemake.output.native), text.encode())


main(snakemake)  # noqa: F821
