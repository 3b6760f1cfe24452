"""NCCL process groups on a machine without CUDA."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
from crystalllm_patches.torch.versions import SUPPORTED

from crystalllm import native
from crystalllm.errors import UserError
from crystalllm.patching import Patch, replace_everywhere

# Whose rules the stand-in follows: the NCCL of torch 2.11's wheel.
_NCCL_VERSION = (2, 28, 9)


def apply(module: ModuleType) -> None:
    """Problem: a program for the cluster asks for the nccl backend, which torch
    refuses without CUDA.

    Change: torch finds an nccl backend whose tensors lie on the CPU. It accepts
    and refuses what NCCL does; get_backend() says nccl.

    Effect on numbers: none beyond those of running on a CPU.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.nccl-without-cuda; init_process_group
    then says that NCCL is not built in.
    """
    extension = native.load()
    backend = extension.NcclBackend

    class Options(extension.Options):
        """Fields that programs set; only the timeout and the members mean something here."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl", timedelta(minutes=10))  # torch's default for NCCL
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(
                blocking=1,
                cga_cluster_size=4,
                min_ctas=1,
                max_ctas=32,
                net_name=None,
                split_share=0,
            )
            self.split_from: Any = None
            self.split_color = 0

    backend.Options = Options
    if hasattr(module, "ProcessGroupNCCL"):  # a build with CUDA on a machine without
        replace_everywhere(module.ProcessGroupNCCL, backend)
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        sys.modules[name].ProcessGroupNCCL = backend
    module._NCCL_AVAILABLE = True
    if not hasattr(torch._C, "_nccl_version"):  # asked for by error messages and by programs
        torch.cuda.nccl.version = lambda: _NCCL_VERSION
    module.default_pg_nccl_timeout = timedelta(minutes=10)  # torch's default for NCCL
    module.Backend.backend_capability["nccl"] = ["cpu", "cuda"]


def refuse(module: ModuleType) -> None:
    """Problem: with CUDA the program would get real NCCL, which waits for peers
    that don't exist.

    Change: an nccl group is refused at once, with what to do instead.

    Effect on numbers: none.

    Turn off: CRYSTALLLM_PATCHES_OFF=torch.nccl-with-cuda; groups then hang.
    """
    real = module.ProcessGroupNCCL

    class ProcessGroupNCCL(real):  # type: ignore[misc, valid-type]
        Options = real.Options

        def __init__(self, *_: Any, **__: Any) -> None:
            raise UserError(
                "NCCL groups with virtual ranks are not supported on CUDA yet",
                where=f"{torch.cuda.device_count()} CUDA devices are visible",
                do="Run the program on the CPU, with CUDA_VISIBLE_DEVICES empty",
            )

    replace_everywhere(real, ProcessGroupNCCL)


def _has_no_cuda(_: ModuleType) -> str | None:
    return None if torch.cuda.is_available() else "there is no CUDA device"


def _has_cuda(_: ModuleType) -> str | None:
    return "CUDA is available" if torch.cuda.is_available() else None


PATCH = Patch(
    id="torch.nccl-without-cuda",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=apply,
    skip=_has_cuda,
)

PATCH_REFUSE = Patch(
    id="torch.nccl-with-cuda",
    target="torch.distributed.distributed_c10d",
    package="torch",
    versions=SUPPORTED,
    apply=refuse,
    skip=_has_no_cuda,
)
