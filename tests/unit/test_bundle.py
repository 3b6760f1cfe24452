"""`doctor --bundle`: the issue template, filled; nobody's secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from crystalllm import __version__
from crystalllm.bundle import bundle
from crystalllm.doctor import Finding
from crystalllm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = [
    Finding(name="GPU", found="8 × NVIDIA H200", ok=True),
    Finding(name="cores", found="2", ok=True),
]
TOKEN = "hf_" + "a1B2c3D4" * 4


@pytest.fixture
def job(tmp_path):
    """A job with a run that crashed and wrote a secret into its log."""
    folder = tmp_path / "results" / "mine"
    for name, text in {
        "logs/emulate.log": "started\n",
        "emulate/rank-3/log.txt": "\n".join(map(str, range(100))) + f"\nHF_TOKEN={TOKEN}\n~~~\n",
        "emulate/summary.json": json.dumps(
            {
                "status": "crash",
                "reason": "Rank 3 died of SIGSEGV.",
                "program": ["train.py", "--steps", "3"],
                "trust": {"valid": False, "why_not": ["Rank 3 died of SIGSEGV."]},
            }
        ),
        "fits/summary.json": "{damaged",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_it_has_the_template_s_sections(job):
    template = (ROOT / ".github/ISSUE_TEMPLATE/bug.md").read_text()
    wanted = re.findall(r"^## .*$", template, re.M)
    assert len(wanted) == 6
    for text in (bundle(FINDINGS), bundle(FINDINGS, job)):
        assert re.findall(r"^## .*$", text, re.M) == wanted


def test_it_tells_of_machine_run_and_logs(job):
    text = bundle(FINDINGS, job)
    assert "8 × NVIDIA H200" in text
    assert f"CrystalLLM {__version__}" in text
    assert "The program: `train.py --steps 3`" in text
    assert "crash. Rank 3 died of SIGSEGV." in text
    assert "fits/summary.json`: unreadable." in text
    assert "\n99\n" in text
    assert "\n50\n" not in text, "the end of a log only"
    # A line of a log cannot end the block it is in.
    assert text.count("~~~text") * 2 == text.count("~~~")


def test_secrets_stay(job):
    text = bundle(FINDINGS, job)
    assert TOKEN not in text
    assert "HF_TOKEN=" in text


def test_a_job_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no results of this job.*nope"):
        bundle(FINDINGS, tmp_path / "nope")
