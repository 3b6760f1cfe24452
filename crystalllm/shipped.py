"""The jobs and clusters that the project ships."""

from __future__ import annotations

from typing import Any

from crystalllm.config import Cluster, Gpu, Job, Link, Nodes, Parallelism, Work
from crystalllm.examples.gpt.config import BYTE_VOCABULARY

# NVIDIA H200 SXM: 141 GB HBM3e; dense peaks from NVIDIA's H200 datasheet, which
# gives them with sparsity for the tensor cores (halved here).
H200 = Gpu(
    model="NVIDIA H200",
    memory_bytes=141_000_000_000,
    peak_flops={
        "fp64": 34e12,
        "fp32": 67e12,
        "tf32": 494.5e12,
        "bf16": 989.5e12,
        "fp16": 989.5e12,
        "fp8": 1979e12,
    },
)
# NVLink 4: 900 GB/s both ways together (NVIDIA's H100 datasheet), so 450 GB/s one way.
# The latency is that of a hop in NCCL's tuner (src/graph/tuning.cc, NVLINK, LL); rings
# without NVLS reach 365 GB/s (docs/transfers.md).
NVLINK_4 = Link(
    scope="node",
    bandwidth_bytes_per_s=450e9,
    latency_s=0.6e-6,
    efficiency=0.81,
    reduces_in_switch=True,
)
# InfiniBand NDR, one 400 Gb/s adapter per GPU. The latency is that of a hop in NCCL's
# tuner (NET, Tree, LL); four nodes with as much Ethernet reach 365 of 400 GB/s.
NDR_400 = Link(scope="cluster", bandwidth_bytes_per_s=50e9, latency_s=5e-6, efficiency=0.92)
H200_CLUSTER = Cluster(
    nodes=[Nodes(count=64, gpus_per_node=8, gpu=H200)],
    links={"nvlink": NVLINK_4, "network": NDR_400},
)
LARGE_H200_CLUSTER = H200_CLUSTER.model_copy(
    update={"nodes": [Nodes(count=1024, gpus_per_node=8, gpu=H200)]}
)
SMALL_H200_CLUSTER = H200_CLUSTER.model_copy(
    update={"nodes": [Nodes(count=2, gpus_per_node=8, gpu=H200)]}
)

FSDP_TP_JOB = Job(
    program="-m crystalllm.examples.fsdp_tp",
    arguments="--steps {iterations} --tp {tp} --seed {seed}",
    world_size=512,
    ranks_per_node=8,
    iterations=10,
    capture_iterations=3,
    parallelism=Parallelism(tp=8, dp=64),
    cluster="h200-64x8",
)


_GPT_ARGUMENTS = (
    "--tp {tp} --pp {pp} --dp {dp} --ep {ep} --layers {layers} --hidden {hidden} --sequence 128 "
    "--micro-batch {micro_batch} --global-batch {global_batch} --num-experts {num_experts} "
    "--data-parallel {data_parallel} --recompute {recompute} {offload_optimizer} "
    "--steps {iterations} --seed {seed} --log-ranks all"
)
_SEQUENCE = 128
# Forward and backward passes of a GPT without recomputation (Narayanan et al., 2021, "Efficient
# Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 5.1, whose 96
# count a second forward pass).
_GPT_FLOPS = (
    f"72 * global_batch * {_SEQUENCE} * layers * hidden ** 2"
    f" * (1 + {_SEQUENCE} / (6 * hidden) + {BYTE_VOCABULARY} / (12 * layers * hidden))"
)
_TOKENS = f"global_batch * {_SEQUENCE}"
GPT_JOB = Job(
    program="-m crystalllm.examples.gpt",
    arguments=_GPT_ARGUMENTS,
    parameters={
        "layers": 8,
        "hidden": 256,
        "num_experts": 0,
        "micro_batch": 1,
        "global_batch": 128,
        "data_parallel": "fsdp",
        "recompute": "none",
        "offload_optimizer": False,
    },
    world_size=512,
    ranks_per_node=8,
    iterations=10,
    capture_iterations=3,
    parallelism=Parallelism(tp=4, pp=8, dp=16),
    cluster="h200-64x8",
    work=Work(tokens=_TOKENS, flops=_GPT_FLOPS),
)


def _sibling(parameters: dict[str, Any], **changes: Any) -> Job:
    """The main job, but for these parameters and fields."""
    data = {**GPT_JOB.model_dump(), **changes, "parameters": GPT_JOB.parameters | parameters}
    return Job.model_validate(data)


DDP_JOB = _sibling({"data_parallel": "ddp"})
MOE_JOB = _sibling(
    {"num_experts": 8, "global_batch": 256},
    parallelism=Parallelism(tp=2, pp=4, dp=64, ep=8),
    work=Work(tokens=_TOKENS),
)
LARGE_GPT_JOB = _sibling(
    {"global_batch": 2048},
    world_size=8192,
    parallelism=Parallelism(tp=4, pp=8, dp=256),
    cluster="h200-1024x8",
)
# The same program on GPUs: one of them stands for any rank of the world.
ONE_GPU_JOB = _sibling(
    {"layers": 32, "hidden": 4096},
    arguments=_GPT_ARGUMENTS + " --heads 32 --device cuda --precision bf16",
)
# A world that two nodes hold whole, so that emulated and real runs can be compared.
TWO_NODES_JOB = _sibling(
    {"layers": 16, "hidden": 2048, "global_batch": 32},
    arguments=_GPT_ARGUMENTS + " --heads 16 --device cuda --precision bf16",
    world_size=16,
    parallelism=Parallelism(tp=4, pp=2, dp=2),
    cluster="h200-2x8",
)
