"""The ledger: durable lines, torn ends, the valid history."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_p2p.errors import ConfigError
from fusion_p2p.owner.ledger import CheckpointWritten, Commit, End, Entry, Ledger, Opened, Skip, Start, read_ledger

JOB = "0" * 31 + "7"
PLAN = "ab" * 32


def start(epoch: int, state_step: int) -> Start:
    return Start(epoch=epoch, state_step=state_step, plan=PLAN, coordinator="12D3KooWa", term=epoch)


def commit(step: int, epoch: int = 1, loss: float = 2.5) -> Commit:
    return Commit(epoch=epoch, step=step, clip=0.75, rate=1e-3, loss=loss)


def write(path: Path, *entries: Entry) -> None:
    with Ledger(path) as ledger:
        for entry in entries:
            ledger.append(entry)


def test_what_was_appended_is_read_again_to_the_bit(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    exact = Commit(epoch=1, step=1, clip=0.1 + 0.2, rate=1e-3 / 3, loss=2.0 / 7.0)
    write(
        path, Opened(job=JOB, incarnation=1), start(1, 0), exact, Skip(epoch=1, step=2), CheckpointWritten(step=2), End(step=2)
    )
    history = read_ledger(path)
    assert history.opened == Opened(job=JOB, incarnation=1)
    assert history.start == start(1, 0)
    assert history.fates == {1: exact, 2: Skip(epoch=1, step=2)}
    assert (history.step, history.checkpoint_step, history.ended) == (2, 2, True)


def test_a_torn_last_line_is_cut_off_and_the_next_one_is_whole(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    write(path, start(1, 0), commit(1), commit(2))
    whole = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(whole[:-cut])
        assert read_ledger(path).step == 1
        write(path, commit(2, loss=1.0))
        assert read_ledger(path).fates[2] == commit(2, loss=1.0)


def test_a_start_takes_back_what_came_after_its_state(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    write(path, start(1, 0), *(commit(step) for step in range(1, 9)))
    write(path, Opened(job=JOB, incarnation=2), start(2, 4), commit(5, epoch=2), Skip(epoch=2, step=6))
    history = read_ledger(path)
    assert list(history.fates) == [1, 2, 3, 4, 5, 6]
    assert history.fates[5] == commit(5, epoch=2)
    assert history.fates[6] == Skip(epoch=2, step=6)


def test_the_last_line_of_a_step_is_the_valid_one(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    write(path, start(1, 0), commit(1), Skip(epoch=1, step=1))
    assert read_ledger(path).fates == {1: Skip(epoch=1, step=1)}


def test_an_empty_ledger_is_at_step_0_and_a_fresh_epoch_at_its_state(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    assert read_ledger(path).step == 0
    write(path, start(3, 17))
    assert read_ledger(path).step == 17


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"not json",
        b'{"kind":"bribe"}',
        b'{"kind":"end","step":-1}',
        b'{"kind":"end","step":1,"more":2}',
        b'{"kind":"end","step":"1"}',
    ],
)
def test_damage_in_the_middle_is_refused_by_its_line(tmp_path: Path, line: bytes):
    path = tmp_path / "ledger.jsonl"
    write(path, start(1, 0))
    path.write_bytes(path.read_bytes() + line + b"\n" + commit(1).model_dump_json().encode() + b"\n")
    with pytest.raises(ConfigError, match="line 2 is no ledger entry"):
        Ledger(path)
