"""Pictures and tables of a run: they are there, say its numbers, and are the same each time."""

from __future__ import annotations

import gzip
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pandas as pd
import pytest
import sandbox_program

from crystalllm import artifacts, report, sandbox, tables
from crystalllm.config import Parallelism, load_cluster
from crystalllm.errors import UserError
from crystalllm.report import figures, frames, overview, pages
from crystalllm.sandbox.outcome import PARTS

RANK = 5
MOST_BYTES = 2 << 20


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    setup = sandbox_program.make_setup(folder, RANK)
    setup.durations.save(folder / "planning" / "profile.parquet", provenance={})
    summary = sandbox.run(setup, folder / "emulate")
    assert summary["status"] == "ok", summary
    job = setup.job.model_copy(update={"cluster": "h200-2x8"})
    return pages.Case(folder / "emulate", setup.capture, job)


@pytest.fixture(scope="module")
def written(case, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    return pages.write(case, out)


def texts(path):
    """Words of a picture or page, however they are nested."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_every_question_has_a_picture_or_table_and_a_caption(written):
    out = written.parent
    for name in (*report.PICTURES, *report.TABLES):
        shown = out / f"{name}.{'svg' if name in report.PICTURES else 'html'}"
        assert 500 < shown.stat().st_size < MOST_BYTES
        assert len((out / f"{name}.rst").read_text().split()) > 3
    for name in report.PICTURES:
        root = ElementTree.parse(out / f"{name}.svg").getroot()
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10 or name == "pipeline"
    page = written.read_text()
    links = re.findall(r"src='([^']+)'", page)
    assert [link.removesuffix(".svg") for link in links] == list(report.PICTURES)
    for question in {**report.PICTURES, **report.TABLES}.values():
        assert question in page


def test_captions_say_this_run_s_numbers(case, written):
    found = case.of_rank(RANK)
    out = written.parent
    assert f"{found['iteration_ns'] / 1e6:.1f} ms" in (out / "breakdown.rst").read_text()
    peak = found["memory"]["peak"]["bytes"]
    assert f"{peak / (1 << 20):.1f} MiB at the most" in (out / "memory.rst").read_text()
    assert "8 ranks are of" in (out / "roles.rst").read_text()
    assert "valid" in (out / "trust.rst").read_text()
    # The capture's times are no baseline, and the table says so.
    assert (out / "anomalies.rst").read_text().strip()


def test_the_same_run_gives_the_same_files(case, written, tmp_path):
    pages.write(case, tmp_path)
    for path in written.parent.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_parts_of_the_breakdown_are_all_of_the_iteration(case):
    frame = frames.breakdown(case)
    ran = frame[frame["is_real"]]
    assert ran["rank"].tolist() == [RANK]
    # Medians of parts do not add up exactly; of replayed ranks every iteration is alike.
    assert frame[list(PARTS)].sum(axis=1).tolist() == pytest.approx(
        frame["iteration_ms"].tolist(), rel=0.25
    )
    assert set(frame.loc[~frame["is_real"], "rank"]).isdisjoint({RANK})


def test_memory_adds_up_to_the_peak(case):
    frame = frames.memory(case)
    assert case.capacity_bytes == load_cluster("h200-2x8").gpu.memory_bytes
    total = frame[list(frames.CATEGORIES)].sum(axis=1)
    assert total.max() == case.of_rank(RANK)["memory"]["peak"]["bytes"]
    assert (frame["at_ms"].diff().dropna() >= 0).all()


def test_bandwidth_is_that_of_the_model(case):
    frame = frames.bandwidth(case)
    # 50 us and a byte a nanosecond, of what the call puts in.
    assert (frame["transfer_us"] >= 50).all()
    messages = frame[frame["kind"].isin(("send", "recv"))]
    for row in messages.itertuples():
        assert row.transfer_us == pytest.approx(50 + row.bytes / 1e3, rel=0.05)
        assert row.bus_gb_s == pytest.approx(row.bytes / row.transfer_us / 1e3)


def test_a_run_without_times_says_why(case, tmp_path):
    run = tmp_path / "emulate"
    run.mkdir()
    summary = {**case.summary, "status": "oom", "reason": "Rank 5 wants more than 1 MiB."}
    summary["ranks_of_interest"] = {}
    artifacts.write_atomically(run / "summary.json", json.dumps(summary).encode())
    page = pages.write(pages.Case(run, case.capture), tmp_path / "report")
    for name in report.PICTURES:
        assert "Rank 5 wants more" in (page.parent / f"{name}.rst").read_text()


# --- the pipeline -----------------------------------------------------------------------


def span(name, start_us, duration_us, **args):
    return {"ph": "X", "name": name, "tid": 1, "ts": start_us, "dur": duration_us, "args": args}


def piped(tmp_path, *, damaged=False):
    """Two stages of two ranks; rank 1 is of interest, and the timeline lacks rank 3."""
    for rank, start in ((0, 0), (1, 0), (2, 500)):
        events = []
        for iteration in (3, 4, 5):
            at = 1000 * iteration + start
            events += [
                span("computation 0", at, 300, iteration=iteration),
                span("wait recv", at + 300, 200, iteration=iteration),
                span("waiting for the other side", at + 300, 150),
                span("transfer", at + 450, 50),
            ]
        # What a call does meanwhile is on a track of its own.
        events.append({**span("transfer", 3000, 999), "tid": 2})
        path = tmp_path / "emulate" / "timeline" / f"rank-{rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"traceEvents": events}).encode()
        path.write_bytes(content if damaged else gzip.compress(content))
    axes = pd.DataFrame({"pp": [0, 0, 1, 1], "dp": [0, 1, 0, 1]})
    return SimpleNamespace(run=tmp_path / "emulate", captured=SimpleNamespace(axes=axes), ranks=[1])


def test_a_rank_of_each_stage_is_shown(tmp_path):
    frame = frames.pipeline(piped(tmp_path))
    assert frame.groupby("stage")["rank"].first().to_dict() == {0: 1, 1: 2}
    first = frame[frame["stage"] == 0]
    # The last iteration may be cut off: of the one before, from its own beginning.
    assert first[["state", "start_ms", "end_ms"]].to_numpy().tolist() == [
        ["compute", 0.0, 0.3],
        ["bubble", 0.3, 0.45],
        ["exposed", 0.45, 0.5],
    ]
    assert frame.loc[frame["stage"] == 1, "start_ms"].min() == 0.5
    drawn = figures.pipeline(frame, {"measured": 0.3, "closed_form": 1 / 3})
    assert drawn.axes[0].get_title(loc="left") == "bubble 30.0%, closed form 33.3%"
    assert [t.get_text() for t in drawn.axes[0].get_yticklabels()] == [
        "stage 0, rank 1",
        "stage 1, rank 2",
    ]


@pytest.mark.parametrize(
    ("stage", "received", "virtual", "idle"),
    # Four stages, four microbatches: an end receives one message less for each of them.
    [(0, 4, 1, 3 / 7), (1, 8, 1, 3 / 7), (3, 4, 1, 3 / 7), (0, 12, 2, 3 / 11), (2, 16, 2, 3 / 11)],
)
def test_the_closed_form_knows_virtual_stages(case, tmp_path, stage, received, virtual, idle):
    rows, provenance = tables.COMMUNICATION.read(case.run / f"rank-{RANK}/communication.parquet")
    kinds = ["recv"] * received + ["send"] * 5
    one = rows.slice(0, 1).to_pylist()[0]
    columns = {name: [one[name]] * len(kinds) for name in rows.column_names}
    columns |= {"kind": kinds, "iteration": [2] * len(kinds)}
    path = tmp_path / f"rank-{stage}" / "communication.parquet"
    tables.COMMUNICATION.write(path, columns, provenance=provenance)
    (tmp_path / "summary.json").write_text(
        json.dumps(
            {
                "warm_up": 1,
                "iterations": 4,
                "ranks_of_interest": {str(stage): {"iteration_ns": 200, "bubble_ns": 50}},
            }
        )
    )
    job = case.job.model_copy(update={"parallelism": Parallelism(pp=4, dp=2, vp=virtual)})
    captured = SimpleNamespace(axes=pd.DataFrame({"pp": range(4)}))
    piped = frames.Case(tmp_path, case.capture, job)
    piped.__dict__["captured"] = captured
    found = frames.bubble(piped)
    assert (found["measured"], found["microbatches"]) == (0.25, 4)
    assert found["closed_form"] == pytest.approx(idle)
    # Nothing says how many virtual stages there are: a formula would be a guess.
    unknown = frames.Case(tmp_path, case.capture)
    unknown.__dict__["captured"] = captured
    assert frames.bubble(unknown) == {"measured": 0.25}


def test_a_damaged_timeline_is_named(tmp_path):
    with pytest.raises(UserError, match=r"timeline cannot be read.*rank-1\.json\.gz"):
        frames.pipeline(piped(tmp_path, damaged=True))


def test_all_cases_side_by_side(case, tmp_path):
    """Front page and page of all: numbers, trust and a link for each; one of them was not timed."""
    row = {
        "case": "tp2_pp4",
        "sweep": "layouts",
        "world_size": 8,
        "tp": 2,
        "cp": 1,
        "status": "ok",
        "iteration_ms": 123.4,
        "low_ms": 120.0,
        "high_ms": 130.0,
        "tokens_per_s": 73_728.0,
        "flops_per_s": 3e9,
        "mfu": 0.031,
        "bubble": 0.25,
        "exposed": 0.1,
        "peak_mib": 12.0,
        "limit": "the pipeline",
        "place": "1",
        "results": str(case.run),
    }
    numbers = ("iteration_ms", "low_ms", "high_ms", "tokens_per_s", "flops_per_s", "mfu")
    failed = {**row, **dict.fromkeys(numbers), "case": "tp8", "status": "oom", "limit": "memory"}
    frame = pd.DataFrame([row, failed])
    linked = tmp_path / "layouts" / "report" / "index.html"
    linked.parent.mkdir(parents=True)
    linked.write_text("there")
    page = overview.write(frame, [linked, linked], tmp_path / "report")
    for link in re.findall(r"(?:href|src)='([^']+)'", page.read_text()):
        assert (page.parent / link).exists(), link
    shown = (page.parent / "overview.html").read_text()
    names, values = (re.findall(rf"<{tag}>(.*?)</{tag}>", shown) for tag in ("th", "td"))
    first = dict(zip(names, values, strict=False))
    assert first["case"] == "tp2_pp4"
    assert first["tokens/s/rank"] == "73,728"
    assert "CP" not in first, "it is 1 for all"
    assert (first["ranks"], first["TP"], first["MFU"]) == ("8", "2", "3.1%")
    assert (first["limited by"], first["model GFLOP/s/rank"]) == ("the pipeline", "3")
    caption = (page.parent / "overview.rst").read_text()
    assert "1 of 2 case(s) were timed" in caption
    assert "123.4 ms, limited by the pipeline" in caption
    front = (page.parent / "front.rst").read_text()
    assert front.count(":valid: yes") == 2, "each with its trust box"
    assert "123.4 ms for an iteration (120.0 to 130.0)" in front
    assert "{" not in front, "Snakemake reads it as a template"
    drawn = figures.cases(frame, band=0.1)
    assert [t.get_text() for t in drawn.axes[0].get_yticklabels()] == ["tp2_pp4"]
