"""Who a peer is: one Ed25519 key in a file that p2pd and py-libp2p read too, and records sealed with it.

The file is libp2p's `PrivateKey` protobuf in go's 64-byte form (key type Ed25519, then seed and public key); the peer id is the
base58 of the identity multihash of the `PublicKey` protobuf (libp2p specs, peer-ids).

A sealed record is `public key (32) | signature (64) | payload`. The signature covers a domain name and the peer id besides the
payload, so that a record of one kind cannot be shown as another's, nor one peer's as another's.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fusion_p2p.errors import ConfigError, WireError
from fusion_p2p.ids import PeerId

KEY_BYTES = 32
SIGNATURE_BYTES = 64
SEAL_BYTES = KEY_BYTES + SIGNATURE_BYTES
"""How much longer a sealed record is than its payload."""

_PRIVATE_KEY_PREFIX = bytes.fromhex("08011240")
"""Protobuf: key type 1 (Ed25519), then 64 bytes of data."""
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash of 36 bytes, holding a protobuf: key type 1, then 32 bytes of data."""
_IDENTITY_FILE_BYTES = len(_PRIVATE_KEY_PREFIX) + 2 * KEY_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and the peer id that follows from it."""

    peer_id: PeerId
    _key: Ed25519PrivateKey

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path`, which is created (mode 0600) when there is none. ConfigError when it cannot be used."""
        try:
            if not path.exists():
                _create(path)
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"identity file {path}: {error.strerror}; give another place with --identity or make it readable and writable"
            ) from None
        key = _decode(data, path)
        return cls(peer_id_of(key.public_key().public_bytes_raw()), key)

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity that 32 bytes determine: for simulations and tests, which write no files."""
        key = Ed25519PrivateKey.from_private_bytes(seed)
        return cls(peer_id_of(key.public_key().public_bytes_raw()), key)

    def sign(self, data: bytes) -> bytes:
        """A 64-byte Ed25519 signature of `data`. Prefer `seal`, which names what is signed."""
        return self._key.sign(data)

    @property
    def seed(self) -> bytes:
        """The 32 private bytes, for the relay's own libp2p."""
        return self._key.private_bytes_raw()

    @property
    def public_key(self) -> bytes:
        """The 32 bytes of the public key."""
        return self._key.public_key().public_bytes_raw()


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id that belongs to 32 bytes of Ed25519 public key."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def seal(identity: Identity, payload: bytes, *, domain: str) -> bytes:
    """`payload` signed for one purpose; SEAL_BYTES longer."""
    signature = identity.sign(_signed_bytes(identity.peer_id, payload, domain))
    return identity.public_key + signature + payload


def unseal(record: bytes, *, domain: str) -> tuple[PeerId, bytes]:
    """Who sealed a record, and its payload. WireError when the signature does not fit it, its signer and its domain."""
    if len(record) < SEAL_BYTES:
        raise WireError(f"sealed record of {len(record)} bytes is shorter than its seal")
    public_key, signature, payload = record[:KEY_BYTES], record[KEY_BYTES:SEAL_BYTES], record[SEAL_BYTES:]
    signer = peer_id_of(public_key)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed_bytes(signer, payload, domain))
    except (InvalidSignature, ValueError):
        raise WireError(f"sealed record: the signature is not that of {signer} for {domain}") from None
    return signer, payload


def _signed_bytes(signer: PeerId, payload: bytes, domain: str) -> bytes:
    return b"\0".join((b"fusion_p2p", domain.encode(), signer.encode(), payload))


def _create(path: Path) -> None:
    """Write a new key so that a reader, another creator or a crash never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    data = _PRIVATE_KEY_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)
    except FileExistsError:
        pass  # another process was first: its key is the identity
    finally:
        part.unlink()


def _decode(data: bytes, path: Path) -> Ed25519PrivateKey:
    if len(data) != _IDENTITY_FILE_BYTES or not data.startswith(_PRIVATE_KEY_PREFIX):
        raise ConfigError(
            f"identity file {path} does not hold a 64-byte Ed25519 key of libp2p (it has {len(data)} bytes); "
            "move it away to get a new identity, or give another file with --identity"
        )
    seed, public_key = data[-2 * KEY_BYTES : -KEY_BYTES], data[-KEY_BYTES:]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes_raw() != public_key:
        raise ConfigError(f"identity file {path} is damaged: its public key does not belong to its private key; restore it")
    return key
