"""The command `run`, as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from crystalllm import tables

ENVIRONMENT = """
import os
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
             "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FROM_JOB"):
    print(name, os.environ.get(name))
"""


def _command(*arguments):
    return [sys.executable, "-m", "crystalllm", *map(str, arguments)]


def _run(*arguments, cwd, env=None):
    return subprocess.run(
        _command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        check=False,
    )


def test_output_and_exit_code_are_the_programs(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('out', dist.get_rank(), sys.argv[1:], __name__)\n"
        "print('err', file=sys.stderr)\n"
        "x = torch.ones(2, dtype=torch.int64); dist.broadcast(x, src=0)\n"
        "sys.exit(7)\n"
    )
    done = _run(
        "run", "--world-size", 512, "--rank", 137, "--", "train.py", "--a", "b", cwd=tmp_path
    )
    assert done.stdout == "out 137 ['--a', 'b'] __main__\n"
    assert done.stderr == "err\n"
    assert done.returncode == 7


def test_a_module_runs_like_python_dash_m(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = _run(
        "run", "--world-size", 2, "--rank", 1, "--", "-m", "package.train", "x", cwd=tmp_path
    )
    assert done.stdout == "__main__ package ['x']\n"
    assert done.returncode == 0


def test_a_traceback_is_the_programs_alone(tmp_path):
    (tmp_path / "train.py").write_text("def f():\n    raise KeyError('gone')\nf()\n")
    plain = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    done = _run("run", "--world-size", 2, "--rank", 1, "--", "train.py", cwd=tmp_path)
    assert done.returncode == plain.returncode == 1
    assert done.stderr.replace(str(tmp_path) + "/", "") == plain.stderr.replace(
        str(tmp_path) + "/", ""
    )


def test_neighbouring_modules_are_found(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("value = 3\n")
    (tmp_path / "code" / "train.py").write_text("import helper\nprint(helper.value)\n")
    done = _run("run", "--world-size", 2, "--rank", 1, "--", "code/train.py", cwd=tmp_path)
    assert done.stdout == "3\n"


def test_the_environment_is_torchruns(tmp_path):
    (tmp_path / "train.py").write_text(ENVIRONMENT)
    done = _run(
        "run",
        "--world-size",
        20,
        "--rank",
        17,
        "--ranks-per-node",
        8,
        "--",
        "train.py",
        cwd=tmp_path,
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found["RANK"] == "17"
    assert found["WORLD_SIZE"] == "20"
    assert found["LOCAL_RANK"] == "1"
    assert found["LOCAL_WORLD_SIZE"] == "4"  # the last node is not full
    assert found["GROUP_RANK"] == "2"
    assert found["GROUP_WORLD_SIZE"] == "3"


def test_a_job_gives_program_arguments_and_environment(tmp_path):
    (tmp_path / "train.py").write_text(ENVIRONMENT + "import sys\nprint('ARGS', *sys.argv[1:])\n")
    (tmp_path / "job.yaml").write_text(
        "program: train.py\narguments: --steps {iterations} --tp={tp} --json '{{}}'\n"
        "world_size: 16\nranks_per_node: 4\nparallelism: {tp: 4, dp: 4}\n"
        "environment: {FROM_JOB: 'yes'}\n"
    )
    done = _run("run", "--job", "job.yaml", "--rank", 5, "--iterations", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FROM_JOB yes" in done.stdout
    assert "LOCAL_RANK 1" in done.stdout
    assert "ARGS --steps 3 --tp=4 --json {}" in done.stdout


def test_the_shipped_job_runs(root):
    done = _run("run", "--job", "fsdp-tp-512", "--rank", 511, "--iterations", 2, cwd=root)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank 511/512 step")]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", 8, "--rank", 8, "--", "train.py"], ["Rank 8 is outside", "0 to 7"]),
        (["--world-size", 8, "--rank", -1, "--", "train.py"], ["Rank -1 is outside"]),
        (["--world-size", 0, "--rank", 0, "--", "train.py"], ["at least one rank"]),
        (["--world-size", 8, "--rank", 0, "--", "nothing.py"], ["nothing.py does not exist"]),
        (["--world-size", 8, "--rank", 0], ["no program to run", "Append -- train.py"]),
        (["--job", "nothing", "--rank", 0], ["no job nothing"]),
        (["--world-size", 8, "--rank", 0, "--book", "no.parquet", "--", "train.py"], ["no.parq"]),
        (["--world-size", 8, "--rank", 0, "--iterations", 3, "--", "train.py"], ["needs a job"]),
    ],
)
def test_bad_input_is_refused_before_the_program_starts(tmp_path, arguments, words):
    (tmp_path / "train.py").write_text("print('started')\n")
    done = _run("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_summary_says_what_was_invented(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(2, dtype=torch.int64); dist.broadcast(x, src=0)\n"
    )
    path = tmp_path / "summary.json"
    done = _run(
        "run", "--world-size", 8, "--rank", 1, "--summary", path, "--", "train.py", cwd=tmp_path
    )
    assert done.returncode == 0
    summary = json.loads(path.read_text())
    assert summary["unverified"] is True
    assert summary["num_invented"] == 1
    assert summary["invented"][0]["how"] == "zeros"
    assert summary["exit_code"] == 0
    strict = _run("run", "--world-size", 8, "--rank", 1, "--strict", "--", "train.py", cwd=tmp_path)
    assert strict.returncode == 1
    assert "not in the payload book" in strict.stderr


def test_an_interrupt_ends_it_and_leaves_the_calls(tmp_path):
    (tmp_path / "train.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(2))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    record = tmp_path / "calls.parquet"
    process = subprocess.Popen(
        _command("run", "--world-size", 8, "--rank", 1, "--record", record, "--", "train.py"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # Tests that are started in the background ignore it, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "ready\n"
    start = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert time.perf_counter() - start < 10
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert record.exists()


def test_a_program_without_torch_runs(tmp_path):
    (tmp_path / "train.py").write_text("print('no torch')\n")
    record = tmp_path / "calls.parquet"
    done = _run(
        "run", "--world-size", 8, "--rank", 1, "--record", record, "--", "train.py", cwd=tmp_path
    )
    assert (done.stdout, done.returncode) == ("no torch\n", 0)
    assert record.exists()


def test_a_turned_off_patch_is_off_and_an_unknown_one_is_an_error(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch.distributed as d; print(d.TCPStore.__module__)\n"
    )
    arguments = ("run", "--world-size", 8, "--rank", 1, "--", "train.py")
    on = _run(*arguments, cwd=tmp_path)
    off = _run(*arguments, cwd=tmp_path, env={"CRYSTALLLM_PATCHES_OFF": "torch.stores"})
    wrong = _run(*arguments, cwd=tmp_path, env={"CRYSTALLLM_PATCHES_OFF": "torch.store"})
    assert on.stdout == "crystalllm_patches.torch.stores\n"
    assert off.stdout == "torch._C._distributed_c10d\n"
    assert wrong.returncode == 1
    assert "names no patch. torch.store. Known are" in wrong.stderr


def _script(tmp_path, text, *options):
    (tmp_path / "train.py").write_text(text)
    return _run("run", "--world-size", 8, "--rank", 1, *options, "--", "train.py", cwd=tmp_path)


def test_the_root_logger_is_the_programs(tmp_path):
    done = _script(
        tmp_path,
        "import logging, sys, torch\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "logging.info('shown')\n",
    )
    assert (done.stdout, done.stderr) == ("shown\n", "")


LATE = """
import atexit, os, sys, threading, time
import torch, torch.distributed as dist
class Thing: pass
dist.init_process_group("gloo")
x = torch.ones(2)
def late():
    import pickle
    pickle.dumps(Thing())
    dist.all_reduce(x)
