"""Readers of the soak: each goes through the epochs of one loader and holds every batch against an undisturbed run.

A batch is known by the digest of all its bytes. What arrives must be the next of the epoch, whole and unchanged; batches that
are kept for a while must not change meanwhile. Anything else is a `Mismatch`, which ends the soak.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import soak_datasets as data

from ringloader import FactorySpec, FaultPolicy, Loader, SampleRetry

NUM_EPOCHS = 2
# Far more deaths than any sample would cause: here they come from outside, and nobody is to blame for them.
_OFTEN = 1_000_000
TIMEOUT_S = 1.0
_FAULTS = {
    "restarts": _OFTEN,
    "window_s": 60.0,
    "sample_deaths": _OFTEN,
    "max_backoff_s": 0.2,
    "retry": SampleRetry(times=5, backoff_s=0.01),
}


class Mismatch(Exception):
    """A batch that should not be, or is not what it should be."""


class Interrupted(BaseException):
    """What the injector throws into a reader's `next`."""


@dataclass(frozen=True)
class Job:
    """One loader: how it is made, and which trouble is not for it."""

    name: str
    make: Callable[[int], Loader]  # from its number
    spared: tuple[str, ...] = ()
    is_resumed: bool = False
    bad: tuple[int, ...] = ()  # samples that are always left out


def jobs(folder: str) -> list[Job]:
    """Every kind of loader."""

    def job(name: str, kind: Any, spared: tuple[str, ...] = (), *, resumed: bool = False, **options: Any) -> Job:
        def make(number: int) -> Loader:
            faults = _FAULTS | options.get("faults", {})
            given = {"batch_size": 16, "num_workers": 2, "output": "numpy", "timeout": TIMEOUT_S, "max_ring_bytes": 8 << 20}
            given |= {name: value for name, value in options.items() if name not in ("faults", "arguments")}
            dataset = kind if not isinstance(kind, type) else FactorySpec(kind, folder, number, *options.get("arguments", ()))
            dataset = data.Shared(folder, number) if kind is data.Shared else dataset
            return Loader(dataset, faults=FaultPolicy(**faults), **given)

        return Job(name, make, spared, resumed, options.get("arguments", ()))

    streams = ("raise",)  # an iterator that raised has ended
    return [
        job("map", data.Samples, shuffle=True),
        job("skip", data.Samples, arguments=(77,), faults={"on_bad_sample": "skip"}, num_workers=1),
        job("together", data.Together, shuffle=True, faults={"max_batches_per_worker": 60}),
        job("written", data.Written, num_workers=1, prefetch_factor=4),
        job("out of order", data.Samples, in_order=False),
        job("resumed", data.Samples, shuffle=True, resumed=True, num_workers=1),
        job("custom collate", data.Samples, collate_fn=data.collate),
        job("shared", data.Shared, shuffle=True, num_workers=1),
        job("stream", data.Stream, streams, faults={"max_batches_per_worker": 60}),
        job("replayed", data.Replayed, streams),
        job("threads", data.Drawn, ("abort", "garbage", "torn", "print"), worker_backend="thread"),
    ]


def digest(batch: Any) -> bytes:
    """Return a digest of every leaf, its type and its shape."""
    state = hashlib.blake2b(digest_size=16)
    leaves = batch.items() if isinstance(batch, dict) else enumerate(batch)
    for name, leaf in leaves:
        if isinstance(leaf, np.ndarray):
            state.update(f"{name} {leaf.dtype} {leaf.shape} ".encode())
            state.update(np.ascontiguousarray(leaf))
        else:
            state.update(f"{name} {leaf!r} ".encode())
    return state.digest()


