"""Checkpoints: exact, whole or refused, the one before it when damaged; export by the model's own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_p2p.errors import ConfigError
from fusion_p2p.graph.encoding import encode_graph
from fusion_p2p.graph.schema import OPSET, Graph, Node, Parameter, Ref, TensorType
from fusion_p2p.ids import digest_of
from fusion_p2p.owner import checkpoint as checkpoint_module
from fusion_p2p.owner.checkpoint import Checkpoint, CheckpointDamaged, CheckpointWriter, checkpoint_folders, newest_checkpoint
from fusion_p2p.owner.export import export_state_dict

GRAPH = digest_of(b"graph")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "parameter/a": torch.randn(64, 64, generator=generator),
        "parameter/b": torch.randn(8, generator=generator).to(torch.bfloat16),
        "parameter/norm.count": torch.tensor(7 + seed),
        "parameter/mask": torch.tensor([True, False]),
        "first_moment/a": torch.randn(64, 64, generator=generator).T,
        "parameter/empty": torch.zeros(0, 3),
    }


def write(folder: Path, step: int, content: dict[str, Tensor] | None = None) -> Path:
    writer = CheckpointWriter(folder, GRAPH, step)
    for name, tensor in (tensors(step) if content is None else content).items():
        writer.add(name, tensor)
    return writer.finish()


def test_tensors_come_back_to_the_bit_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_module, "PART_BYTES", 10_000)
    written = write(tmp_path, 20)
    assert len(list(written.glob("*.safetensors"))) > 1
    opened = Checkpoint.open(written)
    assert opened.step == 20
    assert opened.manifest.graph == GRAPH
    assert set(opened.names) == set(tensors())
    for name, expected in tensors(20).items():
        found = opened.tensor(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_newest_two_are_kept_and_a_repeated_step_is_replaced(tmp_path: Path):
    for step in (20, 40, 60):
        write(tmp_path, step)
    write(tmp_path, 60, tensors(5))
    assert [folder.name for folder in checkpoint_folders(tmp_path)] == ["step-00000060", "step-00000040"]
    newest = newest_checkpoint(tmp_path, pytest.fail)
    assert newest is not None
    assert int(newest.tensor("parameter/norm.count")) == 12


def test_what_was_not_finished_is_not_there(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, GRAPH, 20)
    writer.add("parameter/a", torch.zeros(3))
    with pytest.raises(ValueError, match="added before"):
        writer.add("parameter/a", torch.zeros(3))
    assert newest_checkpoint(tmp_path, pytest.fail) is None
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_caller_may_go_on_using_its_tensor(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, GRAPH, 1)
    live = torch.ones(4)
    writer.add("parameter/a", live)
    live.zero_()
    assert torch.equal(Checkpoint.open(writer.finish()).tensor("parameter/a"), torch.ones(4))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def forge_step(path: Path) -> None:
    sealed = json.loads(path.read_bytes())
    sealed["manifest"]["step"] += 1
    path.write_text(json.dumps(sealed))


@pytest.mark.parametrize(
    ("file", "damage", "fragment"),
    [
        ("part-0000.safetensors", truncate, "cannot be read"),
        ("part-0000.safetensors", flip, "are not those that were written"),
        ("part-0000.safetensors", Path.unlink, "cannot be read"),
        ("manifest.json", truncate, "its manifest is damaged"),
        ("manifest.json", forge_step, "its manifest was changed"),
        ("manifest.json", Path.unlink, "has no readable manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, file: str, damage: Callable[[Path], None], fragment: str
):
    write(tmp_path, 20)
    damage(write(tmp_path, 40) / file)
    said: list[str] = []
    newest = newest_checkpoint(tmp_path, said.append)
    assert newest is not None
    assert newest.step == 20
    assert len(said) == 1
    assert fragment in said[0]
    assert "step-00000040" in said[0]


def test_when_all_are_damaged_it_is_an_error(tmp_path: Path):
    truncate(write(tmp_path, 20) / "manifest.json")
    with pytest.raises(CheckpointDamaged, match="step-00000020"):
        newest_checkpoint(tmp_path, lambda line: None)


def tied_graph() -> Graph:
    vector = TensorType((3,), "float32", True)
    return Graph(
        opset=OPSET,
        inputs=("inputs",),
        parameters=(Parameter("embedding.weight", True, aliases=("head.weight",)), Parameter("norm.mean", False)),
        nodes=(Node("add", {"self": Ref(1), "other": Ref(0)}, 3, 1),),
        types=(TensorType((3,), "float32", False), vector, TensorType((3,), "float32", False), vector),
        outputs=(3,),
    )


def keep_model(run: Path, untouched: dict[str, torch.Tensor]) -> None:
    names = ["embedding.weight", "head.weight", *untouched]
    (run / "config.toml").write_text("")
    (run / "graph.fusion").write_bytes(encode_graph(tied_graph()))
    (run / "names.json").write_text(json.dumps(names))
    save_file(untouched, run / "untouched.safetensors")


def test_export_has_exactly_the_names_of_the_modules_state_dict(tmp_path: Path):
    idle = torch.tensor([7.0])
    keep_model(tmp_path, {"idle.weight": idle})
    weight, mean = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    content = {"parameter/embedding.weight": weight, "parameter/norm.mean": mean, "momentum/embedding.weight": weight}
    write(tmp_path / "checkpoint", 20, content)
    out = tmp_path / "model.safetensors"
    assert export_state_dict(tmp_path, out) == (20, 3)
    loaded = load_file(out)
    assert sorted(loaded) == ["embedding.weight", "head.weight", "idle.weight"]
    assert torch.equal(loaded["embedding.weight"], weight)
    assert torch.equal(loaded["head.weight"], weight)
    assert torch.equal(loaded["idle.weight"], idle)


def test_export_of_something_else_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run folder: it has no config"):
        export_state_dict(tmp_path, tmp_path / "out")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        export_state_dict(tmp_path, tmp_path / "out")
    (tmp_path / "graph.fusion").write_bytes(encode_graph(tied_graph()))
    write(tmp_path / "checkpoint", 10, {"parameter/embedding.weight": torch.ones(3), "parameter/norm.mean": torch.ones(3)})
    with pytest.raises(ConfigError, match="does not say what its model's tensors are called"):
        export_state_dict(tmp_path, tmp_path / "out")
    keep_model(tmp_path, {})
    write(tmp_path / "checkpoint", 20, {"parameter/embedding.weight": torch.ones(3), "parameter/norm.mean": torch.ones(3)})
    with pytest.raises(ConfigError, match="cannot write"):
        export_state_dict(tmp_path, tmp_path / "absent" / "out")
