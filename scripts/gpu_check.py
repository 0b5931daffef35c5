"""Check on a GPU what the tests can only check on a fake: page-locking in place, copies that outlive their batch, `device=`.

Prints one table and, with --json, writes the same. Exit code 0 when everything holds, 1 when something does not, 3 without a
GPU. The asynchronous-copy race is run once with our fences switched off as well: it must then corrupt batches, or the check
proves nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_datasets import WIDTH, Images, Numbered

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

from ringloader import FactorySpec, Loader, LoaderError, record_stream, release
from ringloader._runtime import memory
from ringloader._runtime.fences import Fences

_NO_GPU = 3
_LIMIT_S = 180.0
_PINNED_SHARE = 0.97
_RACE_BATCHES = 1000
# Long enough that the copy behind it has not begun when the next batches are made, about 2 ms at 1.5 GHz.
_SLEEP_CYCLES = 3_000_000
_RACE_ROWS = 4
_TRAIN_BATCH = 64
_TRAIN_SAMPLES = 64 * 120
_HOST_MEMORY = 1  # cudaMemoryTypeHost


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    found: str
    wanted: str
    holds: bool


class _Attributes(ctypes.Structure):
    """`struct cudaPointerAttributes` of driver_types.h, with room for what newer releases append."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 32),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run every check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write("torch sees no GPU; nothing was checked\n")
        return _NO_GPU
    # A slot that never comes back would have it wait for ever.
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    began_s = time.monotonic()
    rows: list[Row] = []
    for check in (pinned, bandwidth, races, training, cycles, capture, contexts):
        try:
            rows += check()
        except Exception as error:
            rows.append(Row(check.__name__, f"{type(error).__name__}: {error}"[:100], "no error", holds=False))
        gc.collect()
    facts = {**report.machine(), "gpu": torch.cuda.get_device_name()}
    cells = [(row.check, row.found, row.wanted, "yes" if row.holds else "NO") for row in rows]
    report.show("gpu_check", ("check", "found", "wanted", "holds"), cells)
    sys.stdout.write(f"{report.machine_line(facts)}; {time.monotonic() - began_s:.0f} s\n")
    if args.json is not None:
        report.write_json(args.json, {"machine": facts, "rows": [asdict(row) for row in rows]})
    faulthandler.cancel_dump_traceback_later()
    return 0 if all(row.holds for row in rows) else 1


def pinned() -> list[Row]:
    """Batches are page-locked where they lie, by torch's word and by the runtime's."""
    with Loader(FactorySpec(Images, 512), batch_size=64, num_workers=2, pin_memory="require") as loader:
        batches = list(loader)
        by_torch = sum(images.is_pinned() and labels.is_pinned() for images, labels in batches)
        by_runtime = sum(_memory_type(images.data_ptr()) == _HOST_MEMORY for images, _ in batches)
        next(iter(loader))  # should the ring have grown after the last batch was handed over
        stats = loader.stats()
        num_locked, num_ring = stats.pinned_nbytes, stats.ring_nbytes
        del batches
    return [
        Row("batches pinned, by torch", f"{by_torch} of 8", "8", by_torch == 8),
        Row("batches pinned, by cudaPointerGetAttributes", f"{by_runtime} of 8", "8", by_runtime == 8),
        Row("bytes of the ring page-locked", f"{num_locked:,} of {num_ring:,}", "all", 0 < num_locked == num_ring),
    ]


def _memory_type(address: int) -> int:
    runtime = ctypes.CDLL(_runtime_path())
    attributes = _Attributes()
    code = runtime.cudaPointerGetAttributes(ctypes.byref(attributes), ctypes.c_void_p(address))
    return int(attributes.type) if code == 0 else -1


def _runtime_path() -> str:
    """The runtime that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcudart" in line:
            return line.split(maxsplit=5)[5]
    raise RuntimeError("torch has loaded no libcudart")


def bandwidth() -> list[Row]:
    """Copies out of a slot are as fast as out of torch's own pinned memory."""
    with Loader(FactorySpec(Images, 512), batch_size=256, num_workers=1, pin_memory="require") as loader:
        images, _ = next(iter(loader))
        own = torch.empty(images.shape, dtype=images.dtype, pin_memory=True).copy_(images)
        target = torch.empty_like(images, device="cuda")
        rates: dict[str, list[float]] = {"slot": [], "torch": []}
        for _ in range(20):
            for name, source in (("slot", images), ("torch", own)):
                rates[name].append(_copy_rate(source, target))
        del images
    slot, plain = (statistics.median(rates[name]) for name in ("slot", "torch"))
    found = f"{slot:.1f} GB/s, {slot / plain:.3f} of {plain:.1f}"
    return [Row("host to device out of a slot", found, f">= {_PINNED_SHARE} of pinned", slot >= _PINNED_SHARE * plain)]


def _copy_rate(source: torch.Tensor, target: torch.Tensor) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    target.copy_(source, non_blocking=True)
    ended.record()
    ended.synchronize()
    return source.nbytes / began.elapsed_time(ended) / 1e6


