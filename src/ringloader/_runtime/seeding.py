"""Random draws that depend on the sample, not on the worker.

Owns the seeding of `random`, numpy and torch: before the dataset is built from the loader's seed alone, so that every worker
builds the same one; before each batch from (seed, epoch, global position of its first sample), so that draws differ between
ranks, batches and epochs and depend on neither the number of workers nor on restarts. numpy.random and torch are seeded the
moment they are imported when that happens late. Must not import either by itself.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ringloader._core.blake2 import blake2b

_LATE = ("numpy.random", "torch")
_BUILD_EPOCH = -1


def draw_key(seed: int, epoch: int, position: int, place: int = 0) -> int:
    """Return 128 bits that are a function of the four alone. Source: BLAKE2, RFC 7693."""
    packed = struct.pack("<Qqqq", seed & 0xFFFFFFFFFFFFFFFF, epoch, position, place)
    return int.from_bytes(blake2b(packed, digest_size=16).digest(), "little")


class Seeder:
    """Seeds the global generators of this process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._key = draw_key(seed, _BUILD_EPOCH, 0)

    def for_build(self) -> None:
        """Seed for the construction of the dataset."""
        self._seed_all(draw_key(self._seed, _BUILD_EPOCH, 0))

    def for_position(self, epoch: int, position: int, place: int = 0) -> None:
        """Seed for a batch, or a sample, that begins at a global position of an epoch; `place` counts samples without one."""
        self._seed_all(draw_key(self._seed, epoch, position, place))

    @staticmethod
    def save() -> tuple[Any, ...]:
        """Return where the generators are, for `restore`."""
        numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        return (
            random.getstate(),
            numpy_random.get_state() if numpy_random is not None else None,
            torch.default_generator.get_state() if torch is not None else None,
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Put the generators back; one that was imported since begins as the batch did."""
        random.setstate(saved[0])
        for name, state in zip(_LATE, saved[1:], strict=True):
            module: Any = sys.modules.get(name)
            if module is not None and state is None:
                self.seed_module(name, module)
            elif module is not None:
                module.set_state(state) if name != "torch" else module.default_generator.set_state(state)

    def _seed_all(self, key: int) -> None:
        self._key = key
        random.seed(key)
        modules = sys.modules
        for name in _LATE:
            module = modules.get(name)
            if module is not None:
                self.seed_module(name, module)

    def seed_module(self, name: str, module: Any) -> None:
        """Seed one module's global generator with the present key, if the module is far enough imported to have one."""
        if name == "torch":
            generator = getattr(module, "default_generator", None)
            if generator is not None:
                generator.manual_seed(self._key >> 64)
        elif hasattr(module, "seed"):
            # One word: a longer seed costs four times as much, and this happens for every batch.
            module.seed(self._key & 0xFFFFFFFF)


class LateImports:
    """Seeds numpy.random and torch the moment somebody imports them; for workers, and inline while dataset code runs.

    `also`: what to call with other modules once they are imported.

    A finder and loader as sys.meta_path knows them. The abstract classes of importlib.abc would cost every worker a megabyte.
    """

    def __init__(self, seeder: Seeder, also: dict[str, Callable[[ModuleType], None]] | None = None) -> None:
        self._also = also or {}
        self._seeder = seeder
        self._searching = False
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (fullname not in _LATE and fullname not in self._also) or self._searching:
            return None
        self._searching = True
        try:
            # Imported late for the same reason.
            from importlib.util import find_spec

            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        self._loaders[fullname] = spec.loader
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        loader = self._loaders[module.__name__]
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        module.__loader__ = loader
        loader.exec_module(module)
        if module.__name__ in self._also:
            self._also[module.__name__](module)
        else:
            self._seeder.seed_module(module.__name__, module)


# Generators to lend, which `Seeder` seeds before anybody draws: making one costs more than a small batch, saving and restoring
# the user's state half of that. There is one per depth: a dataset may read another loader.
_SPARE_GENERATORS: list[Any] = []


class Generators:
    """The global generators of this process, lent to code that runs on the user's own thread and put back as they were.

    An interrupt may break into either method: `put_back` undoes a `lend` that came half way, and can be called again.
    """

    def __init__(self) -> None:
        self._random: Any = None
        self._numpy: Any = None
        self._torch: Any = None
        self._lent: Any = None  # numpy's: the last to be lent, once all are saved

    def lend(self) -> None:
        self._random = random.getstate()
        import numpy as np

        numpy_random: Any = np.random  # numpy itself loads it at first use, in the midst of a batch
        self._numpy = numpy_random.get_bit_generator()
        torch = sys.modules.get("torch")
        if torch is not None:
            self._torch = torch.default_generator.get_state()
        self._lent = _SPARE_GENERATORS.pop() if _SPARE_GENERATORS else numpy_random.MT19937(0)
        numpy_random.set_bit_generator(self._lent)

    def put_back(self) -> None:
        if self._lent is None:
            return
        random.setstate(self._random)
        sys.modules["numpy.random"].set_bit_generator(self._numpy)
        torch = sys.modules.get("torch")
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)  # type: ignore[union-attr]
        elif torch is not None:
            torch.default_generator.seed()  # as in a process that has just imported it
        lent, self._lent = self._lent, None
        _SPARE_GENERATORS.append(lent)
