"""Configuration: precedence, strictness, sentences."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fusion_p2p.config import (
    TRACELESS_RATIO,
    BootstrapConfig,
    JoinConfig,
    StatusConfig,
    TrainConfig,
    check_resumable,
    resolve,
    settings_of,
    to_toml,
)
from fusion_p2p.errors import ConfigError
from fusion_p2p.setting_values import help_of
from fusion_p2p.wire.codecs import LADDER, rung_for

ADDRESS = "/ip4/192.0.2.7/tcp/31337/p2p/12D3KooWGBfGbUe8kHzUJ7bUG1oFyTzUPQHzjxLzWcEDKhHrYh5P"


def train(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, files: tuple[Path, ...] = ()):
    return resolve(TrainConfig, {"bootstrap": [ADDRESS]} | (flags or {}), environ or {}, files)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fusion.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path):
    file = toml(tmp_path, "steps = 7\nseed = 7\nbatch_size = 4\n")
    config = train({"steps": "9"}, {"FUSION_STEPS": "8", "FUSION_SEED": "8"}, (file,))
    assert (config.steps, config.seed, config.batch_size, config.micro_batches) == (9, 8, 4, 4)


def test_a_repeatable_setting_is_a_comma_list_in_the_environment():
    config = resolve(JoinConfig, {}, {"FUSION_BOOTSTRAP": f"{ADDRESS}, {ADDRESS}"})
    assert config.bootstrap == (ADDRESS, ADDRESS)


def test_optional_settings_are_cleared_by_none(tmp_path: Path):
    file = toml(tmp_path, "peers = 3\nclip = 1\n")
    config = train({"peers": "none"}, {"FUSION_CLIP": "none"}, (file,))
    assert config.peers is None
    assert config.clip is None


def test_every_setting_has_an_environment_twin_and_a_help_text():
    for kind in (BootstrapConfig, JoinConfig, StatusConfig, TrainConfig):
        for name, annotation in settings_of(kind).items():
            assert help_of(annotation), f"{kind.__name__}.{name} says nothing"
            assert name == name.lower()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("optimizer = 'adam'", "unknown key 'optimizer'; did you mean 'optimiser'?"),
        ("[train]\nsteps = 3", "unknown key 'train'"),
        ("steps = '3'", "steps: '3' should be a valid integer"),
        ("steps = 0", "steps: '0' should be greater than or equal to 1"),
        ("steps = true", "steps: 'True' should be a valid integer"),
        ("learning_rate = nan", "learning_rate: 'nan'"),
        ("learning_rate = inf", "learning_rate: 'inf'"),
        ("bootstrap = 'one'", "bootstrap: 'one' should be a valid array"),
        ("bootstrap = [1]", "bootstrap: '[1]' should be a valid string"),
        ("optimiser = 'lion'", "optimiser: 'lion' should be sgd, adam or adamw"),
        ("steps = ", "is not valid TOML"),
        ("batch_size = 8194\nmicro_batches = 4097", "micro_batches 4097 is more than a swarm plans for: 4096; raise"),
        ("batch_size = 10\nmicro_batches = 4", "batch_size 10 is not divisible by micro_batches 4; 8 would be"),
        ("dropout = 1.0", "dropout: '1.0' should be less than 1"),
        ("steps = 1979-05-27", "steps: '1979-05-27' should be a valid integer"),
    ],
)
def test_wrong_files_are_refused_with_place_and_reason(tmp_path: Path, text: str, fragment: str):
    with pytest.raises(ConfigError) as caught:
        train(files=(toml(tmp_path, text),))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("flags", "environ", "fragment"),
    [
        ({"steps": "many"}, {}, "--steps: 'many' should be a valid integer"),
        ({}, {"FUSION_STEPS": "many"}, "FUSION_STEPS: 'many' should be a valid integer"),
        ({}, {"FUSION_NO_NAT": "perhaps"}, "FUSION_NO_NAT: 'perhaps' should be a valid boolean"),
        ({"option": ["blocks"]}, {}, "'blocks' is not NAME=VALUE"),
        ({"option": ["a=1", "a=2"]}, {}, "a is given twice"),
        ({"layers": "2", "option": ["layers=3"]}, {}, "layers is given both"),
        ({"run": "a", "resume": "b"}, {}, "run and resume exclude each other"),
        ({"network": ""}, {}, "network must be"),
    ],
)
def test_wrong_flags_are_refused(flags: dict[str, Any], environ: dict[str, str], fragment: str):
    with pytest.raises(ConfigError) as caught:
        _ = train(flags, environ).model_options
    assert fragment in str(caught.value)


@pytest.mark.row(32)
def test_a_batch_that_cannot_be_divided_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match="batch_size 6 is not divisible by micro_batches 4"):
        train({"batch_size": "6", "micro_batches": "4"})


def test_model_options_join_flags_and_options():
    config = train({"layers": "2", "tied": True, "option": ["blocks=[1, 1]", "stem=small", "bias=false"]})
    assert config.model_options == {"layers": 2, "tied": True, "blocks": [1, 1], "stem": "small", "bias": False}


def test_a_missing_bootstrap_and_a_missing_file_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="join needs --bootstrap"):
        resolve(JoinConfig, {}, {})
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        train(files=(tmp_path / "absent.toml",))


def test_the_resolved_configuration_can_be_read_again(tmp_path: Path):
    config = train({"steps": "5", "option": ["a=1"], "clip": "0.5", "run": str(tmp_path), "tied": False})
    text = to_toml(config)
    assert "run" not in tomllib.loads(text)
    again = resolve(TrainConfig, {}, {}, (toml(tmp_path, text),))
    assert again == dataclasses.replace(config, run=None)


def test_adaptive_keeps_to_codecs_without_a_trace_unless_told_otherwise():
    asked = [{}, {"codec": "adaptive"}, {"codec": "adaptive", "ratio": "100"}, {"codec": "adatopk"}, {"ratio": "30"}]
    assert [train(flags).most_ratio for flags in asked] == [100, 7.5, 100, 100, 30]
    assert rung_for(TRACELESS_RATIO, sparse=True) == LADDER[-1][1]


def test_a_resumed_run_keeps_what_decides_its_result():
    stored = train({"seed": "1"})
    check_resumable(stored, dataclasses.replace(stored, steps=500, bootstrap=("x",)))
    with pytest.raises(ConfigError, match="seed was 1 when this run began and cannot become 2"):
        check_resumable(stored, dataclasses.replace(stored, seed=2))
