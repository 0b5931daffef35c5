"""Everything that touches torch: tensors into a slot, and a slot as tensors.

The only module that imports torch; it is imported where a tensor was met (so torch is there already), where a column needs
torch's own judgement, or in a training process with `output="torch"`. Must not be imported at the top of another module.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from ringloader._collate.containers import name_of
from ringloader._collate.wrap import LeafPlan, plan_of, wrap_with
from ringloader._core import dtypes
from ringloader._core.layout import Layout, LeafType, Placement, leaf_type
from ringloader._kernels import know_tensors
from ringloader.errors import ConfigError

# torch has second names for some: "float" is "float32".
_NAMES = {value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_DTYPES = {name: value for value, name in _NAMES.items()}
# In one thread, as in a worker, numpy copies 1.5 times as fast as torch; for small rows the way to numpy costs more than that.
_LARGE_ROW_NBYTES = 16 * 1024
_ON_HOST = "return CPU tensors; move them in the training loop"


def wrap(
    layout: Layout,
    placement: Placement,
    inline: bytes,
    root: np.ndarray,
    copy_out: bool,
    copy: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[Any, list[Any]]:
    """Rebuild a batch over `root`, the slot as a 1-D uint8 array, with tensors as leaves.

    Returns the batch and those of its leaves that lie in `root`. Each has a storage of its own size. With `copy_out`, small
    leaves beside a far larger one get memory of their own, made by `copy` if that is given.
    """
    plan = plan_of(layout, placement, "torch", _make_tensor, torch.from_numpy)
    if copy is None:
        return wrap_with(plan, inline, root, copy_out)
    return wrap_with(plan, inline, root, copy_out, lambda array, leaf: _copied(array, leaf, copy))


def wrap_copied(
    layout: Layout, placement: Placement, inline: bytes, root: np.ndarray, copy: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Any, list[Any]]:
    """Rebuild a batch of what `copy` makes of each tensor over `root`; no leaf lies in `root`, and arrays are copied here."""
    plan = plan_of(layout, placement, "torch", _make_tensor, torch.from_numpy)
    plan = dataclasses.replace(plan, make=lambda array, leaf: _copied(array, leaf, copy), direct=None)
    return wrap_with(plan, inline, root, copy_out=False)[0], []


def _copied(array: np.ndarray, leaf: LeafPlan, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return array.copy() if leaf.kind == "array" else copy(_make_tensor(array, leaf))


def _make_tensor(array: np.ndarray, leaf: LeafPlan) -> Any:
    if leaf.kind == "array":
        return array
    if leaf.viewed_as is not None:
        return torch.from_numpy(array).view(_DTYPES[leaf.viewed_as])
    return torch.from_numpy(array)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return _NAMES[dtype]


def dtype_names(values: Sequence[torch.Tensor]) -> list[str]:
    """Return the distinct dtypes of tensors in order of appearance, by name."""
    found = dict.fromkeys([value.dtype for value in values])
    return [_NAMES[dtype] for dtype in found]


def default_dtype_name() -> str:
    """Return the dtype torch gives to a Python float in a list of integers."""
    return _NAMES[torch.get_default_dtype()]


@functools.cache
def _promote(first: str, second: str) -> str | None:
    try:
        return _NAMES[torch.promote_types(_DTYPES[first], _DTYPES[second])]
    except RuntimeError:
        return None


def promote_all(names: Sequence[str]) -> str | None:
    """Return torch's common dtype of `names`, or None where it has none."""
    result: str | None = names[0]
    for name in names[1:]:
        result = None if result is None else _promote(result, name)
    return result


def is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor is what nearly all are: dense, on the CPU, without gradient, of a type that slots hold."""
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_nested
        and dtypes.is_known(_NAMES[value.dtype])
    )


def is_large(value: torch.Tensor, least_nbytes: int) -> bool:
    """Return whether a tensor is plain, and of so many bytes at least."""
    # Its size tells in most cases, and costs a tenth of the other looks.
    return type(value) is torch.Tensor and value.numel() * value.itemsize >= max(1, least_nbytes) and is_plain(value)


def is_joined(value: torch.Tensor) -> bool:
    """Return whether rows like this tensor are joined without torch."""
    return are_joined and is_plain(value) and not dtypes.is_torch_only(_NAMES[value.dtype])


def refusal(value: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor is and what to do instead, if it cannot be carried; None if it can."""
    kind = type(value)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return f"a tensor of the subclass {name_of(kind)}", "return .as_subclass(torch.Tensor), or rebuild it"
    if value.is_nested:
        return "a nested tensor", "return the parts as a list from a collate_fn, or pad them"
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.").removeprefix("_")
        return f"a sparse or opaque tensor of layout {layout}", "return .to_dense(), or its indices and values as tensors"
    if value.device.type != "cpu":
        return f"a tensor on device {value.device}", _ON_HOST
    if value.is_quantized or not dtypes.is_known(_NAMES[value.dtype]):
        advice = "return .dequantize(), or .int_repr() and the scale, or another dtype"
        return f"a tensor of dtype {_NAMES[value.dtype]}", advice
    return None


