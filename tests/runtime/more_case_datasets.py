"""More datasets of the reported cases and pitfalls: importable, small, each with the habit that its case is named after."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ringloader import get_worker_info
from tests.runtime.sample_datasets import Numbers, first_time

# Long enough for any machine; whoever waits this long has failed.
PATIENCE_S = 30.0


def await_file(path: str) -> None:
    """Wait until a file exists. Raises RuntimeError when it never does."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not os.path.exists(path):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{path} never came")
        time.sleep(0.005)


def append_line(path: str, line: object) -> None:
    """Add a line to a file in one write, so that several processes may."""
    fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


class Plain(Numbers):
    """Sample i is i."""

    def make(self, i: int) -> Any:
        return i


class Buckets(Numbers):
    """Sample i has one, two or three rows, all of i."""

    def make(self, i: int) -> Any:
        return np.full((i % 3 + 1, 4), i, np.float32)


class Sized(Numbers):
    """Sample i is i, `widths.get(i, width)` times; those in `gates` wait for a file of their name in `folder`."""

    def __init__(self, size: int, width: int, widths: dict[int, int], folder: str = "", gates: tuple[int, ...] = ()) -> None:
        super().__init__(size, width)
        self.widths, self.folder, self.gates = widths, folder, gates

    def make(self, i: int) -> Any:
        if i in self.gates:
            await_file(os.path.join(self.folder, f"go-{i}"))
        if self.folder:
            Path(self.folder, f"made-{i}").touch()
        return np.full(self.widths.get(i, self.width), i, np.float32)


class Empty(Numbers):
    """No samples at all."""

    def __init__(self) -> None:
        super().__init__(0)


class Cached(Numbers):
    """Sample i is (i, pid, whether this very object has been asked for it before); constructions are counted in a file."""

    def __init__(self, size: int, builds: str) -> None:
        super().__init__(size)
        self.known: set[int] = set()
        append_line(builds, os.getpid())

    def make(self, i: int) -> Any:
        hit = i in self.known
        self.known.add(i)
        return np.array([i, os.getpid(), hit])


class Epochs(Numbers):
    """Sample i is (i, the epoch that was last set)."""

    def __init__(self, size: int, pause_s: float = 0.0) -> None:
        super().__init__(size)
        self.epoch, self.pause_s = -1, pause_s

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def make(self, i: int) -> Any:
        if self.pause_s:
            time.sleep(self.pause_s)
        return np.array([i, self.epoch])


class Text(Numbers):
    """Sample i is i and a long string; all but the first wait for the file `gate`, if there is one."""

    def __init__(self, size: int, num_characters: int, *, ballast: str = "", gate: str = "") -> None:
        super().__init__(size)
        self.text, self.ballast, self.gate = "x" * num_characters, ballast, gate

    def make(self, i: int) -> Any:
        if i and self.gate:
            await_file(self.gate)
        return i, f"{i} {self.text}"


class LongError(Numbers):
    """Sample 1 fails with a very long text."""

    def make(self, i: int) -> Any:
        if i == 1:
            raise ValueError("begin" + "x" * 50_000_000 + "end")
        return i


class Fails(Numbers):
    """Samples below `until` fail, by turns in the dataset and in the collation."""

    def __init__(self, size: int, until: int) -> None:
        super().__init__(size)
        self.until = until

    def make(self, i: int) -> Any:
        if i < self.until and i % 4 == 1:
            raise OSError("image file is truncated")
        return np.full(2 + (i < self.until and i % 4 == 3), i)


