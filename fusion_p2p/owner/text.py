"""Byte-level text: a file, a folder, or the Python standard library's own sources. The vocabulary is the 256 bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusion_p2p.errors import ConfigError
from fusion_p2p.owner.data import HELD_OUT, random_for

Bytes = npt.NDArray[np.uint8]
VOCABULARY = 256
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders below the standard library that are not its own text, or that installations leave out."""


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes held out, as uint8 arrays."""

    training: Bytes
    validation: Bytes
    source: str


class TextData:
    """Windows of a text: `tokens` int64 [batch, context] and `targets`, the same shifted by one byte."""

    DEFAULT_CONTEXT: ClassVar[int] = 256
    unit = "tokens"

    def __init__(self, text: Text, context: int, micro_batch_size: int, seed: int) -> None:
        """ConfigError when the text is shorter than one window, or its held-out part than one validation micro-batch."""
        self._text = text
        self._context = context
        self._size = micro_batch_size
        self._seed = seed
        if len(text.training) < context + 1:
            raise ConfigError(
                f"data {text.source}: {len(text.training)} bytes to train on are fewer than context + 1 = {context + 1}"
            )
        self._windows = random_for("validation").permutation(max(0, (len(text.validation) - 1) // context))

    @property
    def units_per_micro_batch(self) -> int:
        return self._size * self._context

    @property
    def num_validation(self) -> int:
        return len(self._windows) // self._size

    @property
    def model_defaults(self) -> Mapping[str, Any]:
        return {"vocabulary": VOCABULARY, "context": self._context}

    def example(self) -> dict[str, Tensor]:
        return self.micro_batch(1, 0)

    def micro_batch(self, step: int, index: int) -> dict[str, Tensor]:
        """Windows that begin anywhere in the training text."""
        begins = random_for("text", self._seed, step, index).integers(0, len(self._text.training) - self._context, self._size)
        return self._windows_at(self._text.training, begins.tolist())

    def validation(self, index: int) -> dict[str, Tensor]:
        """Windows that do not overlap, in an order that mixes the files and never changes."""
        chosen = self._windows[index * self._size : (index + 1) * self._size]
        return self._windows_at(self._text.validation, (chosen * self._context).tolist())

    def _windows_at(self, text: Bytes, begins: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.from_numpy(np.stack([text[begin : begin + self._context + 1] for begin in begins]).astype(np.int64))
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


@cache
def stdlib_text() -> Text:
    """The sources of the Python standard library that runs this, read once; every tenth file in sorted order is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not NOT_LIBRARY.intersection(path.relative_to(root).parts)]
    return _split_by_file(files, "stdlib-text")


def folder_text(path: Path) -> Text:
    """A text file (its last tenth is held out) or a folder (every tenth file, or the last tenth if there are fewer)."""
    if not path.exists():
        raise ConfigError(f"data {path}: there is no such file or folder (built in: stdlib-text, digits)")
    if path.is_file():
        return _split_by_length(_read([path], str(path)), str(path))
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(path))]
    if not files:
        raise ConfigError(f"data {path}: the folder holds no files")
    return _split_by_file(files, str(path)) if len(files) >= HELD_OUT else _split_by_length(_read(files, str(path)), str(path))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _split_by_file(files: Sequence[Path], source: str) -> Text:
    held_out = files[HELD_OUT - 1 :: HELD_OUT]
    training = [file for number, file in enumerate(files) if number % HELD_OUT != HELD_OUT - 1]
    return Text(_read(training, source), _read(held_out, source), source)


def _split_by_length(content: Bytes, source: str) -> Text:
    border = len(content) - len(content) // HELD_OUT
    return Text(content[:border], content[border:], source)


def _read(files: Sequence[Path], source: str) -> Bytes:
    try:
        return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
    except OSError as error:
        raise ConfigError(f"data {source}: cannot read {error.filename}: {error.strerror}") from None
