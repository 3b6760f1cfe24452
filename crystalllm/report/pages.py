"""Pictures and tables of one emulation, with captions that say its numbers."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from crystalllm import artifacts
from crystalllm.compare.anomalies import find
from crystalllm.config import Cluster
from crystalllm.errors import UserError
from crystalllm.report import PICTURES, QUESTIONS, captions, figures, frames
from crystalllm.report.frames import Case

_STYLE = (
    "body{font-family:sans-serif;font-size:14px;margin:1em}table{border-collapse:collapse}"
    "td,th{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
    "img{max-width:100%}body{max-width:70em}"
)
_PAGE = (
    "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
    "<style>{style}</style></head><body>{body}</body></html>\n"
)
# What reStructuredText would read as markup.
_MARKUP = "\\*`|_"


def write(case: Case, out: Path, *, cluster: Cluster | None = None) -> Path:
    """Writes a picture (SVG) or table (HTML) per question, and a page that shows all.

    Captions lie beside them as reStructuredText, for reports that others put together.

    A question that the run does not answer (it ended before, or kept no account) has a picture
    that says why.

    Args:
        case: The emulation.
        out: Folder.
        cluster: That the job is meant for; its devices' memory is the capacity, unless the run
            had a limit.

    Returns:
        The page.

    Raises:
        UserError: A file of the run or of its capture is missing or damaged.
    """
    out.mkdir(parents=True, exist_ok=True)
    if case.ranks:
        _write_pictures(case, out, cluster)
    else:
        why = f"Nothing was timed: {case.summary['status']}. {case.summary['reason']}".strip()
        for name in PICTURES:
            _write_picture(out, name, figures.words(why), why)
    trust = pd.DataFrame(captions.trust(case.summary), columns=["", "of this result"])
    state = "valid" if case.summary["trust"]["valid"] else "not valid"
    _write_table(out, "trust", trust, f"The result is {state}.")
    of_roles = frames.roles(case)
    _write_table(out, "roles", of_roles, captions.roles(of_roles))
    _write_anomalies(case, out)
    return _write_page(case, out)


def _write_page(case: Case, out: Path) -> Path:
    parts = [f"<h1>{html.escape(str(case.run))}</h1>"]
    for name, question in QUESTIONS.items():
        caption = (out / f"{name}.rst").read_text()
        parts.append(f"<h2 id='{name}'>{html.escape(question)}</h2>")
        if name in PICTURES:
            said = html.escape(_unmarked(caption), quote=True)
            parts.append(f"<p><img src='{name}.svg' alt='{said}'></p><p>{said}</p>")
        else:
            body = (out / f"{name}.html").read_text()
            parts.append(body.partition("<body>")[2].partition("</body>")[0])
    page = _PAGE.format(title=html.escape(str(case.run)), style=_STYLE, body="\n".join(parts))
    path = out / "index.html"
    artifacts.write_atomically(path, page.encode())
    return path


def _write_pictures(case: Case, out: Path, cluster: Cluster | None) -> None:
    rank = case.ranks[0]
    of_ranks = frames.breakdown(case)
    _write_picture(
        out, "breakdown", figures.breakdown(of_ranks), captions.breakdown(case, of_ranks)
    )

    stages = frames.pipeline(case)
    bubble = frames.bubble(case)
    text = captions.pipeline(stages, bubble)
    timeline = case.run / "timeline.json.gz"
    if timeline.exists():
        text += f" All that is shown, and more: open {timeline} at https://ui.perfetto.dev."
    _write_picture(
        out, "pipeline", _unless_empty(stages, text, lambda: figures.pipeline(stages, bubble)), text
    )

    limit = (case.of_rank(rank).get("memory") or {}).get("limit_bytes")
    capacity = limit or (cluster.gpu.memory_bytes if cluster is not None else None)
    held = frames.memory(case, rank)
    text = captions.memory(case, rank, held, capacity)
    _write_picture(
        out,
        "memory",
        _unless_empty(held, text, lambda: figures.memory(held, capacity_bytes=capacity)),
        text,
    )

    transfers = frames.bandwidth(case)
    text = captions.bandwidth(case, transfers)
    _write_picture(
        out, "bandwidth", _unless_empty(transfers, text, lambda: figures.bandwidth(transfers)), text
    )


def _unless_empty(frame: pd.DataFrame, why: str, draw: Callable[[], Figure]) -> Figure:
    return figures.words(why) if frame.empty else draw()


def _write_picture(out: Path, name: str, figure: Figure, caption: str) -> None:
    # Equal results are equal files.
    with matplotlib.rc_context({"svg.hashsalt": "crystalllm"}):
        figure.savefig(out / f"{name}.svg", metadata={"Date": None})
    _write_caption(out, name, caption)


def _write_table(out: Path, name: str, frame: pd.DataFrame, caption: str) -> None:
    text = frame.to_html(index=False, border=0, justify="left")
    body = f"{text}<p>{html.escape(caption)}</p>"
    page = _PAGE.format(title=name, style=_STYLE, body=body)
    artifacts.write_atomically(out / f"{name}.html", page.encode())
    _write_caption(out, name, caption)


def _write_caption(out: Path, name: str, caption: str) -> None:
    # Snakemake takes what is in braces for its own.
    text = _plain(caption.replace("{", "(").replace("}", ")"))
    artifacts.write_atomically(out / f"{name}.rst", f"{text}\n".encode())


def _plain(text: str) -> str:
    """Without what reStructuredText would read as markup, and on one line."""
    return "".join(f"\\{c}" if c in _MARKUP else c for c in " ".join(text.split()))


def _unmarked(caption: str) -> str:
    return re.sub(r"\\(.)", r"\1", caption).strip()


def _write_anomalies(case: Case, out: Path) -> None:
    try:
        found = find(case.run, capture=case.capture)
    except UserError as error:
        nothing = pd.DataFrame({"": [f"Not compared: {error}"]})
        _write_table(out, "anomalies", nothing, "The run was not compared with its profile.")
        return
    rows = _findings(found.summary["findings"])
    if rows.empty:
        rows = pd.DataFrame({"": ["Nothing deviates by more than what is normal here."]})
    _write_table(out, "anomalies", rows, captions.anomalies(found.summary))


def _findings(found: Iterable[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame([{k: v for k, v in one.items() if v not in (None, "")} for one in found])
