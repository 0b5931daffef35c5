"""The scheduler against a simulated pool, and single decisions of it."""

from __future__ import annotations

import os

import pytest

from tests.core.simulation import Simulation

# Rare orders of events need many schedules; about a millisecond each.
_NUM_SCHEDULES = int(os.environ.get("RINGLOADER_SCHEDULES", "10000"))
_NUM_BLOCKS = 10


@pytest.mark.parametrize("block", range(_NUM_BLOCKS))
def test_scheduler_random_faults_loses_repeats_and_waits_for_nothing(block: int) -> None:
    """Whatever dies, hangs, fails or is interrupted when: each batch once, in order, unchanged, and an end."""
    for seed in range(block * _NUM_SCHEDULES // _NUM_BLOCKS, (block + 1) * _NUM_SCHEDULES // _NUM_BLOCKS):
        try:
            Simulation(seed).run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {type(error).__name__}: {error}") from error
