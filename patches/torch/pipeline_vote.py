"""The vote of pipeline stages about shape inference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt
from crystalllm_patches.torch.stand_in import standing_in
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.patching import Patch


def apply(module: ModuleType) -> None:
    """Problem: before its first step a pipeline passes one integer from stage to
    stage and back: whether all stages know their shapes. Integers from virtual
    stages are zeros without a payload book, which means no, and starts an
    exchange of metadata that virtual stages cannot take part in.

    Change: without a payload, the neighbouring stage votes as this one does.

    Effect on numbers: none; a program whose stages really exchange shapes still
    needs the payload book.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.pipeline-vote.
    """
    stage = module.PipelineStage
    stage._warmup_forward_vote = wrapt.FunctionWrapper(
        stage._warmup_forward_vote, _voting_from(module, -1)
    )
    stage._warmup_backward_result = wrapt.FunctionWrapper(
        stage._warmup_backward_result, _voting_from(module, +1)
    )


def _voting_from(module: ModuleType, step: int) -> Callable[..., Any]:
    def vote(wrapped: Callable[..., Any], stage: Any, args: Any, kwargs: Any) -> Any:
        neighbour = stage.stage_index + step
        if not 0 <= neighbour < stage.num_stages or stage._is_same_rank(neighbour):
            return wrapped(*args, **kwargs)
        world = native.load().the_world()
        group = stage.group if stage.group is not None else module.dist.group.WORLD
        members = group._get_backend(stage.device).crystal_group
        source = stage.stage_index_to_group_rank[neighbour]
        if members.is_mate(source):
            return wrapped(*args, **kwargs)
        seq = members.num_received(source)
        address = (members.members[source], members.members[members.rank])
        if world.has_live_source or world.has_payload(members, seq, *address):
            return wrapped(*args, **kwargs)
        dynamic = module.InferenceMode.needs_dynamic(stage._user_meta, stage.has_backward)
        world.note_invented(f"vote of pipeline stage {neighbour}", "mirrored")
        ballot = ("int32", (0 if dynamic else 1).to_bytes(4, "little"))
        with standing_in(world, members, seq, *address, [ballot]):
            return wrapped(*args, **kwargs)

    return vote


def _has_no_vote(module: ModuleType) -> str | None:
    return (
        None
        if hasattr(module.PipelineStage, "_warmup_forward_vote")
        else "this torch has no such vote"
    )


PATCH = Patch(
    id="torch.pipeline-vote",
    target="torch.distributed.pipelining.stage",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
    skip=_has_no_vote,
)
