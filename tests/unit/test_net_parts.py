"""The small pure parts of net/ and peer/: reasons of dials, ports, preflight, relay addresses, who may be dialled back."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from fusion_p2p.errors import ConfigError
from fusion_p2p.net.dialling import reason_of, reasons_by_address
from fusion_p2p.net.identity import Identity, seal
from fusion_p2p.net.ports import reserved_ports
from fusion_p2p.net.records import RECORD_DOMAIN, read_record, read_stamped, stamp
from fusion_p2p.peer import preflight
from fusion_p2p.peer.relay_child import RelayChild, RelayChildSettings

PEER = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
ONE, OTHER = "/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/2"


@pytest.mark.row(1)
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("dial tcp4 127.0.0.1:1: connect: connection refused", "refused: nothing listens there"),
        ("dial tcp4 10.0.0.1:2: i/o timeout", "no answer"),
        ("context deadline exceeded", "no answer"),
        ("dial tcp4: connect: no route to host", "no route to that host"),
        (
            f"failed to negotiate security protocol: peer id mismatch: expected X, but remote key matches {PEER}",
            f"other peer id: {PEER} answers there (its key has changed, or the address is old)",
        ),
        ("failed to negotiate security protocol: EOF", "the connection was cut"),
        ("error opening relay circuit: NO_RESERVATION (204)", "the relay does not know that peer"),
        ("something\nnew " + "x" * 500, "something new xxx"),
    ],
)
def test_what_the_daemon_says_becomes_a_reason(said: str, reason: str):
    assert reason_of(said).startswith(reason)
    assert len(reason_of(said)) <= 200


def test_each_address_keeps_its_own_reason():
    report = f"failed to dial: all dials failed\n  * [{ONE}] connection refused\n  * [{OTHER}] dial backoff"
    earlier = {OTHER: "no answer"}
    assert reasons_by_address(report, [ONE, OTHER], earlier) == {ONE: "refused: nothing listens there", OTHER: "no answer"}
    assert reasons_by_address(report, [OTHER], {}) == {OTHER: "it did not answer a moment ago"}
    assert reasons_by_address("failed to dial: no addresses", [ONE], {}) == {ONE: "failed to dial: no addresses"}


@pytest.mark.row(9)
def test_a_port_is_kept_from_others_but_not_from_our_own_daemon():
    with reserved_ports(["/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"]) as (tcp, udp):
        port = int(tcp.split("/")[4])
        assert port > 0
        assert udp.startswith("/ip4/127.0.0.1/udp/")
        assert not udp.startswith("/ip4/127.0.0.1/udp/0/")
        with pytest.raises(ConfigError, match=f"port {port}"), reserved_ports([tcp]):
            pass
        with socket.socket() as daemon:  # as p2pd listens
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            daemon.bind(("127.0.0.1", port))
            daemon.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    with reserved_ports([tcp]) as again:
        assert again == (tcp,)


@pytest.mark.row(10)
@pytest.mark.parametrize(("limits", "raised"), [((256, 4096), (1024, 4096)), ((4096, 4096), None), ((256, 512), ConfigError)])
def test_too_few_open_files_are_raised_or_named(
    limits: tuple[int, int], raised: tuple[int, int] | type[Exception] | None, monkeypatch: pytest.MonkeyPatch
):
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: changes.append(new))
    if isinstance(raised, type):
        with pytest.raises(raised, match="ulimit -n 1024"):
            preflight.check_machine()
    else:
        preflight.check_machine()
    assert changes == ([raised] if isinstance(raised, tuple) else [])


@pytest.mark.row(10)
def test_a_temp_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        preflight.check_machine()


def test_a_relay_on_all_hosts_is_dialled_where_its_node_is():
    settings = RelayChildSettings(
        listen="/ip4/0.0.0.0/tcp/0", identity_path=Path("key"), reservations=1, circuits=1, duration_s=1, num_bytes=1
    )
    relay = RelayChild(settings)
    own = [f"/ip4/127.0.0.1/tcp/5/p2p/{PEER}", f"/dns4/home.example.org/tcp/5/p2p/{PEER}", f"/ip6/::1/tcp/5/p2p/{PEER}"]
    assert relay.addresses(own) == ()
    relay._address = f"/ip4/0.0.0.0/tcp/7/p2p/{PEER}"
    assert relay.addresses(own) == (f"/dns4/home.example.org/tcp/7/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/7/p2p/{PEER}")
    relay._address = f"/ip4/127.0.0.1/tcp/7/p2p/{PEER}"
    assert relay.addresses(own) == (relay._address,)


@pytest.mark.row(39)
def test_a_stamp_binds_publisher_record_and_expiry():
    identity = Identity.from_seed(bytes(32))
    record = seal(identity, (7).to_bytes(8, "big") + b"content", domain=RECORD_DOMAIN)
    assert read_record(record) == (identity.peer_id, 7)
    assert read_stamped(stamp(identity, record, 1000.5), 1000.5) == (identity.peer_id, record)
