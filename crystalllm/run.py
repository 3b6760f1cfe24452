"""`run`: an unmodified program as one rank of a logical world, in this process.

Standard output, standard error and exit code are the program's. What we have
to say goes into files, and one line to a terminal.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import io
import json
import os
import runpy
import sys
import tempfile
import threading
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType
from typing import Any

from crystalllm import __version__, logical, table, tables
from crystalllm.ending import INTERRUPTED, Ending
from crystalllm.errors import UserError
from crystalllm.identity import Identity
from crystalllm.payload import PayloadBook
from crystalllm.records import call_columns


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run.

    Args:
        command: Script and its arguments, or "-m", module and its arguments.
    """

    command: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.command or self.command == ("-m",):
            raise UserError(
                "There is no program to run",
                where="Nothing after --",
                do="Append -- train.py and its arguments, or -- -m module and its arguments",
            )
        if not self.is_module and not Path(self.command[0]).exists():
            raise UserError(
                f"The program {self.command[0]} does not exist",
                where=f"Folder {os.getcwd()}",
                do="Pass a path that exists from there, or -m and a module's name",
            )

    @property
    def is_module(self) -> bool:
        return self.command[0] == "-m"

    def sources(self) -> list[Path]:
        """The files of the program itself: the script's folder or the module's package."""
        if self.is_module:
            spec = self._module_spec()
            if spec is None or spec.origin is None:
                return []
            if spec.submodule_search_locations:
                folder = Path(next(iter(spec.submodule_search_locations)))
                return sorted(folder.rglob("*.py"))
            return [Path(spec.origin)]
        return sorted(Path(self.command[0]).resolve().parent.glob("*.py"))

    def _module_spec(self) -> ModuleSpec | None:
        """Found as python -m finds it, from this folder first."""
        before = list(sys.path)
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.util.find_spec(self.command[1])
        except ModuleNotFoundError:
            return None
        finally:
            sys.path[:] = before

    def digest(self) -> str:
        """Of the contents of its files."""
        digest = hashlib.sha256()
        for path in self.sources():
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def execute(self) -> None:
        """Runs it as `__main__`; ends as it ends, by return, exit or exception.

        The module stays `__main__` afterwards, for threads and atexit handlers
        that pickle what it defines.
        """
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = main
        if self.is_module:
            name, *arguments = self.command[1:]
            sys.argv = [name, *arguments]
            sys.path[0] = os.getcwd()
            # What python -m does itself: the public run_module takes __main__ away
            # when it returns.
            runpy._run_module_as_main(name)
        else:
            path, *_ = self.command
            sys.argv = list(self.command)
            sys.path[0] = str(Path(path).resolve().parent)
            main.__file__ = path
            with io.open_code(os.path.abspath(path)) as source:
                code = compile(source.read(), path, "exec")
            exec(code, main.__dict__)


def run(
    program: Program,
    identity: Identity,
    *,
    book: PayloadBook | Path | None = None,
    extra_periods: int = 0,
    strict: bool = False,
    record: Path | None = None,
    summary: Path | None = None,
    transfer_ns: int = 0,
    logical_local_rank: bool = False,
) -> int:
    """Runs `program` as rank `identity.rank`.

    Args:
        program: What to run.
        identity: Which rank to be.
        book: Payload book; without one, control values are mirrored.
        extra_periods: As in `logical.enter`.
        strict: Refuse control values that the book does not have.
        record: Where to write the calls (a `calls` table; times beside it).
        summary: Where to write what happened, as JSON.
        transfer_ns: Every communication call takes so long.
        logical_local_rank: Leave LOCAL_RANK as it is on the cluster (see `logical.enter`).

    Returns:
        The program's exit code.
    """
    for path in (record, summary):
        if path is not None:
            _check_writable(path)
    if record is not None:
        table.prepare()
    ending = Ending(lambda code: _write(program, identity, record, summary, code))
    os.environ.update(identity.variables())
    logical.enter(
        identity,
        book=book,
        extra_periods=extra_periods,
        strict=strict,
        keep_records=record is not None,
        transfer_ns=transfer_ns,
        logical_local_rank=logical_local_rank,
    )
    ending.code = exit_code(program)
    join_threads()
    return ending.code


def join_threads() -> None:
    """Waits for the program's threads, as the interpreter does before it calls atexit handlers."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()


def _write(
    program: Program,
    identity: Identity,
    record: Path | None,
    summary: Path | None,
    code: int | None,
) -> None:
    world = logical.world()
    if record is not None:
        write_records(record, world, program, identity)
    outcome = summarize(world, program, identity, code)
    if summary is not None:
        summary.write_text(json.dumps(outcome, indent=2) + "\n")
    if outcome["num_invented"] and sys.stderr.isatty():
        print(
            f"crystalllm: unverified: {outcome['num_invented']} control values of virtual "
            "ranks were invented (--summary FILE lists them)",
            file=sys.stderr,
        )


def _check_writable(path: Path) -> None:
    """Refuses a file that could not be written, before the program runs for hours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(
            "A result could not be written",
            where=f"File {path}: {error.strerror or error}",
            do="Pass another path",
        ) from error


def exit_code(program: Program) -> int:
    """Runs the program; what it raises is shown as if it had been started by itself."""
    try:
        program.execute()
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # As if the program had been started by itself: without our frames.
        error.__traceback__ = _without_ours(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    first = tb
    while first is not None and first.tb_frame.f_code.co_filename in ours:
        first = first.tb_next
    return first if first is not None else tb


def write_records(path: Path, world: Any, program: Program, identity: Identity) -> None:
    """Writes the calls so far to `path` and their times to `<stem>.times.parquet`."""
    records = world.take_records() if world is not None else {}
    groups = world.groups if world is not None else []
    columns = call_columns(records, groups, identity.rank)
    provenance = provenance_of(world, program, identity)
    tables.CALLS.write(path, columns, provenance=provenance)
    tables.CALL_TIMES.write(times_path(path), columns, provenance=provenance)


def times_path(path: Path) -> Path:
    """Where the times of the calls in `path` lie."""
    return path.with_name(f"{path.stem}.times{path.suffix}")


def provenance_of(world: Any, program: Program, identity: Identity) -> dict[str, Any]:
    """What the calls depend on; nothing of this host or this moment."""
    torch = sys.modules.get("torch")
    return {
        "crystalllm": __version__,
        "torch": str(torch.__version__) if torch is not None else None,
        "program": list(program.command),
        "rank": identity.rank,
        "world_size": identity.world_size,
        "ranks_per_node": identity.ranks_per_node,
        "seed": identity.seed,
        "unverified": bool(world is not None and world.num_invented),
    }


def summarize(world: Any, program: Program, identity: Identity, code: int | None) -> dict[str, Any]:
    """What happened, ready for JSON."""
    invented = world.inventions if world is not None else []
    return {
        **provenance_of(world, program, identity),
        "exit_code": code,
        "num_calls": world.num_calls if world is not None else 0,
        "num_groups": len(world.groups) if world is not None else 0,
        "num_invented": world.num_invented if world is not None else 0,
        "invented": [{"call": c, "key": k, "how": h} for c, k, h in invented],
    }
