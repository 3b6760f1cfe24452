"""Pictures of a report: each takes a table of `frames` and returns a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from crystalllm.report.frames import CATEGORIES, WORDS
from crystalllm.sandbox.outcome import PARTS

# Okabe and Ito's colours, which people with any colour vision tell apart.
COLOURS = {
    "compute": "#0072B2",
    "exposed": "#D55E00",
    "wait": "#E69F00",
    "bubble": "#BBBBBB",
    "host": "#009E73",
}
_OF_CATEGORY = dict(
    zip(
        CATEGORIES,
        ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999"),
        strict=True,
    )
)
_MARKERS = "osD^vPX*<>"
_WIDTH = 9.0
_MIB = 1 << 20
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def breakdown(frame: pd.DataFrame) -> Figure:
    """Stacked bars, one for each rank of `frames.breakdown`."""
    figure, axes = _empty(0.42 * len(frame) + 1.6)
    place = np.arange(len(frame))[::-1]
    left = np.zeros(len(frame))
    for part in PARTS:
        ms = frame[part].to_numpy(float)
        axes.barh(place, ms, left=left, color=COLOURS[part], height=0.7, label=WORDS[part])
        left += ms
    for y, row in zip(place, frame.itertuples(), strict=True):
        spread = f" ({row.low_ms:.1f} .. {row.high_ms:.1f})" if row.is_real else ""
        axes.annotate(
            f"{row.iteration_ms:.1f} ms{spread}",
            (max(left), y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(place, frame["label"], fontsize=8)
    axes.set_xlim(0, 1.22 * max(left))
    axes.set_xlabel("ms of an iteration")
    _legend(figure, [Patch(color=COLOURS[p], label=WORDS[p]) for p in PARTS])
    return figure


def pipeline(frame: pd.DataFrame, bubble: Mapping[str, float]) -> Figure:
    """Stage × time of `frames.pipeline`."""
    stages = sorted(frame["stage"].unique())
    figure, axes = _empty(0.36 * len(stages) + 1.6)
    for y, stage in enumerate(stages):
        of_stage = frame[frame["stage"] == stage]
        for state, spans in of_stage.groupby("state"):
            lengths = spans["end_ms"] - spans["start_ms"]
            axes.broken_barh(
                list(zip(spans["start_ms"], lengths, strict=True)),
                (y - 0.4, 0.8),
                facecolor=COLOURS[str(state)],
                linewidth=0,
            )
    ranks = frame.groupby("stage")["rank"].first()
    labels = [f"stage {stage}, rank {ranks[stage]}" for stage in stages]
    axes.set_yticks(range(len(stages)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(min(0, frame["start_ms"].min()), frame["end_ms"].max())
    axes.set_xlabel("ms from the beginning of the iteration of the first stage")
    text = f"bubble {bubble['measured']:.1%}"
    if "closed_form" in bubble:
        text += f", closed form {bubble['closed_form']:.1%}"
    axes.set_title(text, fontsize=10, loc="left")
    shown = [part for part in PARTS if part in set(frame["state"])]
    _legend(figure, [Patch(color=COLOURS[p], label=WORDS[p]) for p in shown])
    return figure


def memory(frame: pd.DataFrame, *, capacity_bytes: int | None) -> Figure:
    """Stacked categories of `frames.memory`, the peak named, with the capacity if it is near."""
    figure, axes = _empty(3.4)
    total = frame[list(CATEGORIES)].sum(axis=1)
    peak = int(total.idxmax())
    unit, name = next(((u, n) for u, n in _UNITS if total.max() >= u), (1, "bytes"))
    shown = [c for c in CATEGORIES if frame[c].max() > 0]
    axes.stackplot(
        frame["at_ms"],
        [frame[c] / unit for c in shown],
        colors=[_OF_CATEGORY[c] for c in shown],
        step="post",
        linewidth=0,
    )
    top = total.max() / unit
    axes.plot(frame["at_ms"][peak], top, "kv", markersize=5)
    axes.annotate(
        f"peak {top:.1f} {name}",
        (frame["at_ms"][peak], top),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=9,
    )
    limit = top
    if capacity_bytes is not None and capacity_bytes < 4 * total.max():
        limit = max(top, capacity_bytes / unit)
        axes.axhline(capacity_bytes / unit, color="black", linestyle="--", linewidth=1)
        axes.text(0, capacity_bytes / unit, " capacity", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.15 * limit)
    axes.set_xlim(0, frame["at_ms"].max())
    axes.set_xlabel("ms of the iteration with the peak")
    axes.set_ylabel(name)
    _legend(figure, [Patch(color=_OF_CATEGORY[c], label=c) for c in shown[::-1]])
    return figure


def bandwidth(frame: pd.DataFrame) -> Figure:
    """Size against bus bandwidth of `frames.bandwidth`, both logarithmic."""
    figure, axes = _empty(3.6)
    kinds = sorted(frame["kind"].unique())
    colours = [*COLOURS.values(), "#CC79A7", "#56B4E9", "#000000"]
    for number, kind in enumerate(kinds):
        of_kind = frame[frame["kind"] == kind]
        axes.scatter(
            of_kind["bytes"],
            of_kind["bus_gb_s"],
            marker=_MARKERS[number % len(_MARKERS)],
            color=colours[number % len(colours)],
            s=30 + 4 * of_kind["n"].clip(upper=40),
            alpha=0.8,
            label=kind,
        )
    for (num_bytes, _), here in frame.groupby(["bytes", frame["bus_gb_s"].map("{:.0e}".format)]):
        groups = dict.fromkeys(f"{r.group} × {r.ranks}" for r in here.itertuples())
        axes.annotate(
            ", ".join(groups),
            (num_bytes, here["bus_gb_s"].iloc[0]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#444444",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_size))
    axes.margins(x=0.15, y=0.15)
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("size of the call, as nccl-tests counts it")
    axes.set_ylabel("bus bandwidth, GB/s")
    handles, labels = axes.get_legend_handles_labels()
    _legend(figure, handles, labels)
    return figure


def cases(frame: pd.DataFrame, *, band: float) -> Figure:
    """Iteration times of `study.table.table`, each with the error that it may have."""
    timed = frame[frame["iteration_ms"].notna()]
    if timed.empty:
        return words("Nothing was timed.")
    figure, axes = _empty(0.36 * len(timed) + 1.3)
    place = np.arange(len(timed))[::-1]
    ms = timed["iteration_ms"].to_numpy(float)
    axes.barh(place, ms, color=COLOURS["compute"], height=0.62)
    axes.errorbar(ms, place, xerr=band * ms, fmt="none", ecolor="#444444", capsize=3, lw=1)
    for y, row in zip(place, timed.itertuples(), strict=True):
        axes.annotate(
            f"{row.iteration_ms:,.1f} ms, limited by {row.limit}",
            (row.iteration_ms * (1 + band), y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(place, timed["case"], fontsize=8)
    axes.set_ylim(-0.7, len(timed) - 0.3)
    axes.set_xlim(0, 1.5 * (1 + band) * ms.max())
    axes.set_xlabel("ms of an iteration")
    return figure


def _empty(height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, handles: list[Any], labels: list[str] | None = None) -> None:
    names = labels if labels is not None else [h.get_label() for h in handles]
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _size(num_bytes: float, _: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes:g} B"


def words(text: str) -> Figure:
    """In place of a picture that there is not."""
    figure, axes = _empty(1.2)
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=10)
    return figure
