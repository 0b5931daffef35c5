"""What a filled slot becomes for the user: arrays, tensors, page-locked ones, or tensors on a device.

Owns the choice, once per engine. Must not know slots or leases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringloader._core.layout import Layout, Placement
from ringloader._runtime.cuda import Copier, Copy, Cuda, Stream, Tensor


class Wrap(Protocol):
    """Rebuilds a batch over a slot. `streams`: those that go on reading the slot after the call."""

    streams: tuple[Stream, ...]

    def throttle(self) -> None:
        """Wait until the device can take more."""

    def prune(self) -> None:
        """Let go of what was on its way and is not wanted any more."""

    def __call__(
        self, layout: Layout, placement: Placement, inline: bytes, root: np.ndarray[Any, Any]
    ) -> tuple[Any, list[Any]]:
        """Return the batch and those of its leaves that lie in `root`, the slot as a 1-D uint8 array."""


class HostWrap:
    """Arrays or tensors over the slot. Where the ring is page-locked, so is the memory of small leaves that are copied out."""

    def __init__(self, output: str, copy: Callable[[Tensor], Tensor] | None = None) -> None:
        self.streams: tuple[Stream, ...] = ()
        self._wrap: Callable[..., tuple[Any, list[Any]]]
        self._extra: tuple[Any, ...] = ()
        if output == "numpy":
            from ringloader._collate.wrap import wrap_numpy

            self._wrap = wrap_numpy
        else:
            from ringloader._collate.tensors import wrap

            self._wrap = wrap
            self._extra = () if copy is None else (copy,)

    def throttle(self) -> None:
        """Nothing is on its way."""

    def prune(self) -> None:
        """Nor does anything stay behind."""

    def __call__(
        self, layout: Layout, placement: Placement, inline: bytes, root: np.ndarray[Any, Any]
    ) -> tuple[Any, list[Any]]:
        return self._wrap(layout, placement, inline, root, True, *self._extra)


@dataclass(slots=True)
class Arriving:
    """A batch on its way to a device."""

    value: Any
    copy: Copy
    is_noted: bool = False


class DeviceWrap:
    """Tensors on a device, in an `Arriving`; the slot is free as soon as they are there."""

    def __init__(self, copier: Copier) -> None:
        from ringloader._collate.tensors import wrap_copied

        self.streams: tuple[Stream, ...] = (copier.stream,)
        self._copier = copier
        self._wrap_copied = wrap_copied

    def throttle(self) -> None:
        self._copier.throttle()

    def prune(self) -> None:
        self._copier.prune()

    def __call__(
        self, layout: Layout, placement: Placement, inline: bytes, root: np.ndarray[Any, Any]
    ) -> tuple[Any, list[Any]]:
        value, copy = self._copier.start(lambda copy: self._wrap_copied(layout, placement, inline, root, copy)[0])
        return Arriving(value, copy), []


def choose(output: str, device: str | None, *, pinned: bool, cuda: Cuda) -> Wrap:
    """Return what makes batches of this kind. With a device, the caller's thread makes a stream on it."""
    if device is not None:
        return DeviceWrap(cuda.copier(device))
    return HostWrap(output, cuda.pinned_copy if pinned else None)
