"""From the user's dataset to what a worker builds.

Owns the choice between a spec, a pickle in one shared segment, and the object itself (inline), and the settings a worker is
told.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from ringloader import factory
from ringloader._collate.collate import Collator
from ringloader._core import messages as msg
from ringloader._runtime.building import PAYLOAD_ALIGNMENT, build_collator, is_iterable, retry_to_wire, run_init
from ringloader._runtime.lacks import RoomError
from ringloader._runtime.options import Options
from ringloader._runtime.pool import WorkerSettings
from ringloader._runtime.seeding import draw_key
from ringloader._runtime.segment import Segment
from ringloader._runtime.torch_datasets import without_torch
from ringloader._specs import main_module
from ringloader._specs.handles import MAX_HANDLES, Shareable
from ringloader._specs.payload import PickledDataset
from ringloader.collation import is_default, make_collator
from ringloader.errors import ConfigError
from ringloader.factory import FactorySpec, find_process_spec

_BUILD_EPOCH = -1


def check_dataset(dataset: Any) -> None:
    """Refuse what is no dataset. Raises ConfigError."""
    if isinstance(dataset, FactorySpec):
        return
    if isinstance(dataset, (str, bytes, type)):
        raise ConfigError(
            f"dataset is {dataset!r:.80}; give a FactorySpec({dataset!r:.80}) or an object with __len__ and __getitem__",
            option="dataset",
            value=dataset,
        )
    if not hasattr(dataset, "__getitem__") and not is_iterable(dataset):
        kind = type(dataset).__qualname__
        raise ConfigError(
            f"dataset of type {kind} has neither __getitem__ nor __iter__; give a map-style or an iterable dataset",
            option="dataset",
            value=kind,
        )


def check_stream_options(options: Options) -> None:
    """Refuse what an iterable dataset cannot do. Raises ConfigError."""
    given = {"shuffle": options.shuffle or None, "sampler": options.sampler, "batch_sampler": options.batch_sampler}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} was given with an iterable dataset, whose order is its own; shuffle inside the dataset, or give one "
                "with __len__ and __getitem__",
                option=name,
                value=value,
            )


# A descriptor, and what closes it.
Closing = tuple[int, Callable[[], None]]


def close_all(closing: Sequence[Closing]) -> None:
    """Close descriptors that workers were to get."""
    for _, close in closing:
        close()


def worker_settings(dataset: Any, options: Options, rank: int, world_size: int) -> tuple[WorkerSettings, int, list[Closing]]:
    """Return what process workers are told, the dataset's length where the parent knows it (else -1), and what has to be closed
    when the loader is gone. Raises ConfigError."""
    closing: list[Closing] = []
    try:
        settings, length = _settings(dataset, options, closing)
    except BaseException:
        close_all(closing)
        raise
    torch_origin = _torch_origin(settings.pop("references"))  # type: ignore[arg-type]
    settings |= {"rank": rank, "world_size": world_size}
    hash_seed = draw_key(options.seed, _BUILD_EPOCH, 0) % (1 << 32)
    return WorkerSettings(settings, hash_seed, tuple([fd for fd, _ in closing]), torch_origin), length, closing


def _settings(dataset: Any, options: Options, closing: list[Closing]) -> tuple[dict[str, object], int]:
    """The settings but for the ranks, and the length; descriptors that go along are put into `closing`."""
    collate, init_fn, used = _callables(options)
    retry = retry_to_wire(options.faults.retry)
    kinds: list[bytes] = retry[3] if retry else []  # type: ignore[assignment]
    wires = [wire for wire in (collate, init_fn, *kinds) if wire]
    needs_main = any(map(factory.callable_needs_main, wires))
    references = set().union(*map(factory.callable_references, wires))
    settings = {**_plain_settings(options), "collate": collate, "init_fn": init_fn, "retry": retry}
    length = -1
    dataset = without_torch(dataset, options)
    spec = find_process_spec(dataset)
    if spec is not None:
        settings["spec"] = spec.to_wire()
        used += spec.handles
        needs_main = needs_main or spec.needs_main
        references |= spec.references
    else:
        payload_fd, sizes, pickled = _pickle(dataset)
        closing.append((payload_fd, functools.partial(os.close, payload_fd)))
        settings["payload_sizes"] = sizes
        needs_main = needs_main or pickled.needs_main
        used += pickled.handles
        references |= {f"{kind.__module__}:{kind.__qualname__}" for kind in type(dataset).__mro__}
        length = len(dataset) if hasattr(dataset, "__len__") and not is_iterable(dataset) else -1
    main = main_module.describe_main() if needs_main else None
    settings["main"] = main.to_wire() if main is not None else {}
    settings["handles"] = _lend(used, closing)
    settings["references"] = references
    return settings, length


def _torch_origin(references: set[str]) -> str:
    """Where this process has torch from, if workers will import it before what these references name; else ""."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    try:
        is_needed = any(_has_torch_before(reference) for reference in references)
    except Exception:
        return ""  # a module like no other: whatever is wrong, it is only about time
    return str(getattr(torch, "__file__", "")) if is_needed else ""