def races() -> list[Row]:
    """A small ring, workers that refill slots at once, a long kernel before each copy."""
    side = torch.cuda.Stream()
    ways: dict[str, Callable[[], int]] = {
        "on the current stream": lambda: _race(_copy_on_current),
        "inside torch.cuda.stream(s)": lambda: _race_inside(side),
        "on a side stream, record_stream": lambda: _race_aside(side, record_stream),
        "through device=": _race_on_device,
        "through device=, streams in turn": lambda: _race_on_device(side),
    }
    rows = []
    for name, run in ways.items():
        num_wrong = run()
        rows.append(Row(f"copies corrupted {name}", f"{num_wrong} of {_RACE_BATCHES:,}", "0", num_wrong == 0))
    for name in ("on the current stream", "through device="):
        with _without_fences():
            num_wrong = ways[name]()
        found = f"{num_wrong} of {_RACE_BATCHES:,}"
        rows.append(Row(f"the same {name}, our events switched off", found, "> 0", num_wrong > 0))
    num_wrong = _race_aside(side, lambda batch, stream: None)
    found = f"{num_wrong} of {_RACE_BATCHES:,}"
    rows.append(Row("the same on a side stream, without record_stream", found, "> 0", num_wrong > 0))
    return rows


def _race_loader(**options: Any) -> Loader:
    # Room for few slots, so that each comes back into use soon.
    room = 8 * _RACE_ROWS * (WIDTH * 4 + 4096)
    spec = FactorySpec(Numbered, _RACE_BATCHES * _RACE_ROWS)
    return Loader(spec, batch_size=_RACE_ROWS, num_workers=2, pin_memory="require", max_ring_bytes=room, **options)


def _race(copy: Callable[[Any], torch.Tensor]) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with _race_loader() as loader:
        number = 0
        for batch in loader:  # no enumerate, which would keep the batch
            torch.cuda._sleep(_SLEEP_CYCLES)
            copied = copy(batch)
            del batch
            wrong += _is_wrong(copied, number)
            number += 1
        torch.cuda.synchronize()
    return _counted(wrong, number)


def _counted(wrong: torch.Tensor, num_batches: int) -> int:
    """How many batches were wrong; an epoch that ended early is no proof of anything."""
    if num_batches != _RACE_BATCHES:
        raise RuntimeError(f"{num_batches} batches came instead of {_RACE_BATCHES}")
    return int(wrong.item())


def _race_inside(stream: torch.cuda.Stream) -> int:
    with torch.cuda.stream(stream):
        return _race(_copy_on_current)


