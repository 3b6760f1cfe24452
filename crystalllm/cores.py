"""CPU cores of this host, for what is timed."""

from __future__ import annotations

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def separate() -> list[int]:
    """CPUs that this process may use, one of each physical core, ascending.

    Two CPUs of one core (hyper-threads) slow each other down, so that neither is a
    device of its own.
    """
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        path = _TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            core = path.read_text().strip()
        except OSError:  # a kernel that does not say takes each CPU for a core
            core = str(cpu)
        found.setdefault(core, cpu)
    return sorted(found.values())
