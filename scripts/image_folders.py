"""Labelled images in a folder, as datasets: the label is in the file's name, or is the folder's.

To copy and to change. Needs Pillow. Files are listed in sorted order, so that index and label mean the same everywhere, and
labels are counted in the order of their names. Each image is opened in the worker that needs it; nothing stays open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ringloader import Dataset, get_worker_info

_SUFFIXES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".webp"))
# "cat_001.jpg", "cat-001.jpg" and "cat.001.jpg" are cats, and so is "tabby_cat_001.jpg" a tabby_cat.
_NUMBERED = re.compile(r"(.*?[^\W\d_].*?)[-_. ]*\d+")


class LabelledImages(Dataset):
    """What both kinds have in common: `(height, width, 3) uint8` arrays, or what `transform` makes of them, and int labels.

    classes: the names of the labels, in their order. transform: called with the array; in workers it is what a `FactorySpec`
    takes as an argument.
    """

    def __init__(self, files: Sequence[Path], names: Sequence[str], transform: Callable[[Any], Any] | None) -> None:
        self.files = list(files)
        self.classes = sorted(set(names))
        numbers = {name: number for number, name in enumerate(self.classes)}
        self.labels = [numbers[name] for name in names]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index]) as image:
            array = np.asarray(image.convert("RGB"))
        return (array if self.transform is None else self.transform(array)), self.labels[index]


class LabelInName(LabelledImages):
    """The label is the file's name without its number: `cat_001.jpg`."""

    def __init__(self, folder: str | Path, transform: Callable[[Any], Any] | None = None) -> None:
        files = _images(Path(folder), Path(folder).iterdir())
        super().__init__(files, [_label(file) for file in files], transform)


class LabelInFolder(LabelledImages):
    """The label is the name of the folder that the file lies in, at any depth: `cat/001.jpg`."""

    def __init__(self, folder: str | Path, transform: Callable[[Any], Any] | None = None) -> None:
        files = _images(Path(folder), Path(folder).rglob("*"))
        outside = [file for file in files if file.parent == Path(folder)]
        if outside:
            raise ValueError(f"{outside[0]} lies in no folder of its own below {folder}, so it has no label; move it")
        super().__init__(files, [file.parent.name for file in files], transform)


class RandomCrop:
    """A square out of the image, flipped half the time; drawn from the sample's own generator, so it is the same whatever the
    batch size and the number of workers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        info = get_worker_info()
        rng = info.rng if info is not None else np.random.default_rng()
        height, width = array.shape[:2]
        if min(height, width) < self.size:
            raise ValueError(f"an image of {width} by {height} has no square of {self.size} in it; resize it first")
        top, left = (int(rng.integers(extent - self.size + 1)) for extent in (height, width))
        cropped = array[top : top + self.size, left : left + self.size]
        return cropped[:, ::-1] if rng.random() < 0.5 else cropped


def _images(folder: Path, found: Any) -> list[Path]:
    files = sorted(file for file in found if file.suffix.lower() in _SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(_SUFFIXES))})")
    return files


def _label(file: Path) -> str:
    match = _NUMBERED.fullmatch(file.stem)
    if match is None:
        raise ValueError(f"{file} has no label in its name; name it after its label and a number, as in cat_001.jpg")
    return match[1]
