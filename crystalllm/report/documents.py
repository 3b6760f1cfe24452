"""Files that a report consists of: pictures, pages, captions."""

from __future__ import annotations

import html
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from crystalllm import artifacts

_STYLE = (
    "body{font-family:sans-serif;font-size:14px;margin:1em;max-width:70em}img{max-width:100%}"
    "table{border-collapse:collapse}"
    "td,th{padding:.3em .6em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
)
_PAGE = (
    "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    "<style>{style}</style></head><body>{body}</body></html>\n"
)
# What reStructuredText would read as markup.
_MARKUP = "\\*`|_"


def save_figure(figure: Figure, path: Path) -> None:
    """As SVG; equal pictures are equal files."""
    with matplotlib.rc_context({"svg.hashsalt": "crystalllm"}):
        figure.savefig(path, metadata={"Date": None})


def write_page(path: Path, title: str, body: str) -> None:
    """A page of HTML around its body."""
    page = _PAGE.format(title=html.escape(title), style=_STYLE, body=body)
    artifacts.write_atomically(path, page.encode())


def as_rst(text: str) -> str:
    """Without what reStructuredText would read as markup, on one line.

    Snakemake takes what is in braces for its own.
    """
    line = " ".join(text.replace("{", "(").replace("}", ")").split())
    return "".join(f"\\{c}" if c in _MARKUP else c for c in line) + "\n"