def _race_on_device(other: torch.cuda.Stream | None = None) -> int:
    """With `other`, every second batch is asked for and read on that stream."""
    streams = [torch.cuda.current_stream(), other or torch.cuda.current_stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    number = 0
    with _race_loader(device="cuda") as loader:
        batches = iter(loader)
        while True:
            with torch.cuda.stream(streams[number % 2]):
                batch = next(batches, None)
                if batch is None:
                    break
                # The copy of a batch waits for this, and its slot with it.
                torch.cuda._sleep(_SLEEP_CYCLES)
                wrong[number % 2] += _is_wrong(batch[0], number)
                del batch
            number += 1
        torch.cuda.synchronize()
    return _counted(wrong[0] + wrong[1], number)


def _race_aside(stream: torch.cuda.Stream, record: Callable[[Any, torch.cuda.Stream], None]) -> int:
    """Copy and compare on a stream that is current at no call of the loader's, and that no other stream waits for."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with _race_loader() as loader:
        number = 0
        for batch in loader:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_SLEEP_CYCLES)
                copied = batch[0].to("cuda", non_blocking=True)
                wrong += _is_wrong(copied, number)
            record(batch, stream)
            del batch
            number += 1
        torch.cuda.synchronize()
    return _counted(wrong, number)


def _copy_on_current(batch: Any) -> torch.Tensor:
    rows: torch.Tensor = batch[0]
    return rows.to("cuda", non_blocking=True)


def _is_wrong(rows: torch.Tensor, number: int) -> torch.Tensor:
    """1 where a batch is not the one of this number, without waiting for the device."""
    first = number * _RACE_ROWS
    expected = torch.arange(first, first + _RACE_ROWS, device="cuda", dtype=rows.dtype)
    return (rows != expected[:, None]).any().to(torch.int64)


@contextmanager
def _without_fences() -> Iterator[None]:
    needs = Fences.needs
    Fences.needs = lambda self, lease: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        Fences.needs = needs  # type: ignore[method-assign]


def training() -> list[Row]:
    """The same loop with both loaders, batches of 38 MB."""
    from torch.utils.data import DataLoader

    num_workers = min(8, max(2, (os.cpu_count() or 2) - 2))
    common: dict[str, Any] = {"batch_size": _TRAIN_BATCH, "num_workers": num_workers, "pin_memory": True}
    ours = Loader(FactorySpec(Images, _TRAIN_SAMPLES), **common)
    ahead = Loader(FactorySpec(Images, _TRAIN_SAMPLES), device="cuda", **common)
    plain = DataLoader(Images(_TRAIN_SAMPLES), persistent_workers=True, **common)  # type: ignore[arg-type]
    rates: dict[str, tuple[float, float]] = {}
    with ours, ahead:
        for name, loader in (("ringloader", ours), ("ringloader device=", ahead), ("DataLoader", plain)):
            try:
                _train(loader)
                rates[name] = _train(loader)
            except RuntimeError as error:
                if loader is not plain:
                    raise
                # A small /dev/shm is too small for DataLoader: then there is nothing to compare with.
                rates[name] = (float("nan"), float("nan"))
                sys.stderr.write(f"training with {name}: {error}\n")
    base = rates["DataLoader"][0]
    return [
        Row(
            f"training with {name}",
            f"{rate:,.0f} images/s ({rate / base:.2f}x), waiting {share:.0%}",
            "for comparison",
            holds=True,
        )
        for name, (rate, share) in rates.items()
    ]


def _train(loader: Iterable[Any]) -> tuple[float, float]:
    """One epoch of a small convolutional network; images per second and the share of time spent in `next`."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 7, stride=4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    model = torch.nn.Sequential(model, torch.nn.Linear(32, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_images, wait_s = 0, 0.0
    began_s = time.perf_counter()
    batches = iter(loader)
    while True:
        asked_s = time.perf_counter()
        batch = next(batches, None)
        wait_s += time.perf_counter() - asked_s
        if batch is None:
            break
        images, labels = (part.to("cuda", non_blocking=True) for part in batch)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_images += len(labels)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    return num_images / took_s, wait_s / took_s


def cycles() -> list[Row]:
    """Opening, reading and closing again and again leaves nothing page-locked or open."""
    num_open = []
    for _ in range(20):
        with Loader(FactorySpec(Numbered, 16), batch_size=4, num_workers=1, pin_memory="require") as loader:
            for rows, _ in loader:
                rows.to("cuda", non_blocking=True)
            del rows
        torch.cuda.synchronize()
        release(None)  # any call has closed rings looked through
        num_open.append(len(os.listdir("/proc/self/fd")))
    left = memory.PINNED.nbytes
    grown = num_open[-1] - num_open[1]
    counted = Row("after 20 loaders", f"{left} bytes pinned, {grown} more descriptors", "0, 0", left == 0 and grown <= 0)
    # Not by our own account alone: a mapping that is kept is asked about before and after.
    with Loader(FactorySpec(Numbered, 16), batch_size=4, num_workers=1, pin_memory="require") as loader:
        list(loader)
        mappings = [segment.mapping for segment in loader._engine.ring.segments.values()]  # type: ignore[union-attr]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(mapping)) for mapping in mappings]
        before = [_memory_type(address) for address in addresses]
    release(None)
    after = [_memory_type(address) for address in addresses]
    holds = bool(before) and {*before} == {_HOST_MEMORY} and _HOST_MEMORY not in after
    return [counted, Row("mappings registered, and after close", f"{before}, {after}", "1, then not 1", holds)]


def capture() -> list[Row]:
    """A graph is captured while workers load; batches go on before and after."""
    still = torch.zeros(_RACE_ROWS, WIDTH, device="cuda")
    wrong = num_refused = number = 0
    loader = Loader(FactorySpec(Numbered, 64), batch_size=_RACE_ROWS, num_workers=2, pin_memory="require")
    on_device = Loader(FactorySpec(Numbered, 64), batch_size=_RACE_ROWS, num_workers=1, device="cuda")
    with loader, on_device:
        ahead = iter(on_device)
        next(ahead)
        for batch in loader:
            still.copy_(batch[0], non_blocking=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = still * 2
                release(batch)  # nothing of CUDA's may be called from here
                del batch
                loader.stats()
                num_refused += _refuses_to_capture(ahead)
            graph.replay()
            wrong += int(_is_wrong(doubled / 2, number).item())
            number += 1
        num_left = sum(1 for _ in ahead)
    return [
        Row("batches wrong around graph captures", f"{wrong} of {number}", "0 of 16", wrong == 0 and number == 16),
        Row(
            "next with device= in a capture",
            f"{num_refused} refused, {num_left} after",
            "16, 15",
            (num_refused, num_left) == (16, 15),
        ),
    ]


def _refuses_to_capture(batches: Iterator[Any]) -> bool:
    try:
        next(batches)
    except LoaderError:
        return True
    return False


def contexts() -> list[Row]:
    """No worker has anything of CUDA's loaded."""
    with Loader(FactorySpec(Numbered, 16), batch_size=4, num_workers=4, pin_memory="require") as loader:
        next(iter(loader))
        pids = loader.stats().worker_pids
        num_with = sum("libcuda.so" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return [Row("workers with CUDA loaded", f"{num_with} of {len(pids)}", "0", num_with == 0 and len(pids) == 4)]


if __name__ == "__main__":
    sys.exit(main())