def _has_torch_before(reference: str) -> bool:
    """Whether a module has bound something of torch's before the object, in the order in which it was run.

    What comes later may stand under `if __name__ == "__main__":`, which workers leave out. Runs nothing of the user's: objects
    may answer anything when they are asked for an attribute or for their class.
    """
    name, _, qualname = reference.partition(":")
    module = sys.modules.get("__main__" if name in main_module.MAIN_NAMES else name)
    if type(module) is not ModuleType:
        return False
    for key, value in list(vars(module).items()):
        if key == qualname.partition(".")[0]:
            return False
        kind, owner = type(value), None
        if kind is ModuleType:
            owner = vars(value).get("__name__")
        elif kind in (FunctionType, BuiltinFunctionType):
            owner = value.__module__
        elif issubclass(kind, type):
            owner = type.__dict__["__dict__"].__get__(value).get("__module__")
        if isinstance(owner, str) and owner.partition(".")[0] == "torch":
            return True
    return False


def _plain_settings(options: Options) -> dict[str, object]:
    """What depends on neither the dataset nor the user's functions."""
    return {
        "sys_path": [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)],
        "argv": [argument for argument in sys.argv if isinstance(argument, str)],
        "cwd": os.getcwd(),
        "spec": b"",
        "payload_sizes": [],
        "output": options.output,
        "convert": options.batch_size is None and options.batch_sampler is None,
        "batch_size": options.batch_size or 0,
        "drop_last": options.drop_last,
        "seed": options.seed,
        "seed_per": options.seed_per,
        "num_workers": options.num_workers,
    }


def _lend(used: list[Shareable], closing: list[Closing]) -> list[str]:
    """Have descriptors of what lies in shared memory go along; returns their tokens. Raises ConfigError for too many."""
    shared = {handle.token: handle for handle in used}
    if len(shared) > MAX_HANDLES:
        raise ConfigError(
            f"the dataset refers to {len(shared)} objects in shared memory, of {MAX_HANDLES} at most: keep many arrays in one "
            "SharedArrays",
            option="dataset",
            value=len(shared),
        )
    for handle in shared.values():
        closing.append(handle.lend())
    return list(shared)


def _callables(options: Options) -> tuple[bytes, bytes, list[Shareable]]:
    """The user's functions as they travel, and what they refer to in shared memory."""
    collate_fn, init_fn = options.collate_fn, options.worker_init_fn
    collate = init = b""
    used: list[Shareable] = []
    if collate_fn is not None and not is_default(collate_fn):
        collate, found = factory.pack_callable(collate_fn, "collate_fn")
        used += found
    if init_fn is not None:
        init, found = factory.pack_callable(init_fn, "worker_init_fn")
        used += found
    return collate, init, used


def _pickle(dataset: Any) -> tuple[int, list[int], PickledDataset]:
    """Pickle once, into one unnamed segment that all workers map; returns its descriptor and the sizes of its parts."""
    pickled = factory.pickle_dataset(dataset)
    parts = [memoryview(pickled.pickle), *pickled.buffers]
    padded = [-(-part.nbytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT for part in parts]
    try:
        segment = Segment.create(max(1, sum(padded)))
    except RoomError as error:
        raise ConfigError(
            f"dataset of {pickled.nbytes:,} bytes does not fit into shared memory: {error}; give a FactorySpec, so that each "
            "worker builds its own, or memory-map its files",
            option="dataset",
            value=pickled.nbytes,
        ) from error
    view, start = segment.mapping.view(), 0
    for part, size in zip(parts, padded, strict=True):
        view[start : start + part.nbytes] = part.cast("B")
        start += size
    view.release()
    fd = os.dup(segment.fd)
    segment.close()
    return fd, [part.nbytes for part in parts], pickled


class LocalBuild:
    """Makes what workers in this very process need: nothing is pickled, any callable and any object will do."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self._dataset = dataset
        # Calls of methods that this very object has run: a worker that starts over must not run them on it again.
        self.done: dict[int, msg.Called] = {}
        self.batch_size, self.drop_last = options.batch_size, options.drop_last
        self.retry = options.faults.retry
        self._convert = options.batch_size is None and options.batch_sampler is None
        self._output = options.output
        self._collate_fn, self._init_fn = options.collate_fn, options.worker_init_fn
        # Named by text or spec: refused here, where its words are the user's, as for processes.
        if isinstance(self._collate_fn, (str, FactorySpec)):
            self._collate_wire = factory.callable_to_wire(self._collate_fn, "collate_fn")
        if isinstance(self._init_fn, (str, FactorySpec)):
            self._init_wire = factory.callable_to_wire(self._init_fn, "worker_init_fn")

    def dataset(self) -> Any:
        """Build the dataset, or return the user's own. Raises what its factory raises."""
        if not isinstance(self._dataset, FactorySpec):
            return self._dataset
        self.done.clear()
        return self._dataset.build()

    def collator(self) -> Collator:
        """Return a new collator; each worker needs its own."""
        collate_fn = self._collate_fn
        if isinstance(collate_fn, (str, FactorySpec)):
            return build_collator({"collate": self._collate_wire, "output": self._output, "convert": self._convert})
        return make_collator(collate_fn, output=self._output, convert=self._convert)

    def init(self, worker_id: int) -> None:
        """Run the user's `worker_init_fn`."""
        if isinstance(self._init_fn, (str, FactorySpec)):
            run_init({"init_fn": self._init_wire}, worker_id)
        elif self._init_fn is not None:
            self._init_fn(worker_id)
