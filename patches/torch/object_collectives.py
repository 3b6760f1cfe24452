"""Pickled objects from virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import wrapt
from crystalllm_patches.torch.stand_in import standing_in
from crystalllm_patches.torch.unwatched import unwatched
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.errors import UserError
from crystalllm.patching import Patch, replace_everywhere


def apply(module: ModuleType) -> None:
    """Problem: broadcast_object_list, scatter_object_list and recv_object_list
    receive sizes and pickled bytes from a virtual rank. Invented bytes don't
    unpickle.

    Change: where the payload book has nothing, a virtual sender is taken to hold
    what this rank holds itself (its own list), and the run is marked unverified;
    where this rank holds nothing, an error says so. The calls are torch's own.

    Effect on numbers: sizes of objects are this rank's instead of the sender's.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.object-collectives; such calls then
    end in an unpickling error.
    """
    replace_everywhere(
        module.broadcast_object_list,
        wrapt.FunctionWrapper(module.broadcast_object_list, _Broadcast(module)),
    )
    replace_everywhere(
        module.recv_object_list,
        wrapt.FunctionWrapper(module.recv_object_list, _Receive(module)),
    )
    replace_everywhere(
        module.scatter_object_list,
        wrapt.FunctionWrapper(module.scatter_object_list, _Scatter(module)),
    )


class _Mirror:
    """What the three calls have in common: finding the group and the missing payload."""

    name = ""

    def __init__(self, module: ModuleType) -> None:
        self.c10d = module

    def __call__(self, wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        group = kwargs.get("group") or (args[self.group_at] if len(args) > self.group_at else None)
        pg = self.c10d._group_or_default_group(group)
        source = kwargs.get("src", args[self.source_at] if len(args) > self.source_at else None)
        group_source = kwargs.get("group_src")
        if group_source is None:
            if source is None and self.default_source is None:
                return wrapped(*args, **kwargs)  # from any source: nobody to stand in for
            source = self.default_source if source is None else source
            group_source = self.c10d.get_group_rank(pg, source)
        if self.c10d._rank_not_in_group(pg) or pg.rank() == group_source:
            return wrapped(*args, **kwargs)
        world = native.load().the_world()
        device = torch.device(self.c10d._get_object_coll_device(pg))
        members = pg._get_backend(device).crystal_group
        if members.is_mate(group_source):
            return wrapped(*args, **kwargs)
        root = members.members[group_source]
        seq, peer = self.position(members, group_source)
        if world.has_live_source or world.has_payload(members, seq, root, peer):
            return wrapped(*args, **kwargs)
        objects = self.held(pg, args, kwargs)
        where = f"{self.name} from rank {root} in group {members.identity}"
        if objects is None or all(o is None for o in objects):
            raise UserError(
                "A virtual rank's object is not known, and this rank holds nothing like it",
                where=f"Rank {world.rank}, {where}, sequence number {seq}",
                do="Capture the job and pass its payload book (--book); pipeline stages that are "
                "given input_args and output_args exchange nothing",
            )
        world.note_invented(where, "mirrored")
        with standing_in(world, members, seq, root, peer, self.payloads(pg, objects)):
            return wrapped(*args, **kwargs)

    group_at = 2
    source_at = 1
    default_source: int | None = 0

    def position(self, members: Any, group_source: int) -> tuple[int, int]:
        return members.num_collectives, -1

    def held(self, pg: Any, args: Any, kwargs: Any) -> Sequence[Any] | None:
        return args[0] if args else kwargs["object_list"]

    def payloads(self, pg: Any, objects: Sequence[Any]) -> list[tuple[str, bytes]]:
        """Dtype and bytes of the messages that the sender would send, in order."""
        pickled, sizes = self.pickled(pg, objects)
        return [("int64", _bytes(sizes)), ("uint8", b"".join(pickled))]

    def pickled(self, pg: Any, objects: Sequence[Any]) -> tuple[list[bytes], list[int]]:
        with unwatched():
            made = [self.c10d._object_to_tensor(o, "cpu", pg)[0] for o in objects]
            pickled = [tensor.numpy().tobytes() for tensor in made]
        return pickled, [len(p) for p in pickled]


class _Broadcast(_Mirror):
    name = "broadcast_object_list"


class _Receive(_Mirror):
    name = "recv_object_list"
    default_source = None

    def position(self, members: Any, group_source: int) -> tuple[int, int]:
        seq = members.num_received(group_source)
        return seq, members.members[members.rank]


class _Scatter(_Mirror):
    name = "scatter_object_list"
    group_at = 3
    source_at = 2

    def held(self, pg: Any, args: Any, kwargs: Any) -> Sequence[Any] | None:
        given = args[1] if len(args) > 1 else kwargs.get("scatter_object_input_list")
        return None if given is None else [given[pg.rank()]]

    def payloads(self, pg: Any, objects: Sequence[Any]) -> list[tuple[str, bytes]]:
        (pickled,), sizes = self.pickled(pg, objects)
        return [("int64", _bytes(sizes)), ("uint8", pickled), ("int64", _bytes(sizes))]


def _bytes(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


def apply_sizes(module: ModuleType) -> None:
    """Problem: pickled objects travel as tensors of bytes, and so may weights of
    8 bits. The first have to be what the peer sent, the others would fill the
    payload book.

    Change: while one of torch's object collectives runs, the world knows that
    bytes are objects.

    Effect on numbers: none.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.object-bytes; objects above 64 KiB are
    then taken for data.
    """
    for name in _OBJECT_CALLS:
        original = getattr(module, name, None)
        if original is not None:
            replace_everywhere(original, wrapt.FunctionWrapper(original, _moving_objects))


_OBJECT_CALLS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


def _moving_objects(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    world = native.load().the_world()
    world.move_objects(True)
    try:
        return wrapped(*args, **kwargs)
    finally:
        world.move_objects(False)


PATCH_SIZES = Patch(
    id="torch.object-bytes",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply_sizes,
)
PATCH = Patch(
    id="torch.object-collectives",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
