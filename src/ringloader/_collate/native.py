"""The compiled loops of `kernels.c`, or None for each where they are not to be had.

They are not where the package was installed without a C compiler, or with RINGLOADER_KERNELS=0. Who uses one has an equal in
Python. Must not import torch.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _load() -> Any:
    if os.environ.get("RINGLOADER_KERNELS") == "0":
        return None
    try:
        return importlib.import_module("ringloader._collate.kernels")
    except ImportError:
        return None


_kernels = _load()
join: Any = getattr(_kernels, "join", None)
know_tensors: Any = getattr(_kernels, "know_tensors", None)
take: Any = getattr(_kernels, "take", None)
stream: Any = getattr(_kernels, "stream", None)
fetch: Any = getattr(_kernels, "fetch", None)