class Reader:
    """Reads one loader, again and again."""

    def __init__(self, job: Job, number: int, seed: int) -> None:
        self.job = job
        self.number = number
        self.num_batches = self.num_epochs = 0
        self.latest_s = time.monotonic()  # when it had its last batch
        self.counts: Counter[str] = Counter()  # what happened on purpose
        self.past: Counter[str] = Counter()  # of loaders that were closed
        self.is_inside = False  # inside `next`, where it may be interrupted
        self.loader: Loader | None = None
        self.expected: list[list[bytes]] = []
        self._rng = random.Random(seed)
        self._held: deque[tuple[Any, bytes, int]] = deque()
        self._iterator: Any = None
        self._epoch = 0
        self._seen: list[bytes] = []

    def learn(self) -> None:
        """Read every epoch undisturbed."""
        with self.job.make(self.number) as loader:
            for _ in range(NUM_EPOCHS):
                batches = list(loader)
                self.expected.append([digest(batch) for batch in batches])
                keys = np.sort(np.concatenate([batch["key"] if isinstance(batch, dict) else batch[1] for batch in batches]))
                whole = [key for key in range(data.SIZE) if key not in self.job.bad]
                if keys.tolist() != whole:
                    raise Mismatch(f"{self.job.name}: the undisturbed epoch has {len(keys)} samples, {len(whole)} are expected")
                del batches

    def step(self) -> None:
        """Take one more batch, and perhaps do something that users do."""
        if self.loader is None:
            self.loader = self.job.make(self.number)
        if self._iterator is None:
            self._begin()
        try:
            self.is_inside = True
            batch = next(self._iterator)
        except StopIteration:
            self.is_inside = False
            self._finish()
            return
        except Interrupted:
            self.counts["interrupted"] += 1
            return
        finally:
            self.is_inside = False
        self._take(batch)
        self._misbehave()

    def _begin(self) -> None:
        assert self.loader is not None
        self.loader.set_epoch(self._epoch)
        self._iterator = iter(self.loader)
        self._seen = []

    def _take(self, batch: Any) -> None:
        found = digest(batch)
        expected = self.expected[self._epoch]
        if self.job.name == "out of order":
            if found not in expected or found in self._seen:
                raise Mismatch(f"{self.job.name}: a batch that is none of epoch {self._epoch}, or comes twice")
        elif len(self._seen) >= len(expected) or found != expected[len(self._seen)]:
            place = expected.index(found) if found in expected else None
            raise Mismatch(
                f"{self.job.name}: batch {len(self._seen)} of epoch {self._epoch} has other bytes; they are of batch {place}"
            )
        self._seen.append(found)
        self.num_batches += 1
        self.latest_s = time.monotonic()
        if self._rng.random() < 0.1:
            self._held.append((batch, found, self.num_batches + self._rng.randrange(1, 12)))
        while self._held and self._held[0][2] <= self.num_batches:
            kept, before, _ = self._held.popleft()
            if digest(kept) != before:
                raise Mismatch(f"{self.job.name}: a batch changed while it was kept")
            self.counts["kept"] += 1

    def _finish(self) -> None:
        """The epoch is over."""
        if sorted(self._seen) != sorted(self.expected[self._epoch]):
            num_expected = len(self.expected[self._epoch])
            raise Mismatch(f"{self.job.name}: epoch {self._epoch} ended after {len(self._seen)} of {num_expected} batches")
        self.num_epochs += 1
        self._iterator = None
        self._epoch = (self._epoch + 1) % NUM_EPOCHS

    def _misbehave(self) -> None:
        draw = self._rng.random()
        if draw < 0.002:
            self.counts["abandoned"] += 1
            self._iterator = None  # in the middle of an epoch
        elif self.job.is_resumed and draw < 0.03:
            self._resume()

    def _resume(self) -> None:
        """Close the loader and go on with another from its state."""
        assert self.loader is not None
        self.counts["resumed"] += 1
        state = self.loader.state_dict()
        self._note_past()
        self._iterator = None
        self.loader.close()
        self.loader = self.job.make(self.number)
        self.loader.load_state_dict(state)
        seen = self._seen
        self._iterator = iter(self.loader)
        self._seen = seen

    def _note_past(self) -> None:
        for name, value in self.stats().items():
            self.past[name] = value

    def stats(self) -> dict[str, int]:
        """What the loader counted, over all that were made."""
        if self.loader is None:
            return dict(self.past)
        now = self.loader.stats()
        names = ("num_restarts", "num_refilled", "num_retried", "num_recycled", "num_recoveries")
        return {name: self.past[name] + getattr(now, name) for name in names}

    def pids(self) -> tuple[int, ...]:
        return () if self.loader is None else self.loader.stats().worker_pids

    def close(self) -> None:
        """Let go of everything."""
        self._note_past()
        self._iterator = None
        self._held.clear()
        if self.loader is not None:
            self.loader.close()
            self.loader = None


class Crew:
    """Readers that take turns on one thread, until they are told to end or one of them finds a mismatch."""

    def __init__(self, readers: list[Reader], pause_s: float) -> None:
        self.readers = readers
        self.failure: BaseException | None = None
        self._pause_s = pause_s
        self._end = threading.Event()

    def run(self) -> None:
        """Read in turns."""
        try:
            while not self._end.is_set():
                for reader in self.readers:
                    reader.step()
                time.sleep(self._pause_s)
        except BaseException as error:
            self.failure = error

    def end(self) -> None:
        self._end.set()
