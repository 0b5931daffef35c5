"""Nothing may be left here either."""

from tests.runtime.conftest import _frozen, _heeds_interrupts, _nothing_left, _spread

__all__ = ["_frozen", "_heeds_interrupts", "_nothing_left", "_spread"]
