"""Tokens: bytes of real text, or synthetic. Which sample is where depends on no layout."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

from .config import Config

STDLIB_BYTES = 2 << 20  # plenty for a demonstration, and read in a few milliseconds


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on all parts and on nothing else."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Data:
    """The samples of one data-parallel and context-parallel rank.

    Sample i of step t is the same whatever the layout, so that every layout
    trains on the same global batch.
    """

    def __init__(self, config: Config, *, dp_rank: int, cp_rank: int) -> None:
        self.config = config
        self.dp_rank = dp_rank
        self.part = slice(cp_rank * config.local_sequence, (cp_rank + 1) * config.local_sequence)
        self.text = None if config.data == "synthetic" else _read(config.data)
        if self.text is not None and len(self.text) <= config.sequence + 1:
            raise ValueError(
                f"data={config.data!r} has {len(self.text)} bytes, a sample needs "
                f"more than sequence + 1 = {config.sequence + 1}"
            )

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, each int64 [micro_batch × num_microbatches, sequence / cp]."""
        count = self.config.micro_batch * self.config.num_microbatches
        first = step * self.config.global_batch + self.dp_rank * count
        samples = torch.stack([self._sample(first + i) for i in range(count)])
        inputs, targets = samples[:, :-1], samples[:, 1:]
        return inputs[:, self.part].contiguous(), targets[:, self.part].contiguous()

    def _sample(self, index: int) -> torch.Tensor:
        """int64 [sequence + 1]."""
        length, seed = self.config.sequence + 1, seed_of(self.config.seed, "sample", index)
        if self.text is None:
            # Counting in steps of 1 to 4 from anywhere: something that can be learnt.
            start, stride = seed // 4 % self.config.vocabulary, 1 + seed % 4
            return (start + stride * torch.arange(length)) % self.config.vocabulary
        offset = seed % (len(self.text) - length)
        return self.text[offset : offset + length].long()


def _read(data: str) -> torch.Tensor:
    """uint8, the bytes of a file, or of the standard library's sources in order of name."""
    if data != "stdlib":
        return torch.frombuffer(bytearray(Path(data).read_bytes()), dtype=torch.uint8)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= STDLIB_BYTES:
            break
    return torch.frombuffer(text[:STDLIB_BYTES], dtype=torch.uint8)
