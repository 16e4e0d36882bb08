"""`fusion-peer plan` and `fusion-peer bench`: what they print, and what they refuse at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusion_p2p.cli.main import exit_code_of
from fusion_p2p.cli.own_rates import _cells
from fusion_p2p.config import PlanConfig
from fusion_p2p.device import peak as peaks
from fusion_p2p.owner.dry_run import cost_model

TESTBEDS = Path(__file__).resolve().parents[2] / "contrib" / "testbeds"
T2, T7 = TESTBEDS / "t2-24-gpus-3-sites.json", TESTBEDS / "t7-emulated.json"
SMALL = [
    "--model", "gpt2", "--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--option", "vocabulary=300",
    "--scheduler", "equal-compute",
]  # fmt: skip


def plan(*arguments: str, testbed: Path = T7) -> int:
    return exit_code_of(["plan", "--testbed", str(testbed), *arguments])


def test_a_plan_in_words(capsys: pytest.CaptureFixture[str]):
    assert plan(*SMALL) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("gpt2: ")
    assert "6 peers in 3 sites" in out[0]
    assert out[1].startswith("equal-compute: 6 slices on 6 peers, 4 micro-batches")
    assert out[2].startswith("bottleneck: the ")
    assert out[3].startswith("bound: a chain of single peers takes at least ")
    assert sum(line.startswith("slice ") for line in out) == 6
    assert sum(line.startswith("edge ") for line in out) >= 5


def test_a_plan_as_json_and_as_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    picture = tmp_path / "plan.png"
    assert plan(*SMALL, "--codec", "int8", "--json", "--plot", str(picture)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] > 100_000
    assert [part["members"] for part in told["slices"]] == [[peer] for peer in told["peers"]]
    assert {codec for edge in told["edges"] for codec in edge["codecs"]} <= {"int8", "none"}
    assert any("int8" in edge["codecs"] for edge in told["edges"])
    assert told["step_s"] > told["bound_s"] > 0
    assert picture.stat().st_size > 10_000


def test_the_order_of_tasks_is_printed_when_asked(capsys: pytest.CaptureFixture[str]):
    chosen = [*SMALL, "--pipeline", "gpipe", "--micro-batches", "2", "--batch-size", "4", "--actions"]
    assert plan(*chosen) == 0
    assert capsys.readouterr().out.splitlines()[-6:] == [f"stage {index} | F0 F1 B0 B1" for index in range(6)]
    assert plan(*chosen, "--json") == 0
    assert json.loads(capsys.readouterr().out)["actions"][0] == "stage 0 | F0 F1 B0 B1"


def test_pipeline_and_micro_batches_are_obeyed(capsys: pytest.CaptureFixture[str]):
    assert plan(*SMALL, "--pipeline", "gpipe", "--micro-batches", "2", "--batch-size", "4", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schedule"], told["micro_batches"]) == ("gpipe", 2)
    assert {part["in_flight"] for part in told["slices"]} == {2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--plot", "plan.pdf"], "has to end in .png or .svg"),
        (["--codec", "zip"], "unknown codec 'zip'"),
        (["--codec", "topk:10", "--ratio", "50"], "says itself how much it keeps, as in topk:50"),
        (["--ratio", "50"], "it is for the policies uniform, adatopk, adaptive"),
        (["--plot", "no-such-folder/plan.png"], "plot: there is no folder no-such-folder"),
        (["--bootstrap", "/ip4/1.2.3.4"], "either --testbed FILE or --bootstrap ADDRESS"),
        (["--model", "a.b:c"], "give its --data"),
        (["--model", "gpt3"], "no built-in model 'gpt3'"),
        (["--scheduler", "best"], "--scheduler: 'best'"),
    ],
)
def test_wrong_usage_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str):
    assert plan(*arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert sentence in error


def test_a_picture_that_cannot_be_written_is_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "plan.png").mkdir()
    assert plan(*SMALL, "--plot", str(tmp_path / "plan.png")) == 2
    assert "error: plot: cannot write" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("testbed", "relative"), [(T7, True), (T2, False)], ids=["relative devices", "absolute devices"])
def test_guessed_rates_of_this_machine_are_said_to_be_guessed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, testbed: Path, relative: bool
):
    assert plan(*SMALL, "--state-dir", str(tmp_path), testbed=testbed) == 0
    assert ("was never measured" in capsys.readouterr().err) == relative


def test_a_wrong_testbed_is_refused_before_anything_is_captured(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert plan(testbed=tmp_path / "none.json") == 2
    assert "captured" not in capsys.readouterr().err


def test_what_does_not_fit_is_no_plan_and_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    content = json.loads(T7.read_text())
    for device in content["devices"].values():
        device["memory_gb"] = 0.0005
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    assert plan(*SMALL, testbed=tmp_path / "tiny.json") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "there is no plan for gpt2 here: slice " in error
    assert "more" in error


def test_synthetic_inputs_have_the_sizes_of_the_model():
    config = PlanConfig(testbed=T2, model="resnet", batch_size=6, micro_batches=3, image=16)
    graph = cost_model(config).graph
    assert [kind.shape for kind in graph.types[: graph.first_parameter]] == [(2, 1, 16, 16), (2,)]


def test_the_model_of_a_training_run_is_planned_with_its_data(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("all the words that there are " * 100)
    options = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    graph = cost_model(PlanConfig(testbed=T2, data=str(text), batch_size=4, micro_batches=2, **options)).graph
    assert graph.types[0].shape == (2, 16)
    assert graph.types[graph.first_parameter].shape == (256, 32), "one row for every byte, as train has it"


def test_bench_shows_measured_rates_beside_the_peak(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert exit_code_of(["bench", "--device", "cpu", "--json", "--state-dir", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["measured"]["matmul_flops"] > 1e8
    assert Path(told["file"]).parent == tmp_path
    assert Path(told["file"]).exists()
    assert exit_code_of(["bench", "--device", "cpu", "--benchmark", "off", "--state-dir", str(tmp_path)]) == 0
    assert "matrix product" in capsys.readouterr().out


def test_bench_refuses_what_was_never_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert exit_code_of(["bench", "--device", "cpu", "--benchmark", "off", "--state-dir", str(tmp_path)]) == 2
    assert "no measured rates" in capsys.readouterr().err


def test_an_unknown_peak_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peaks, "_clock_hz", lambda: None)
    found = peaks._cpu_peak()
    assert found.flops_per_s is None
    assert "unknown" in found.how
    assert _cells(2e9, found.flops_per_s, "GFLOP/s") == ("2.0 GFLOP/s", "unknown", "")
