"""How much memory may still be taken: cgroup limits, free memory, file system, and this process's own bound.

Owns the process-wide account of ring bytes. Memory control groups answer a demand beyond their limit with the out-of-memory
killer, not with an error, so whoever reserves asks here first. Best effort: others take memory at the same time.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ringloader._core.units import in_words

# Left free below every limit: what the allocator, page tables and the user's own program take meanwhile.
_MARGIN_NBYTES = 256 << 20
_MARGIN_SHARE = 20
_DEFAULT_SHARE = 4


def available_nbytes() -> int:
    """Bytes this process can still take: the least of free memory and of every limit of its control groups."""
    return max(0, min(_free_nbytes(), *_cgroup_free_nbytes()))


def margin_nbytes(available: int) -> int:
    """What to leave of `available`."""
    return min(max(available // _MARGIN_SHARE, _MARGIN_NBYTES), available // 2)


def default_ring_nbytes() -> int:
    """A quarter of the memory available, shared among the ranks of this node (`LOCAL_WORLD_SIZE`)."""
    try:
        num_local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        num_local = 1
    return available_nbytes() // _DEFAULT_SHARE // num_local


def _free_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_free_nbytes() -> list[int]:
    """Limit minus usage of each ancestor group, v2 and v1; usage without what the kernel gives back by itself."""
    found = [1 << 62]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk_up(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            found += _walk_up(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found


def _walk_up(root: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[int]:
    found = []
    group = root / path.lstrip("/")
    while True:
        # In a container the path names the host's group while only our own is mounted, at the root.
        free = _group_free_nbytes(group, limit_name, usage_name, reclaimable)
        if free is not None:
            found.append(free)
        if group == root or root not in group.parents:
            return found
        group = group.parent


def _group_free_nbytes(group: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit_text = (group / limit_name).read_text().strip()
        if limit_text == "max":
            return None
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit_text) - usage + int(stat.get(reclaimable, 0))


class RingAccount:
    """Bytes of all rings of this process against the bound of each loader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0

    def take(self, slot_nbytes: int, num_slots: int, *, least: int, limit: int, own_nbytes: int, forced: bool) -> int:
        """Take room for as many slots as the bound allows and return how many; 0 when it does not allow `least`.

        A ring that would otherwise have fewer than `least` slots may take those as long as it alone stays within the bound:
        another loader of this process must not be able to starve it.
        """
        with self._lock:
            num_fitting = min(num_slots, max(0, limit - self._nbytes) // slot_nbytes)
            if num_fitting < least and (forced or own_nbytes + least * slot_nbytes <= limit):
                num_fitting = least
            if num_fitting < least:
                return 0
            self._nbytes += num_fitting * slot_nbytes
            return num_fitting

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes


ACCOUNT = RingAccount()


def bound_sentence(slot_nbytes: int, least: int, limit: int) -> str:
    """Why the bound said no, in words."""
    return (
        f"max_ring_bytes={limit} ({in_words(limit)}) has no room for {least} more slot{'s' * (least > 1)} of "
        f"{in_words(slot_nbytes)}; {in_words(ACCOUNT.nbytes)} are in use by the rings of this process"
    )
