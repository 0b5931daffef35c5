"""Nothing may be left here either."""

from tests.runtime.conftest import _collects_silently, _frozen, _heeds_interrupts, _nothing_left, _spread

__all__ = ["_collects_silently", "_frozen", "_heeds_interrupts", "_nothing_left", "_spread"]
