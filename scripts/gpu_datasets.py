"""Datasets for gpu_check.py. Importable by workers, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

WIDTH = 1 << 18


class Numbered:
    """Sample i is a row of 2**18 float32, all of them i: 1 MiB whose every number says which sample it is."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return np.full(WIDTH, index, np.float32), index


class Images:
    """Images `(3, 224, 224)` float32 from memory, with a label out of ten."""

    def __init__(self, size: int, num_rows: int = 256) -> None:
        self._size = size
        self._rows = np.random.default_rng(0).random((num_rows, 3, 224, 224), dtype=np.float32)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._rows[index % len(self._rows)], index % 10
