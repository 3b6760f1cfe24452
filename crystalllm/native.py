"""Builds and loads the native extension (sources under `nccl/`).

The extension is compiled against the torch that is installed, so each
combination of sources, torch and Python has a build of its own. A build that
is missing is made at first use.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType

from crystalllm.errors import UserError

NAME = "crystalllm_native"
SOURCES = Path(__file__).resolve().parent.parent / "nccl"
REPLAY = SOURCES / "replay"
# Compiling takes about a minute on two cores; another process may be at it.
BUILD_LIMIT_S = 900


def loaded() -> ModuleType | None:
    """The extension, if this process has loaded it already."""
    return sys.modules.get(NAME)


def load() -> ModuleType:
    """The extension, built before if need be. Imports torch."""
    if module := loaded():
        return module
    import torch  # noqa: F401  the extension links against its libraries

    path = build()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module


def source_digest() -> str:
    """Digest of everything that goes into the extension besides torch and Python."""
    return _digest(p for p in SOURCES.rglob("*") if REPLAY not in p.parents or p.name == "replay.h")


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.suffix in {".cpp", ".h", ".cu"} or path.name == "Makefile":
            digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def target() -> Path:
    """Where the build for this interpreter and torch lies, or will lie."""
    stack = f"torch{metadata.version('torch')}-{sysconfig.get_config_var('SOABI')}"
    return build_root() / stack / f"{NAME}-{source_digest()}.so"


def build_root() -> Path:
    """`build/` of the checkout, or the user's cache where that cannot be written."""
    if given := os.environ.get("CRYSTALLLM_BUILD_DIR"):
        return Path(given)
    checkout = SOURCES.parent
    if os.access(checkout, os.W_OK):
        return checkout / "build" / "native"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "crystalllm" / "native"


def build(*, echo: bool = False) -> Path:
    """Builds the extension unless it is there. Returns the shared object.

    Args:
        echo: Show the compiler's commands.

    Raises:
        UserError: No compiler, or it failed; the log is named.
    """
    return _build(target(), "The native extension", _make_command, echo=echo)


def replay_library(*, echo: bool = False) -> Path:
    """The replay engine's library, built before if need be; it knows nothing of torch.

    Raises:
        UserError: As for `build`.
    """
    digest = _digest(p for p in REPLAY.rglob("*") if p.parent.name != "tests")
    name = f"libcrystal_replay-{digest}.so"
    path = build_root() / "replay" / name
    return _build(path, "The replay engine", _replay_command, echo=echo)


def _build(
    path: Path, what: str, command: Callable[[Path, Path], list[str]], *, echo: bool
) -> Path:
    if path.exists():
        return path
    for tool in ("make", os.environ.get("CXX", "g++")):
        if shutil.which(tool) is None:
            raise UserError(
                f"{what} cannot be built without {tool}",
                where=f"No {tool} on PATH",
                do="Install make and g++ (Debian: apt-get install build-essential)",
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent / "lock"):
        if path.exists():
            return path
        partial = path.with_suffix(f".{os.getpid()}.partial")
        log = path.parent / "build.log"
        with log.open("w") as out:
            try:
                done = subprocess.run(
                    command(partial, path.parent / "objects"),
                    stdout=None if echo else out,
                    stderr=None if echo else subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    timeout=BUILD_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                partial.unlink(missing_ok=True)
                raise UserError(
                    f"{what}: building took longer than {BUILD_LIMIT_S} s",
                    where=f"Log {log}",
                    do="Run python -m crystalllm build on an idle machine",
                ) from None
        if done.returncode != 0:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{what} did not compile",
                where=f"Exit code {done.returncode}, log {log}",
                do="Read the log; python -m crystalllm doctor says which compiler is used",
            )
        partial.rename(path)
    return path


def _replay_command(partial: Path, objects: Path) -> list[str]:
    return [
        "make",
        "--no-print-directory",
        f"-j{os.cpu_count() or 1}",
        "-C",
        str(REPLAY),
        f"TARGET={partial}",
        f"OBJECTS={objects}",
    ]


def _make_command(partial: Path, objects: Path) -> list[str]:
    torch_root = Path(_find_torch())
    include = torch_root / "include"
    includes = [include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    libraries = f"-L{torch_root / 'lib'} -ltorch_python -ltorch -ltorch_cpu -lc10"
    return [
        "make",
        "--no-print-directory",
        f"-j{os.cpu_count() or 1}",
        "-C",
        str(SOURCES),
        f"TARGET={partial}",
        f"OBJECTS={objects}",
        f"NAME={NAME}",
        "INCLUDES=" + " ".join(f"-isystem {path}" for path in includes),
        f"LIBRARIES={libraries}",
    ]


def _find_torch() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError(
            "torch is not installed",
            where=f"Python {sys.executable}",
            do="Install the locked requirements (make venv)",
        )
    return os.path.dirname(spec.origin)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel gives the lock back when its holder dies, so nothing goes stale.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
