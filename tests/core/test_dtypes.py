"""Element types: names and promotion against the installed torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ringloader._core import dtypes

NUMPY_NAMES = [dtype.name for dtype in (np.dtype(code) for code in "?BbhilHILefdFD") if dtypes.name_of(dtype)]


def torch_promotion(first: str, second: str) -> str | None:
    """Return what torch says, None for a refusal."""
    try:
        return str(torch.promote_types(getattr(torch, first), getattr(torch, second))).removeprefix("torch.")
    except RuntimeError:
        return None


def test_promote_every_pair_equals_torch() -> None:
    """The table of promotions is torch's, refusals included."""
    assert len(set(NUMPY_NAMES)) == 14
    for first, second in itertools.product(NUMPY_NAMES, repeat=2):
        assert dtypes.promote(first, second) == torch_promotion(first, second), (first, second)


def test_promote_all_unsupported_step_gives_none() -> None:
    """A refused step refuses the whole column, whatever follows it."""
    assert dtypes.promote_all(["uint16", "int32", "float32"]) is None
    assert dtypes.promote_all(["uint16", "float32", "int32"]) == "float32"


@pytest.mark.parametrize("name", sorted(NUMPY_NAMES))
def test_name_of_numpy_dtype_is_torchs_name(name: str) -> None:
    """numpy's and torch's names of a type agree, and so do their sizes."""
    assert dtypes.name_of(np.dtype(name)) == name
    assert getattr(torch, name).itemsize == dtypes.storage_of(name).itemsize
    assert not dtypes.is_torch_only(name)


@pytest.mark.parametrize(
    "name", ["bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_storage_of_torch_only_dtype_has_its_size(name: str) -> None:
    """A type numpy lacks is carried by one of the same size."""
    assert dtypes.is_torch_only(name)
    assert dtypes.storage_of(name).itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", ["object", "<U3", "datetime64[s]", "nonsense", "V8"])
def test_storage_of_non_numeric_dtype_is_refused(name: str) -> None:
    """A definition from another process can never ask for an array of pointers."""
    with pytest.raises(ValueError, match="dtype"):
        dtypes.storage_of(name)


@pytest.mark.parametrize("code", [">f4", "O", "<U2", "S3", "M8[s]", "m8[s]", "V3", "g"])
def test_name_of_foreign_dtype_is_none(code: str) -> None:
    """What no tensor can hold has no name."""
    assert dtypes.name_of(np.dtype(code)) is None
