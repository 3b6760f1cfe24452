"""All cases side by side: a picture, a table, and the front page of a report."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from crystalllm import artifacts
from crystalllm.report import OVERVIEW, captions, figures
from crystalllm.report.documents import as_rst, save_figure, write_page
from crystalllm.sandbox.outcome import SUMMARY
from crystalllm.study.table import error_band, share

# What a person looks for, in the order of Megatron-Bridge's tables of performance.
_COLUMNS = {
    "case": "case",
    "status": "status",
    "world_size": "ranks",
    "tp": "TP",
    "pp": "PP",
    "cp": "CP",
    "dp": "DP",
    "vp": "VP",
    "ep": "EP",
    "iteration_ms": "iteration, ms",
    "tokens_per_s": "tokens/s/rank",
    "gflops_per_s": "model GFLOP/s/rank",
    "mfu": "MFU",
    "bubble": "bubble",
    "exposed": "exposed",
    "peak_mib": "peak, MiB",
    "limit": "limited by",
    "place": "place",
}
_AXES = ("tp", "pp", "cp", "dp", "vp", "ep")
_CPU = (
    "Computation was timed on CPU cores: it says how these cases differ here, not how they rank on "
    "GPUs."
)
_MFU = "MFU is the model's operations over what a core reached with a product of fp32 matrices."


def write(frame: pd.DataFrame, pages: Sequence[Path], out: Path) -> Path:
    """Writes overview.svg, overview.html, their caption, a front page (RST), and a page of all.

    Args:
        frame: From `study.table.table`, or as its file has it.
        pages: Of each row, the page of its pictures.
        out: Folder.

    Returns:
        The page of all.

    Raises:
        UserError: A summary is missing or damaged.
    """
    out.mkdir(parents=True, exist_ok=True)
    caption = _caption(frame)
    save_figure(figures.cases(frame, band=error_band()), out / "overview.svg")
    shown = _shown(frame)
    write_page(out / "overview.html", OVERVIEW, _table(shown) + f"<p>{html.escape(caption)}</p>")
    artifacts.write_atomically(out / "overview.rst", as_rst(caption).encode())
    trusts = [
        captions.trust(artifacts.read_json(Path(folder) / SUMMARY)) for folder in frame["results"]
    ]
    artifacts.write_atomically(out / "front.rst", _front(frame, trusts, caption).encode())
    links = [os.path.relpath(page, out) for page in pages]
    linked = shown.assign(
        case=[
            f"<a href='{html.escape(link, quote=True)}'>{html.escape(str(name))}</a>"
            for link, name in zip(links, shown["case"], strict=True)
        ]
    )
    boxes = "".join(
        f"<h3>{html.escape(str(name))}</h3>"
        + pd.DataFrame(rows, columns=["", "of this result"]).to_html(
            index=False, border=0, justify="left"
        )
        for name, rows in zip(frame["case"], trusts, strict=True)
    )
    body = (
        f"<h1>{OVERVIEW}</h1><p><img src='overview.svg' alt='{html.escape(caption, quote=True)}'>"
        f"</p><p>{html.escape(caption)}</p>{_table(linked, escape=False)}"
        f"<h2>How far can this be trusted?</h2>{boxes}"
    )
    page = out / "index.html"
    write_page(page, "CrystalLLM", body)
    return page


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    """For people: known columns that say something, rounded; no axis that nobody divides."""
    full = frame.assign(gflops_per_s=frame["flops_per_s"] / 1e9)
    names = [
        n
        for n in _COLUMNS
        if n in full
        and not full[n].isna().all()
        and any(full[n] != "")
        and not (n in _AXES and (full[n] == 1).all())
    ]
    found = full[names].astype(object)
    for name in names:
        if name in ("mfu", "bubble", "exposed"):
            found[name] = [share(v) for v in full[name]]
        elif pd.api.types.is_float_dtype(full[name]):
            found[name] = ["" if pd.isna(v) else _number(v) for v in full[name]]
        else:
            found[name] = ["" if pd.isna(v) else v for v in full[name]]
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _table(shown: pd.DataFrame, *, escape: bool = True) -> str:
    text: str = shown.rename(columns=_COLUMNS).to_html(
        index=False, border=0, justify="left", escape=escape
    )
    return text


def _caption(frame: pd.DataFrame) -> str:
    timed = frame[frame["iteration_ms"].notna()]
    if timed.empty:
        return f"None of {len(frame)} case(s) was timed."
    fastest = timed.loc[timed["iteration_ms"].idxmin()]
    parts = [
        f"{len(timed)} of {len(frame)} case(s) were timed; the shortest iteration is that of "
        f"{fastest['case']}, {fastest['iteration_ms']:.1f} ms, limited by {fastest['limit']}."
    ]
    if timed["tokens_per_s"].notna().any():
        best = timed.loc[timed["tokens_per_s"].idxmax()]
        parts.append(
            f"Most tokens: {best['case']}, {_number(best['tokens_per_s'])} a second and rank."
        )
    if len(timed) > 1:
        parts.append(
            f"Bars are the error of the worst measured case, {error_band():.0%}: cases whose bars "
            "overlap cannot be told apart."
        )
    parts.append(_CPU)
    if timed["mfu"].notna().any():
        parts.append(_MFU)
    return " ".join(parts)


def _front(frame: pd.DataFrame, trusts: Sequence[Sequence[tuple[str, str]]], caption: str) -> str:
    """As reStructuredText: what came out, and how far each of it can be trusted."""
    lines = [as_rst(caption)]
    for row, trust in zip(frame.to_dict("records"), trusts, strict=True):
        name = as_rst(str(row["case"])).strip()
        lines += [name, "-" * len(name), ""]
        took = row["iteration_ms"]
        if not pd.isna(took):
            lines += [
                f"{took:.1f} ms for an iteration ({row['low_ms']:.1f} to {row['high_ms']:.1f}), "
                f"limited by {row['limit']}.",
                "",
            ]
        for what, said in trust:
            lines.append(f":{as_rst(what).strip()}: {as_rst(said).strip()}")
        lines.append("")
    return "\n".join(lines)
