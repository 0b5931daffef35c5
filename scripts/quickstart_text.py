"""The dataset of the quickstart, in a module of its own so that workers need not import torch."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]  # comes with Python, not with its stubs

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[np.int64]]


class Windows:
    """Windows of `width` characters at even distances in a text, numbered, each with the window one character later.

    A sample is `(index, input, target)`; the arrays are `(width,)` int64. The text is Python's own manual, or a file.
    """

    def __init__(self, num_windows: int, width: int, path: str | None = None) -> None:
        text = (
            Path(path).read_text(errors="replace") if path is not None else "\n".join(topics[name] for name in sorted(topics))
        )
        if len(text) <= width:
            raise ValueError(f"a text of {len(text)} characters has no window of {width} and its target")
        self.alphabet, codes = np.unique(np.array(list(text)), return_inverse=True)
        self._codes = codes.astype(np.int64)
        self._starts = np.linspace(0, len(text) - width - 1, num_windows, dtype=np.int64)
        self._width = width

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[int, Array, Array]:
        start = self._starts[index]
        window = self._codes[start : start + self._width + 1]
        return index, window[:-1], window[1:]
