"""The bundled GPT's pieces, each against a plain computation, on one rank."""

from __future__ import annotations

import functools
import math
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from crystalllm.examples.gpt import data as gpt_data
from crystalllm.examples.gpt.config import Config
from crystalllm.examples.gpt.data import Data
from crystalllm.examples.gpt.log import flops_per_step
from crystalllm.examples.gpt.model import Groups, rotate
from crystalllm.examples.gpt.moe import MoE
from crystalllm.examples.gpt.optimizer import Optimizer
from crystalllm.examples.gpt.parallel import Weight, build_axes, build_stage
from crystalllm.examples.gpt.train import train

SIZE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 256, "seed": 3}


def in_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a child: pytest's process forks logical ranks and so never computes."""

    def child(pipe: object, arguments: dict[str, object]) -> None:
        error = None
        try:
            torch.manual_seed(0)
            test(**arguments)
        except BaseException:
            error = traceback.format_exc()
        pipe.send(error)

    @functools.wraps(test)
    def parent(**arguments: object) -> None:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=child, args=(there, arguments))
        with closing(here):
            process.start()
            there.close()
            finished = here.poll(60)
            try:
                error = here.recv() if finished else "no answer within 60 s"
            except EOFError:
                error = "the child died"
            if not finished:
                process.kill()
            process.join()
        if error:
            pytest.fail(error, pytrace=False)

    return parent


def one_rank(**fields: object) -> Config:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Config(**(SIZE | fields))


def curve(**fields: object) -> list[tuple[float, float]]:
    return [(r.loss, r.grad_norm) for r in train(one_rank(**fields))]


def built(config: Config) -> torch.nn.Module:
    axes = build_axes(config, device=torch.device("cpu"))
    return build_stage(config, axes, index=0).module


# --- data ------------------------------------------------------------------


