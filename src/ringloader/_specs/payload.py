"""Pickles that a worker is able to load.

Owns the one pickler of the package: for a single argument, in one piece of bounded size, and for a whole dataset, once, with
its large buffers out of band. It finds the object that cannot be pickled or that lives in a `__main__` no worker can load, and
refuses in the parent. Must not import torch: tensors are recognised only when the user's code has imported it.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringloader._specs.handles import Shareable, holder_of, view_of
from ringloader._specs.main_module import MAIN_NAMES, unreachable_reason
from ringloader._specs.mapped import map_file, source_of
from ringloader._specs.refusals import refuse
from ringloader.errors import ConfigError

# An argument beyond this is a dataset in disguise: every worker would hold a copy of its own.
MAX_PICKLE_NBYTES = 64 << 20
# Smaller buffers stay inside the pickle: 10,000 small arrays need not become 10,000 ranges to track.
_OUT_OF_BAND_NBYTES = 32 << 10


class Spec(Protocol):
    """What the pickler needs of a factory spec."""

    @property
    def needs_main(self) -> bool: ...
    @property
    def handles(self) -> tuple[Shareable, ...]: ...
    @classmethod
    def from_wire(cls, wire: bytes, /) -> Spec: ...
    def to_wire(self) -> bytes: ...
    def build(self) -> Any: ...


# Gives the spec of an object that is rebuilt from one instead of pickled, None for any other object.
SpecFinder = Callable[[Any], Spec | None]


@dataclass(frozen=True)
class PickledDataset:
    """A dataset as bytes.

    `pickle` is protocol 5; `buffers` are its out-of-band buffers in order, views of the dataset's own memory; `nbytes` is the
    size of all of it; `needs_main` says that a worker must load the user's script first; `handles` is what it refers to in
    shared memory.
    """

    pickle: bytes
    buffers: list[memoryview]
    nbytes: int
    needs_main: bool
    handles: tuple[Shareable, ...] = ()


@dataclass(frozen=True)
class PickledArgument:
    """One argument as bytes; `needs_main` and `handles` as for a dataset."""

    pickle: bytes
    needs_main: bool
    handles: tuple[Shareable, ...]


def pickle_argument(value: Any, argument: str, find_spec: SpecFinder) -> PickledArgument:
    """Pickle one argument and log its size. Raises ConfigError that names the object."""
    data, pickler = _pickle(value, argument, find_spec, None, MAX_PICKLE_NBYTES)
    _logger().info("%s is pickled for the workers: %s, %d bytes", argument, _type_name(value), len(data))
    return PickledArgument(data, pickler.needs_main, tuple(pickler.handles.values()))


def pickle_in_parts(dataset: Any, find_spec: SpecFinder, max_nbytes: int) -> PickledDataset:
    """Pickle a dataset with its large buffers out of band; `max_nbytes` bounds the rest. Raises ConfigError."""
    buffers: list[memoryview] = []

    def keep_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND_NBYTES:
            return True
        buffers.append(raw)
        return False

    data, pickler = _pickle(dataset, "dataset", find_spec, keep_small, max_nbytes)
    nbytes = len(data) + sum(buffer.nbytes for buffer in buffers)
    _logger().info(
        "dataset is pickled for the workers: %s, %d bytes, %d of them out of band",
        _type_name(dataset),
        nbytes,
        nbytes - len(data),
    )
    return PickledDataset(data, buffers, nbytes, pickler.needs_main, tuple(pickler.handles.values()))


def unpickle(data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Load what `pickle_argument` or `pickle_in_parts` made; arrays lie in `buffers`, in place."""
    return pickle.loads(data, buffers=buffers)


def rebuild_tensor(array: Any, dtype_name: str) -> Any:
    """Wrap an array as a tensor of the named torch dtype, in place. The counterpart of the reduction in the pickler."""
    torch = importlib.import_module("torch")
    return torch.from_numpy(array).view(getattr(torch, dtype_name))


def rebuild_from_spec(spec_class: type[Spec], wire: bytes) -> Any:
    """Build the object that a spec inside a pickle stands for."""
    return spec_class.from_wire(wire).build()


