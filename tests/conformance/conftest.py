"""Nothing may be left here either."""

from tests.runtime.conftest import _heeds_interrupts, _nothing_left, _spread

__all__ = ["_heeds_interrupts", "_nothing_left", "_spread"]
