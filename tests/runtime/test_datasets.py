"""The dataset base class: an unchanged instance has a spec that rebuilds it, a changed one says what changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringloader.datasets import Dataset
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec, pickle_dataset, unpickle_dataset


class Numbers(Dataset):
    """A dataset with attributes of several kinds."""

    def __init__(self, size: int, names: list[str] | None = None, *, transform: Any = None) -> None:
        self.size = size
        self.names = names
        self.items = list(range(size))
        self.labels = {"a": 1}
        self.array = np.arange(size)
        self.transform = transform

    def __len__(self) -> int:
        return self.size

    @functools.cached_property
    def total(self) -> int:
        return sum(self.items)


class Squares(Numbers):
    """A subclass with another signature."""

    def __init__(self, size: int) -> None:
        super().__init__(size, names=["square"])
        self.items = [item**2 for item in self.items]


@dataclasses.dataclass(frozen=True)
class Frozen(Dataset):
    """A frozen dataclass."""

    size: int
    extra: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Dataset):
    """A frozen dataclass whose fields are slots."""

    size: int


@dataclasses.dataclass
class Open(Dataset):
    """A plain dataclass."""

    size: int


def rebuilt(dataset: Dataset) -> Any:
    """Build from the spec's wire form."""
    spec = dataset.process_spec
    assert spec is not None
    return FactorySpec.from_wire(spec.to_wire()).build()


def test_dataset_unchanged_is_rebuilt_from_class_and_arguments() -> None:
    """The spec calls the class itself with the arguments it was given, a subclass included."""
    dataset = Numbers(3, ["a"], transform=Frozen(2))
    assert dataset.process_spec == FactorySpec(Numbers, 3, ["a"], transform=FactorySpec(Frozen, 2))
    assert rebuilt(dataset).transform == Frozen(2)
    assert rebuilt(Squares(4)).items == [0, 1, 4, 9]
    assert Squares(4).process_spec == FactorySpec(Squares, 4)


@pytest.mark.parametrize("dataset", [Frozen(3), FrozenSlots(3), Open(size=3)])
def test_dataset_dataclass_has_a_spec_and_keeps_its_nature(dataset: Any) -> None:
    """Dataclasses, frozen and slotted, are recorded without showing it in repr, equality or fields."""
    assert rebuilt(dataset) == dataset
    assert "record" not in repr(dataset)
    assert "record" not in str(dataclasses.asdict(dataset))


def test_dataset_beside_torch_base_has_a_spec() -> None:
    """torch's own Dataset can be a second base."""
    data = pytest.importorskip("torch.utils.data")
    cls = type("Both", (Dataset, data.Dataset), {"__module__": __name__})
    assert isinstance(cls(), data.Dataset)
    with pytest.raises(ConfigError, match="Both"):  # made here, so not importable: recorded all the same
        cls().process_spec  # noqa: B018  (the property is what raises)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: setattr(d, "transform", len), "transform"),
        (lambda d: setattr(d, "size", 4), "size"),
        (lambda d: setattr(d, "extra", 1), "extra"),
        (lambda d: delattr(d, "labels"), "labels"),
        (lambda d: d.items.append(9), "items"),
        (lambda d: d.items.reverse(), "items"),
        (lambda d: d.labels.update(b=2), "labels"),
        (lambda d: setattr(d, "items", [5, 6, 7]), "items"),
        (lambda d: setattr(d, "array", d.array[::-1].copy()), "array"),
        (lambda d: d.array.__setitem__(0, 9), "array"),
        (lambda d: d.names.append("b"), "names"),
    ],
)
def test_dataset_changed_afterwards_has_no_spec_and_one_log_line(
    change: Callable[[Any], Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A change of any kind makes the dataset one to be pickled as it is, and is named once."""
    dataset = Numbers(3, ["a"])
    assert rebuilt(dataset).items == dataset.items
    change(dataset)
    with caplog.at_level(logging.INFO, "ringloader"):
        assert dataset.process_spec is None
        assert dataset.process_spec is None
    assert len(caplog.records) == 1
    assert repr(word) in caplog.text


def test_dataset_argument_changed_in_place_has_no_spec() -> None:
    """A list that was only read by the constructor, and has changed since, cannot be used to call it again."""
    names = ["a"]

    class Reader(Dataset):
        def __init__(self, names: list[str]) -> None:
            self.count = len(names)

    dataset = Reader(names)
    names.append("b")
    assert dataset.process_spec is None


def test_dataset_cached_property_is_no_change() -> None:
    """Filling a cache by looking at it changes nothing."""
    dataset = Numbers(3)
    assert dataset.total == 3
    assert dataset.process_spec is not None


def test_dataset_changed_is_pickled_as_it_is() -> None:
    """The changed state reaches the worker, without the constructor's arguments along with it."""
    dataset = Numbers(3, transform=len)
    dataset.items.append(99)
    packed = pickle_dataset(dataset)
    clone = unpickle_dataset(packed.pickle, packed.buffers)
    assert clone.items == [0, 1, 2, 99]
    assert clone.transform is len


def test_dataset_copies_go_by_their_own_state(caplog: pytest.LogCaptureFixture) -> None:
    """A shallow copy is an unchanged instance until it is changed; deep copies and unpickled ones are pickled as they are."""
    dataset = Numbers(3)
    shallow = copy.copy(dataset)
    assert shallow.process_spec == dataset.process_spec
    shallow.size = 5
    assert shallow.process_spec is None
    assert dataset.process_spec is not None
    with caplog.at_level(logging.INFO, "ringloader"):
        assert copy.deepcopy(dataset).process_spec is None
        assert pickle.loads(pickle.dumps(dataset)).process_spec is None
    assert "copied or unpickled" in caplog.text


def test_b25_dataset_of_a_local_class_is_refused_in_words() -> None:
    """B25: a class that a worker cannot import is named when the spec is asked for, not when the instance is made."""

    class Local(Dataset):
        pass

    dataset = Local()
    with pytest.raises(ConfigError, match=r"dataset of class .*Local.*move it to module level"):
        dataset.process_spec  # noqa: B018  (the property is what raises)


def test_b28_dataset_with_open_file_argument_is_refused_by_name(tmp_path: Any) -> None:
    """B28: a handle among the constructor's arguments is refused naming it."""
    with (
        (tmp_path / "f").open("w") as handle,
        pytest.raises(ConfigError, match=r"kwargs\['transform'\].*open it inside the factory"),
    ):
        Numbers(3, transform=handle).process_spec  # noqa: B018  (the property is what raises)
