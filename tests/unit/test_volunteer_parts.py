"""What a volunteer's caps stand on: the battery, the month's traffic, the control socket, what is offered of the memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.cli.main import exit_code_of
from fusion_p2p.config import JoinConfig
from fusion_p2p.device.power import on_battery
from fusion_p2p.errors import WireError
from fusion_p2p.net.base import Stream
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.metering import Meter, MeteredTransport
from fusion_p2p.net.pacing import Bandwidth
from fusion_p2p.peer import memory_watch
from fusion_p2p.peer.control_socket import Answer, Command, ControlSocket, ask, decode_command, running, socket_path
from fusion_p2p.peer.memory_watch import MemoryWatch, differs
from fusion_p2p.peer.traffic import MonthlyTraffic

pytestmark = pytest.mark.row(21)

NOVEMBER, DECEMBER = datetime(2026, 11, 30, 23, 59, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)


def supply(folder: Path, name: str, **attributes: str) -> None:
    (folder / name).mkdir(parents=True)
    for attribute, value in attributes.items():
        (folder / name / attribute).write_text(value + "\n")


def test_on_battery_is_a_battery_that_discharges_without_a_charger(tmp_path: Path):
    assert not on_battery(tmp_path / "none")
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging")
    assert not on_battery(tmp_path), "a mouse"
    supply(tmp_path, "BAT0", type="Battery", status="Full")
    assert not on_battery(tmp_path)
    (tmp_path / "BAT0" / "status").write_text("Discharging\n")
    assert on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert not on_battery(tmp_path), "a weak charger, but a charger"
    (tmp_path / "AC" / "online").write_text("0\n")
    assert on_battery(tmp_path)


def test_traffic_is_counted_over_restarts_and_peers_and_begins_anew_with_the_month(tmp_path: Path):
    meter, other = Meter(), Meter()
    first, second = MonthlyTraffic(tmp_path, "a", meter, NOVEMBER), MonthlyTraffic(tmp_path, "b", other, NOVEMBER)
    meter.num_bytes, other.num_bytes = 100, 7
    assert first.count(NOVEMBER) == 100
    assert second.count(NOVEMBER) == 107
    restarted = MonthlyTraffic(tmp_path, "a", Meter(1000), NOVEMBER)
    assert restarted.count(NOVEMBER) == 107, "what a meter showed before is not counted"
    other.num_bytes += 3
    assert second.count(DECEMBER) == 3
    assert json.loads((tmp_path / "traffic-b.json").read_text()) == {"month": "2026-12", "bytes": 3}
    assert restarted.count(DECEMBER) == 3


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"month": "2026-11"}', '{"month": "2026-11", "bytes": "x"}', "null"])
def test_a_damaged_count_begins_anew(tmp_path: Path, damage: str):
    (tmp_path / "traffic-a.json").write_text(damage)
    meter = Meter()
    traffic = MonthlyTraffic(tmp_path, "a", meter, NOVEMBER)
    meter.num_bytes = 5
    assert traffic.count(NOVEMBER) == 5


async def test_all_that_crosses_a_metered_transport_is_counted():
    async with SimulatedNetwork(seed=1) as network:
        here, there = network.join(), network.join()
        ours, theirs = Meter(), Meter()
        served = MeteredTransport(there.transport, theirs)

        async def echo(stream: Stream) -> None:
            await stream.write(await stream.read_exactly(1000))

        await served.serve("/echo/1", echo)
        stream = await MeteredTransport(here.transport, ours).open(there.peer_id, "/echo/1")
        assert stream.remote == served.peer_id
        await stream.write(memoryview(bytearray(500 * 2)).cast("H"))
        await stream.read_into(memoryview(bytearray(1000)))
        await stream.close()
    assert (ours.num_bytes, theirs.num_bytes) == (2000, 2000)


async def obey(command: Command) -> AsyncIterator[Answer]:
    """A peer that echoes, and that goes away when it is told to leave."""
    yield Answer(f"{command.name} {command.for_s}", 1.0 if command.name != "show" else 0.0)
    if command.name == "pause":
        yield Answer("paused")


async def answers(path: Path, command: Command) -> list[Answer]:
    return await asyncio.to_thread(lambda: list(ask(path, command)))


async def listening(path: Path) -> asyncio.Task[None]:
    """A control socket that has begun to listen."""
    control = ControlSocket(path, obey)
    task = asyncio.create_task(control.run())
    async with asyncio.timeout(5.0):
        await control.listening.wait()
    return task


async def test_commands_reach_a_peer_and_its_answers_come_back(tmp_path: Path):
    folder = tmp_path / ("a folder whose name alone is longer than the address of a socket may be " + "x" * 40)
    path = socket_path(folder, tmp_path / "join.key")
    task = await listening(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await answers(path, Command("pause", 7200)) == [Answer("pause 7200", 1.0), Answer("paused")]
    assert await answers(path, Command("leave")) == [Answer("leave None", 1.0)]
    assert await asyncio.to_thread(running, folder) == {path: "show None"}
    with pytest.raises(WireError, match="commands are leave, pause, resume, show"):
        await answers(path, Command("shout"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not path.exists()


async def test_a_socket_of_a_killed_peer_is_no_peer_and_gives_way(tmp_path: Path):
    path = tmp_path / "join-00000000.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert running(tmp_path) == {}
    task = await listening(path)
    assert await asyncio.to_thread(running, tmp_path) == {path: "show None"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nonsense_is_answered_and_silence_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusion_p2p.peer.control_socket.ANSWER_S", 0.5)
    path = tmp_path / "join.sock"
    task = await listening(path)
    for said in (b"hello\n", b'{"command": "leave", "more": 1}\n', b'{"command": "pause", "for_s": true}\n', b"[" * 9000):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):  # what it did not read is thrown away with the connection
            assert (b"error" in await reader.read()) == (len(said) < 4096)
        writer.close()
    reader, silent = await asyncio.open_unix_connection(path)
    assert await reader.read() == b""
    silent.close()
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_WORDS = st.sampled_from(["command", "for_s", "pause", "x"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=200) | _JSON.map(lambda said: json.dumps(said).encode()))
def test_whatever_is_said_is_a_command_or_refused(line: bytes):
    try:
        command = decode_command(line)
    except WireError:
        return
    assert command.name in ("leave", "pause", "resume", "show")
    assert command.for_s is None or 0 < command.for_s < 1e8


async def test_no_place_for_a_socket_is_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    await ControlSocket(tmp_path / "file" / "join.sock", obey).run()
    assert "no commands are heard" in caplog.text


async def told(*arguments: str) -> int:
    return await asyncio.to_thread(exit_code_of, list(arguments))


async def test_the_command_line_finds_the_one_peer_and_names_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FUSION_STATE_DIR", str(tmp_path))
    assert await told("leave") == 2
    assert f"no peer of this user runs with the state directory {tmp_path}" in capsys.readouterr().err
    first = await listening(socket_path(tmp_path, tmp_path / "join.key"))
    assert await told("pause", "--for", "1h30m") == 0
    assert capsys.readouterr().out == "pause 5400.0\npaused\n"
    assert await told("leave") == 0
    assert capsys.readouterr().out == "leave None\nit has left\n"
    second = await listening(socket_path(tmp_path, tmp_path / "join-2.key"))
    assert await told("resume") == 2
    assert "2 peers run here, choose one with --identity FILE: show None; show None" in capsys.readouterr().err
    assert await told("resume", "--identity", str(tmp_path / "join-2.key")) == 0
    assert await told("show") == 0
    assert capsys.readouterr().out == "resume None\nshow None\nshow None\n"
    assert await told("resume", "--identity", str(tmp_path / "join-3.key")) == 2
    assert "no peer with the identity" in capsys.readouterr().err
    assert await told("pause", "--for", "soon") == 2
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


async def test_memory_that_others_take_is_no_longer_offered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_watch, "WATCH_S", 0.001)
    gib = 1 << 30
    free, idle, offers, looks = [8 * gib], [True], asyncio.Queue[int](), asyncio.Queue[None]()

    async def measure() -> int:
        return free[0]

    def is_idle() -> bool:
        looks.put_nowait(None)
        return idle[0]

    watching = asyncio.create_task(MemoryWatch(8 * gib, measure, is_idle, offers.put_nowait).run())
    async with asyncio.timeout(5.0):
        free[0] = 3 * gib
        assert await offers.get() == 3 * gib
        free[0] = 8 * gib
        assert await offers.get() == 8 * gib
        idle[0], free[0] = False, gib
        while not looks.empty():
            looks.get_nowait()
        for _ in range(3):
            await looks.get()
        assert offers.empty(), "its own slices took it"
    watching.cancel()
    assert not differs(8 * gib, 8 * gib - (700 << 20))
    assert not differs(1 << 30, (1 << 30) - (200 << 20))


async def test_caps_on_the_line_are_kept_and_announced():
    from fusion_p2p.peer.agent import announced_caps, keep_to  # imports torch and hivemind

    config = JoinConfig(bootstrap=("/ip4/192.0.2.7/tcp/1/p2p/x",), upload_mbit=8.0)
    bandwidth, caps = Bandwidth(), announced_caps(config)
    keep_to(bandwidth, caps)
    assert (caps.upload_bytes_per_s, caps.download_bytes_per_s) == (1e6, None)
    assert (bandwidth.up.bytes_per_s, bandwidth.down.bytes_per_s) == (1e6, None)