def samples(config: Config, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of `step`, put together from what each data rank reads."""
    parts = []
    for dp in range(config.dp):
        across = [Data(config, dp_rank=dp, cp_rank=cp).batch(step) for cp in range(config.cp)]
        parts.append([torch.cat(xs, dim=1) for xs in zip(*across, strict=True)])
    return tuple(torch.cat(xs) for xs in zip(*parts, strict=True))


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
@in_fork
def test_global_batch_is_the_same_in_every_layout(source):
    one = samples(Config(**SIZE, data=source, global_batch=8), step=3)
    cut = Config(**SIZE, data=source, global_batch=8, world_size=8, cp=2, micro_batch=2)
    for a, b in zip(one, samples(cut, step=3), strict=True):
        assert torch.equal(a, b)
    inputs, targets = one
    assert inputs.shape == targets.shape == (8, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len({tuple(row) for row in inputs.tolist()}) > 4
    assert not torch.equal(inputs, samples(cut, step=4)[0])


@in_fork
def test_stdlib_tokens_are_python_source():
    config = Config(**(SIZE | {"sequence": 4096}), global_batch=4)
    inputs, _ = Data(config, dp_rank=0, cp_rank=0).batch(0)
    text = bytes(inputs.flatten().tolist()).decode("utf-8", errors="ignore")
    assert "def " in text
    assert "self" in text


def test_file_tokens_are_its_bytes_and_a_short_file_is_refused(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    config = Config(**SIZE, data=str(file))
    inputs, targets = Data(config, dp_rank=0, cp_rank=0).batch(0)
    assert targets.tolist() == (inputs + 1).tolist()
    file.write_bytes(bytes(17))
    with pytest.raises(ValueError, match=r"has 17 bytes, a sample needs more than .* 17"):
        Data(config, dp_rank=0, cp_rank=0)


def test_seeds_depend_on_every_part():
    seeds = {gpt_data.seed_of(*parts) for parts in [(1, 23), (12, 3), (1, 2, 3), ("1/23",), (3,)]}
    # ("1/23",) and (1, 23) read the same; names have no slash.
    assert len(seeds) == 4
    assert all(0 <= s < 2**63 for s in seeds)


# --- model -----------------------------------------------------------------


@in_fork
def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8)
    products = []
    for shift in (0, 5, 90):
        a = rotate(q, torch.tensor([3 + shift]))
        b = rotate(k, torch.tensor([1 + shift]))
        assert a.norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
        products.append((a * b).sum().item())
    assert products[1:] == pytest.approx([products[0]] * 2, rel=1e-3)
    other = (rotate(q, torch.tensor([4])) * rotate(k, torch.tensor([1]))).sum().item()
    assert other != pytest.approx(products[0], rel=1e-2)


@pytest.mark.parametrize("experts", [0, 4])
@in_fork
def test_a_token_does_not_see_later_ones(experts):
    model = built(one_rank(num_experts=experts))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-5


@in_fork
def test_weights_depend_on_seed_and_name_but_not_on_the_stage():
    whole = dict(built(one_rank()).named_parameters())
    again = dict(built(one_rank()).named_parameters())
    other = dict(built(one_rank(seed=4)).named_parameters())
    assert all(torch.equal(whole[n], again[n]) for n in whole)
    random = [n for n in whole if "norm" not in n]
    assert not any(torch.equal(whole[n], other[n]) for n in random)
    assert len({whole[n].flatten()[0].item() for n in random}) == len(random)

    config = Config(**SIZE, world_size=2, pp=2)
    axes = build_axes(one_rank(), device=torch.device("cpu"))
    halves = [dict(build_stage(config, axes, index=i).module.named_parameters()) for i in (0, 1)]
    assert halves[0].keys() | halves[1].keys() == whole.keys()
    assert not halves[0].keys() & halves[1].keys()
    for half in halves:
        assert all(torch.equal(half[n], whole[n]) for n in half)


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("mode", ["selective", "full"])
@in_fork
def test_recomputation_changes_what_is_kept_and_not_the_gradients(mode, experts):
    kept, gradients = {}, {}
    for recompute in ("none", mode):
        model = built(one_rank(recompute=recompute, num_experts=experts))
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.arange(16)[None]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = F.cross_entropy(model(tokens)[0], tokens[0])
        kept[recompute] = sum(sizes.values())
        loss.backward()
        gradients[recompute] = [p.grad for p in model.parameters()]
    assert kept[mode] < kept["none"]
    for a, b in zip(*gradients.values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)


# --- experts ---------------------------------------------------------------


def layer(**fields: object) -> tuple[MoE, torch.Tensor]:
    config = Config(**SIZE, num_experts=4, **fields)
    moe = MoE(config, Groups())
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return moe, torch.randn(2, 16, 32)


def by_hand(moe: MoE, x: torch.Tensor, capacity: float) -> tuple[torch.Tensor, int]:
    """Token by token; also the number of choices that found their expert full."""
    out, dropped = torch.zeros_like(x), 0
    for b in range(len(x)):
        load = [0] * 4
        for t in range(x.shape[1]):
            probabilities = moe.router(x[b, t]).softmax(-1)
            for e in probabilities.argsort(descending=True)[: moe.config.top_k].tolist():
                load[e] += 1
                if load[e] > capacity:
                    dropped += 1
                    continue
                inner = F.gelu(moe.experts.up[e] @ x[b, t])
                out[b, t] += probabilities[e] * (moe.experts.down[e] @ inner)
    return out, dropped


@pytest.mark.parametrize("top_k", [1, 2, 4])
@in_fork
def test_dropless_experts_compute_what_a_loop_over_tokens_does(top_k):
    moe, x = layer(top_k=top_k)
    expected, dropped = by_hand(moe, x, math.inf)
    assert dropped == 0
    assert torch.allclose(moe(x), expected, atol=1e-5)


@in_fork
def test_full_experts_drop_the_later_tokens_of_a_sequence():
    moe, x = layer(top_k=2, capacity_factor=0.7)
    expected, dropped = by_hand(moe, x, math.ceil(0.7 * 16 * 2 / 4))
    assert 0 < dropped < 2 * 16 * 2
    assert torch.allclose(moe(x), expected, atol=1e-5)


@in_fork
def test_balance_loss_adds_its_gradient_and_nothing_to_the_output():
    with_loss, x = layer(aux_loss=0.5, num_microbatches=2)
    without, _ = layer(aux_loss=0.0, num_microbatches=2)
    without.load_state_dict(with_loss.state_dict())
    outputs = [moe(x.clone().requires_grad_()) for moe in (with_loss, without)]
    assert torch.equal(*outputs)
    for y in outputs:
        (0 * y).sum().backward()  # what is left is the loss that was added on the way
    assert without.router.weight.grad.abs().max() == 0

    weight = without.router.weight.detach().requires_grad_()
    probabilities = (x @ weight.T).softmax(-1)  # [2, 16, 4]
    chosen = F.one_hot(probabilities.topk(2).indices, 4).sum(2).float()
    fraction = chosen.sum(1) / (16 * 2)
    loss = 0.5 * (4 * (fraction * probabilities.mean(1)).sum(-1)).mean() / 2
    loss.backward()
    assert weight.grad.abs().max() > 1e-4
    assert torch.allclose(with_loss.router.weight.grad, weight.grad, atol=1e-6)


# --- training --------------------------------------------------------------


@in_fork
def test_a_step_is_clipped_adamw():
    config = one_rank(clip=0.5, learning_rate=0.1, weight_decay=0.2)
    axes = build_axes(config, device=torch.device("cpu"))
    leaves = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in leaves]
    weights = [Weight(name=str(i), value=p, leaf=p, expert=False) for i, p in enumerate(leaves)]
    ours = Optimizer(config, axes, weights)
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(plain, (0.2, 0.0), strict=True)]
    theirs = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        for p, q in zip(leaves, plain, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = q.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        assert ours.step().item() == pytest.approx(norm.item(), rel=1e-6)
        assert norm > 0.5
        theirs.step()
        for p, q in zip(leaves, plain, strict=True):
            assert torch.allclose(p, q, atol=1e-6)
            assert p.grad is None


@in_fork
def test_a_missing_gradient_is_an_error_with_a_name():
    config = one_rank()
    parameter = torch.nn.Parameter(torch.ones(2))
    weight = Weight(name="blocks.0.lost", value=parameter, leaf=parameter, expert=False)
    optimizer = Optimizer(config, build_axes(config, device=torch.device("cpu")), [weight])
    with pytest.raises(RuntimeError, match=r"blocks\.0\.lost got no gradient"):
        optimizer.step()


@in_fork
def test_offloaded_state_is_other_memory_with_the_same_outcome():
    assert curve(steps=4, offload_optimizer=True) == curve(steps=4)
    config = one_rank(offload_optimizer=True)
    axes = build_axes(config, device=torch.device("cpu"))
    optimizer = Optimizer(config, axes, build_stage(config, axes, index=0).weights)
    for shard, master in zip(optimizer.shards, optimizer.masters, strict=True):
        assert shard.data_ptr() != master.data_ptr()


@in_fork
def test_bf16_computes_in_bf16_near_fp32():
    assert built(one_rank(precision="bf16"))(torch.arange(16)[None]).dtype == torch.bfloat16
    half, full = curve(steps=3, precision="bf16"), curve(steps=3)
    for a, b in zip(half, full, strict=True):
        assert a == pytest.approx(b, rel=0.02)
        assert a != b


@in_fork
def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path):
    straight = curve(steps=4, num_experts=4)
    folder = str(tmp_path / "checkpoint")
    first = curve(steps=2, num_experts=4, save=folder)
    assert first + curve(steps=4, num_experts=4, load=folder) == straight


@in_fork
def test_synthetic_tokens_can_be_learnt():
    losses = [loss for loss, _ in curve(data="synthetic", vocabulary=16, steps=60, global_batch=8)]
    # Even odds at first; then that the next token is at most four steps ahead.
    assert losses[0] > math.log(16) - 0.1
    assert losses[-1] < losses[0] - 0.7


def test_flops_of_a_model_that_is_counted_by_hand():
    # s=4, h=8, V=256, 1 layer: projections 8·4·64, attention 4·16·8, MLP 16·4·64, head 2·4·8·256.
    size = {"layers": 1, "hidden": 8, "heads": 2, "sequence": 4, "global_batch": 3}
    dense = 2048 + 512 + 4096 + 16384
    assert flops_per_step(Config(**size)) == 3 * 3 * dense
    # Two MLPs per token instead of one, and a router 2·4·8·6.
    assert flops_per_step(Config(**size, num_experts=6)) == 3 * 3 * (dense + 4096 + 384)


@in_fork
def test_flops_agree_with_torch_counting_them():
    config = one_rank(global_batch=1)
    model = built(config)
    # As plain products, which is how they are counted; fused kernels count otherwise.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.arange(16)[None]).sum().backward()
    assert counter.get_total_flops() == flops_per_step(config)
