"""A rank of a real run that keeps account of its memory: `python -m … FOLDER`, by torch elastic.

gloo moves the data between the ranks; our records and the account are beside it. Leaves
FOLDER/memory-RANK.json, what `memory.finish` says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from crystalllm.bench.real_rank import settle
from crystalllm.config import Job
from crystalllm.run import Program, exit_code

SPEC = "accounted.json"


def main(folder: Path) -> int:
    spec = json.loads((folder / SPEC).read_text())
    rank = int(os.environ["RANK"])
    settle(spec["cores"][rank], folder / f"accounted-{rank}.log")

    from crystalllm import logical, memory

    logical.enter(Job(**spec["job"]).identity(rank), keep_records=True, carried=True)
    import torch  # noqa: F401  the world is there once it is imported

    memory.start(logical.world())
    code = exit_code(Program(command=tuple(spec["command"])))
    _, summary = memory.finish(logical.world(), epoch_ns=0)
    (folder / f"memory-{rank}.json").write_text(json.dumps(summary))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
