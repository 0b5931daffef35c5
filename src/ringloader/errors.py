"""The exception tree.

Owns every exception a user of the package can see. One class per thing a caller can do about it. Facts go in as keywords and
are kept as attributes; the sentence is rendered from them. Must not import anything of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
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
]


class LoaderError(Exception):
    """Base of every error this package raises.

    `facts` holds the keyword facts; each is also an attribute. `str(error)` is the sentence rendered from them.
    """

    def __init__(self, message: str, /, **facts: Any) -> None:
        self.facts: dict[str, Any] = facts
        super().__init__(message)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self), self.facts)


def _rebuild(kind: type[LoaderError], message: str, facts: Mapping[str, Any]) -> LoaderError:
    return kind(message, **facts)


class ConfigError(LoaderError, ValueError):
    """An option or argument that cannot work; raised before any process starts."""


class LayoutError(LoaderError, ValueError):
    """Samples that cannot be laid out as one batch; `path` names the place in the sample, `samples` the dataset indices."""


class FactoryError(LoaderError):
    """The dataset could not be imported or built in a worker, or workers built different datasets."""


class SampleError(LoaderError):
    """The dataset raised while a sample was fetched.

    `index` is the dataset key, `batch` the batch number, `worker` the worker id (None inline), `original_type` the qualified
    name of the exception's type, `original_message` its text. `__cause__` is a `RemoteError` with the worker's traceback.
    """


class WorkerError(LoaderError):
    """A worker died and could not be replaced, or one sample killed workers again and again."""


class LoaderTimeoutError(LoaderError, TimeoutError):
    """Another process took longer than `timeout_s`."""


class RingFullError(LoaderError):
    """Every slot is held by batches the caller keeps, and the ring may not grow."""


class ClosedError(LoaderError):
    """The loader was closed, or belongs to another process."""


class ProtocolError(LoaderError):
    """Bytes on a control pipe that are no message of this version."""


class InternalError(LoaderError):
    """A bug in this package; `events` names the last facts before it, oldest first."""


class RemoteError(LoaderError):
    """An exception of another process, in words: `str()` is its formatted traceback."""
