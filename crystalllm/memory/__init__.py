"""Memory of tensors on the CPU: an account by category, limits, and whether a job fits.

What counts as what, and what equals a real run, is in docs/memory.md.
"""

from __future__ import annotations

from crystalllm.memory.blocks import CATEGORIES
from crystalllm.memory.fits import verdict
from crystalllm.memory.recorder import finish, start

__all__ = ["CATEGORIES", "finish", "start", "verdict"]