class Talks(Numbers):
    """Every sample prints, logs and writes raw bytes to descriptor 1."""

    def __init__(self, size: int, flood_nbytes: int) -> None:
        super().__init__(size)
        self.flood = b"\x00\xff\x52\x4c" * (flood_nbytes // 4)

    def make(self, i: int) -> Any:
        print(f"printed {i}", flush=True)  # noqa: T201  # what this dataset is for
        print(f"complained {i}", file=sys.stderr, flush=True)  # noqa: T201
        logging.getLogger("my.dataset").info("sample %d", i)
        if self.flood:
            os.write(1, self.flood)
        return i


def log_to_stderr(worker_id: int) -> None:
    """Show this worker's log lines, with its number."""
    logging.basicConfig(level=logging.INFO, format=f"worker {worker_id}: %(name)s: %(message)s", force=True)


class ManyLeaves(Numbers):
    """Samples of many arrays of 1 kB."""

    def __init__(self, size: int, num_leaves: int) -> None:
        super().__init__(size)
        self.leaves = {f"k{j}": np.full(256, j, np.float32) for j in range(num_leaves)}

    def make(self, i: int) -> Any:
        return self.leaves


class SumsOf(Numbers):
    """Is given many small tensors."""

    def __init__(self, size: int, *, tensors: list[Any]) -> None:
        super().__init__(size)
        self.tensors = tensors

    def make(self, i: int) -> Any:
        return len(self.tensors), float(self.tensors[i].sum())


class Breaks(Numbers):
    """Sample 1 has a breakpoint in it."""

    def make(self, i: int) -> Any:
        if i == 1:
            breakpoint()
        return i


def have_debuggers_leave() -> None:
    """By `sys.exit`, as from Python 3.14 on."""
    import pdb

    exec("import sys\ndef leave(self, arg):\n    sys.exit(1)", vars(pdb))
    pdb.Pdb.do_EOF = pdb.leave  # type: ignore[attr-defined, method-assign]


class BreaksAndLeaves(Breaks):
    """The same, where debuggers leave."""

    def make(self, i: int) -> Any:
        have_debuggers_leave()
        return super().make(i)


class BreaksInBuild(Numbers):
    """There is a breakpoint where it is made."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        break_and_leave(0)


class BreaksInCall(Numbers):
    """There is a breakpoint in a method."""

    def inspect(self) -> None:
        break_and_leave(0)


def break_and_leave(worker_id: int) -> None:
    """What a `worker_init_fn` may do."""
    have_debuggers_leave()
    breakpoint()


class BreaksAndLeavesTogether(BreaksAndLeaves):
    """The same, of samples that are fetched in one call."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self.make(i) for i in keys]


class Opaque:
    """No collate rule, no meaning."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A batch: an array, and another record in it."""

    x: Any
    inner: Inner


@dataclasses.dataclass
class Inner:
    y: Any
    names: list[str]


def as_frozen(samples: list[Any]) -> Frozen:
    """Records in a record, with an array large enough to be worth a slot."""
    rows = np.stack([np.full(4096, i, np.float32) for i in samples])
    return Frozen(rows, Inner(np.array(samples), [f"n{i}" for i in samples]))


ODD_TEXTS = ["plain", "ünïcode ✓", "\ud800 alone", "with\0nul", ""]
_NAMES = [f"{ODD_TEXTS[k % len(ODD_TEXTS)]}-{k}" for k in range(160_000)]


def expected_names() -> list[str]:
    """The strings that `many_names` gives."""
    return _NAMES


def many_names(samples: list[Any]) -> dict[str, Any]:
    return {"x": np.array(samples), "names": _NAMES}


def expanded(samples: list[Any]) -> Any:
    """One number, looking like two million."""
    return np.broadcast_to(np.float32(samples[0]), (2_000_000,))


def mean(samples: list[Any]) -> Any:
    """One number."""
    return np.array(sum(samples) / len(samples))


class Picture(Numbers):
    """Sample: an image that nobody has converted."""

    def make(self, i: int) -> Any:
        from PIL import Image

        return {"img": Image.new("RGB", (4, 4)), "label": i}


class Objects(Numbers):
    """Sample 3 has an object in it that no rule is for."""

    def make(self, i: int) -> Any:
        return {"graph": Opaque() if i == 3 else np.ones(2)}


class Table(Numbers):
    """Samples of batch k of two are row k of the tables of these names, one after the other; made in every process anew."""

    def __init__(self, names: tuple[str, ...]) -> None:
        found = tables()
        self.rows = [row for name in names for row in found[name]]
        super().__init__(2 * len(self.rows))

    def make(self, i: int) -> Any:
        return self.rows[i // 2][i % 2]


DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


def tables() -> dict[str, list[Any]]:
    """Pairs of samples by case; torch is imported here and nowhere above."""
    import torch

    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")

    bits = torch.tensor([0x00, 0x80, 0x7F, 0xFF, 0x01, 0xC1, 0x7E, 0xFE] * 16, dtype=torch.uint8)
    big = torch.arange(1_000_000, dtype=torch.float32)
    image = torch.arange(24, dtype=torch.float32).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    row = torch.arange(6, dtype=torch.float32)
    empty = {"boxes": torch.zeros(0, 4), "t": torch.ones(0, 2, dtype=torch.long).t(), "z": torch.tensor(3.0)}
    without_bytes: list[Any] = [torch.empty(0), np.zeros((2, 0)), {}, [], (), "", b"", torch.zeros(0, 4)]
    after = (torch.zeros(0, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8), torch.zeros(0), torch.ones(2).double())
    dtypes = [(bits % 2).bool() if name == "bool" else bits.view(getattr(torch, name)) for name in DTYPES]
    return {
        "b53": [(tensor, tensor.flip(0) if tensor.dtype == torch.uint8 else tensor.clone()) for tensor in dtypes],
        "b60": [
            ({key: torch.ones(2), "z": {key: k}}, {key: torch.zeros(2), "z": {key: k}})
            for k, key in enumerate((0, 1, ("cam", 1), None, True, 1.5, b"k", -(2**70), "\ud800"))
        ],
        "b72": [
            (big[:3], big[3:6]),
            (big[::250_000], big[1::250_000]),
            (big[:6].reshape(2, 3).t(), big[6:12].reshape(2, 3).t()),
            (image[0], image[0] + 1),
            (row.as_strided((3, 3), (1, 1)), row.as_strided((3, 3), (1, 1))),
            (row[:1].expand(5), row[1:2].expand(5)),
            ({"a": row, "b": row}, {"a": row[:], "b": row[:]}),
        ],
        "b73": [({"w": torch.ones(2, requires_grad=True) * 2, "x": 1},) * 2] * 3,
        "b81": [
            *([1.5, 2.5], [True, False], [1, 2], [1, 2.5], [2.5, 1], [True, 2], [np.float32(1), np.float32(2)]),
            *([np.bool_(True)] * 2, [np.array(3)] * 2, ["a", "b"], [b"a", b"b"], [torch.tensor(3)] * 2, [np.float16(1)] * 2),
            *([1, np.float64(2)], [torch.ones(1), torch.ones(1).double()], [np.ones(1, np.int32), np.ones(1, np.int64)]),
            *([np.ones(1), torch.ones(1)], [torch.ones(2), np.zeros(2, np.int8)], [10**20, 1.5], [1 + 2j] * 2, [10**20] * 2),
        ],
        "b82": [
            (empty, empty),
            (after, after),
            *((value, value) for value in without_bytes),
        ],
        "p02": [
            *([np.array([1, 2]), np.array([2.9, 3.5])], [np.array([1], np.uint8), np.array([300])], [1, 2.9], [True, 2]),
            *([np.ones(2, np.float32), np.array([1, 2])], [torch.ones(2, dtype=torch.int32), torch.tensor([2**40, 1])]),
            *([np.int64(2**53 + 1), 1.5], [np.ones((3, 8, 8)), np.ones((8, 8))], [np.ones((3, 8, 8)), np.ones((1, 8, 8))]),
            *([np.ones((3, 8, 8)), np.ones(())], [np.ones((3, 8, 8)), 1.0], [np.ones((3, 8, 8)), np.ones((3, 1, 8))]),
        ],
    }


# --- for the pitfalls ---------------------------------------------------------------------------------------------------


class Slow(Numbers):
    """Every sample takes its time and is noted in a file, one line per sample."""

    def __init__(self, size: int, pause_s: float, notes: str = "", fails_at: int = -1) -> None:
        super().__init__(size)
        self.pause_s, self.notes, self.fails_at = pause_s, notes, fails_at

    def make(self, i: int) -> Any:
        if self.notes:
            append_line(self.notes, i)
        time.sleep(self.pause_s)
        if i == self.fails_at:
            raise ValueError("bad sample")
        return i


class Deadly(Numbers):
    """Some samples kill whoever reads them, every time."""

    def __init__(self, size: int, at: tuple[int, ...]) -> None:
        super().__init__(size)
        self.at = at

    def __getitem__(self, i: int) -> Any:
        if i in self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make(i)


class FailsToBuildOnce(Numbers):
    """The second and third construction fail, as on a file system that is away for a moment; sample 7 kills once."""

    def __init__(self, size: int, marks: str) -> None:
        super().__init__(size)
        self.marks = marks
        if not first_time(marks, "first") and (first_time(marks, "second") or first_time(marks, "third")):
            raise OSError("stale file handle")

    def __getitem__(self, i: int) -> Any:
        if i == 7 and first_time(self.marks, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.make(i)


class LeavesChild(Numbers):
    """Starts a child of its own that outlives it unless it is ended; its pid goes to a file. "fork" keeps every descriptor
    and leaves the session. Sample 7 kills the worker once."""

    def __init__(self, size: int, folder: str, how: str) -> None:
        super().__init__(size)
        self.folder, self.how = folder, how

    def make(self, i: int) -> Any:
        if i == 3 and first_time(self.folder, "started"):
            if self.how == "fork":
                heard, said = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    os.write(said, b"out")
                    time.sleep(PATIENCE_S)
                    os._exit(0)
                os.read(heard, 3)  # while it is in the worker's session it would be ended with the worker
                os.close(heard)
                os.close(said)
            else:
                pid = subprocess.Popen(["sleep", str(PATIENCE_S)]).pid
            part = Path(self.folder, "child.part")
            part.write_text(str(pid))
            part.rename(Path(self.folder, "child"))
        if i == 7 and first_time(self.folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(i)


class SegfaultsOnce(Numbers):
    """Sample 7 ends its worker by a fault, once."""

    def __init__(self, size: int, marks: str) -> None:
        super().__init__(size)
        self.marks = marks

    def __getitem__(self, i: int) -> Any:
        if i == 7 and first_time(self.marks, "fault"):
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.make(i)


# --- habits for comparing workers with inline ---------------------------------------------------------------------------


class Nested(Numbers):
    """Containers in containers."""

    def make(self, i: int) -> Any:
        return {"a": (np.float32(i), [i, {"b": f"s{i}"}]), "c": np.arange(3) * i, 1: i % 2 == 0}


class Batched(Plain):
    """Gives samples by the batch."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [(i, np.full(2, -i)) for i in keys]


class Keyed(Numbers):
    """Keys are texts."""

    def make(self, i: Any) -> Any:
        return {"key": i, "size": len(i)}


class Draws(Numbers):
    """Draws from numpy's and Python's generators."""

    def make(self, i: int) -> Any:
        import random

        return np.array([i, random.randrange(1 << 40), np.random.randint(1 << 40)])


class Ragged(Numbers):
    """Samples of different lengths."""

    def make(self, i: int) -> Any:
        return {"x": np.ones(i + 1)}


class MissingKey(Numbers):
    """Sample 3 lacks a field."""

    def make(self, i: int) -> Any:
        return {"x": i, "y": i} if i != 3 else {"x": i}


class NoneField(Numbers):
    """Sample 2 has a None in it."""

    def make(self, i: int) -> Any:
        return {"x": None if i == 2 else i}


class RaisesOwn(Numbers):
    """Raises an error of an unusual kind."""

    def make(self, i: int) -> Any:
        if i == 2:
            raise KeyError(("no", i))
        if i == 4:
            raise Odd("first line\nsecond line")
        return i


class Odd(Exception):
    """An exception of the user's."""


class StopsEarly(Numbers):
    """Sample 2 raises what ends a for loop."""

    def make(self, i: int) -> Any:
        if i == 2:
            raise StopIteration("oops")
        return i


class BadInit(Numbers):
    """Cannot be built."""

    def __init__(self, size: int) -> None:
        raise RuntimeError("no such split: 'trian'")


class BadLength(Plain):
    """Its length is wrong: the last samples are not there."""

    def make(self, i: int) -> Any:
        return [0, 1, 2, 3, 4][i]


class WorkerFacts(Numbers):
    """What the dataset can ask about epoch and seed."""

    def make(self, i: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return np.array([i, info.epoch, info.seed, info.rank, info.world_size])


def doubling(samples: list[Any]) -> Any:
    """A collate_fn."""
    return {"x": np.array(samples) * 2, "n": len(samples)}


def failing(samples: list[Any]) -> Any:
    """A collate_fn that fails for one batch."""
    if 2 in samples:
        raise ZeroDivisionError("no mean of nothing")
    return np.array(samples)


def returns_object(samples: list[Any]) -> Any:
    """A collate_fn whose result cannot travel."""
    return {"x": np.array(samples), "extra": Opaque()}


class TurnsSlow(Numbers):
    """Samples from one on take their time; each says who made it."""

    def __init__(self, size: int, slow_from: int, pause_s: float) -> None:
        super().__init__(size)
        self.slow_from, self.pause_s = slow_from, pause_s

    def make(self, i: int) -> Any:
        if i >= self.slow_from:
            time.sleep(self.pause_s)
        return np.array([i, os.getpid()])


class SlowNowAndThen(Numbers):
    """Every `step`-th sample takes its time; each says who made it."""

    def __init__(self, size: int, step: int, pause_s: float) -> None:
        super().__init__(size)
        self.step, self.pause_s = step, pause_s

    def make(self, i: int) -> Any:
        if i % self.step == 0:
            time.sleep(self.pause_s)
        return np.array([i, os.getpid()])
