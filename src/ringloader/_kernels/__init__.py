"""Loops over the rows of a batch in C, or None for each where it is not to be had.

Owns the copying of many rows in one call: out of samples (`join`), out of one array by places (`take`), of a large row past the
caches (`stream`); and the asking for samples (`fetch`). There are none where the package was installed without a C compiler, or
with RINGLOADER_KERNELS=0: who uses one has an equal in Python. What is built and cannot be loaded, as with a numpy that it was
not built for, is warned of. What is given is checked in C to the byte, whatever the caller
has looked at before: no call reads or writes outside of it. Must not know slots, layouts or batches, nor import torch.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any


def _load() -> Any:
    if os.environ.get("RINGLOADER_KERNELS") == "0":
        return None
    try:
        return importlib.import_module("ringloader._kernels.compiled")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        words = (
            f"ringloader's compiled loops cannot be loaded, and batches are made without them, slower: {error}; install it anew"
        )
        warnings.warn(words, RuntimeWarning, stacklevel=2)
        return None


_compiled = _load()
join: Any = getattr(_compiled, "join", None)
know_tensors: Any = getattr(_compiled, "know_tensors", None)
take: Any = getattr(_compiled, "take", None)
stream: Any = getattr(_compiled, "stream", None)
fetch: Any = getattr(_compiled, "fetch", None)
