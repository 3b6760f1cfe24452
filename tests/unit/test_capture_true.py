"""Capture against the real thing: eight gloo ranks that record what they do.

Every rank that was captured alone, with virtual peers, has to have made the
same calls in the same groups, of the same sizes, in the same order, and to have
waited for them at the same places.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import real_capture
import training_programs

from crystalllm.capture import capture
from crystalllm.capture.captured import Captured
from crystalllm.config import Job, Parallelism

WORLD = 8
ITERATIONS = 4  # DDP builds its buckets anew in the second; two more have to be equal
GPT = (
    "--hidden 16 --heads 4 --sequence 16 --data synthetic --vocabulary 32 --steps {iterations} "
    "--tp {tp} --pp {pp} --vp {vp} --cp {cp} --dp {dp} --ep {ep} --layers "
)
LAYOUTS = {
    "ddp": ({"dp": 8}, "2 --data-parallel ddp"),
    "fsdp2": ({"dp": 8}, "2"),
    "tp": ({"tp": 4, "dp": 2}, "1"),
    "pp": ({"pp": 4, "dp": 2}, "4 --num-microbatches 6"),
    "pp-vp": ({"pp": 2, "vp": 2, "dp": 4}, "4"),
    "cp": ({"cp": 4, "dp": 2}, "2 --recompute full"),
    "tp-pp-dp": ({"tp": 2, "pp": 2, "dp": 2}, "2 --data-parallel ddp"),
    "moe": ({"tp": 2, "dp": 4, "ep": 4}, "1 --num-experts 4"),
}


def both(job: Job, folder: Path) -> tuple[list[Captured], list[Captured]]:
    """What real ranks and captured ones left."""
    real = real_capture.run(job, folder / "real")
    capture(job, folder / "job" / "capture", strategy="all")
    (work,) = (folder / "job" / ".work" / "capture").glob("*/all")
    return real, [Captured.read(work / f"rank-{r}.arrow") for r in range(job.world_size)]


def rows(left: Captured, part: str) -> list[dict[str, object]]:
    """Rows of a part, without split sizes and what follows from them.

    Routers of experts make them of data, and those of virtual peers are invented.
    """
    split = {c["call"] for c in left.parts["calls"].to_pylist() if " count=split " in c["key"]}
    found = left.parts[part].to_pylist()
    for row in found:
        if row.get("call") in split:
            for name in ("in_splits", "out_splits", "in_elements", "out_elements", "bytes"):
                row.pop(name, None)
    return found


def assert_same(real: list[Captured], ours: list[Captured], *, with_splits: bool) -> None:
    for theirs, left in zip(real, ours, strict=True):
        assert theirs.rank == left.rank
        assert theirs.num_marks == left.num_marks
        assert left.num_invented == 0
        for part in ("calls", "groups", "events"):
            if with_splits:
                a, b = (c.parts[part].to_pylist() for c in (theirs, left))
            else:
                a, b = rows(theirs, part), rows(left, part)
            for i, (expected, found) in enumerate(zip(a, b, strict=False)):
                assert found == expected, f"rank {left.rank}, row {i} of {part}"
            assert len(a) == len(b), f"rank {left.rank}, {part}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_captured_ranks_do_what_real_ones_do(name, virtual, tmp_path):
    parallelism, more = LAYOUTS[name]
    job = Job(
        program="-m crystalllm.examples.gpt",
        arguments=GPT + more,
        world_size=WORLD,
        capture_iterations=ITERATIONS,
        parallelism=Parallelism(**parallelism),
    )
    real, ours = both(job, tmp_path)
    assert_same(real, ours, with_splits=name != "moe")
    assert len({c.keys_digest for c in real}) == len({c.keys_digest for c in ours})


# Stacks that the GPT does not use.
STACKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
import training_programs
training_programs.ITERATIONS = int(sys.argv[2])
dist.init_process_group("gloo")
for name in (
    "fsdp1", "fsdp2_hybrid", "zero_redundancy_optimizer", "pipeline_zero_bubble",
    "object_collectives_then_ddp", "ddp_with_own_python_hook",
):
    training_programs.PROGRAMS[name]()
dist.destroy_process_group()
"""

# Every kind of call, by every way of making it, in groups of every kind.
CALLS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
half = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])][rank // 4]
# Before `odd`: torch names it by how many groups the rank is in, which has to be equal in a pair.
pair = dist.new_group(sorted([rank, rank ^ 1]), use_local_synchronization=True)
odd = dist.new_group([0, 5, 7])
split = [dist.new_group([0, 2, 4, 6]), dist.new_group([1, 3, 5, 7])][rank % 2]
again = dist.new_group([0, 5, 7])
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
for step in range(int(sys.argv[1])):
    late = dist.all_reduce(torch.ones(5), async_op=True)
    dist.all_reduce(torch.ones(3, dtype=torch.float64), dist.ReduceOp.MAX, group=half)
    for group, root in ((dist.group.WORLD, 3), (pair, 1), (split, 2)):
        x = torch.full((4,), float(rank))
        n = group.size()
        dist.broadcast(x, group_src=root, group=group)
        dist.reduce(x, group_dst=root, group=group)
        parts = [torch.zeros(4) for _ in range(n)] if group.rank() == root else None
        dist.gather(x, parts, group_dst=root, group=group)
        dist.scatter(x, parts, group_src=root, group=group)
        dist.all_gather([torch.zeros(4) for _ in range(n)], x, group=group)
        dist.all_gather_into_tensor(torch.zeros(4 * n), x, group=group)
        dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(4 * n), group=group)
        dist.all_to_all_single(torch.zeros(2 * n), torch.ones(2 * n), group=group)
        dist.barrier(group=group)
    mine = [(rank + peer) % 3 for peer in range(world)]
    dist.all_to_all_single(torch.zeros(sum(mine)), torch.ones(sum(mine)), mine, mine)
    for group in (odd, again):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(torch.ones(1), group=group)
    a, b = torch.zeros(2), torch.zeros(3)
    receive = dist.P2POp(dist.irecv, a, (rank - 1) % world)
    send = dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % world)
    for work in dist.batch_isend_irecv([receive, send]):
        work.wait()
    sent = dist.isend(b + 1, rank ^ 1, tag=4)
    dist.recv(b, rank ^ 1, tag=4)
    sent.wait()
    with dist._coalescing_manager(group=half, async_ops=True) as coalesced:
        for n in (1, 2):
            dist.all_gather_into_tensor(torch.zeros(4 * n), torch.ones(n), group=half)
    coalesced.wait()
    everybody = [None] * world
    dist.all_gather_object(everybody, "x" * rank)
    dist.broadcast_object_list(everybody, src=6)
    forgotten = dist.all_reduce(torch.ones(7), async_op=True, group=split)
    future = dist.all_reduce(torch.ones(6), async_op=True).get_future().then(lambda f: f.value())
    future.wait()
    late.wait()
    late.wait()
    if step % 2:
        dist.monitored_barrier()
    optimizer.step()
dist.barrier()
"""


@pytest.mark.parametrize("name", ["stacks", "calls"])
def test_captured_programs_do_what_real_ones_do(name, virtual, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text({"stacks": STACKS, "calls": CALLS}[name])
    where = f"{Path(training_programs.__file__).parent} " if name == "stacks" else ""
    job = Job(
        program=str(script),
        arguments=where + "{iterations}",
        world_size=WORLD,
        capture_iterations={"stacks": ITERATIONS, "calls": 6}[name],
    )
    real, ours = both(job, tmp_path)
    assert_same(real, ours, with_splits=True)
