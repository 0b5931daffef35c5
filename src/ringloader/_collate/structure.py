"""The structure of samples: where their leaves are, and how to take all samples of a batch apart along it.

The first sample of a batch fixes the structure. It serves the next batches too, as long as their first sample has the same one:
then nothing is built per batch. Owns paths (`sample['x'][0]`) and the words for samples that do not agree on their structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any

from ringloader._collate.containers import CONTAINERS, Form, FormError, Rule, form_of, name_of, rule_of
from ringloader._core.layout import MAX_DEPTH, Layout, Node
from ringloader.errors import LayoutError

ADVICE = "return tensors, arrays, numbers, text, or dicts, lists, tuples and dataclasses of them, or pass a collate_fn"


class Keys:
    """The dataset keys of a batch's samples, for words only: positions where the caller gave none."""

    __slots__ = ("_keys",)

    def __init__(self, keys: Sequence[Any] | None) -> None:
        self._keys = keys

    def __getitem__(self, row: int) -> Any:
        return self._keys[row] if self._keys is not None and row < len(self._keys) else row

    def error(self, path: str, words: str, *rows: int, **facts: Any) -> LayoutError:
        """Return an error about the value at `path` in the samples at `rows`; `words` follow the path."""
        return LayoutError(f"{path} {words}", path=path, samples=tuple(self[row] for row in rows), **facts)


class Leaf:
    """A place for arrays, numbers or text; `in_sequence` where torch hands a column of text over as a tuple."""

    __slots__ = ("in_sequence", "path")

    def __init__(self, path: str, in_sequence: bool) -> None:
        self.path = path
        self.in_sequence = in_sequence


class Branch:
    """A container of the sample: its form and a structure for each of its children."""

    __slots__ = ("children", "form", "get_all", "getters", "key_types", "path", "rule")

    def __init__(self, path: str, rule: Rule, form: Form, children: tuple[Leaf | Branch, ...]) -> None:
        self.path = path
        self.rule = rule
        self.form = form
        self.children = children
        make: Callable[..., Callable[[Any], Any]] = attrgetter if rule is Rule.FIELDS else itemgetter
        self.getters = tuple(make(key) for key in form.keys)
        self.get_all = make(*form.keys) if form.keys else None  # at once, in half of the time; of a single key not as a tuple
        self.key_types = list(map(type, form.keys))


class Structure:
    """The structure of a sample; `leaves` in order, and the layouts its batches had."""

    __slots__ = ("layouts", "leaves", "reusable", "root", "runs")

    def __init__(self, sample: Any, keys: Keys, accepts: Callable[[type], bool]) -> None:
        """Raises LayoutError for a value in `sample` that has no rule, unless `accepts` says its type has one elsewhere."""
        self.leaves: list[Leaf] = []
        self.layouts: dict[tuple[int, ...] | None, Layout] = {}
        self.reusable = True
        self.runs: tuple[tuple[int, int], ...] | None = None  # see `columns.find_runs`; None: not known
        self.root = self._build(sample, "sample", False, keys, accepts)

    def _build(
        self, value: Any, path: str, in_sequence: bool, keys: Keys, accepts: Callable[[type], bool], depth: int = 0
    ) -> Leaf | Branch:
        kind = type(value)
        rule = rule_of(kind)
        if rule not in CONTAINERS or (rule is Rule.FIELDS and accepts(kind)):
            if rule is Rule.UNKNOWN and not accepts(kind):
                words = f"is {describe(kind)} in sample {keys[0]!r}, which has no collate rule: {ADVICE}"
                raise keys.error(path, words, 0, type=name_of(kind))
            self.leaves.append(Leaf(path, in_sequence))
            return self.leaves[-1]
        if depth > MAX_DEPTH:
            raise keys.error(path[:200], f"is nested deeper than {MAX_DEPTH} containers in sample {keys[0]!r}", 0)
        try:
            form = form_of(value, rule, collating=True)
        except FormError as error:
            raise keys.error(path, f"is {error} (sample {keys[0]!r})", 0, type=name_of(kind)) from error
        self.reusable &= form.reusable
        inner = rule in (Rule.SEQUENCE, Rule.NAMED)
        children = tuple(
            self._build(child, child_path(path, rule, form, position), inner, keys, accepts, depth + 1)
            for position, child in enumerate(contents(value, rule, form))
        )
        return Branch(path, rule, form, children)

    def matches(self, sample: Any) -> bool:
        """Return whether a structure made from this sample would be this very one."""
        return self.reusable and _matches(self.root, sample)

    def columns(self, samples: Sequence[Any], keys: Keys) -> list[Sequence[Any]]:
        """Return for each leaf its values in all samples. Raises LayoutError where samples differ in structure."""
        columns: list[Sequence[Any]] = []
        _take_columns(self.root, samples, columns, keys)
        return columns

    def flatten(self, sample: Any, row: int, keys: Keys) -> list[Any]:
        """Return the leaf values of one sample. Raises LayoutError where it differs in structure."""
        flat: list[Any] = []
        _flatten(self.root, sample, flat, row, keys)
        return flat

    def node(self, parts: Sequence[tuple[Node, list[Any]]]) -> tuple[Node, list[Any]]:
        """Return a batch's tree, given the subtree and inline values of every leaf, and all inline values in tree order."""
        values: list[Any] = []
        return _node(self.root, iter(parts), values), values


def contents(value: Any, rule: Rule, form: Form) -> list[Any]:
    """Return the children of a container, in the order of its form's keys."""
    if rule is Rule.FIELDS:
        return [getattr(value, name) for name in form.keys]
    if rule is Rule.MAPPING:
        return [value[key] for key in form.keys]
    return list(value)


