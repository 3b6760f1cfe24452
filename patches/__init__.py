"""Changes to other people's code that make an unmodified program run as one logical rank.

One folder per stack, one file per patch. Imported as `crystalllm_patches`;
`crystalllm.patching` says how a patch is described and applied.
"""

from __future__ import annotations

from crystalllm_patches.torch import MEMORY as TORCH_MEMORY
from crystalllm_patches.torch import PATCHES as TORCH_PATCHES
from crystalllm_patches.torch import RECORDING as TORCH_RECORDING

ALL = (*TORCH_PATCHES,)
RECORDING = (*TORCH_RECORDING,)
MEMORY = (*TORCH_MEMORY,)
KNOWN = tuple(dict.fromkeys((*ALL, *RECORDING, *MEMORY)))
