"""In what order tests are run."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with those that take long: at the end one process of the run would be left alone with them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