"""


def test_calls_after_the_last_line_are_recorded(tmp_path):
    record = tmp_path / "calls.parquet"
    done = _script(
        tmp_path,
        LATE + "atexit.register(late)\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), late())).start()\n",
        "--record",
        record,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert tables.CALLS.read(record)[0].num_rows == 2


def test_an_exit_without_handlers_leaves_its_record(tmp_path):
    record, summary = tmp_path / "calls.parquet", tmp_path / "summary.json"
    done = _script(
        tmp_path, LATE + "late()\nos._exit(7)\n", "--record", record, "--summary", summary
    )
    assert done.returncode == 7
    assert tables.CALLS.read(record)[0].num_rows == 1
    assert json.loads(summary.read_text())["exit_code"] == 7


@pytest.mark.parametrize("option", ["--record", "--summary"])
def test_a_result_that_cannot_be_written_is_refused_first(tmp_path, option):
    done = _script(tmp_path, "print('started')\n", option, tmp_path)
    assert done.returncode == 2
    assert "could not be written" in done.stderr
    assert done.stdout == ""


def test_asynchronous_calls_at_the_end_neither_hang_nor_crash(tmp_path):
    done = _script(
        tmp_path,
        LATE + "import atexit\n"
        "def more(future):\n"
        "    dist.all_reduce(x, async_op=True).get_future().then(lambda f: None)\n"
        "dist.all_reduce(x, async_op=True).get_future().then(more)\n"
        "atexit.register(lambda: dist.all_reduce(x, async_op=True).get_future().then(more))\n",
        "--transfer-us",
        200_000,
    )
    assert (done.returncode, done.stderr) == (0, "")
