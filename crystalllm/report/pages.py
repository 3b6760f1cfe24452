"""Pictures and tables of one emulation, with captions that say its numbers."""

from __future__ import annotations

import html
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from crystalllm import artifacts
from crystalllm.compare.anomalies import find
from crystalllm.errors import UserError
from crystalllm.report import PICTURES, QUESTIONS, captions, figures, frames
from crystalllm.report.documents import as_rst, save_figure, write_page
from crystalllm.report.frames import Case

# What answers a question, and what is said of it.
Answer = tuple[Figure | pd.DataFrame, str]


def write(case: Case, out: Path) -> Path:
    """Writes a picture (SVG) or table (HTML) per question, and a page that shows all.

    Captions lie beside them as reStructuredText, for reports that others put together. A
    question that the run does not answer (it ended before, or kept no account) has a picture
    that says why.

    Args:
        case: The emulation.
        out: Folder.

    Returns:
        The page.

    Raises:
        UserError: A file of the run or of its capture is missing or damaged.
    """
    out.mkdir(parents=True, exist_ok=True)
    answers = _answers(case)
    parts = [f"<h1>{html.escape(str(case.run))}</h1>"]
    for name, question in QUESTIONS.items():
        shown, caption = answers[name]
        said = html.escape(caption, quote=True)
        if isinstance(shown, Figure):
            save_figure(shown, out / f"{name}.svg")
            body = f"<p><img src='{name}.svg' alt='{said}'></p><p>{said}</p>"
        else:
            body = f"{shown.to_html(index=False, border=0, justify='left')}<p>{said}</p>"
            write_page(out / f"{name}.html", name, body)
        parts.append(f"<h2 id='{name}'>{html.escape(question)}</h2>\n{body}")
        artifacts.write_atomically(out / f"{name}.rst", as_rst(caption).encode())
    page = out / "index.html"
    write_page(page, str(case.run), "\n".join(parts))
    return page


def _answers(case: Case) -> dict[str, Answer]:
    trust = pd.DataFrame(captions.trust(case.summary), columns=["", "of this result"])
    state = "valid" if case.summary["trust"]["valid"] else "not valid"
    of_roles = frames.roles(case)
    answers: dict[str, Answer] = {
        "trust": (trust, f"The result is {state}."),
        "roles": (of_roles, captions.roles(of_roles)),
        "anomalies": _anomalies(case),
    }
    if case.ranks:
        return answers | _pictures(case)
    why = f"Nothing was timed: {case.summary['status']}. {case.summary['reason']}".strip()
    return answers | {name: (figures.words(why), why) for name in PICTURES}


def _pictures(case: Case) -> dict[str, Answer]:
    of_ranks = frames.breakdown(case)
    stages, bubble = frames.pipeline(case), frames.bubble(case)
    held = frames.memory(case)
    transfers = frames.bandwidth(case)
    of_stages = captions.pipeline(stages, bubble)
    timeline = case.run / "timeline.json.gz"
    if timeline.exists():
        of_stages += f" All that is shown, and more: open {timeline} at https://ui.perfetto.dev."
    of_memory = captions.memory(case, held)
    of_transfers = captions.bandwidth(case, transfers)
    return {
        "breakdown": (figures.breakdown(of_ranks), captions.breakdown(case, of_ranks)),
        "pipeline": (
            figures.words(of_stages) if stages.empty else figures.pipeline(stages, bubble),
            of_stages,
        ),
        "memory": (
            figures.words(of_memory)
            if held.empty
            else figures.memory(held, capacity_bytes=case.capacity_bytes),
            of_memory,
        ),
        "bandwidth": (
            figures.words(of_transfers) if transfers.empty else figures.bandwidth(transfers),
            of_transfers,
        ),
    }


def _anomalies(case: Case) -> Answer:
    try:
        found = find(case.run, capture=case.capture)
    except UserError as error:
        nothing = pd.DataFrame({"": [f"Not compared: {error}"]})
        return nothing, "The run was not compared with its profile."
    rows = [
        {k: v for k, v in one.items() if v not in (None, "")} for one in found.summary["findings"]
    ]
    nothing = pd.DataFrame({"": ["Nothing deviates by more than what is normal here."]})
    return pd.DataFrame(rows) if rows else nothing, captions.anomalies(found.summary)
