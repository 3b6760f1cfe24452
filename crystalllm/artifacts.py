"""Where a job's artifacts lie, and reading and writing those that are no tables."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from crystalllm.errors import UserError

STRUCTURE = "structure.json"
_REQUIRED: dict[str, type] = {
    "world_size": int,
    "program": list,
    "fingerprint": str,
    "period": int,
    "prologue_marks": int,
}


def capture_folder(path: Path) -> Path:
    """The capture folder of a job's folder, or `path` itself if it is one.

    Raises:
        UserError: Neither is there.
    """
    for folder in (path / "capture", path):
        if (folder / STRUCTURE).exists():
            return folder
    raise UserError(
        "There is no capture here",
        where=f"Folder {path}: neither {STRUCTURE} nor capture/{STRUCTURE}",
        do="Pass results/<job>, or run: python -m crystalllm capture --job <job>",
    )


def read_structure(folder: Path) -> dict[str, Any]:
    """What `structure.json` says; the keys of `_REQUIRED` are there.

    Raises:
        UserError: Missing, damaged, or of another version.
    """
    path = folder / STRUCTURE
    structure = read_json(path)
    wrong = [
        name
        for name, kind in _REQUIRED.items()
        if not isinstance(structure.get(name), kind)
        or isinstance(structure[name], bool)
        or (kind is int and structure[name] < 0)
    ]
    if not wrong and structure["world_size"] == 0:
        wrong = ["world_size"]
    if wrong:
        raise UserError(
            "The structure of a capture lacks what this version reads",
            where=f"File {path}, keys {', '.join(wrong)}",
            do="Capture again with this version",
        )
    return structure


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: Missing, no JSON, or no object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"There is no {path.name} here",
            where=f"File {path}",
            do="Check the path, or run the stage that writes it",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "A JSON file cannot be read",
            where=f"File {path}: {str(error).splitlines()[0]}",
            do="Write it again; it is truncated or damaged",
        ) from error
    if not isinstance(content, dict):
        raise UserError(
            "A JSON file holds no object",
            where=f"File {path}: {type(content).__name__}",
            do="Pass the right file, or write it again",
        )
    return content


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.rename(path)


def sha256(path: Path) -> str:
    """Digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
