"""A report of a small real run as people see it, in headless Chromium."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from workflow_project import JOBS, Project

from crystalllm.report import OVERVIEW, PICTURES, QUESTIONS

pytestmark = pytest.mark.browser

JOB = JOBS[0]
MOST_BYTES = 2 << 20
LIMIT_S = 120
WINDOW = (1280, 900)
# Appended to a page; leaves what the browser made of it in the page itself.
LOOK = """<script>addEventListener('load', () => {
  const found = document.createElement('pre');
  found.id = 'found';
  found.textContent = JSON.stringify({
    pictures: [...document.images].map(i => ({
      source: i.getAttribute('src'), is_there: i.complete && i.naturalWidth > 0,
      scale: i.getBoundingClientRect().width / i.naturalWidth,
      height: i.getBoundingClientRect().height, said: i.alt,
    })),
    links: [...document.links].map(a => a.getAttribute('href')),
    headings: [...document.querySelectorAll('h1,h2')].map(h => h.textContent),
    is_cut: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  });
  document.body.append(found);
})</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Runs Chromium with these arguments; gives what it prints."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if path is None:
        why = "Chromium is missing (Debian: chromium)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    profile = tmp_path_factory.mktemp("chromium")

    def run(*arguments: str) -> str:
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={WINDOW[0]},{WINDOW[1]}"]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def project(browser, tmp_path_factory):
    """After one run of everything, with Snakemake's report at its end."""
    made = Project(tmp_path_factory.mktemp("project"))
    made.study(jobs=[JOB])
    # As many columns as there are.
    sizes = {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "vp": 2}
    made.job(JOB, parallelism=sizes, work={"tokens": "dp * 1024", "flops": 1e9})
    made.run("--report", "report.zip", "--report-after-run")
    return made


def looked_at(browser, page: Path) -> dict:
    copy = page.with_name("looked-at.html")
    copy.write_text(page.read_text() + LOOK)
    dom = browser("--virtual-time-budget=5000", "--dump-dom", copy.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("name", [JOB, None], ids=[JOB, "all cases"])
def test_pages_show_all_that_they_should(browser, project, name):
    results = project.folder / "results"
    folder = results / name / "report" / "emulate" if name else results / "report"
    found = looked_at(browser, folder / "index.html")
    wanted = list(PICTURES) if name else ["overview"]
    assert [p["source"] for p in found["pictures"]] == [f"{w}.svg" for w in wanted]
    for picture in found["pictures"]:
        assert picture["is_there"], picture
        # Words are 7 points or more in the picture; shrunk, they would be less.
        assert picture["scale"] >= 0.9, picture
        assert picture["height"] > 60, picture
        assert len(picture["said"].split()) > 5, picture
    assert not found["is_cut"], "the page is wider than the window"
    assert set(found["headings"]) >= ({*QUESTIONS.values()} if name else {OVERVIEW})
    for link in found["links"]:
        assert (folder / link).exists(), link
    assert bool(found["links"]) == (name is None)
    for path in folder.iterdir():
        assert path.stat().st_size < MOST_BYTES, path


@pytest.mark.parametrize("name", [*PICTURES, "overview"])
def test_pictures_are_drawn_and_not_cut(browser, project, name):
    results = project.folder / "results"
    folder = results / JOB / "report" / "emulate" if name in PICTURES else results / "report"
    shot = project.folder / f"{name}.png"
    drawn = folder / f"{name}.svg"
    browser(f"--screenshot={shot}", drawn.as_uri())
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', drawn.read_text())
    width, height = (float(points) * 96 / 72 for points in size.groups())
    seen = np.asarray(Image.open(shot).convert("L"))
    inked = seen < 200
    assert 0.002 < inked.mean() < 0.6, "empty, or full"
    # Nothing touches the picture's border.
    rows, columns = np.nonzero(inked)
    assert 0 < rows.min() <= rows.max() < min(height, WINDOW[1]) - 1
    assert 0 < columns.min() <= columns.max() < width - 1


def test_snakemake_s_report_opens_with_the_trust_box(browser, project):
    opened = project.folder / "opened"
    with zipfile.ZipFile(project.folder / "report.zip") as packed:
        packed.extractall(opened)
        sizes = {info.filename: info.file_size for info in packed.infolist()}
    (page,) = opened.rglob("report.html")
    # Snakemake's page brings its own application along, 3 MB; what is ours lies beside it.
    sizes.pop(str(page.relative_to(opened)))
    assert max(sizes.values()) < MOST_BYTES, max(sizes.items(), key=lambda item: item[1])
    assert not any(name.endswith(".gz") for name in sizes), "timelines are linked"
    dom = html.unescape(browser("--virtual-time-budget=20000", "--dump-dom", page.as_uri()))
    text = re.sub(r"<script.*?</script>|<[^>]+>", " ", dom, flags=re.S)
    assert f"{JOB} (emulate)" in text, "its category"
    ms = project.summary(JOB)["ranks_of_interest"]["0"]["iteration_ns"] / 1e6
    assert f"{ms:.1f} ms for an iteration" in text
    assert "rests on" in text
    assert "nearest measured case" in text
