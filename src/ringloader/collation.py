"""Collation as functions: the default one and one that pads, to call by hand or to name as a `collate_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringloader._collate.collate import Collator
from ringloader._collate.padding import Padding
from ringloader.errors import ConfigError

__all__ = ["PadCollate", "default_collate", "is_default", "make_collator", "pad_collate"]

_TORCH_HOMES = ("torch.utils.data._utils.collate", "torch.utils.data")
_SIDES = ("right", "left")


def default_collate(samples: Sequence[Any]) -> Any:
    """Return the batch of `samples` in fresh memory, as tensors: what torch's `default_collate` returns.

    Beyond torch, dataclass samples are collated field by field, and arrays with negative strides are taken. Raises LayoutError,
    which names the place in the sample, for samples that do not make a batch.
    """
    return _collate(Collator(), samples)


def pad_collate(padding_value: float | complex = 0, side: str = "right", dim: int = 0, lengths: bool = False) -> PadCollate:
    """Return a `collate_fn` that collates as `default_collate`, and pads leaves whose rows differ in length.

    padding_value: a number that the leaf's dtype holds. side: "right" or "left" of a row. dim: the dimension of a sample's
    array or tensor that may differ, from 0; all others must agree. A leaf whose rows agree is left as it is. lengths: the batch
    becomes `(batch, lengths)`, where `lengths` has the tree of the batch and for each array or tensor with that dimension the
    rows' own lengths, `(batch,) int64`, else None.

    In a Loader rows are written straight into the ring, padding included. Raises ConfigError for options that cannot work.
    """
    if not isinstance(padding_value, (bool, int, float, complex, np.number, np.bool_)):
        raise ConfigError(f"padding_value is {padding_value!r}; give a number", option="padding_value", value=padding_value)
    if side not in _SIDES:
        raise ConfigError(f"side is {side!r}; choose one of 'right', 'left'", option="side", value=side)
    if type(dim) is not int or dim < 0:
        raise ConfigError(f"dim is {dim!r}; give an int of at least 0", option="dim", value=dim)
    if not isinstance(lengths, bool):
        raise ConfigError(f"lengths is {lengths!r}; give True or False", option="lengths", value=lengths)
    return PadCollate(Padding(padding_value, side, dim, lengths))


@dataclass(frozen=True, slots=True)
class PadCollate:
    """What `pad_collate` returns. Called by hand it gives the batch in fresh memory, as tensors."""

    padding: Padding

    def __call__(self, samples: Sequence[Any]) -> Any:
        return _collate(Collator(padding=self.padding), samples)


def _collate(collator: Collator, samples: Sequence[Any]) -> Any:
    from ringloader._collate import tensors

    batch = collator.begin(len(samples))
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


def make_collator(collate_fn: Callable[..., Any] | None, *, output: str, convert: bool) -> Collator:
    """Return the collator of a loader, for its `collate_fn` as a callable; ours work in the slot itself."""
    if isinstance(collate_fn, PadCollate) and not convert:
        return Collator(output=output, padding=collate_fn.padding)
    own = None if collate_fn is None or is_default(collate_fn) else collate_fn
    return Collator(output=output, collate_fn=own, convert=convert)
