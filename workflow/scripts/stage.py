"""What all scripts share: output goes to the rule's log and to the terminal; mistakes are told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from crystalllm.errors import UserError

_COPY_LIMIT_S = 10

# Snakemake sets them to the threads of the rule, all of the machine's. Each rank has a core to
# itself; how many threads it takes there is the library's business.
for _name in ("OMP", "OPENBLAS", "MKL", "GOTO", "NUMEXPR"):
    os.environ.pop(f"{_name}_NUM_THREADS", None)
os.environ.pop("VECLIB_MAXIMUM_THREADS", None)


@contextmanager
def logged(path: str) -> Iterator[None]:
    """Copies what this process and its children say into a log. A user's mistake ends it."""
    sys.stdout.flush()
    sys.stderr.flush()
    # In a session of its own: it has to outlive an interrupt to the others.
    copying = subprocess.Popen(
        ["tee", str(path)], stdin=subprocess.PIPE, stdout=2, start_new_session=True
    )
    assert copying.stdin is not None
    before = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(copying.stdin.fileno(), number)
    copying.stdin.close()
    try:
        yield
    except UserError as error:
        print(f"crystalllm: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("crystalllm: interrupted; what is finished is kept", file=sys.stderr)
        sys.exit(130)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)
        with suppress(subprocess.TimeoutExpired):  # a child that outlives us keeps it open
            copying.wait(_COPY_LIMIT_S)


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def job_of(snakemake: Any) -> Any:
    """The job of a rule."""
    from crystalllm.config import Job

    cluster = snakemake.params.get("cluster")
    return Job.model_validate({**snakemake.params.job, "cluster": cluster})
