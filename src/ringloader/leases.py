"""What users may say about a batch they hold: that they are done with it, or who else reads it.

Owns finding the slot behind a batch of any shape. Harmless on anything that is no batch of ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringloader._collate.containers import leaves_of
from ringloader._runtime import lifetime
from ringloader.errors import ConfigError

__all__ = ["record_stream", "release"]


def release(batch: Any) -> None:
    """Give the batch's slot back now, before its last view is gone; the batch must not be read any more.

    Harmless on anything that is no batch of ours, and any number of times.
    """
    lifetime.sweep()
    for leaf in leaves_of(batch):
        address = _address(leaf)
        if address is not None and any(engine.release(leaf, address) for engine in list(lifetime.ENGINES)):
            return


def record_stream(batch: Any, stream: Any) -> None:
    """Have the batch's slot wait for `stream`, a `torch.cuda.Stream`, before it is filled anew.

    Needed for a copy out of the batch that is queued on a stream other than those current when the batch was handed over and
    at the same thread's next call of the loader: a stream that is current only between the two is seen by nobody. Harmless on
    anything that is no batch of ours.

    Raises ConfigError for what is no stream.
    """
    if not hasattr(stream, "cuda_stream"):
        raise ConfigError(f"stream is {stream!r}; give a torch.cuda.Stream", option="stream", value=stream)
    for leaf in leaves_of(batch):
        address = _address(leaf)
        if address is not None and any(engine.record_stream(leaf, address, stream) for engine in list(lifetime.ENGINES)):
            return


def _address(leaf: Any) -> int | None:
    """Where a leaf's memory begins, for leaves of the kinds we hand out."""
    if isinstance(leaf, np.ndarray):
        return int(leaf.ctypes.data)
    storage = getattr(leaf, "untyped_storage", None)
    try:
        return None if storage is None else int(storage().data_ptr())
    except (RuntimeError, NotImplementedError, TypeError):
        return None  # a tensor without memory of its own is none of ours
