"""Unpacks what a colleague sent: everything is checked before anything appears.

The file may come from anybody, so names, sizes, kinds and digests are checked
against the manifest, tables against this version, payloads by `restricted`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from crystalllm import artifacts, tables
from crystalllm.errors import UserError
from crystalllm.sharing import restricted
from crystalllm.sharing.pack import FORMAT, MANIFEST, VERSION, refuse_existing

DEFAULT_LIMIT_BYTES = 64 << 30
_MOST_FILES = 10_000
_MANIFEST_LIMIT_BYTES = 64 << 20
_CHUNK = 1 << 20
_SUFFIXES = (".json", ".parquet")
# Plain names only: no hidden files, drives, parents or separators of another system.
_NAME = re.compile(r"[A-Za-z0-9_][\w.+=\-]{0,200}(?:/[A-Za-z0-9_][\w.+=\-]{0,200}){0,16}", re.ASCII)
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    KeyError,
    OverflowError,
    MemoryError,
)


def unpack(
    file: Path, out: Path, *, trust: bool = False, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> dict[str, Any]:
    """Unpacks `file` into `out`, which appears whole or not at all.

    Args:
        file: From `pack`.
        out: A folder that must not be there yet.
        trust: Take payloads that could run code; the user has reviewed them.
        limit_bytes: Refuse more than this unpacked.

    Returns:
        The manifest.

    Raises:
        UserError: `out` exists, or the file is not what a pack of this version
            is, is damaged, too large, or holds payloads that could run code.
    """
    refuse_existing(out)
    with _damage(file):
        source = artifacts.sha256(file)
        with zipfile.ZipFile(file) as archive:
            manifest = _manifest(archive, file, limit_bytes)
            out.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
            try:
                folder = work / "content"
                for name, entry in manifest["files"].items():
                    _extract(archive, name, entry, folder / name, file)
                with _named(folder, file):
                    _check(folder, manifest["files"], trust, limit_bytes, file)
                for place in {(folder / name).parent for name in manifest["files"]} | {folder}:
                    restricted.mark_untrusted(place, source=source, trusted=trust)
                refuse_existing(out)
                folder.rename(out)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return manifest


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(
            "There is no such file", where=f"File {error.filename or file}", do="Check the path"
        ) from None
    except _DAMAGE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise _refuse(file, "is damaged or no zip", reason) from error


def _refuse(file: Path, what: str, where: str) -> UserError:
    return UserError(
        f"A pack {what}, and nothing of it was unpacked",
        where=f"File {file}: {where}",
        do="Ask the sender for the file again, made by: python -m crystalllm pack",
    )


def _manifest(archive: zipfile.ZipFile, file: Path, limit_bytes: int) -> dict[str, Any]:
    """The manifest, once it and the archive's own directory agree and are harmless."""
    infos = archive.infolist()
    _check_entries(infos, file)
    if not infos or infos[0].filename != MANIFEST:
        raise _refuse(file, "has no manifest", f"first entry is not {MANIFEST}")
    if infos[0].file_size > _MANIFEST_LIMIT_BYTES:
        raise _refuse(file, "has too large a manifest", f"{infos[0].file_size} bytes")
    with archive.open(infos[0]) as entry:
        text = entry.read(_MANIFEST_LIMIT_BYTES + 1)
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(file, "has a broken manifest", str(error).splitlines()[0]) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _refuse(file, "has a manifest of another kind", MANIFEST)
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise _refuse(file, "says no version", f"version {version!r}")
    if version > VERSION:
        raise UserError(
            "A pack is of a newer version than this program knows",
            where=f"File {file}: version {version}, known up to {VERSION}, made by crystalllm "
            f"{manifest.get('crystalllm')}",
            do="Install that version of crystalllm",
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(_is_entry(entry) for entry in files.values()):
        raise _refuse(file, "has a broken manifest", "key files")
    sizes = {info.filename: info.file_size for info in infos[1:]}
    if sizes != {name: entry["bytes"] for name, entry in files.items()}:
        differing = sorted(
            name
            for name in {*sizes, *files}
            if name not in sizes or name not in files or files[name]["bytes"] != sizes[name]
        )
        raise _refuse(file, "does not hold what its manifest says", ", ".join(differing[:5]))
    if sum(sizes.values()) > limit_bytes:
        raise UserError(
            "A pack would take more space than allowed",
            where=f"File {file}: {sum(sizes.values())} bytes unpacked, limit {limit_bytes}",
            do="If it is meant to be that large, raise the limit (--limit-gib)",
        )
    return manifest


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and isinstance(entry.get("sha256"), str)
    )


def _check_entries(infos: list[zipfile.ZipInfo], file: Path) -> None:
    if len(infos) > _MOST_FILES:
        raise _refuse(file, "holds too many files", f"{len(infos)}, limit {_MOST_FILES}")
    seen: set[str] = set()
    for info in infos:
        name = info.filename
        mode = info.external_attr >> 16
        if not _NAME.fullmatch(name) or not name.endswith(_SUFFIXES):
            raise _refuse(file, "holds a name that is not allowed", ascii(name))
        if Path(name).name == restricted.MARKER:
            raise _refuse(file, "vouches for itself", name)
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise _refuse(file, "holds something else than files", name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _refuse(file, "is compressed in an unknown way", name)
        # Some file systems take no notice of case.
        if name.casefold() in seen:
            raise _refuse(file, "holds a name twice", name)
        seen.add(name.casefold())
    for name in seen:
        if any(str(parent) in seen for parent in Path(name).parents):
            raise _refuse(file, "holds a name twice", f"{name} lies below a file")


def _extract(
    archive: zipfile.ZipFile, name: str, entry: dict[str, Any], target: Path, file: Path
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), entry["bytes"]
    with archive.open(name) as source, target.open("xb") as out:
        while chunk := source.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                break
            digest.update(chunk)
            out.write(chunk)
    if left != 0 or digest.hexdigest() != entry["sha256"]:
        raise _refuse(file, "is damaged", f"{name} is not what the manifest says")


@contextmanager
def _named(folder: Path, file: Path) -> Iterator[None]:
    """Names a file of `folder`, which will be gone, as one of the pack."""
    try:
        yield
    except UserError as error:
        where = error.where.replace(f"{folder}/", f"{file}, ").replace(str(folder), str(file))
        raise UserError(error.what, where=where, do=error.do) from error


def _check(folder: Path, names: dict[str, Any], trust: bool, limit_bytes: int, file: Path) -> None:
    for name in names:
        path = folder / name
        if path.suffix == ".json":
            artifacts.read_json(path)
            continue
        table = tables.table_in(path)
        if table is None:
            raise _refuse(file, "holds a table that this version does not know", name)
        table.provenance(path)
        size = _size_in_memory(path)
        if size > limit_bytes:
            raise _refuse(file, "holds a table that is too large", f"{name}: {size} bytes")
        if table is tables.PAYLOADS and not trust:
            restricted.check_table(path)
    artifacts.read_structure(artifacts.capture_folder(folder))


def _size_in_memory(path: Path) -> int:
    """Bytes that a table says to take, and at least eight per value."""
    about = pq.read_metadata(path)
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    declared = sum(group.total_byte_size for group in groups)
    return max(declared, 8 * about.num_rows * about.num_columns)
