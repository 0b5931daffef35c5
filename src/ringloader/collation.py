"""The default collation, as a function to call by hand or to name as a `collate_fn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringloader._collate.collate import Collator

__all__ = ["default_collate", "is_default"]

_TORCH_HOMES = ("torch.utils.data._utils.collate", "torch.utils.data")


def default_collate(samples: Sequence[Any]) -> Any:
    """Return the batch of `samples` in fresh memory, as tensors: what torch's `default_collate` returns.

    Beyond torch, dataclass samples are collated field by field, and arrays with negative strides are taken. Raises LayoutError,
    which names the place in the sample, for samples that do not make a batch.
    """
    from ringloader._collate import tensors

    batch = Collator().begin(len(samples))
    batch.extend(samples)
    collated = batch.finish()
    memory = np.empty(collated.nbytes, np.uint8)
    if not collated.written:
        collated.write(memory)
    placement = collated.layout.place(collated.shapes)
    result, _ = tensors.wrap(collated.layout, placement, collated.inline, memory, copy_out=True)
    return result


def is_default(collate_fn: Any) -> bool:
    """Return whether this is our `default_collate` or torch's, without importing torch."""
    if collate_fn is default_collate:
        return True
    name, home = getattr(collate_fn, "__name__", None), getattr(collate_fn, "__module__", None)
    return name == "default_collate" and home in _TORCH_HOMES and getattr(collate_fn, "__closure__", None) is None
