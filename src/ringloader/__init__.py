"""ringloader: a data loader for PyTorch whose batches are never copied between processes.

Public names are imported when they are first used, so that `import ringloader` and the start of a worker stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringloader._core.array_spec import ArraySpec
    from ringloader._core.policy import FaultPolicy, SampleRetry
    from ringloader._runtime.worker_info import WorkerInfo, get_worker_info
    from ringloader.arrays import ArrayDataset, TokenWindows, tensor_dataset
    from ringloader.collation import default_collate, pad_collate
    from ringloader.datasets import Dataset, dataset
    from ringloader.errors import (
        ClosedError,
        ConfigError,
        FactoryError,
        InternalError,
        LayoutError,
        LoaderError,
        LoaderTimeoutError,
        ProtocolError,
        RemoteError,
        RingFullError,
        SampleError,
        WorkerError,
    )
    from ringloader.factory import FactorySpec
    from ringloader.leases import record_stream, release
    from ringloader.loader import Loader
    from ringloader.samplers import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, WeightedSampler
    from ringloader.shared_records import SharedRecords
    from ringloader.sharing import SharedArrays
    from ringloader.stats import LoaderStats

__version__ = "0.1.0"

_MODULES = {
    "errors": (
        "ClosedError",
        "ConfigError",
        "FactoryError",
        "InternalError",
        "LayoutError",
        "LoaderError",
        "LoaderTimeoutError",
        "ProtocolError",
        "RemoteError",
        "RingFullError",
        "SampleError",
        "WorkerError",
    ),
    "_core.array_spec": ("ArraySpec",),
    "_core.policy": ("FaultPolicy", "SampleRetry"),
    "_runtime.worker_info": ("WorkerInfo", "get_worker_info"),
    "arrays": ("ArrayDataset", "TokenWindows", "tensor_dataset"),
    "collation": ("default_collate", "pad_collate"),
    "datasets": ("Dataset", "dataset"),
    "factory": ("FactorySpec",),
    "leases": ("record_stream", "release"),
    "loader": ("Loader",),
    "shared_records": ("SharedRecords",),
    "sharing": ("SharedArrays",),
    "stats": ("LoaderStats",),
    "samplers": ("BatchSampler", "DistributedSampler", "RandomSampler", "SequentialSampler", "WeightedSampler"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ArrayDataset",
    "ArraySpec",
    "BatchSampler",
    "ClosedError",
    "ConfigError",
    "Dataset",
    "DistributedSampler",
    "FactoryError",
    "FactorySpec",
    "FaultPolicy",
    "InternalError",
    "LayoutError",
    "Loader",
    "LoaderError",
    "LoaderStats",
    "LoaderTimeoutError",
    "ProtocolError",
    "RandomSampler",
    "RemoteError",
    "RingFullError",
    "SampleError",
    "SampleRetry",
    "SequentialSampler",
    "SharedArrays",
    "SharedRecords",
    "TokenWindows",
    "WeightedSampler",
    "WorkerError",
    "WorkerInfo",
    "dataset",
    "default_collate",
    "get_worker_info",
    "pad_collate",
    "record_stream",
    "release",
    "tensor_dataset",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ringloader' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ringloader.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
