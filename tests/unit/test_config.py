"""Configuration: generated files, and errors that say what would be legal."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from crystalllm import config, generated, shipped
from crystalllm.errors import UserError

JOB = {"program": "train.py", "world_size": 64, "parallelism": {"tp": 4, "pp": 2, "dp": 8}}


def _cluster(**changes):
    data = shipped.H200_CLUSTER.model_dump(mode="json")
    return {**data, **changes}


def _load(tmp_path, loader, data):
    path = tmp_path / "it.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return loader(str(path))


def test_generated_files_are_up_to_date(root):
    for path, text in generated.generated_files().items():
        assert (root / path).read_text() == text, f"{path}: run python -m crystalllm generate"


def test_default_files_load_and_fit_their_schemas(root, monkeypatch):
    monkeypatch.chdir(root)
    schemas = {
        "jobs": (config.load_job, "job"),
        "clusters": (config.load_cluster, "cluster"),
    }
    for folder, (load, name) in schemas.items():
        schema = json.loads((root / f"config/schema/{name}.schema.json").read_text())
        files = sorted((root / "config" / folder).glob("*.yaml"))
        assert files
        for path in files:
            load(path.stem)
            jsonschema.validate(yaml.safe_load(path.read_text()), schema)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wrold_size": 3}, ["unknown key wrold_size", "3", "did you mean world_size", "program"]),
        (
            {"parallelism": {"tp": 4, "dq": 2}},
            ["unknown key parallelism.dq", "legal keys are tp, pp, cp, dp, ep, vp"],
        ),
        ({"world_size": "many"}, ["key world_size", "'many'", "integer"]),
        ({"world_size": 0}, ["key world_size", "0", "greater than 0"]),
        (
            {"world_size": 100},
            ["tp=4 × pp=2 × cp=1 × dp=8 = 64 ranks", "world_size is 100", "tp × pp × cp = 8 does"],
        ),
        ({"world_size": 128}, ["dp=16 would fill it"]),
        (
            {"parallelism": {"tp": 4, "pp": 2, "dp": 8, "ep": 3}},
            ["ep=3 does not divide cp × dp = 1 × 8 = 8", "1, 2, 4, 8"],
        ),
        ({"arguments": "--n {iteration}"}, ["{iteration}", "did you mean iterations"]),
        ({"program": None}, ["key program", "None", "string"]),
    ],
)
def test_a_wrong_job_is_explained(tmp_path, changes, words):
    with pytest.raises(UserError) as caught:
        _load(tmp_path, config.load_job, {**JOB, **changes})
    for word in ["it.yaml", "config/schema/job.schema.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [("a: [1", "no YAML"), ("- 1\n- 2\n", "keys and values"), ("", "keys and values")],
)
def test_a_file_that_is_no_mapping_is_explained(tmp_path, text, word):
    with pytest.raises(UserError, match=word):
        _load(tmp_path, config.load_job, text)


def test_mixed_gpu_models_are_refused_by_name(tmp_path):
    nodes = _cluster()["nodes"]
    other = {**nodes[0], "gpu": {**nodes[0]["gpu"], "model": "NVIDIA H100"}}
    with pytest.raises(UserError, match="mixed GPU models NVIDIA H100 and NVIDIA H200"):
        _load(tmp_path, config.load_cluster, _cluster(nodes=[*nodes, other]))


def test_a_cluster_needs_the_links_of_its_nodes(tmp_path):
    links = {"nvlink": _cluster()["links"]["nvlink"]}
    with pytest.raises(UserError, match="a cluster of 64 nodes needs one of scope node and one of"):
        _load(tmp_path, config.load_cluster, _cluster(links=links))


def test_a_wrong_key_deep_down_is_named(tmp_path):
    links = {"nvlink": {**_cluster()["links"]["nvlink"], "bandwith": 3}}
    with pytest.raises(UserError, match=r"unknown key links\.nvlink\.bandwith"):
        _load(tmp_path, config.load_cluster, _cluster(links=links))


def test_a_cluster_too_small_for_the_world_is_refused(tmp_path):
    small = _cluster(nodes=[{**_cluster()["nodes"][0], "count": 4}])
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    job = {**JOB, "cluster": str(tmp_path / "small.yaml")}
    with pytest.raises(UserError, match=r"too small for the world: 64 ranks, 4 × 8 = 32 GPUs"):
        _load(tmp_path, config.load_job, job)
    crowded = {**JOB, "world_size": 32, "ranks_per_node": 16, "parallelism": None}
    crowded["cluster"] = str(tmp_path / "small.yaml")
    with pytest.raises(UserError, match="16 ranks, 8 GPUs"):
        _load(tmp_path, config.load_job, crowded)


def test_an_unknown_name_lists_the_known(root, monkeypatch):
    monkeypatch.chdir(root)
    with pytest.raises(UserError, match=r"no job fsdp-tp-513 \(did you mean fsdp-tp-512\?\)"):
        config.load_job("fsdp-tp-513")
    with pytest.raises(UserError, match=r"Known clusters: .*h200-64x8"):
        config.load_cluster("b200")


def test_arguments_are_filled_in():
    job = config.Job(
        **{**JOB, "arguments": "--n {iterations} --dp {dp} --x '{{a}} b'", "iterations": 4}
    )
    assert job.command() == ("train.py", "--n", "4", "--dp", "8", "--x", "{a} b")
    assert job.command(iterations=9)[2] == "9"


def test_what_an_iteration_gets_through_follows_the_job_s_values():
    job = config.Job(
        program="-m json.tool",
        parameters={"batch": 8},
        world_size=4,
        parallelism=config.Parallelism(dp=4),
        work=config.Work(tokens="batch * 128 * dp", flops="6 * 1e3 * batch"),
    )
    assert job.amounts() == {"tokens": 4096.0, "flops": 48_000.0}
    resolved = job.resolved()
    assert resolved.parameters == {}
    assert resolved.amounts() == job.amounts()
    assert config.Job.model_validate(resolved.model_dump(mode="json")) == resolved
    assert job.model_copy(update={"work": None}).amounts() == {}
    plain = {**job.model_dump(), "work": {"tokens": 524_288, "flops": 1e21}}
    assert config.Job.model_validate(plain).amounts() == {"tokens": 524_288.0, "flops": 1e21}
    large = {**plain, "parameters": {"hidden": 16_384, "layers": 126, "batch": 2048 * 8192}}
    large["work"] = {"tokens": "batch", "flops": "72 * batch * layers * hidden ** 2"}
    assert config.Job.model_validate(large).amounts()["flops"] == pytest.approx(4.0855e19, rel=1e-3)
    for wrong in ("batch * sequence", "batch *", "batch.foo", "0", "batch - 8"):
        with pytest.raises(ValueError, match=r"cannot be evaluated|must be above 0"):
            config.Job.model_validate({**job.model_dump(), "work": {"tokens": wrong}})


def test_the_shipped_jobs_know_their_work():
    """Six operations per weight and token, and those of attention."""
    sequence, vocabulary, layers, hidden, batch = 128, 256, 8, 256, 128
    weights = layers * 12 * hidden**2 + vocabulary * hidden
    attention = 12 * layers * hidden * sequence
    tokens = batch * sequence
    amounts = shipped.GPT_JOB.amounts()
    assert amounts["tokens"] == tokens
    assert amounts["flops"] == pytest.approx((6 * weights + attention) * tokens)
