"""A slot as a batch: arrays over its memory, and the tree around them.

Owns the plan that is derived once per layout and shapes, and the rule for small leaves. Every leaf is an array of its own over
the root, so that any view of it keeps the root, and with it the slot. Must not import torch: `tensors` passes its own maker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringloader._collate.containers import load_prototype
from ringloader._core import dtypes, values
from ringloader._core.layout import Kind, Layout, Node, Placement
from ringloader._specs.references import resolve

# Kept labels must not keep images: a leaf this small beside one this many times larger gets memory of its own.
SMALL_NBYTES = 16 * 1024
FAR_LARGER = 64

Build = Callable[[Sequence[Any], Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlan:
    """How one leaf is made; `viewed_as` names a dtype that numpy lacks."""

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype
    viewed_as: str | None
    offset: int
    is_empty: bool
    is_small: bool


Make = Callable[[np.ndarray, LeafPlan], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How to wrap a batch of one layout and one set of shapes. `direct` makes a leaf of an array alone, where that is enough;
    `spans` are shape, dtype and offset of each leaf."""

    leaves: tuple[LeafPlan, ...]
    spans: tuple[tuple[tuple[int, ...], np.dtype, int], ...]
    make: Make
    direct: Callable[[np.ndarray], Any] | None
    build: Build
    all_stay: bool
    any_small: bool


def wrap_numpy(layout: Layout, placement: Placement, inline: bytes, root: np.ndarray, copy_out: bool) -> tuple[Any, list[Any]]:
    """Rebuild a batch over `root`, the slot as a 1-D uint8 array, with numpy arrays as leaves.

    Returns the batch and those of its leaves that lie in `root`. Raises TypeError for a dtype that numpy lacks.
    """
    plan = plan_of(layout, placement, "numpy", _make_array)
    return wrap_with(plan, inline, root, copy_out)


def _make_array(array: np.ndarray, leaf: LeafPlan) -> Any:
    if leaf.viewed_as is not None:
        raise TypeError(f"numpy has no {leaf.viewed_as}")
    return array


def plan_of(
    layout: Layout, placement: Placement, output: str, make: Make, direct: Callable[[np.ndarray], Any] | None = None
) -> Plan:
    """Return the plan for this output, derived once per placement. `direct` does as `make` where numpy has the dtypes."""
    plan: Plan | None = placement.plans.get(output)
    if plan is None:
        plan = placement.plans[output] = _derive(layout, placement, make, direct)
    return plan


def _derive(layout: Layout, placement: Placement, make: Make, direct: Callable[[np.ndarray], Any] | None) -> Plan:
    build = layout.plans.get("build")
    if build is None:
        build = layout.plans["build"] = _builder(layout.tree)
    largest = max(placement.sizes, default=0)
    leaves = tuple(
        LeafPlan(
            leaf.kind,
            shape,
            dtypes.storage_of(leaf.dtype),
            leaf.dtype if dtypes.is_torch_only(leaf.dtype) else None,
            offset,
            size == 0,
            size < SMALL_NBYTES and largest >= FAR_LARGER * size,
        )
        for leaf, shape, offset, size in zip(layout.leaves, placement.shapes, placement.offsets, placement.sizes, strict=True)
    )
    any_empty, any_small = any(leaf.is_empty for leaf in leaves), any(leaf.is_small for leaf in leaves)
    spans = tuple([(leaf.shape, leaf.dtype, leaf.offset) for leaf in leaves])
    if any(leaf.kind == "array" or leaf.viewed_as is not None for leaf in leaves):
        direct = None
    return Plan(leaves, spans, make, direct, build, not any_empty, any_small)


