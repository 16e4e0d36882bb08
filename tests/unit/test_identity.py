"""The identity file and sealed records."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import ConfigError, WireError
from fusion_p2p.net.identity import SEAL_BYTES, Identity, seal, unseal


def test_identity_is_created_once_and_only_its_user_may_read_it(tmp_path: Path):
    path = tmp_path / "state" / "identity.key"
    first = Identity.load_or_create(path)
    assert first.peer_id.startswith("12D3Koo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 68
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_peer_id_is_the_one_libp2p_derives(tmp_path: Path):
    """A key of the libp2p specification (peer-ids, test vectors) and the id that go-libp2p gives it."""
    key = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    path = tmp_path / "key"
    path.write_bytes(key)
    assert Identity.load_or_create(path).peer_id == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@pytest.mark.parametrize("data", [b"", b"not a key", bytes(68), bytes.fromhex("08001240") + bytes(64)])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, data: bytes):
    path = tmp_path / "identity.key"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"identity\.key"):
        Identity.load_or_create(path)


def test_a_damaged_key_is_refused(tmp_path: Path):
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged"):
        Identity.load_or_create(path)


def test_a_directory_in_its_place_is_one_sentence(tmp_path: Path):
    with pytest.raises(ConfigError, match="--identity"):
        Identity.load_or_create(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_place_is_one_sentence(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="--identity"):
        Identity.load_or_create(tmp_path / "deep" / "identity.key")


def test_a_sealed_record_names_its_signer(tmp_path: Path):
    identity = Identity.load_or_create(tmp_path / "key")
    record = seal(identity, b"hello", domain="test")
    assert len(record) == SEAL_BYTES + 5
    assert unseal(record, domain="test") == (identity.peer_id, b"hello")


@pytest.mark.row(39)
def test_a_seal_is_bound_to_domain_signer_and_payload(tmp_path: Path):
    ours, other = (Identity.load_or_create(tmp_path / name) for name in ("ours", "other"))
    record = seal(ours, b"hello", domain="test")
    with pytest.raises(WireError, match="other domain"):
        unseal(record, domain="other domain")
    for forged in (record[:-1] + b"!", other.public_key + record[32:], record[: SEAL_BYTES - 1], b""):
        with pytest.raises(WireError):
            unseal(forged, domain="test")


@given(st.binary(max_size=200))
def test_noise_is_never_a_sealed_record(data: bytes):
    with pytest.raises(WireError):
        unseal(data, domain="test")