def _pickle(
    value: Any,
    argument: str,
    find_spec: SpecFinder,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
    max_nbytes: int,
) -> tuple[bytes, _Pickler]:
    sink = _BoundedSink(max_nbytes)
    pickler = _Pickler(sink, value, find_spec, buffer_callback)
    try:
        pickler.dump(value)
    except _TooLargeError:
        raise too_large(value, argument, max_nbytes) from None
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}", **{**error.facts, "argument": argument}) from None
    except MemoryError:
        raise
    except Exception as error:  # a user's __reduce__ or __getstate__ may raise anything
        raise refuse(pickler.latest, argument, error=error, root=value) from error
    return bytes(sink.content), pickler


def too_large(value: Any, argument: str, max_nbytes: int) -> ConfigError:
    """Return the error for an argument that outgrows its bound."""
    remedy = (
        "pass a path and read or memory-map it inside the factory, or keep arrays in SharedArrays and lists of records in "
        "SharedRecords, which all processes share"
    )
    return ConfigError(
        f"{argument} is too large to be sent to the workers: {_type_name(value)} takes more than {max_nbytes >> 20} MiB "
        f"({max_nbytes} bytes), and every worker would hold a copy; {remedy}",
        argument=argument,
        max_nbytes=max_nbytes,
        remedy=remedy,
    )


def _logger() -> Any:
    import logging  # late: a worker only unpickles

    return logging.getLogger("ringloader")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _TooLargeError(Exception):
    """The pickle has outgrown its bound."""


class _BoundedSink:
    """Where the pickler writes; stops it as soon as the bound is passed, not after gigabytes have been copied."""

    def __init__(self, max_nbytes: int) -> None:
        self.content = bytearray()
        self._max_nbytes = max_nbytes

    def write(self, chunk: Any) -> int:
        nbytes = memoryview(chunk).nbytes
        if len(self.content) + nbytes > self._max_nbytes:
            raise _TooLargeError
        self.content += chunk
        return nbytes


class _Pickler(pickle.Pickler):
    """Remembers the object it works on, which is the one to blame when pickling fails, and looks at every name it writes."""

    def __init__(self, sink: _BoundedSink, root: Any, find_spec: SpecFinder, buffer_callback: Any) -> None:
        super().__init__(sink, protocol=5, buffer_callback=buffer_callback)
        self.latest = root
        self.needs_main = False
        self.handles: dict[str, Shareable] = {}
        self._root = root
        self._find_spec = find_spec

    def reducer_override(self, obj: Any) -> Any:
        self.latest = obj
        if isinstance(obj, (type, types.FunctionType)):
            self._check_name(obj)
            return NotImplemented
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise pickle.PicklingError("an open file belongs to the process that opened it")
        if isinstance(obj, np.ndarray):
            return self._reduce_array(obj)
        if isinstance(obj, Shareable):
            self.handles[obj.token] = obj
            return type(obj).attach_token, (obj.token,)
        spec = None if obj is self._root else self._find_spec(obj)
        if spec is not None:
            self.needs_main |= spec.needs_main
            self.handles.update({handle.token: handle for handle in spec.handles})
            return rebuild_from_spec, (type(spec), spec.to_wire())
        return _reduce_tensor(obj) or NotImplemented

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        """An array in shared memory, or of a file, as where it lies; any other as it is."""
        held = holder_of(array) if type(array) is np.ndarray else None
        if held is not None:
            holder, offset = held
            self.handles[holder.token] = holder
            return view_of, (type(holder), holder.token, offset, array.shape, array.strides, array.dtype, array.flags.writeable)
        source = source_of(array)
        return NotImplemented if source is None else (map_file, source)

    def _check_name(self, named: type | types.FunctionType) -> None:
        if named.__module__ not in MAIN_NAMES:
            return
        self.needs_main = True
        if "<locals>" not in named.__qualname__ and unreachable_reason(named.__qualname__) is not None:
            raise pickle.PicklingError("defined in a __main__ that no worker can load")


def _reduce_tensor(value: Any) -> tuple[Any, ...] | None:
    """Reduce a plain CPU tensor to an array, whose buffer can go out of band: torch's own way copies it into the pickle."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not getattr(torch, "Tensor", None):
        return None
    plain = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous() and not value.requires_grad
    if not plain or value.is_quantized or value.is_conj() or value.is_neg() or value.dim() == 0 or vars(value):
        return None
    dtype_name = str(value.dtype).removeprefix("torch.")
    as_bytes = value.dtype is torch.bfloat16 or dtype_name.startswith("float8")
    array = (value.view(torch.uint8) if as_bytes else value).numpy()
    return rebuild_tensor, (array, dtype_name)
