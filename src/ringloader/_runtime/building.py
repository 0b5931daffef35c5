"""Build what a worker needs from its settings: import path, dataset, collator.

Owns the form of the settings that travel in a Setup; the same functions serve inline. Must not import torch.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any

from ringloader import factory
from ringloader._collate.collate import Collator
from ringloader._core.policy import SampleRetry
from ringloader._runtime.pages import map_file
from ringloader._specs import main_module
from ringloader.collation import make_collator
from ringloader.factory import FactorySpec


def prepare(settings: dict[str, Any]) -> None:
    """Make imports work as they do in the parent."""
    sys.path[:] = settings["sys_path"]
    sys.argv[:] = settings["argv"]  # a main script may parse its arguments at module level
    try:
        os.chdir(settings["cwd"])
    except OSError:
        pass  # gone since: relative paths fail in the user's own code, with its own words
    if settings["main"]:
        main_module.load_main(main_module.MainModule.from_wire(settings["main"]))


def import_target(settings: dict[str, Any]) -> None:
    """Import the module of the dataset's spec."""
    if settings["spec"]:
        FactorySpec.from_wire(settings["spec"]).import_target()


def build_dataset(settings: dict[str, Any], payload: list[int]) -> Any:
    """Build the dataset from its spec, or from the pickle in the payload's segment."""
    if settings["spec"]:
        return FactorySpec.from_wire(settings["spec"]).build()
    fd, sizes = payload[0], settings["payload_sizes"]
    # Private: what a dataset writes to its own arrays stays in this worker, and what it only reads is shared by all.
    view, parts, start = map_file(fd, os.fstat(fd).st_size, shared=False).view(), [], 0
    os.close(fd)
    for size in sizes:
        parts.append(view[start : start + size])
        start += -(-size // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    return factory.unpickle_dataset(bytes(parts[0]), parts[1:])


def describe(dataset: Any) -> dict[str, Any]:
    """The facts of a dataset that the parent asks for: length (-1: none) and fingerprint ("": none)."""
    fingerprint = getattr(dataset, "fingerprint", None)
    streams = is_iterable(dataset)
    try:
        length = len(dataset) if hasattr(dataset, "__len__") else -1
    except (TypeError, NotImplementedError):
        if not streams:
            raise
        length = -1  # torch's own chains have one that fails for streams without
    return {
        # Workers that were given a part of a stream each may count it alone.
        "length": -1 if streams else length,
        "fingerprint": str(fingerprint()) if callable(fingerprint) and not streams else "",
        "iterable": streams,
        "stream_length": length if streams else -1,
        "can_replay": bool(getattr(dataset, "can_replay", True)),
        "has_set_epoch": hasattr(dataset, "set_epoch"),
    }


_HOMES = ("torch", "datasets")


def is_iterable(dataset: Any) -> bool:
    """A dataset that is read from its beginning on: torch's `IterableDataset`, or what can be iterated and not indexed."""
    # By name, so that torch need not be imported: its base class has a __getitem__ that raises. Hugging Face has one, too.
    if any(kind.__name__ == "IterableDataset" and kind.__module__.split(".")[0] in _HOMES for kind in type(dataset).__mro__):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def check_built(dataset: Any) -> None:
    """Refuse what a factory built and no loader can read. Raises TypeError."""
    if not hasattr(dataset, "__getitem__") and not is_iterable(dataset):
        kind = type(dataset).__qualname__
        raise TypeError(f"the factory built a {kind}, which has neither __getitem__ nor __iter__: it is no dataset")


PAYLOAD_ALIGNMENT = 64
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def build_collator(settings: dict[str, Any]) -> Collator:
    collate_fn = factory.callable_from_wire(settings["collate"]) if settings["collate"] else None
    return make_collator(collate_fn, output=settings["output"], convert=settings["convert"])


def retry_to_wire(retry: SampleRetry | None) -> list[object]:
    """How samples are retried, as it travels. Raises ConfigError for an exception that a worker could not import."""
    if retry is None:
        return []
    kinds = retry.on if isinstance(retry.on, tuple) else (retry.on,)
    return [
        retry.times,
        retry.backoff_s,
        retry.max_backoff_s,
        [factory.callable_to_wire(kind, "SampleRetry.on") for kind in kinds],
    ]


def retry_from_wire(wire: list[Any]) -> SampleRetry | None:
    """The inverse."""
    if not wire:
        return None
    times, backoff_s, max_backoff_s, kinds = wire
    on = tuple([factory.callable_from_wire(kind) for kind in kinds])
    return SampleRetry(times, on, backoff_s, max_backoff_s)  # type: ignore[arg-type]


# A program of more files than this is too large to be told about file by file.
_MAX_FILES = 1000
_MAX_FILE_NBYTES = 1 << 20
# Where packages are installed that are not under the interpreter's own prefix.
_SITES = re.compile(r"/(site|dist)-packages/")


def user_files() -> dict[str, list[int]]:
    """The files of the modules that were imported, but for installed packages: path → checksum, size."""
    installed = tuple({os.path.join(root, "") for root in (sys.prefix, sys.base_prefix, _PACKAGE_ROOT)})
    found: dict[str, list[int]] = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or path.startswith(installed) or _SITES.search(path) or len(found) >= _MAX_FILES:
            continue
        try:
            with open(path, "rb") as file:
                content = file.read(_MAX_FILE_NBYTES)
        except OSError:
            continue  # out of an archive, or gone
        found[path] = [zlib.crc32(content), len(content)]
    return found


def run_init(settings: dict[str, Any], worker_id: int) -> None:
    if settings["init_fn"]:
        init_fn: Callable[[int], object] = factory.callable_from_wire(settings["init_fn"])
        init_fn(worker_id)
