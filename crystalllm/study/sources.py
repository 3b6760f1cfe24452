"""What results depend on besides configuration: the program's files, and those of this library.

Imports are followed without running anything, also those inside functions. What is loaded by a
name that is made at run time cannot be seen.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path

import crystalllm
from crystalllm import native
from crystalllm.arguments import BENCHES
from crystalllm.run import Program

_PACKAGE = Path(crystalllm.__file__).resolve().parent
_ROOT = _PACKAGE.parent
# Processes are started by the name of their module, which no import shows.
_ENTRIES = {
    "capture": ("crystalllm.capture",),
    "planning": ("crystalllm.planning", "crystalllm.sandbox.worker", "crystalllm.transfers"),
    "emulate": ("crystalllm.emulate", "crystalllm.sandbox.worker"),
    "table": ("crystalllm.study.table",),
    "report": ("crystalllm.report.pages", "crystalllm.report.overview"),
    **{f"bench {name}": (f"crystalllm.bench.{name}",) for name in BENCHES},
}
# Programs of their own that lie in the package: jobs depend on them as on any program.
_PROGRAMS = _PACKAGE / "examples"


def program_files(program: Program) -> list[Path]:
    """The files of a program: its own, and the modules that it imports from beside it.

    What is installed, and this library, is not among them.
    """
    own = [path.resolve() for path in program.sources()]
    if program.is_module:
        folders = [Path.cwd()]
        code = f"import {program.command[1]}\n"
    else:
        folders = [Path(program.command[0]).resolve().parent, Path.cwd()]
        code = Path(program.command[0]).read_text()
    imported = _imported(code, folders)
    return sorted({*own, *(p for p in imported if not _is_library(p))})


@cache
def library_digest(stage: str) -> str:
    """Digest of the modules that a stage uses, of the patches and of the native sources.

    Args:
        stage: capture, planning, emulate, table, report or bench and its name.
    """
    code = "".join(f"import {name}\n" for name in _ENTRIES[stage])
    files = {p for p in _imported(code, [_ROOT]) if _is_library(p)}
    patches = _ROOT / "patches"
    files |= set(patches.rglob("*.py"))
    digest = hashlib.sha256(native_digest().encode())
    for path in sorted(files):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def native_digest() -> str:
    """Digest of the native sources, those of the replay engine included."""
    digest = hashlib.sha256()
    for path in sorted(p for p in native.SOURCES.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(native.SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _is_library(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PROGRAMS)


def _imported(code: str, folders: Sequence[Path]) -> Iterable[Path]:
    """Files below these folders that code imports, directly or not."""
    finder = ModuleFinder(path=[str(folder) for folder in folders])
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        finder.run_script(file.name)
    environment = Path(sys.prefix).resolve()
    found = {
        Path(module.__file__).resolve()
        for name, module in finder.modules.items()
        if name != "__main__" and module.__file__
    }
    return {p for p in found if not p.is_relative_to(environment)}
