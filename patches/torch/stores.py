"""Rendezvous stores that answer for virtual peers."""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType

from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.patching import Patch, replace_everywhere

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # torch's own


def apply(module: ModuleType) -> None:
    """Problem: rank 0's TCPStore waits for peers that don't exist, and other
    ranks' stores connect to one that doesn't.

    Change: TCPStore and FileStore are stores in memory that give what a peer
    would have set; torch's rendezvous handlers stay as they are.

    Effect on numbers: none on iterations; initialisation takes no round trips.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.stores; the program then hangs at
    initialisation until its timeout.
    """
    extension = native.load()

    class TCPStore(extension.VirtualStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = _DEFAULT_TIMEOUT,
            wait_for_workers: bool = True,
            multi_tenant: bool = False,
            master_listen_fd: int | None = None,
            use_libuv: bool = True,
        ) -> None:
            super().__init__(f"tcp://{host_name}:{port}", timeout, max(world_size or 0, 0))
            self.host, self.port, self.libuvBackend = host_name, port, use_libuv

    class FileStore(extension.VirtualStore):
        def __init__(self, file_name: str, world_size: int = -1) -> None:
            super().__init__(f"file://{file_name}", _DEFAULT_TIMEOUT)
            self.path = file_name

    for ours in (TCPStore, FileStore):
        replace_everywhere(getattr(module, ours.__name__), ours)


PATCH = Patch(
    id="torch.stores",
    target="torch.distributed",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
)
