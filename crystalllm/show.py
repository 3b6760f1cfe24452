"""Prints what `inspect` answers: tables on a terminal, complete lines in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crystalllm import inspect
from crystalllm.chosen import ranks_at
from crystalllm.errors import UserError

DEFAULT_LIMIT = 50
# A file has no width: nothing is cut or wrapped there.
_FILE_COLUMNS = 100_000


def show(
    path: Path,
    *,
    rank: int | None = None,
    coordinates: str | None = None,
    summary: bool = False,
    limit: int | None = None,
) -> None:
    """Prints a capture, one rank of it, or a calls file.

    Args:
        path: A job's folder, its capture folder, or a calls file.
        rank: Show the calls of this rank.
        coordinates: Show those of the rank here, such as "pp=5,tp=0".
        summary: Of a capture, only what it found in all.
        limit: Rows of each table, 0 for all; 50 by default on a terminal.

    Raises:
        UserError: Nothing of the kind is there, or `rank` or `coordinates` aren't.
    """
    if limit is not None and limit < 0:
        raise UserError(
            "A number of rows cannot be negative",
            where=f"--limit {limit}",
            do="Pass the number of rows, or 0 for all",
        )
    page = Page(limit)
    if path.is_file():
        if coordinates is not None:
            raise UserError(
                "A calls file has no coordinates", where=f"File {path}", do="Pass --rank"
            )
        _calls_file(page, path, rank)
        return
    capture = inspect.Capture(path)
    if coordinates is not None:
        there = ranks_at(capture.axes, coordinates)
        rank, num_there = there[0], len(there)
        if num_there > 1:
            page.line(f"{num_there} ranks are at {coordinates}; this is the lowest")
    if rank is not None:
        _rank(page, capture, rank)
    else:
        _summary(page, capture)
        if not summary:
            _details(page, capture)
        page.title("Unchecked")
        for line in inspect.unchecked(capture) or ["Nothing: every rank was captured"]:
            page.line(line)


def show_calls(path: Path) -> None:
    """Prints the summary of a calls file."""
    _calls_summary(Page(0), path, *inspect.read_calls(path))


class Page:
    """Lines and tables on standard output.

    Args:
        limit: Rows of each table, 0 for all; by default 50 on a terminal, and all in a file.
    """

    def __init__(self, limit: int | None) -> None:
        console = Console(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console = Console(file=sys.stdout, highlight=False, width=_FILE_COLUMNS)
            limit = limit or 0
        self.console = console
        self.limit = DEFAULT_LIMIT if limit is None else limit

    def line(self, text: str) -> None:
        self.console.print(Text(text))

    def title(self, text: str) -> None:
        self.console.print()
        self.console.print(Text(text, style="bold"))

    def table(self, frame: pd.DataFrame) -> None:
        if frame.empty:
            self.line("none")
            return
        shown = frame.head(self.limit) if self.limit else frame
        out = Table()
        for name in shown:
            numeric = pd.api.types.is_numeric_dtype(shown[name])
            justify = "right" if numeric else "left"
            out.add_column(str(name).replace("_", " "), justify=justify, overflow="fold")
        for row in shown.itertuples(index=False):
            out.add_row(*(Text(_cell(value)) for value in row))
        self.console.print(out)
        if len(shown) < len(frame):
            self.line(f"{len(frame) - len(shown)} more rows; --limit 0 shows all")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _summary(page: Page, capture: inspect.Capture) -> None:
    structure = capture.structure
    page.line(f"Capture {capture.folder}")
    page.line(f"program      {' '.join(map(str, structure['program']))}")
    page.line(f"world        {structure['world_size']} ranks")
    page.line(f"fingerprint  {structure['fingerprint']}")
    if structure["period"]:
        page.line(
            f"structure    {structure['prologue_marks']} marks of prologue, then calls repeat "
            f"every {structure['period']} marks (one iteration below)"
        )
    else:
        page.line("structure    no period is known")
    if "num_payloads" in structure:
        page.line(f"payloads     {structure['num_payloads']} control values")
    page.title("Roles")
    page.table(inspect.roles(capture))


def _details(page: Page, capture: inspect.Capture) -> None:
    page.title("Calls by part, of each role's representative")
    page.table(inspect.parts(capture))
    page.title("Groups by kind")
    page.table(inspect.groups(capture))
    page.title("Communication of each role's representative, by iteration and in all")
    page.table(inspect.communication(capture))


def _rank(page: Page, capture: inspect.Capture, rank: int) -> None:
    calls, speaker = inspect.rank_calls(capture, rank)
    axes = capture.axes
    place = " ".join(f"{axis}={axes.loc[rank, axis]}" for axis in axes)
    role = capture.ranks.loc[rank, "role"]
    page.line(f"rank {rank} of {capture.structure['world_size']}, {place}, role {role}")
    if speaker != rank:
        page.line(f"It is inferred: these are the calls of rank {speaker}, which speaks for it")
    page.table(calls.drop(columns="rank"))


def _calls_file(page: Page, path: Path, rank: int | None) -> None:
    calls, provenance = inspect.read_calls(path)
    there = sorted(calls["rank"].unique())
    if rank is not None and rank not in there:
        raise UserError(
            f"There are no calls of rank {rank} here",
            where=f"File {path}",
            do=f"Those of {', '.join(map(str, there)) or 'no rank'} are",
        )
    if rank is not None:
        calls = calls[calls["rank"] == rank]
    _calls_summary(page, path, calls, provenance)
    page.title("Calls")
    page.table(inspect.list_calls(calls).drop(columns="part"))


def _calls_summary(
    page: Page, path: Path, calls: pd.DataFrame, provenance: dict[str, object]
) -> None:
    if "rank" in provenance:
        who = f"rank {provenance['rank']} of {provenance.get('world_size')}"
    else:
        who = f"{calls['rank'].nunique()} ranks in {path}"
    line = f"{who}, {len(calls)} calls"
    if provenance.get("unverified"):
        line += ", unverified: control values of virtual ranks were invented"
    page.line(line)
    page.table(inspect.by_group_and_kind(calls))
