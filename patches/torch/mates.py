"""Real gloo groups among the ranks that run side by side."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import logical, native
from crystalllm.errors import UserError
from crystalllm.mates import Mates
from crystalllm.patching import Patch

# They share a host, whatever interface the program names for its cluster.
_HOST = "127.0.0.1"


def apply(module: ModuleType) -> None:
    """Problem: between ranks that run side by side data should move for real, and
    other patches put virtual classes in the place of gloo and of its stores.

    Change: before they do, this one takes torch's own; when a group is created,
    our backend makes a ProcessGroupGloo of its members that run side by side.

    Effect on numbers: such members get each other's data, and take gloo's time.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.mates; creating a group then ends in an
    error.
    """
    mates = logical.mates()
    assert mates is not None
    native.load().connect_mates_by(_connector(mates, module.ProcessGroupGloo))


def _connector(mates: Mates, gloo: Any) -> Callable[[Any, timedelta], Any]:
    import torch

    c10d = torch._C._distributed_c10d
    prefix_store, file_store, tcp_store = c10d.PrefixStore, c10d.FileStore, c10d.TCPStore
    stores: list[Any] = []  # one for the process, made when the first group is

    def store(limit: timedelta) -> Any:
        if not stores:
            if mates.is_file:
                stores.append(file_store(mates.path))
            else:
                host, port = mates.host_and_port
                stores.append(tcp_store(host, port, timeout=limit, wait_for_workers=False))
        stores[0].set_timeout(limit)
        return stores[0]

    def connect(group: Any, timeout: timedelta) -> Any:
        limit = mates.limit(timeout)
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=_HOST)]
        place, size = group.mates.index(group.rank), len(group.mates)
        try:
            return gloo(prefix_store(group.identity, store(limit)), place, size, options)
        except RuntimeError as error:
            ranks = " and ".join(str(group.members[member]) for member in group.mates)
            raise UserError(
                "Ranks that run side by side did not meet in a new group",
                where=f"Rank {group.members[group.rank]}, group {group.identity}, whose ranks "
                f"{ranks} run here and had {limit.total_seconds():g} s: {_cause(error)}",
                do="Look at the logs of the others: one of them has ended, or does not create "
                "this group",
            ) from error

    return connect


def _cause(error: RuntimeError) -> str:
    """What happened, without gloo's source lines and advice."""
    return re.sub(r"\[/[^]]*\] ", "", str(error).splitlines()[0].split(". ")[0].rstrip("."))


def _alone(_: ModuleType) -> str | None:
    mates = logical.mates()
    return "no other rank runs side by side" if mates is None or len(mates.ranks) < 2 else None


PATCH = Patch(
    id="torch.mates",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
    skip=_alone,
)
