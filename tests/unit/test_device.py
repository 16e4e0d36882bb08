from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from fusion_p2p.device.choose import choose, prove
from fusion_p2p.device.memory import MARGIN, _container_bytes_left, device_name, free_bytes
from fusion_p2p.device.rates import Rates, cache_key, measure, rates
from fusion_p2p.errors import ConfigError, DeviceUnusable

CPU = torch.device("cpu")


def test_cpu_is_chosen_by_name():
    assert choose("cpu") == CPU


@pytest.mark.row(10)
def test_auto_takes_a_device_that_passes_the_proof():
    prove(choose("auto"))


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "CPU", "mps"])
def test_unknown_names_are_refused(name: str):
    with pytest.raises(ConfigError, match="use auto, cpu or cuda:N"):
        choose(name)


@pytest.mark.row(10)
def test_missing_card_is_named_with_the_remedy():
    with pytest.raises(DeviceUnusable, match=r"cuda:99 does not exist.*--device cpu"):
        choose("cuda:99")


@pytest.mark.row(10)
def test_device_without_kernels_fails_the_proof_with_one_line():
    with pytest.raises(DeviceUnusable, match="meta cannot run a forward and backward pass") as caught:
        prove(torch.device("meta"))
    assert "\n" not in str(caught.value)


def test_rates_are_measured_within_the_budget():
    started = time.perf_counter()
    found = measure(CPU, 0.4)
    assert time.perf_counter() - started < 20
    assert 1e8 < found.matmul_flops < 1e14
    assert 1e8 < found.convolution_flops < 1e14
    assert 1e7 < found.attention_flops < 1e14
    assert 1e7 < found.memory_bytes_per_s < 1e13


def test_rates_are_remembered_until_asked_again(tmp_path: Path):
    first = rates(CPU, tmp_path, budget_s=0.01)
    assert rates(CPU, tmp_path, budget_s=0.01) == first
    assert rates(CPU, tmp_path, benchmark="off") == first
    assert rates(CPU, tmp_path, benchmark="again", budget_s=0.01) != first


def test_rates_of_another_key_are_not_taken(tmp_path: Path):
    rates(CPU, tmp_path, budget_s=0.01)
    with pytest.raises(ConfigError, match="without --benchmark off"):
        rates(CPU, tmp_path, benchmark="off", precision="bf16")


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"key": 1}', "\x00"])
def test_damaged_memory_of_rates_means_to_measure_again(tmp_path: Path, damage: str):
    known = Rates(1.0, 2.0, 3.0, 4.0)
    rates(CPU, tmp_path, budget_s=0.01)
    (path,) = tmp_path.iterdir()
    content = {"key": cache_key(CPU, "fp32"), "rates": {"matmul_flops": 1.0, "convolution_flops": 2.0}}
    content["rates"] |= {"attention_flops": 3.0, "memory_bytes_per_s": 4.0}
    path.write_text(json.dumps(content))
    assert rates(CPU, tmp_path, benchmark="off") == known
    path.write_text(damage)
    assert rates(CPU, tmp_path, budget_s=0.01) != known
    path.write_text(json.dumps(content).replace("4.0", "Infinity"))
    assert rates(CPU, tmp_path, budget_s=0.01) != known


def test_free_memory_keeps_a_margin_and_the_device_has_a_name():
    assert 0 < free_bytes(CPU) < (1 - MARGIN / 2) * 1e15
    assert device_name(CPU)


def test_container_limit_counts(tmp_path: Path):
    assert _container_bytes_left(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    assert _container_bytes_left(tmp_path) == 1 << 62
    (tmp_path / "memory.max").write_text("2000\n")
    assert _container_bytes_left(tmp_path) == 1500
    (tmp_path / "memory.max").write_text("400\n")
    assert _container_bytes_left(tmp_path) == 0


@pytest.mark.row(21)
def test_what_torch_keeps_of_a_card_is_free_and_what_others_take_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 << 30, 12 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    assert free_bytes(torch.device("cuda:0")) == int((10 << 30) * 0.9)
