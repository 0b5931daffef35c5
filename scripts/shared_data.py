"""Train from several processes on one copy of the data: the first builds it, the others attach it, and so do later runs.

    python scripts/shared_data.py --ranks 4 --rows 100000

Each rank is a process of its own, as with torchrun; what they share is built once per machine and stays until
`ringloader.sharing.remove_leftovers` takes it away, which this script does at its end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringloader import FactorySpec, Loader, SharedArrays, SharedRecords
from ringloader.sharing import leftovers, remove_leftovers

WIDTH = 1024


class Pictures:
    """Rows of an array with what is known of each."""

    def __init__(self, arrays: SharedArrays, records: SharedRecords) -> None:
        self.rows, self.records = arrays["rows"], records

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        record = self.records[index]
        return self.rows[index], record["label"]


def build_rows(num_rows: int) -> SharedArrays:
    """Fill the rows in place, as a decoder or reader would."""
    made = SharedArrays.empty({"rows": ((num_rows, WIDTH), "float32")})
    for start in range(0, num_rows, 1000):
        made["rows"][start : start + 1000] = np.arange(start, min(start + 1000, num_rows), dtype=np.float32)[:, None]
    return made


def build_records(num_rows: int) -> Iterator[dict[str, Any]]:
    """One record per row."""
    return ({"path": f"train/{number}.jpg", "label": number % 10} for number in range(num_rows))


def read(rank: int, num_ranks: int, num_rows: int, name: str) -> None:
    """What one rank does: attach or build, then read its share."""
    began_s = time.perf_counter()
    arrays = SharedArrays.attach_or_build(f"{name}-rows", lambda: build_rows(num_rows))
    records = SharedRecords.attach_or_build(f"{name}-records", lambda: build_records(num_rows))
    ready_s = time.perf_counter() - began_s
    spec = FactorySpec(Pictures, arrays, records)
    total = count = 0
    with Loader(spec, batch_size=256, shuffle=True, num_workers=1, rank=rank, world_size=num_ranks, output="numpy") as loader:
        for rows, labels in loader:
            count += len(labels)
            total += int((rows[:, 0].astype(np.int64) % 10 == labels).sum())
    # The line's end with the line: where nothing is buffered it would be a write of its own, after another rank's line.
    print(
        f"rank {rank}: {arrays.nbytes / 2**20:,.0f} MiB after {ready_s:.2f} s, {count} rows read, {total} labels right\n",
        end="",
        flush=True,
    )


def main() -> None:
    """Run the ranks side by side."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4, help="processes (4)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of 4 KiB (100,000)")
    parser.add_argument("--name", default=f"shared-data-{os.getpid()}", help="what it is found by")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=read, args=(rank, args.ranks, args.rows, args.name)) for rank in range(args.ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    mine = [one for one in leftovers() if one.name.startswith(args.name)]
    print(
        *(
            f"{one.name}: {one.kind}, {one.nbytes / 2**20:,.0f} MiB, {'in use' if one.is_used else 'not in use'}"
            for one in mine
        ),
        sep="\n",
    )
    print("removed:", *remove_leftovers(*(one.name for one in mine)))
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
