"""One step's forward and backward passes: the order of microbatches on this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from .config import Config
from .model import DTYPES
from .parallel import Axes, Stage

RunBatch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build_schedule(config: Config, axes: Axes, stages: list[Stage]) -> RunBatch:
    """A function that runs a batch forwards and backwards and returns its mean loss.

    It takes inputs and targets, int64 [micro_batch × num_microbatches, s], and
    fills the gradients of the mean loss of all data ranks. The loss, a scalar,
    is that of this rank's samples; on ranks without the last stage it is 0.
    """
    loss = _loss_function(config, axes)
    # Cross entropy over a split vocabulary needs its rules in the backward pass too.
    vocabulary = loss_parallel if config.tp > 1 else nullcontext
    if config.pp == 1:
        return _Accumulation(config, stages[0].module, loss, vocabulary)
    return _Pipeline(config, axes, stages, loss, vocabulary)


def _loss_function(config: Config, axes: Axes) -> RunBatch:
    """Logits [b, s, vocabulary / tp] and targets [b, s] to this microbatch's share of the mean."""

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        if config.tp > 1:
            logits = DTensor.from_local(logits, axes.dense["tp"], [Shard(-1)], run_check=False)
        entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if isinstance(entropy, DTensor):
            entropy = entropy.to_local()
        return entropy / config.num_microbatches

    return loss


class _Accumulation:
    """No pipeline: one microbatch after the other, gradients reduced with the last one."""

    def __init__(
        self,
        config: Config,
        module: nn.Module,
        loss: RunBatch,
        vocabulary: Callable[[], AbstractContextManager],
    ) -> None:
        self.config, self.module, self.loss, self.vocabulary = config, module, loss, vocabulary

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        size = self.config.micro_batch
        total = inputs.new_zeros((), dtype=torch.float32)
        for i, (x, y) in enumerate(zip(inputs.split(size), targets.split(size), strict=True)):
            with self._synchronised(i == self.config.num_microbatches - 1), self.vocabulary():
                loss = self.loss(self.module(x), y)
                loss.backward()
            total += loss.detach()
        return total

    def _synchronised(self, last: bool) -> AbstractContextManager:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()


class _Pipeline:
    """1F1B, or interleaved 1F1B where a rank holds several stages."""

    def __init__(
        self,
        config: Config,
        axes: Axes,
        stages: list[Stage],
        loss: RunBatch,
        vocabulary: Callable[[], AbstractContextManager],
    ) -> None:
        self.vocabulary = vocabulary
        self.device = axes.device
        self.has_first = stages[0].index == 0
        self.has_last = stages[-1].index == config.num_stages - 1
        parts = [_StaticStage(config, axes, stage) for stage in stages]
        # The loss is a share of the mean already, and DDP's parameters are out of
        # the schedule's sight: it scales nothing.
        options = {"loss_fn": loss, "scale_grads": False}
        if config.vp == 1:
            self.schedule = Schedule1F1B(parts[0], config.num_microbatches, **options)
        else:
            self.schedule = ScheduleInterleaved1F1B(parts, config.num_microbatches, **options)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        with self.vocabulary():
            self.schedule.step(
                *([inputs] if self.has_first else []),
                target=targets if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
            )
        if not self.has_last:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class _StaticStage(PipelineStage):
    """A stage whose shapes are known beforehand, so that ranks need not ask each other."""

    def __init__(self, config: Config, axes: Axes, stage: Stage) -> None:
        b, s = config.micro_batch, config.local_sequence
        dtype = DTYPES[config.precision]
        between = torch.empty(b, s // config.tp, config.hidden, dtype=dtype, device="meta")
        tokens = torch.empty(b, s, dtype=torch.int64, device="meta")
        logits = torch.empty(b, s, config.vocabulary // config.tp, dtype=dtype, device="meta")
        first, last = stage.index == 0, stage.index == config.num_stages - 1
        super().__init__(
            stage.module,
            stage.index,
            config.num_stages,
            axes.device,
            input_args=tokens if first else between.requires_grad_(),
            output_args=logits if last else between.detach().requires_grad_(),
            group=axes.dense.get_group("pp"),
        )
