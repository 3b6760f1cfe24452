"""One file to send to a colleague, and back: tables and JSON of a job, scrubbed and checked.

A pack is a zip whose first entry, `manifest.json`, names every other one with
its size and digest, the versions that made it, what was scrubbed and what was
left out. Identical artifacts give identical bytes.

Only tables (`tables.ALL`) and JSON are packed: other files, such as logs, could
hold anything. Unpacked content is foreign: see `restricted`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from crystalllm import __version__, artifacts, tables
from crystalllm.errors import UserError
from crystalllm.sharing.restricted import MARKER
from crystalllm.sharing.scrub import Scrubber

FORMAT = "crystalllm-pack"
VERSION = 1
MANIFEST = "manifest.json"

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment of a zip
_PERMISSIONS = 0o100644 << 16
_UNIX = 3
_CHUNK = 1 << 20


def pack(folder: Path, out: Path, *, scrubber: Scrubber | None = None) -> dict[str, Any]:
    """Packs a job's artifacts into one file.

    Args:
        folder: `results/<job>`, or its capture folder.
        out: The file, which must not be there yet; it appears whole or not at all.
        scrubber: What to remove; this user's and this machine's by default.

    Returns:
        The manifest.

    Raises:
        UserError: No capture, damaged artifacts, or `out` exists.
    """
    artifacts.read_structure(artifacts.capture_folder(folder))
    refuse_existing(out)
    scrubber = scrubber or Scrubber()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        chosen, left_out = _choose(folder)
        sources = {
            name: _scrubbed(path, name, Path(work) / str(i), scrubber)
            for i, (name, path) in enumerate(sorted(chosen.items()))
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "crystalllm": __version__,
            "torch": _version_of("torch"),
            "python": platform.python_version(),
            "files": {
                name: {"sha256": artifacts.sha256(path), "bytes": path.stat().st_size}
                for name, path in sources.items()
            },
            "scrubbed": [
                {"where": where, "kind": kind, "count": count}
                for (where, kind), count in sorted(scrubber.found.items())
            ],
            "left_out": left_out,
        }
        partial = Path(work) / "pack"
        _write(partial, manifest, sources)
        refuse_existing(out)
        partial.rename(out)
    return manifest


def refuse_existing(path: Path) -> None:
    """Raises UserError if something is at `path`."""
    if os.path.lexists(path):
        raise UserError(
            "Something is there already, and is not overwritten",
            where=f"Path {path}",
            do="Delete it, or name another place with --out",
        )


def _choose(folder: Path) -> tuple[dict[str, Path], list[dict[str, str]]]:
    """Files to pack by their name in it, and those left out with the reason; no hidden ones."""
    chosen: dict[str, Path] = {}
    left_out = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(f for f in (*files, *folders) if not f.startswith(".")):
            path = Path(root) / file
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                reason = "a link"
            elif path.is_dir():
                continue
            elif not path.is_file():
                reason = "no file"
            elif file == MARKER:
                reason = "says that this came from outside"
            elif path.suffix == ".json" or (path.suffix == ".parquet" and tables.table_in(path)):
                chosen[name] = path
                continue
            else:
                reason = "neither a table of this version nor JSON"
            left_out.append({"file": name, "reason": reason})
    return chosen, left_out


def _scrubbed(path: Path, name: str, work: Path, scrubber: Scrubber) -> Path:
    """The file itself, or a copy below `work` without what should not leave."""
    if path.suffix == ".json":
        before = artifacts.read_json(path)
        after = scrubber.json(before, name)
        if after == before:
            return path
        work.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n")
        return work
    table = tables.table_in(path)
    assert table is not None, "chosen because it is one"
    before = table.provenance(path)
    after = scrubber.json(before, f"{name} (provenance)")
    if table is tables.PAYLOADS:
        content, changed = _without_secrets(table.read(path)[0], name, scrubber)
        if changed or after != before:
            table.write(work, content, provenance=after)
            return work
    elif after != before:
        table.write(work, table.read(path)[0], provenance=after)
        return work
    return path


def _without_secrets(book: Any, name: str, scrubber: Scrubber) -> tuple[Any, bool]:
    columns = {c.name: book[c.name] for c in tables.PAYLOADS.columns}
    rows = [book[c].to_pylist() for c in ("dtype", "group", "seq", "rank", "store_key", "value")]
    values = []
    for dtype, group, seq, rank, key, value in zip(*rows, strict=True):
        # Numbers of other types are no text, and are never unpickled.
        if dtype == "uint8" or key:
            place = f"store key {scrubber.text(key, name)}" if key else f"group {group}, seq {seq}"
            value = scrubber.payload(value, f"{name}, {place}, rank {rank}")
        values.append(value)
    return {**columns, "value": values}, values != rows[-1]


def _write(path: Path, manifest: dict[str, Any], sources: dict[str, Path]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        with archive.open(_entry(MANIFEST, zipfile.ZIP_DEFLATED), "w") as file:
            file.write(text.encode())
        for name, source in sources.items():
            # Tables are compressed already.
            how = zipfile.ZIP_STORED if name.endswith(".parquet") else zipfile.ZIP_DEFLATED
            large = source.stat().st_size >= zipfile.ZIP64_LIMIT // 2
            with (
                source.open("rb") as data,
                archive.open(_entry(name, how), "w", force_zip64=large) as file,
            ):
                shutil.copyfileobj(data, file, _CHUNK)


def _entry(name: str, how: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = how
    info.create_system = _UNIX
    info.external_attr = _PERMISSIONS
    return info


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
