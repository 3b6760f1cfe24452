"""The bundled GPT's layouts: what is filled in, what is refused, and how."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from crystalllm.examples.gpt.config import Config, parse

MOE = {"num_experts": 8}
REFUSED = {
    "world not filled": (
        {"world_size": 8, "tp": 2, "dp": 2},
        "dp × tp × pp × cp = 4 must equal world_size=8; with them dp=4 does",
    ),
    "world not divided": ({"world_size": 6, "tp": 4}, "tp × pp × cp = 4 must divide world_size=6"),
    "ep across data": (
        {"world_size": 8, "tp": 2, "ep": 3, **MOE},
        "ep=3 must divide dp × cp = 4, whose ranks share out the experts; legal: 1, 2, 4",
    ),
    "ep without experts": ({"world_size": 2, "ep": 2}, "ep=2 needs num_experts"),
    "experts not divided": (
        {"world_size": 4, "ep": 4, "num_experts": 6},
        "num_experts=6 must be a multiple of ep=4; legal ep: 1, 2, 3, 6",
    ),
    "top-k": ({"num_experts": 2, "top_k": 3}, "top_k=3 must not exceed num_experts=2"),
    "vp without pp": ({"vp": 2}, "vp=2 needs a pipeline"),
    "layers": (
        {"world_size": 4, "pp": 4, "vp": 2, "layers": 4},
        "layers=4 must be a multiple of pp × vp = 8; legal pp × vp: 1, 2, 4",
    ),
    "batch": (
        {"world_size": 4, "micro_batch": 2, "global_batch": 12},
        "global_batch=12 must be micro_batch=2 × dp=4 × num_microbatches=1; "
        "legal: multiples of 8",
    ),
    "batch and microbatches": (
        {"global_batch": 4, "num_microbatches": 2},
        "global_batch=4 must be micro_batch=1 × dp=1 × num_microbatches=2",
    ),
    "batch too small": (
        {"world_size": 4, "global_batch": 2},
        "global_batch=2 must be micro_batch=1 × dp=4 × num_microbatches=0",
    ),
    "few microbatches": (
        {"world_size": 4, "pp": 4, "num_microbatches": 3},
        "num_microbatches=3 must be at least pp=4",
    ),
    "interleaved": (
        {"world_size": 2, "pp": 2, "vp": 2, "num_microbatches": 3},
        "num_microbatches=3 must be a multiple of pp=2 for the interleaved schedule (vp=2)",
    ),
    "heads": ({"world_size": 4, "tp": 4, "heads": 2}, "tp=4 must divide heads=2"),
    "vocabulary": ({"world_size": 4, "tp": 4, "vocabulary": 258}, "must divide vocabulary=258"),
    "sequence": (
        {"world_size": 4, "tp": 2, "cp": 2, "sequence": 30},
        "sequence=30 must be a multiple of cp × tp = 4",
    ),
    "odd heads": ({"hidden": 24, "heads": 8}, "hidden=24 must be heads=8 × an even head size"),
    "bytes": ({"vocabulary": 100}, "vocabulary=100 must be at least 256"),
    "count": ({"layers": 0}, "layers=0 must be at least 1"),
    "choice": ({"recompute": "some"}, "recompute='some' must be one of none, selective, full"),
    "capacity": ({"capacity_factor": 0.0, **MOE}, "capacity_factor=0.0 must be positive"),
    "negative experts": ({"num_experts": -1}, "num_experts=-1 must be 0 (dense) or more"),
    "log ranks": ({"log_ranks": "1"}, "log_ranks='1' must be 'all' or ranks below world_size=1"),
    "one file": (
        {"world_size": 2, "log_ranks": "0,1", "json_log": "x"},
        "json_log='x' needs {rank} in its name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_runs_are_refused_with_what_would_be_legal(case):
    fields, message = REFUSED[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        Config(**fields)
    assert message in str(refusal.value)


@pytest.mark.parametrize("case", ["world not filled", "ep across data", "layers", "heads"])
def test_refused_layouts_come_with_all_factors(case):
    fields, _ = REFUSED[case]
    with pytest.raises(ValueError, match="Asked for: ") as refusal:
        Config(**fields)
    for axis in ("world_size", "tp", "pp", "vp", "dp", "cp", "ep", "num_experts", "layers"):
        assert f" {axis}=" in str(refusal.value)


def test_what_is_left_out_follows_from_the_world():
    config = Config(world_size=16, tp=2, pp=2, cp=2, heads=4, hidden=64, micro_batch=3)
    assert (config.dp, config.num_microbatches, config.global_batch) == (2, 2, 12)
    assert (config.data_ranks, config.num_stages, config.local_sequence) == (4, 2, 64)


def test_the_shipped_job():
    flags = "--tp 4 --pp 8 --dp 16 --layers 8 --hidden 256 --num-microbatches 8"
    config = parse(flags.split(), world_size=512)
    assert config.global_batch == 128
    assert config.use_fsdp
    assert config.num_stages == config.layers == 8


def test_every_flag_reaches_its_field():
    flags = (
        "--tp 2 --pp 2 --vp 2 --dp 2 --cp 1 --ep 2 --data-parallel ddp --micro-batch 2 "
        "--global-batch 16 --num-microbatches 4 --layers 8 --hidden 32 --heads 4 --sequence 16 "
        "--vocabulary 300 --num-experts 4 --top-k 1 --capacity-factor 1.5 --aux-loss 0.5 "
        "--recompute full --offload-optimizer --precision bf16 --learning-rate 0.5 "
        "--weight-decay 0.25 --clip 2 --steps 3 --seed 5 --data synthetic --device cuda "
        "--backend gloo --save a --load b --json-log c{rank} --log-ranks all"
    )
    config = parse(flags.split(), world_size=8)
    unchanged = {n for n in vars(config) if getattr(config, n) == getattr(Config, n)}
    assert unchanged == {"cp"}
    assert config.capacity_factor == 1.5
    assert config.data == "synthetic"


@hypothesis.given(
    axes=st.fixed_dictionaries(
        {a: st.sampled_from([1, 2, 3, 4]) for a in ("tp", "pp", "vp", "dp", "cp", "ep")}
    )
)
def test_a_layout_either_fills_the_world_or_is_refused(axes):
    size = {"world_size": 24, "layers": 144, "heads": 12, "hidden": 48, "sequence": 144}
    size |= {"vocabulary": 312, "num_experts": 12}
    fills = axes["tp"] * axes["pp"] * axes["dp"] * axes["cp"] == 24
    legal = fills and axes["dp"] * axes["cp"] % axes["ep"] == 0
    legal = legal and not (axes["vp"] > 1 and axes["pp"] == 1)
    if legal:
        assert Config(**size, **axes).num_microbatches == axes["pp"]
    else:
        with pytest.raises(ValueError, match="Asked for: "):
            Config(**size, **axes)
