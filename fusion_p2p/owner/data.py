"""Data sets of the owner: micro-batch `index` of step `step` is a pure function of (data, seed, step, index).

So a step can be fed again after a peer was lost, and a resumed run sees the data that an undisturbed one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusion_p2p.config import JobConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.owner.factories import CODE_ERRORS, call_factory, is_factory

HELD_OUT = 10
"""Every so many examples (or files of text) one is kept for validation and never trained on."""


@runtime_checkable
class DataSet(Protocol):
    """Named tensors for the forward of a model, one micro-batch at a time, always of the same shapes."""

    @property
    def unit(self) -> str:
        """What is counted in the rates shown: "tokens", "images", "examples"."""

    @property
    def units_per_micro_batch(self) -> int:
        """How many of them a micro-batch has."""

    @property
    def num_validation(self) -> int:
        """How many validation micro-batches there are; they are never trained on."""

    @property
    def model_defaults(self) -> Mapping[str, Any]:
        """Options of a built-in model that follow from the data, such as its vocabulary."""

    def example(self) -> dict[str, Tensor]:
        """One micro-batch for capturing the model: right names, shapes and dtypes."""

    def micro_batch(self, step: int, index: int) -> dict[str, Tensor]:
        """What micro-batch `index` of a step trains on."""

    def validation(self, index: int) -> dict[str, Tensor]:
        """Validation micro-batch `index`, below `num_validation`."""


def open_data(config: JobConfig) -> DataSet:
    """The data set of a run. ConfigError when it does not exist, is too small or is not one."""
    # Text and images import what they need only when they are wanted.
    if is_factory(config.data):
        return _from_factory(config)
    if config.data_options:
        raise ConfigError(f"data_option is for a data factory; {config.data} takes none")
    if config.data == "digits":
        from fusion_p2p.owner.images import digits

        return digits(config.micro_batch_size, config.micro_batches, config.seed)
    from fusion_p2p.owner.text import TextData, folder_text, stdlib_text

    text = stdlib_text() if config.data == "stdlib-text" else folder_text(Path(config.data))
    return TextData(text, config.context or TextData.DEFAULT_CONTEXT, config.micro_batch_size, config.seed)


def random_for(*parts: int | str) -> np.random.Generator:
    """A generator that depends on its arguments alone."""
    key = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


@dataclass(frozen=True, slots=True)
class Batching:
    """How examples become batches: a step has `micro_batches` micro-batches of `micro_batch_size` examples."""

    micro_batch_size: int
    micro_batches: int
    seed: int


class ExampleData:
    """A data set of single examples, shuffled anew in every pass; every tenth one is held out for validation."""

    def __init__(self, examples: Sequence[Mapping[str, Tensor]], batching: Batching, unit: str = "examples") -> None:
        """ConfigError when there are too few examples for one step, or for one validation micro-batch."""
        self._examples = examples
        self._batching = batching
        self.unit = unit
        self.model_defaults: Mapping[str, Any] = {}
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)
        indices = np.arange(len(examples))
        self._validation = indices[HELD_OUT - 1 :: HELD_OUT]
        self._training = np.setdiff1d(indices, self._validation)
        if len(self._training) < batching.micro_batch_size:
            raise ConfigError(
                f"data: {len(examples)} examples are too few: {len(self._training)} remain for training, "
                f"a micro-batch needs {batching.micro_batch_size}"
            )

    @property
    def units_per_micro_batch(self) -> int:
        return self._batching.micro_batch_size

    @property
    def num_validation(self) -> int:
        return len(self._validation) // self._batching.micro_batch_size

    def example(self) -> dict[str, Tensor]:
        return self.micro_batch(1, 0)

    def micro_batch(self, step: int, index: int) -> dict[str, Tensor]:
        size = self._batching.micro_batch_size
        first = (step * self._batching.micro_batches + index) * size
        return self._stacked([self._training_index(first + offset) for offset in range(size)])

    def validation(self, index: int) -> dict[str, Tensor]:
        size = self._batching.micro_batch_size
        return self._stacked([int(number) for number in self._validation[index * size : (index + 1) * size]])

    def _training_index(self, position: int) -> int:
        turn, place = divmod(position, len(self._training))
        return int(self._shuffled(turn)[place])

    def _shuffle(self, turn: int) -> npt.NDArray[np.int64]:
        return random_for("pass", self._batching.seed, turn).permutation(self._training)

    def _stacked(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        rows = [self._examples[number] for number in numbers]
        try:
            return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        except CODE_ERRORS as error:
            raise ConfigError(f"data: examples {numbers[:3]}... do not stack: {error}") from None


def _from_factory(config: JobConfig) -> DataSet:
    made = call_factory(config.data, config.data_options, "data")
    if isinstance(made, DataSet):
        return made
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise ConfigError(
            f"data {config.data} returned a {type(made).__name__}; it must be a sequence of dicts of tensors, or a data set "
            "with example, micro_batch, validation, num_validation, unit, units_per_micro_batch and model_defaults"
        )
    if len(made) == 0 or not isinstance(made[0], Mapping) or not made[0]:
        raise ConfigError(f"data {config.data}: its examples must be dicts of tensors, and there must be some")
    return ExampleData(made, Batching(config.micro_batch_size, config.micro_batches, config.seed))