def view(slot: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over part of a slot."""
    return from_array(_array_view(slot, offset, dtype, shape), dtype)


def _array_view(slot: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.ndarray(shape, dtypes.storage_of(dtype), slot, offset)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a dense CPU tensor as an array over the same memory, of the dtype that carries its bytes.

    Lazily conjugated or negated tensors are resolved, and so are copies.
    """
    name = _NAMES[tensor.dtype]
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if dtypes.is_torch_only(name):
        tensor = tensor.view(_DTYPES[dtypes.storage_of(name).name])
    array: np.ndarray = tensor.numpy()
    return array


def held_array(tensor: torch.Tensor, label: str) -> tuple[np.ndarray, str]:
    """Return an array over a tensor's memory, and its dtype's name. Raises ConfigError for one that is not in host memory."""
    reason = refusal(tensor)
    if reason is not None:
        raise ConfigError(f"array {label} is {reason[0]}; {reason[1]}", option="arrays", value=label)
    return as_array(tensor.detach()), _NAMES[tensor.dtype]


def try_as_array(value: Any, dtype: str) -> np.ndarray | None:
    """Return a plain tensor of this dtype as an array over its memory, None for any other value, in few looks."""
    if type(value) is not torch.Tensor or value.dtype is not _DTYPES[dtype]:
        return None
    try:
        if dtypes.is_torch_only(dtype):
            return as_array(value) if is_plain(value) else None
        array: np.ndarray = value.numpy()
    except (RuntimeError, TypeError):
        # On a device, sparse, nested, lazily conjugated, or with gradient.
        return None
    return array


def try_as_arrays(values: Sequence[Any]) -> tuple[list[np.ndarray], str] | None:
    """Return plain tensors of one dtype that numpy has as arrays over their memory, and its name; None for any others."""
    dtype = values[0].dtype
    name = _NAMES[dtype]
    if not dtypes.is_known(name) or dtypes.is_torch_only(name):
        return None
    if any(type(value) is not torch.Tensor or value.dtype is not dtype for value in values):
        return None
    try:
        return [value.numpy() for value in values], name
    except (RuntimeError, TypeError):
        return None  # as in `try_as_array`


def from_array(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Return a tensor over the memory of an array that carries the bytes of `dtype`."""
    tensor = torch.from_numpy(array)
    return tensor.view(_DTYPES[dtype]) if dtypes.is_torch_only(dtype) else tensor


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a tensor in a dtype given by name."""
    return tensor.to(_DTYPES[dtype])


def stored_scalar(value: Any, dtype: str) -> Any:
    """Return a number in the bytes of a dtype that numpy does not have. Raises OverflowError for one beyond its range."""
    wide = torch.tensor([value], dtype=torch.float64)
    stored = wide.to(_DTYPES[dtype])
    if bool(wide.isfinite().all()) and not bool(stored.to(torch.float64).isfinite().all()):
        raise OverflowError
    return as_array(stored)[0]


# Rows are joined without torch, where it lets C see them.
are_joined: bool = know_tensors is not None and know_tensors(torch.Tensor)


class TensorRows:
    """Tensors of one shape, stacked along a new first dimension.

    With `cast` to `dtype`; without, all have that of the first, which is looked at when they are written.
    """

    __slots__ = ("_cast", "_rows", "joinable", "leaf", "shape")

    def __init__(self, rows: Sequence[torch.Tensor], dtype: str, cast: bool) -> None:
        self._rows = rows
        self._cast = cast
        self.joinable = rows if are_joined and not cast else None
        self.shape = (len(rows), *rows[0].shape)
        self.leaf: LeafType = leaf_type("tensor", dtype, len(self.shape))

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Write all rows. Raises RuntimeError where torch finds that they do not agree."""
        rows = self._rows
        self._check_dtypes()
        if rows[0].nbytes >= _LARGE_ROW_NBYTES and all(is_plain(row) and row.dtype is rows[0].dtype for row in rows):
            np.stack([as_array(row) for row in rows], out=_array_view(slot, offset, self.leaf.dtype, self.shape), casting="no")
            return
        # torch compares shapes, layouts and devices itself, and would cast.
        torch.stack(list(rows), out=view(slot, offset, self.leaf.dtype, self.shape))

    def check(self) -> None:
        """Raise what `write` would."""
        first = self._rows[0].shape
        if not all(row.shape == first and is_plain(row) for row in self._rows):
            raise RuntimeError("rows do not agree")
        self._check_dtypes()

    def _check_dtypes(self) -> None:
        first = self._rows[0].dtype
        if not self._cast and any(row.dtype is not first for row in self._rows):
            raise RuntimeError("rows differ in dtype")


class WholeTensor:
    """One tensor with all rows of the leaf; only what the view shows is written."""

    __slots__ = ("_tensor", "leaf", "shape")
    joinable = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.leaf: LeafType = leaf_type("tensor", _NAMES[tensor.dtype], tensor.dim())

    def write(self, slot: np.ndarray, offset: int) -> None:
        """Write the logical contents, conjugate and negative bits resolved."""
        np.copyto(_array_view(slot, offset, self.leaf.dtype, self.shape), as_array(self._tensor), casting="no")

    def check(self) -> None:
        """A tensor agrees with itself."""


def has_collate_rule(kind: type) -> bool:
    """Return whether the user gave torch a collate rule for a type."""
    return any(issubclass(kind, known) for known in default_collate_fn_map)


def collate_irregular(values: list[Any]) -> Any:
    """Collate one column by torch's own `default_collate`. Raises what torch raises."""
    rows = [np.array(value) if isinstance(value, np.ndarray) else value for value in values]
    for value in rows:
        reason = refusal(value) if isinstance(value, torch.Tensor) else None
        if reason is not None:
            raise TypeError(f"{reason[0]}: {reason[1]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.utils.data.default_collate(rows)
