"""A dataset as users of torch write it: its module imports torch, so that every worker needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.workloads import Workload


class Tensors(Dataset[tuple[torch.Tensor, int]]):
    """8 float32 numbers and an int label, as tensors whatever `samples` says."""

    def __init__(self, num_samples: int, samples: str = "torch") -> None:
        self._points = torch.rand(num_samples, 8, generator=torch.Generator().manual_seed(0))
        self.nbytes = self._points.nbytes

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        return self._points[index], index % 10


SMALL_TORCH = Workload("small torch", Tensors, batch_size=32, num_batches=64)
