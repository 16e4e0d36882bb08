"""What people see of a run: figures right, strangers' text harmless, plain lines when not a terminal."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from fusion_p2p.ids import PeerId
from fusion_p2p.job.progress import PeerLoad, RunSnapshot
from fusion_p2p.monitor.join_view import JoinView
from fusion_p2p.monitor.run_lines import RunLines, progress_line
from fusion_p2p.monitor.run_table import RunTable, picture
from fusion_p2p.monitor.text import duration, harmless, num_bytes
from fusion_p2p.monitor.view import open_view

EVIL = PeerId("12D3Koo\x1b[2J[red]\n")


def snapshot(step: int = 40, validation: float | None = 2.25, peers: int = 2, peer: str = "12D3KooWabcdefgh") -> RunSnapshot:
    loads = tuple(PeerLoad(PeerId(peer), (index,), 0.5, 3 << 20, 2048) for index in range(peers))
    return RunSnapshot(step, 300, 1, 2.125, validation, 1e-3, 0.5, 12_345.6, "tokens", loads)


def rendered(value: RunSnapshot) -> str:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(picture(value))
    return console.export_text()


def test_a_line_has_every_figure():
    line = progress_line(snapshot())
    for part in (
        "step 40/300",
        "loss 2.1250",
        "validation 2.2500",
        "rate 1.00e-03",
        "0.50 s/step",
        "12,346 tokens/s",
        "ETA 2:10",
    ):
        assert part in line
    assert "abcdefgh busy 50% sent 3.0 MiB" in line


def test_the_picture_has_every_figure():
    shown = rendered(snapshot())
    for part in (
        "step 40/300",
        "loss 2.1250",
        "validation 2.2500",
        "12,346 tokens/s",
        "ETA 2:10",
        "abcdefgh",
        "50%",
        "3.0 MiB",
        "2.0 KiB",
    ):
        assert part in shown


def test_the_picture_says_who_holds_copies():
    said = "copies of step 40: 4 of 4 slices held by 2 spares"
    assert said in rendered(replace(snapshot(), copies=said))
    assert "copies" not in rendered(snapshot())


def test_many_peers_are_bounded():
    assert "and 80 more" in rendered(snapshot(peers=100))


@pytest.mark.parametrize("show", [rendered, progress_line])
def test_a_strangers_name_cannot_reach_the_terminal(show: Callable[[RunSnapshot], str]):
    shown = show(snapshot(peer=EVIL, peers=1))
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_lines_are_few_but_never_miss_the_first_the_last_and_a_validation():
    written: list[str] = []
    lines = RunLines(written.append)
    for step in range(1, 301):
        lines.show(snapshot(step, validation=2.0 if step >= 203 else None))
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in written]
    assert {1, 203, 300} <= set(steps)
    assert len(steps) < 70


def test_a_pipe_gets_plain_lines_which_are_logged_too(caplog: pytest.LogCaptureFixture):
    out = io.StringIO()
    with caplog.at_level(logging.INFO), open_view(out) as view:
        view.say("waiting: \x1b[31mred")
        view.show(snapshot())
    assert caplog.messages == ["waiting: ?[31mred"]
    assert out.getvalue().splitlines()[0] == "waiting: ?[31mred"
    assert out.getvalue().splitlines()[1].startswith("step 40/300")


def test_a_terminal_gets_a_live_picture_with_lines_above():
    out = io.StringIO()
    with RunTable(Console(file=out, force_terminal=True, width=100)) as table:
        table.show(snapshot())
        table.say("peer [bold]x[/bold] left")
        table.show(snapshot(41))
    assert "step 41/300" in out.getvalue()
    assert "peer [bold]x[/bold] left" in out.getvalue()


def test_a_joined_peer_says_each_state_once():
    written: list[str] = []
    view = JoinView(written.append, now=lambda: 0.0)
    for text in ("standby", "standby", "training", "standby"):
        view.state(text)
    assert [line.split(" ", 1)[1] for line in written] == ["standby", "training", "standby"]


def test_words():
    assert [duration(value) for value in (0, 59.6, 185, 7385)] == ["0:00", "1:00", "3:05", "2:03:05"]
    assert [num_bytes(value) for value in (0, 1023, 1536, 20 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "20.0 MiB",
        "3072.0 GiB",
    ]
    assert harmless("a" * 50, 10) == "a" * 9 + "…"
