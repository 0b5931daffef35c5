"""The datasets of `scripts/image_folders.py`, read inline and in workers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ringloader import FactoryError, FactorySpec, Loader

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as a script beside it would import it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("image_folders")
    sys.modules.pop("image_folders", None)


def draw(path: Path, value: int, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    # Made out of order: what a file system lists is in no order at all.
    for number, name in enumerate(["dog_002.png", "cat_001.png", "tabby_cat_7.png", "dog_001.png", "cat_002.PNG"]):
        draw(tmp_path / name, number)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_label_in_the_files_name(folders: Any, named: Path, num_workers: int) -> None:
    """Sorted files, labels in the order of their names."""
    with Loader(folders.LabelInName(named), batch_size=5, num_workers=num_workers, output="numpy") as loader:
        images, labels = next(iter(loader))
    assert images.shape == (5, 30, 40, 3)
    assert images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [1, 4, 3, 0, 2]
    assert labels.tolist() == [0, 0, 1, 1, 2]
    assert folders.LabelInName(named).classes == ["cat", "dog", "tabby_cat"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_label_is_the_folder(folders: Any, tmp_path: Path, num_workers: int) -> None:
    """At any depth."""
    for number, name in enumerate(["b/1.jpg", "a/x/2.jpg", "b/0.jpg", "a/1.jpg"]):
        draw(tmp_path / name, number * 50)
    spec = FactorySpec("image_folders:LabelInFolder", tmp_path)
    with Loader(spec, batch_size=4, num_workers=num_workers, output="numpy") as loader:
        _, labels = next(iter(loader))
    assert labels.tolist() == [0, 2, 1, 1]
    assert folders.LabelInFolder(tmp_path).classes == ["a", "b", "x"]


def test_augmentation_is_the_same_for_any_number_of_workers_and_batch_size(folders: Any, tmp_path: Path) -> None:
    """Its draws are those of the sample, not of the worker."""
    rng = np.random.default_rng(0)
    for number in range(12):
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), np.uint8)).save(tmp_path / f"cat_{number:03}.png")
    seen = []
    for batch_size, num_workers in ((12, 0), (5, 2), (1, 1)):
        dataset = folders.LabelInName(tmp_path, folders.RandomCrop(16))
        with Loader(dataset, batch_size=batch_size, num_workers=num_workers, shuffle=True, output="numpy") as loader:
            epochs = [np.concatenate([images for images, _ in loader]) for _ in range(2)]
        seen.append(np.stack(epochs))
    assert seen[0].shape == (2, 12, 16, 16, 3)
    assert np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


def test_folders_that_cannot_be_read_say_why(folders: Any, tmp_path: Path) -> None:
    """No images, a name without a label, an image without a folder, an image too small."""
    with pytest.raises(ValueError, match="holds no images"):
        folders.LabelInName(tmp_path)
    draw(tmp_path / "0001.png", 1)
    with pytest.raises(ValueError, match=r"no label in its name; name it after .* cat_001.jpg"):
        folders.LabelInName(tmp_path)
    spec = FactorySpec("image_folders:LabelInFolder", tmp_path)
    with Loader(spec, num_workers=1) as loader, pytest.raises(FactoryError, match="lies in no folder of its own"):
        iter(loader)
    with pytest.raises(ValueError, match="has no square of 50"):
        folders.RandomCrop(50)(np.zeros((40, 60, 3), np.uint8))
