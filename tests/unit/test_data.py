"""Data sets: pure functions of (data, seed, step, index), held-out parts, sentences for what is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusion_p2p.config import TrainConfig
from fusion_p2p.errors import ConfigError
from fusion_p2p.owner.bigram import bigram_nats
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.factories import call_factory, is_factory
from fusion_p2p.owner.text import Text, folder_text, stdlib_text

FACTORIES = "tests.unit.factories_for_tests"


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(
        bootstrap=("/ip4/192.0.2.7/tcp/1/p2p/x",), **({"batch_size": 4, "micro_batches": 2, "context": 8} | settings)
    )


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([65 + number]) * 100)
    (tmp_path / ".hidden").write_bytes(b"secret")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "names", "unit"),
    [
        ({"data": "corpus"}, ["targets", "tokens"], "tokens"),
        ({"data": "digits"}, ["images", "labels"], "images"),
        ({"data": f"{FACTORIES}:points"}, ["inputs", "targets"], "examples"),
    ],
)
def test_a_micro_batch_is_a_pure_function_of_seed_step_and_index(
    corpus: Path, settings: dict[str, Any], names: list[str], unit: str
):
    settings = settings | ({"data": str(corpus)} if settings["data"] == "corpus" else {})
    data, again, other = open_data(config(**settings)), open_data(config(**settings)), open_data(config(seed=1, **settings))
    assert isinstance(data, DataSet)
    assert data.unit == unit
    batch = data.micro_batch(3, 1)
    assert sorted(batch) == names
    assert equal(batch, again.micro_batch(3, 1))
    assert not equal(batch, data.micro_batch(3, 0))
    assert not equal(batch, data.micro_batch(4, 1))
    assert not equal(batch, other.micro_batch(3, 1))
    example = data.example()
    for name, tensor in batch.items():
        assert (example[name].shape, example[name].dtype) == (tensor.shape, tensor.dtype)
        assert (data.validation(0)[name].shape, data.validation(0)[name].dtype) == (tensor.shape, tensor.dtype)


def test_text_targets_are_the_tokens_that_follow():
    data = open_data(config())
    batch = data.micro_batch(1, 0)
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].shape == (2, 8)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert data.units_per_micro_batch == 16
    assert data.model_defaults == {"vocabulary": 256, "context": 8}


def test_every_tenth_file_is_held_out_and_never_trained_on(corpus: Path):
    data = open_data(config(data=str(corpus)))
    held_out = {65 + 9, 65 + 19}
    trained = {int(byte) for step in range(40) for byte in data.micro_batch(step, 0)["tokens"].unique()}
    validated = {int(byte) for index in range(data.num_validation) for byte in data.validation(index)["tokens"].unique()}
    assert trained.isdisjoint(held_out)
    assert len(trained) > 10
    assert validated - {10} == held_out


def test_validation_windows_do_not_overlap(corpus: Path):
    text = Text(np.arange(100, dtype=np.uint8), np.arange(41, dtype=np.uint8), "numbers")
    from fusion_p2p.owner.text import TextData

    data = TextData(text, context=10, micro_batch_size=2, seed=0)
    assert data.num_validation == 2
    seen = torch.cat([data.validation(index)["tokens"].flatten() for index in range(2)])
    assert sorted(seen.tolist()) == list(range(40))


def test_a_single_file_and_a_small_folder_hold_out_the_last_tenth(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    for source in (path, tmp_path):
        text = folder_text(source)
        assert text.training.tolist() == list(range(90))
        assert text.validation.tolist() == list(range(90, 100))


def test_the_standard_library_is_a_real_corpus():
    text = stdlib_text()
    assert len(text.training) > 4_000_000
    assert len(text.validation) > 200_000
    assert b"def " in text.validation.tobytes()


def test_examples_are_shuffled_in_passes_and_the_tenth_is_held_out():
    data = open_data(config(data=f"{FACTORIES}:points", batch_size=6, micro_batches=2))
    first_pass = [float(value) for step in range(6) for index in range(2) for value in data.micro_batch(step, index)["targets"]]
    assert len(first_pass) == len(set(first_pass)) == 36
    assert first_pass != sorted(first_pass)
    held_out = {float(value) for value in data.validation(0)["targets"]}
    assert held_out == {9.0, 19.0, 29.0}
    assert held_out.isdisjoint(first_pass)


def test_digits_travel_as_bytes():
    batch = open_data(config(data="digits")).micro_batch(1, 0)
    assert batch["images"].dtype == torch.uint8
    assert batch["images"].shape == (2, 1, 8, 8)
    assert int(batch["images"].max()) > 200
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"data": "/nonexistent/text"}, "there is no such file or folder (built in: stdlib-text, digits)"),
        ({"data": "EMPTY"}, "the folder holds no files"),
        ({"data": "SHORT"}, "5 bytes to train on are fewer than context + 1 = 9"),
        ({"data": "SHORT", "data_option": ("a=1",)}, "data_option is for a data factory"),
        ({"data": "no.such.module:factory"}, "there is no module 'no' in the current folder or installed"),
        ({"data": f"{FACTORIES}:absent"}, f"module {FACTORIES} has no 'absent'"),
        ({"data": f"{FACTORIES}:not_callable"}, "has a int, not a function, named 'not_callable'"),
        ({"data": f"{FACTORIES}:raising"}, "raised RuntimeError: no weights here"),
        ({"data": f"{FACTORIES}:points", "data_option": ("speed=9",)}, "(speed=9) raised TypeError"),
        ({"data": f"{FACTORIES}:not_a_module"}, "its examples must be dicts of tensors"),
        ({"data": f"{FACTORIES}:no_examples"}, "its examples must be dicts of tensors, and there must be some"),
        ({"data": f"{FACTORIES}:regression"}, "returned a Regression; it must be a sequence of dicts"),
        ({"data": f"{FACTORIES}:points", "data_option": ("count=2",)}, "a micro-batch needs 2"),
    ],
)
def test_wrong_data_is_one_sentence(tmp_path: Path, settings: dict[str, Any], fragment: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_bytes(b"short")
    places = {"EMPTY": tmp_path / "empty", "SHORT": tmp_path / "short.txt"}
    if settings.get("data_option") == ("count=2",):
        settings = settings | {"batch_size": 8, "micro_batches": 4, "data_option": ("count=1",)}
    with pytest.raises(ConfigError) as caught:
        open_data(config(**settings | {"data": str(places.get(settings["data"], settings["data"]))}))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.row(32)
def test_examples_of_different_shapes_are_refused_with_their_numbers():
    with pytest.raises(ConfigError, match="do not stack"):
        open_data(config(data=f"{FACTORIES}:ragged")).example()


def test_bigram_entropy_of_known_texts():
    alternating = np.tile(np.array([0, 1], dtype=np.uint8), 50_000)
    training, validation = bigram_nats(Text(alternating, alternating[:1000], "alternating"))
    assert training < 0.01
    assert validation == pytest.approx(training, rel=0.01)
    noise = np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint8)
    _, validation = bigram_nats(Text(noise, noise[:1000], "noise"))
    assert validation == pytest.approx(math.log(256), abs=0.05)


def test_what_is_a_factory():
    assert is_factory("package.module:factory")
    assert not is_factory("gpt2")
    assert not is_factory("C:/texts")
    assert call_factory("collections:OrderedDict", {"a": 1}, "data") == {"a": 1}
