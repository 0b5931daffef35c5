"""How much memory may still be taken: cgroup limits, free memory, file system, and this process's own bound.

Owns the process-wide account of ring bytes. Memory control groups answer a demand beyond their limit with the out-of-memory
killer, not with an error, so whoever reserves asks here first. Best effort: others take memory at the same time.
"""

from __future__ import annotations

import os
import threading

from ringloader._core.units import in_words
from ringloader._runtime.locking import holding

# Left free below every limit: what the allocator, page tables and the user's own program take meanwhile.
_MARGIN_NBYTES = 256 << 20
_MARGIN_SHARE = 20
_DEFAULT_SHARE = 4
_PINNED_SHARE = 2


def available_nbytes() -> int:
    """Bytes this process can still take: the least of free memory and of every limit of its control groups."""
    return max(0, min(_free_nbytes(), *_cgroup_free_nbytes()))


def margin_nbytes(available: int) -> int:
    """What to leave of `available`."""
    return min(max(available // _MARGIN_SHARE, _MARGIN_NBYTES), available // 2)


def default_ring_nbytes() -> int:
    """A quarter of the memory available, shared among the ranks of this node (`LOCAL_WORLD_SIZE`)."""
    return available_nbytes() // _DEFAULT_SHARE // num_local_ranks()


def num_local_ranks() -> int:
    """Training processes on this machine (`LOCAL_WORLD_SIZE`, as torchrun sets it)."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _free_nbytes() -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _cgroup_free_nbytes() -> list[int]:
    """Limit minus usage of each ancestor group, v2 and v1; usage without what the kernel gives back by itself."""
    found = [1 << 62]
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk_up("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            found += _walk_up(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found


def _walk_up(root: str, path: str, limit_name: str, usage_name: str, reclaimable: str) -> list[int]:
    """Free bytes of a group and of each of its ancestors that has a limit."""
    found = [_group_free_nbytes(group, limit_name, usage_name, reclaimable) for group in _groups(root, path)]
    return [free for free in found if free is not None]


def _group_free_nbytes(group: str, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit_text = _read(f"{group}/{limit_name}").strip()
        if limit_text == "max":
            return None
        usage = int(_read(f"{group}/{usage_name}"))
        stat = dict(line.split() for line in _read(f"{group}/memory.stat").splitlines())
    except (OSError, ValueError):
        return None
    return int(limit_text) - usage + int(stat.get(reclaimable, 0))


def private_nbytes(pid: int) -> int:
    """Memory that is a process's own (RssAnon, proc(5)); 0 when the kernel does not say."""
    try:
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # it has ended, or there is no such file here
    return 0


def oom_kills() -> int | None:
    """How many processes the kernel has ended for want of memory, here or in our control groups; None when it does not say."""
    counts = []
    for path, name in (("/proc/vmstat", "oom_kill"), *((path, "oom_kill") for path in _event_files())):
        try:
            found = dict(line.split() for line in _read(path).splitlines())
            counts.append(int(found[name]))
        except (OSError, ValueError, KeyError):
            continue
    return sum(counts) if counts else None


def _event_files() -> list[str]:
    try:
        lines = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [f"{group}/memory.events" for group in _groups("/sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            found += [f"{group}/memory.oom_control" for group in _groups("/sys/fs/cgroup/memory", path)]
    return found


def _groups(root: str, path: str) -> list[str]:
    """A group and its ancestors, from the group on."""
    parts = path.strip("/").split("/")
    # In a container the path names the host's group while only our own is mounted, at the root.
    groups = ["/".join([root, *parts[:depth]]).rstrip("/") for depth in range(len(parts), -1, -1)]
    return list(dict.fromkeys(groups))


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


class RingAccount:
    """Bytes of all rings of this process against the bound of each loader."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._nbytes = 0

    def take(self, slot_nbytes: int, num_slots: int, *, least: int, limit: int, own_nbytes: int, forced: bool) -> int:
        """Take room for as many slots as the bound allows and return how many; 0 when it does not allow `least`.

        A ring that would otherwise have fewer than `least` slots may take those as long as it alone stays within the bound:
        another loader of this process must not be able to starve it.
        """

        def decide() -> int:
            num_fitting = min(num_slots, max(0, limit - self._nbytes) // slot_nbytes)
            if num_fitting < least and (forced or own_nbytes + least * slot_nbytes <= limit):
                num_fitting = least
            if num_fitting < least:
                return 0
            self._nbytes += num_fitting * slot_nbytes
            return num_fitting

        return holding(self._lock, decide)

    def give_back(self, nbytes: int) -> None:
        def subtract() -> None:
            self._nbytes -= nbytes

        holding(self._lock, subtract)

    def reset(self) -> None:
        """In a forked child: the rings are the parent's, and the lock may be held by a thread that is not here."""
        self._lock = threading.RLock()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes


ACCOUNT = RingAccount()


class PinnedAccount:
    """Page-locked bytes of all rings of this process, at most half of the memory there would be without rings.

    The kernel can neither move nor swap them: a machine with too many freezes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.nbytes = 0

    def take(self, nbytes: int) -> str | None:
        """Take room, or return in words why there is none."""
        limit = (available_nbytes() + ACCOUNT.nbytes) // _PINNED_SHARE // num_local_ranks()

        def decide() -> str | None:
            if self.nbytes + nbytes > limit:
                return (
                    f"{in_words(nbytes)} more would be page-locked, {in_words(self.nbytes)} are already, and at most "
                    f"{in_words(limit)} may be (half of the memory available, over the ranks of this machine)"
                )
            self.nbytes += nbytes
            return None

        return holding(self._lock, decide)

    def give_back(self, nbytes: int) -> None:
        def subtract() -> None:
            self.nbytes -= nbytes

        holding(self._lock, subtract)

    def reset(self) -> None:
        """In a forked child, where nothing is page-locked."""
        self._lock = threading.RLock()
        self.nbytes = 0


PINNED = PinnedAccount()


def bound_sentence(slot_nbytes: int, least: int, limit: int) -> str:
    """Why the bound said no, in words."""
    return (
        f"max_ring_bytes={limit} ({in_words(limit)}) has no room for {least} more slot{'s' * (least > 1)} of "
        f"{in_words(slot_nbytes)}; {in_words(ACCOUNT.nbytes)} are in use by the rings of this process"
    )
