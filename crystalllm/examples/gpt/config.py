"""What a run is: the layout of its ranks, the model, the batch; and which of them exist."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

CHOICES = {
    "data_parallel": ("fsdp", "ddp"),
    "recompute": ("none", "selective", "full"),
    "precision": ("fp32", "bf16"),
    "device": ("cpu", "cuda"),
}
BYTE_VOCABULARY = 256
BUILT_IN_DATA = ("stdlib", "synthetic")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run. Ranks are ordered pp, dp, cp, tp, the last one fastest.

    `dp`, `num_microbatches` and `global_batch` may be left out: dp is what fills
    the world, there are pp microbatches (the fewest that fill the pipeline), and
    the global batch, in sequences, is micro_batch × num_microbatches × dp.

    Raises ValueError, with all factors, for a run that cannot exist.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int | None = None
    cp: int = 1
    ep: int = 1
    data_parallel: str = "fsdp"

    micro_batch: int = 1
    global_batch: int | None = None
    num_microbatches: int | None = None

    layers: int = 4
    hidden: int = 128
    heads: int = 8
    sequence: int = 128
    vocabulary: int = BYTE_VOCABULARY

    num_experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    aux_loss: float = 0.01

    recompute: str = "none"
    offload_optimizer: bool = False
    precision: str = "fp32"
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0

    steps: int = 10
    seed: int = 0
    data: str = "stdlib"
    device: str = "cpu"
    backend: str | None = None
    save: str | None = None
    load: str | None = None
    json_log: str | None = None
    log_ranks: str = "0"

    def __post_init__(self) -> None:
        self._check_values()
        self._check_world()
        self._check_batch()
        self._check_model()

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same dense weights and see different tokens: dp × cp."""
        return self.dp * self.cp

    @property
    def num_stages(self) -> int:
        return self.pp * self.vp

    @property
    def local_sequence(self) -> int:
        """Tokens of a sequence that one context-parallel rank attends from."""
        return self.sequence // self.cp

    @property
    def use_fsdp(self) -> bool:
        return self.data_parallel == "fsdp" and self.data_ranks > 1

    @property
    def use_ddp(self) -> bool:
        return self.data_parallel == "ddp" and self.data_ranks > 1

    def logs(self, rank: int) -> bool:
        """Whether this rank writes the training log."""
        return self.log_ranks == "all" or str(rank) in self.log_ranks.split(",")

    def _check_values(self) -> None:
        for name, legal in CHOICES.items():
            if (value := getattr(self, name)) not in legal:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(legal)}")
        counts = ("world_size", "tp", "pp", "vp", "cp", "ep", "micro_batch", "layers", "hidden")
        counts += ("heads", "sequence", "vocabulary", "top_k", "steps")
        optional = ("dp", "global_batch", "num_microbatches")
        given = [n for n in optional if getattr(self, n) is not None]
        for name in (*counts, *given):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_experts < 0:
            raise ValueError(f"num_experts={self.num_experts} must be 0 (dense) or more")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor={self.capacity_factor} must be positive, or left out for dropless"
            )
        ranks = self.log_ranks.split(",")
        if self.log_ranks != "all" and not all(
            r.isdecimal() and int(r) < self.world_size for r in ranks
        ):
            raise ValueError(
                f"log_ranks={self.log_ranks!r} must be 'all' or ranks below "
                f"world_size={self.world_size}, separated by commas"
            )
        several = self.world_size > 1 if self.log_ranks == "all" else len(ranks) > 1
        if self.json_log and several and "{rank}" not in self.json_log:
            raise ValueError(
                f"json_log={self.json_log!r} needs {{rank}} in its name, since "
                f"log_ranks={self.log_ranks!r} of world_size={self.world_size} write one each"
            )

    def _check_world(self) -> None:
        model = self.tp * self.pp * self.cp
        if self.dp is None:
            if self.world_size % model:
                self._refuse_layout(
                    f"tp × pp × cp = {model} must divide world_size={self.world_size}"
                )
            object.__setattr__(self, "dp", self.world_size // model)
        if self.dp * model != self.world_size:
            fits = self.world_size % model == 0
            hint = f"; with them dp={self.world_size // model} does" if fits else ""
            self._refuse_layout(
                f"dp × tp × pp × cp = {self.dp * model} must equal "
                f"world_size={self.world_size}{hint}"
            )
        if self.data_ranks % self.ep:
            self._refuse_layout(
                f"ep={self.ep} must divide dp × cp = {self.data_ranks}, whose ranks share out the "
                f"experts; legal: {_divisors(self.data_ranks)}"
            )
        if self.ep > 1 and not self.num_experts:
            self._refuse_layout(f"ep={self.ep} needs num_experts, a multiple of ep")
        if self.num_experts % self.ep:
            self._refuse_layout(
                f"num_experts={self.num_experts} must be a multiple of ep={self.ep}; "
                f"legal ep: {_divisors(self.num_experts)}"
            )
        if self.num_experts and self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} must not exceed num_experts={self.num_experts}")
        if self.vp > 1 and self.pp == 1:
            self._refuse_layout(f"vp={self.vp} needs a pipeline: pp of 2 or more, or vp=1")
        if self.layers % self.num_stages:
            self._refuse_layout(
                f"layers={self.layers} must be a multiple of pp × vp = {self.num_stages}; "
                f"legal pp × vp: {_divisors(self.layers)}"
            )

    def _check_batch(self) -> None:
        per_microbatch = self.micro_batch * self.dp
        if self.num_microbatches is None:
            num = self.pp if self.global_batch is None else self.global_batch // per_microbatch
            object.__setattr__(self, "num_microbatches", num)
        if self.global_batch is None:
            object.__setattr__(self, "global_batch", per_microbatch * self.num_microbatches)
        if self.global_batch != per_microbatch * self.num_microbatches or not self.num_microbatches:
            self._refuse_layout(
                f"global_batch={self.global_batch} must be micro_batch={self.micro_batch} × "
                f"dp={self.dp} × num_microbatches={self.num_microbatches}; legal: multiples of "
                f"{per_microbatch}"
            )
        if self.num_microbatches < self.pp:
            self._refuse_layout(
                f"num_microbatches={self.num_microbatches} must be at least pp={self.pp}, so that "
                f"every stage has work (global_batch of {per_microbatch * self.pp} or more)"
            )
        if self.vp > 1 and self.num_microbatches % self.pp:
            self._refuse_layout(
                f"num_microbatches={self.num_microbatches} must be a multiple of pp={self.pp} "
                f"for the interleaved schedule (vp={self.vp})"
            )

    def _check_model(self) -> None:
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden={self.hidden} must be heads={self.heads} × an even head size "
                f"(rotary embeddings turn pairs)"
            )
        for name in ("heads", "vocabulary"):
            if getattr(self, name) % self.tp:
                self._refuse_layout(f"tp={self.tp} must divide {name}={getattr(self, name)}")
        if self.sequence % (self.cp * self.tp):
            self._refuse_layout(
                f"sequence={self.sequence} must be a multiple of cp × tp = {self.cp * self.tp} "
                f"(sequence parallelism spreads it over tp as well)"
            )
        if self.data != "synthetic" and self.vocabulary < BYTE_VOCABULARY:
            raise ValueError(
                f"vocabulary={self.vocabulary} must be at least {BYTE_VOCABULARY} for "
                f"data={self.data!r}, whose tokens are bytes; data=synthetic takes any"
            )

    def _refuse_layout(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what}. Asked for: world_size={self.world_size}, tp={self.tp}, pp={self.pp}, "
            f"vp={self.vp}, dp={'the rest' if self.dp is None else self.dp}, cp={self.cp}, "
            f"ep={self.ep}, micro_batch={self.micro_batch}, global_batch={self.global_batch}, "
            f"num_microbatches={self.num_microbatches}, layers={self.layers}, "
            f"hidden={self.hidden}, heads={self.heads}, sequence={self.sequence}, "
            f"vocabulary={self.vocabulary}, num_experts={self.num_experts}"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def parse(arguments: Sequence[str] | None = None, *, world_size: int) -> Config:
    """The run that the command line asks for, in a world of `world_size` ranks."""
    parser = argparse.ArgumentParser(prog="crystalllm.examples.gpt", description=__doc__)

    def add(group: argparse._ArgumentGroup, flag: str, help: str, **options: object) -> None:
        name = flag.replace("-", "_")
        options.setdefault("default", getattr(Config, name))
        options.setdefault("choices", CHOICES.get(name))
        # %(default)s is filled in by argparse.
        shown = "" if options["default"] is None else " (default: %(default)s)"
        group.add_argument(f"--{flag}", help=help + shown, **options)

    layout = parser.add_argument_group("layout (dp × tp × pp × cp = world size)")
    add(layout, "tp", "tensor and sequence parallel ranks", type=int)
    add(layout, "pp", "pipeline ranks; 1F1B", type=int)
    add(layout, "vp", "stages per pipeline rank; interleaved 1F1B above 1", type=int)
    add(layout, "dp", "data parallel ranks (default: what fills the world)", type=int)
    add(layout, "cp", "context parallel ranks: each holds a part of every sequence", type=int)
    add(layout, "ep", "expert parallel ranks; divides dp × cp", type=int)
    add(layout, "data-parallel", "FSDP2 or DDP, over dp × cp")

    batch = parser.add_argument_group("batch")
    add(batch, "micro-batch", "sequences per microbatch and data rank", type=int)
    add(batch, "global-batch", "sequences per step", type=int)
    add(batch, "num-microbatches", "microbatches per step (default: pp)", type=int)

    model = parser.add_argument_group("model")
    add(model, "layers", "transformer layers", type=int)
    add(model, "hidden", "width", type=int)
    add(model, "heads", "attention heads", type=int)
    add(model, "sequence", "tokens per sequence", type=int)
    add(model, "vocabulary", "token values", type=int)
    add(model, "num-experts", "experts per layer; 0 is dense", type=int)
    add(model, "top-k", "experts per token", type=int)
    add(
        model,
        "capacity-factor",
        "an expert takes at most this × sequence × top_k / num_experts tokens of a sequence "
        "(default: dropless)",
        type=float,
    )
    add(model, "aux-loss", "weight of the load balancing loss", type=float)

    training = parser.add_argument_group("training")
    add(
        training,
        "recompute",
        "activations recomputed in backward: selective is attention, full is whole layers",
    )
    training.add_argument(
        "--offload-optimizer", action="store_true", help="optimizer state and step on the host"
    )
    add(training, "precision", "of compute; weights and optimizer state are fp32")
    add(training, "learning-rate", "of AdamW", type=float)
    add(training, "weight-decay", "of matrices", type=float)
    add(training, "clip", "largest gradient norm", type=float)
    add(training, "steps", "iterations in all, those before --load included", type=int)
    add(training, "seed", "of weights and of the choice of samples", type=int)
    add(training, "data", f"{' or '.join(BUILT_IN_DATA)}, or a file whose bytes are tokens")
    add(training, "device", "cpu or cuda")
    add(training, "backend", "of communication (default: nccl on cuda, gloo on cpu)")
    add(training, "save", "folder for a checkpoint after the last step")
    add(training, "load", "folder of a checkpoint, of any layout, to go on from")
    add(training, "json-log", "file for JSON lines; {rank} stands for the rank")
    add(training, "log-ranks", "ranks that log: all, or numbers separated by commas")
    return Config(world_size=world_size, **vars(parser.parse_args(arguments)))