def wrap_with(
    plan: Plan, inline: bytes, root: np.ndarray, copy_out: bool, make_copy: Make | None = None
) -> tuple[Any, list[Any]]:
    """Make the leaves and the tree around them; `make_copy`, if given, makes the small ones that are copied out."""
    decoded = values.decode(inline) if inline else ()
    make, direct, ndarray = plan.make, plan.direct, np.ndarray
    if plan.all_stay and not (copy_out and plan.any_small):
        if direct is not None:
            kept = [direct(ndarray(shape, dtype, root, offset)) for shape, dtype, offset in plan.spans]
        else:
            kept = [make(ndarray(leaf.shape, leaf.dtype, root, leaf.offset), leaf) for leaf in plan.leaves]
        return plan.build(kept, decoded), kept
    make_copy = make_copy or _make_copy(make)
    leaves, kept = [], []
    for leaf in plan.leaves:
        if leaf.is_empty:
            leaves.append(make(np.empty(leaf.shape, leaf.dtype), leaf))
        elif copy_out and leaf.is_small:
            leaves.append(make_copy(ndarray(leaf.shape, leaf.dtype, root, leaf.offset), leaf))
        else:
            leaves.append(make(ndarray(leaf.shape, leaf.dtype, root, leaf.offset), leaf))
            kept.append(leaves[-1])
    return plan.build(leaves, decoded), kept


def _make_copy(make: Make) -> Make:
    return lambda array, leaf: make(array.copy(), leaf)


def _builder(node: Node) -> Build:
    """Return a function that makes the value of a node from all leaves and all inline values."""
    index = node.index
    if node.kind is Kind.LEAF:
        return lambda leaves, inline: leaves[index]
    if node.kind is Kind.VALUE:
        return lambda leaves, inline: inline[index]
    parts = _parts_builder(node)
    if node.kind is Kind.LIST:
        return parts
    assemble = _assembler(node)
    if node.kind in (Kind.MAPPING_LIKE, Kind.SEQUENCE_LIKE):
        return lambda leaves, inline: assemble(load_prototype(inline[index]), parts(leaves, inline))
    return lambda leaves, inline: assemble(None, parts(leaves, inline))


def _parts_builder(node: Node) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    if node.children and all(child.kind is Kind.LEAF for child in node.children):
        # Leaves are numbered in tree order, so those of one node are neighbours.
        first, end = node.children[0].index, node.children[-1].index + 1
        return lambda leaves, inline: list(leaves[first:end])
    builders = [_builder(child) for child in node.children]
    return lambda leaves, inline: [build(leaves, inline) for build in builders]


def _assembler(node: Node) -> Callable[[Any, list[Any]], Any]:
    keys = node.keys
    kind: Any = resolve(node.type_name) if node.type_name else None
    simple: dict[Kind, Callable[[Any, list[Any]], Any]] = {
        Kind.DICT: lambda _, parts: dict(zip(keys, parts, strict=True)),
        Kind.LIST: lambda _, parts: parts,
        Kind.TUPLE: lambda _, parts: tuple(parts),
        Kind.MAPPING_FROM: lambda _, parts: kind(dict(zip(keys, parts, strict=True))),
        Kind.SEQUENCE_FROM: lambda _, parts: kind(parts),
        Kind.NAMED: lambda _, parts: getattr(kind, "_make", kind)(parts),
        Kind.MAPPING: lambda _, parts: _updated(kind.__new__(kind), keys, parts),
        Kind.MAPPING_LIKE: lambda prototype, parts: _updated(prototype, keys, parts),
        Kind.SEQUENCE: lambda _, parts: _extended(kind.__new__(kind), parts),
        Kind.SEQUENCE_LIKE: _filled,
        Kind.FIELDS: lambda _, parts: _with_fields(kind.__new__(kind), keys, parts),
    }
    return simple[node.kind]


def _updated(mapping: Any, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    # Not by `update`, which adds in a Counter.
    for key, part in zip(keys, parts, strict=True):
        mapping[key] = part
    return mapping


def _extended(sequence: Any, parts: list[Any]) -> Any:
    sequence.extend(parts)
    return sequence


def _filled(sequence: Any, parts: list[Any]) -> Any:
    for position, part in enumerate(parts):
        sequence[position] = part
    return sequence


def _with_fields(instance: Any, names: tuple[str, ...], parts: list[Any]) -> Any:
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(instance, name, part)
    return instance
