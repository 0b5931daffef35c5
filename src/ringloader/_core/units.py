"""Sizes in bytes: alignment of slots, and bytes in words.

Must not depend on anything.
"""

from __future__ import annotations

PAGE_NBYTES = 4096
_CACHE_LINE_NBYTES = 64
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


# What RINGLOADER_DEBUG=1 fills a slot with while it holds no batch: a batch read after its release shows it, and so does
# what a dataset leaves unwritten.
MARKER = 0xAB


def align_slot(nbytes: int) -> int:
    """Round a slot's size up: to whole pages, so that slots are populated apart; tiny ones to cache lines, so many fit a
    page."""
    unit = PAGE_NBYTES if nbytes >= PAGE_NBYTES else _CACHE_LINE_NBYTES
    return max(unit, -(-nbytes // unit) * unit)


def counted(number: int, noun: str) -> str:
    """Return e.g. "1 worker", "3 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_words(nbytes: int) -> str:
    """Return e.g. "38.5 MiB"."""
    size, power = float(nbytes), 0
    while size >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.{1 if power else 0}f} {_UNITS[power]}"