def child_path(path: str, rule: Rule, form: Form, position: int) -> str:
    """Return the path of a child as Python would write it."""
    if rule is Rule.FIELDS:
        return f"{path}.{form.keys[position]}"
    if rule is Rule.NAMED and position < len(form.type._fields):  # type: ignore[attr-defined]
        return f"{path}.{form.type._fields[position]}"  # type: ignore[attr-defined]
    return f"{path}[{form.keys[position]!r}]"


def describe(kind: type) -> str:
    """Return "None" or "of type x", to follow "is"."""
    return "None" if kind is type(None) else f"of type {name_of(kind)}"


def _matches(part: Leaf | Branch, value: Any) -> bool:
    if type(part) is Leaf:
        rule = rule_of(type(value))
        return rule not in CONTAINERS and rule is not Rule.UNKNOWN
    assert isinstance(part, Branch)
    form = part.form
    kind: type = type(value)
    if kind is not form.type:
        return False
    if part.rule is Rule.MAPPING:
        keys = tuple(value)
        if keys != form.keys or list(map(type, keys)) != part.key_types:
            return False
        return all(map(_matches, part.children, contents(value, part.rule, form)))
    if part.rule is Rule.FIELDS:
        form = form_of(value, part.rule, collating=True)
        return form.keys == part.form.keys and all(map(_matches, part.children, contents(value, part.rule, form)))
    return len(value) == len(part.children) and all(map(_matches, part.children, value))


def _take_columns(part: Leaf | Branch, samples: Sequence[Any], columns: list[Sequence[Any]], keys: Keys) -> None:
    if isinstance(part, Leaf):
        columns.append(samples)
        return
    if set(map(type, samples)) != {part.form.type}:
        for row, sample in enumerate(samples):
            _check_type(part, sample, row, keys)
    if part.rule in (Rule.MAPPING, Rule.FIELDS):
        for child, held in zip(part.children, _fields(part, samples, keys), strict=True):
            if type(child) is Leaf:
                columns.append(held)
            else:
                _take_columns(child, held, columns, keys)
        return
    if set(map(len, samples)) != {len(part.children)}:
        for row, sample in enumerate(samples):
            _check_length(part, sample, row, keys)
    for child, column in zip(part.children, zip(*samples, strict=True), strict=True):
        _take_columns(child, column, columns, keys)


def _fields(part: Branch, samples: Sequence[Any], keys: Keys) -> Sequence[Sequence[Any]]:
    """What all samples have for each key of a mapping, or field of a dataclass."""
    if part.get_all is not None:
        try:
            found = map(part.get_all, samples)
            return list(zip(*found, strict=True)) if len(part.getters) > 1 else [list(found)]
        except (KeyError, AttributeError):
            pass  # found again, to say in which sample
    positions = range(len(part.getters))
    return [[_get(part, position, sample, row, keys) for row, sample in enumerate(samples)] for position in positions]


def _get(part: Branch, position: int, sample: Any, row: int, keys: Keys) -> Any:
    try:
        return part.getters[position](sample)
    except (KeyError, AttributeError) as error:
        path = child_path(part.path, part.rule, part.form, position)
        words = f"is missing from sample {keys[row]!r}, but sample {keys[0]!r} has it: {_AGREE}"
        raise keys.error(path, words, 0, row, key=repr(part.form.keys[position])) from error


_AGREE = "the samples of a batch must have the same structure"


def _check_type(part: Branch, sample: Any, row: int, keys: Keys) -> None:
    kind = type(sample)
    if kind is part.form.type:
        return
    rule = rule_of(kind)
    if part.rule is Rule.MAPPING and rule is Rule.MAPPING:
        return
    sequences = (Rule.SEQUENCE, Rule.NAMED)
    if part.rule in sequences and rule in sequences:
        return
    expected = describe(part.form.type)
    words = f"is {describe(kind)} in sample {keys[row]!r}, but {expected} in sample {keys[0]!r}: {_AGREE}; {ADVICE}"
    raise keys.error(part.path, words, 0, row, types=(name_of(part.form.type), name_of(kind)))


def _check_length(part: Branch, sample: Any, row: int, keys: Keys) -> None:
    expected = len(part.children)
    if len(sample) != expected:
        found = f"has {len(sample)} elements in sample {keys[row]!r}, but {expected} in sample {keys[0]!r}"
        words = f"{found}: {_AGREE}; pad them, or pass a collate_fn"
        raise keys.error(part.path, words, 0, row, lengths=(expected, len(sample)))


def _flatten(part: Leaf | Branch, value: Any, flat: list[Any], row: int, keys: Keys) -> None:
    if isinstance(part, Leaf):
        flat.append(value)
        return
    if type(value) is not part.form.type:
        _check_type(part, value, row, keys)
    if part.rule in (Rule.MAPPING, Rule.FIELDS):
        for position, child in enumerate(part.children):
            inner = _get(part, position, value, row, keys)
            if type(child) is Leaf:
                flat.append(inner)
            else:
                _flatten(child, inner, flat, row, keys)
        return
    if len(value) != len(part.children):
        _check_length(part, value, row, keys)
    for child, element in zip(part.children, value, strict=True):
        _flatten(child, element, flat, row, keys)


def _node(part: Leaf | Branch, parts: Iterator[tuple[Node, list[Any]]], values: list[Any]) -> Node:
    if isinstance(part, Leaf):
        node, inline = next(parts)
        values += inline
        return node
    form = part.form
    if form.prototype is not None:
        values.append(form.prototype)
    children = tuple(_node(child, parts, values) for child in part.children)
    keys = form.keys if part.rule in (Rule.MAPPING, Rule.FIELDS) else ()
    return Node(form.kind, -1, form.type_name, keys, children)
