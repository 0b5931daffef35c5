"""Train a character-level language model with ringloader and kill one of its workers in the middle.

Ends with a table and exit code 0 when every window arrived exactly once per epoch, the killed worker was replaced and the loss
fell; with code 1 and a line that says what did not hold otherwise.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from quickstart_text import Windows
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from ringloader import FactorySpec, Loader

WIDTH = 64
BATCH_SIZE = 64
NUM_WORKERS = 2
NUM_EPOCHS = 2
# Batches whose mean loss is shown: the loss of one batch alone rises and falls by more than small runs gain.
NUM_AVERAGED = 8


class Model(nn.Module):
    """Predicts each next character from those before it: `(B, T)` int64 to `(B, T, num_characters)`."""

    def __init__(self, num_characters: int, size: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, size)
        self.recur = nn.GRU(size, size, batch_first=True)
        self.read_out = nn.Linear(size, num_characters)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Score every character as the next one."""
        states, _ = self.recur(self.embed(characters))
        scores: torch.Tensor = self.read_out(states)
        return scores


@dataclass
class Outcome:
    """What training recorded."""

    num_windows: int
    losses: list[float] = field(default_factory=list)
    deliveries: list[np.ndarray[Any, Any]] = field(default_factory=list)  # per epoch: how often each window came
    wait_s: float = 0.0
    train_s: float = 0.0
    num_restarts: int = 0

    @property
    def first_loss(self) -> float:
        """Mean loss of the first batches."""
        return float(np.mean(self.losses[:NUM_AVERAGED]))

    @property
    def last_loss(self) -> float:
        """Mean loss of the last batches."""
        return float(np.mean(self.losses[-NUM_AVERAGED:]))

    def find_fault(self) -> str | None:
        """Name the first promise that was not kept."""
        for epoch, counts in enumerate(self.deliveries, start=1):
            missing, repeated = int((counts == 0).sum()), int((counts > 1).sum())
            if missing or repeated:
                return f"epoch {epoch}: {missing} of {self.num_windows} windows never arrived, {repeated} more than once"
        if self.num_restarts < 1:
            return "a worker was killed and none was restarted"
        if not self.last_loss < self.first_loss:
            return f"the loss did not fall: {self.first_loss:.3f} at the start, {self.last_loss:.3f} at the end"
        return None


def train(loader: Loader, model: Model, outcome: Outcome, progress: Progress) -> None:
    """Train for all epochs; half-way through the first, kill a worker with SIGKILL."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    kill_at = len(loader) // 2
    waited_s, began_s = loader.stats().wait_s, time.perf_counter()
    for epoch in range(NUM_EPOCHS):
        counts = np.zeros(outcome.num_windows, np.int64)
        outcome.deliveries.append(counts)
        for number, (indices, inputs, targets) in enumerate(progress.track(loader, description=f"epoch {epoch + 1}")):
            np.add.at(counts, indices.numpy(), 1)
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
            optimizer.step()
            outcome.losses.append(loss.item())
            if epoch == 0 and number == kill_at:
                pid = loader.stats().worker_pids[0]
                os.kill(pid, signal.SIGKILL)
                progress.console.print(f"killed worker process {pid} after batch {number + 1} of epoch 1")
    outcome.train_s = time.perf_counter() - began_s
    outcome.wait_s = loader.stats().wait_s - waited_s
    outcome.num_restarts = loader.stats().num_restarts


def loading_s(loader: Iterable[Any]) -> float:
    """Seconds to load an epoch and do nothing with it; the loader's workers run already."""
    began_s = time.perf_counter()
    for _batch in loader:
        pass
    return time.perf_counter() - began_s


def dataloader_loading_s(dataset: Any) -> float:
    """The same epoch with torch's loader, its workers warmed up by an epoch too."""
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)
    loading_s(loader)
    return loading_s(loader)


def show(console: Console, outcome: Outcome, ringloader_s: float, torch_s: float) -> None:
    """Print the summary."""
    table = Table(title="quickstart", title_justify="left", show_header=False)
    exact = [int((counts == 1).sum()) for counts in outcome.deliveries]
    rows = {
        "loss, start → end": f"{outcome.first_loss:.3f} → {outcome.last_loss:.3f}",
        "batches per second": f"{len(outcome.losses) / outcome.train_s:.1f}",
        "time the trainer waited for data": f"{outcome.wait_s / outcome.train_s:.1%}",
        "worker restarts": str(outcome.num_restarts),
        **{
            f"windows delivered once, epoch {epoch}": f"{number} of {outcome.num_windows}"
            for epoch, number in enumerate(exact, start=1)
        },
        "loading an epoch, ringloader": f"{ringloader_s:.3f} s",
        "loading an epoch, DataLoader": f"{torch_s:.3f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def main() -> int:
    """Train, compare loading times, check, report."""
    args = _parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    console = Console()
    # The loader's warnings go above the progress bar, not through it.
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=console, show_time=False, show_path=False)])
    spec = FactorySpec(Windows, args.windows, WIDTH, args.text)
    try:
        dataset = spec.build()  # for the size of the alphabet and for DataLoader; ringloader's workers build their own
    except (OSError, ValueError) as error:
        console.print(f"FAILED: {error}")
        return 1
    outcome = Outcome(args.windows)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)
    with Loader(spec, batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS) as loader:
        loader.start()
        with bar as progress:
            train(loader, Model(len(dataset.alphabet)), outcome, progress)
        ringloader_s = loading_s(loader)
    show(console, outcome, ringloader_s, dataloader_loading_s(dataset))
    fault = outcome.find_fault()
    if fault is not None:
        console.print(f"FAILED: {fault}")
    return 0 if fault is None else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description="Train a small language model with ringloader.")
    parser.add_argument("--windows", type=int, default=32_768, help=f"windows of {WIDTH} characters per epoch (32768)")
    parser.add_argument("--text", help="a text file to train on in place of Python's manual")
    args = parser.parse_args()
    if args.windows < 4 * BATCH_SIZE:
        parser.error(f"--windows is at least {4 * BATCH_SIZE}: with fewer there is no middle of an epoch to kill a worker in")
    return args


if __name__ == "__main__":
    sys.exit(main())
