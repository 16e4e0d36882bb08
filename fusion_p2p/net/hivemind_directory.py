"""`Directory` on hivemind's DHT: `DHTNode` in our own event loop, on the transport's daemon.

Records are spread over NUM_KEYS keys by a hash of the peer id (one key breaks silently at 4 MiB); the subkey is the peer id.
Every node that stores or reads a record checks its seals (`records.py`). hivemind's own checks are too strict for homes
(it refuses 3 s of clock error and peers that cannot be dialled) and are left out; a relayed peer only asks, it stores nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.hivemind_daemon import Daemon
from fusion_p2p.net.hivemind_parts import DHTNode, DHTRecord, PeerID, RecordValidatorBase
from fusion_p2p.net.hivemind_transport import HivemindTransport
from fusion_p2p.net.identity import Identity
from fusion_p2p.net.records import MAX_LIFETIME_S, MAX_STAMPED_BYTES, read_record, read_stamped, stamp
from fusion_p2p.wire.messages import unpack

logger = logging.getLogger(__name__)


def _is_not_of_a_lookup(record: logging.LogRecord) -> bool:
    """hivemind's look-ups leave tasks behind that wait for their end; asyncio complains of each when it is collected."""
    message = record.getMessage()
    return not (message.startswith("Task was destroyed but it is pending!") and "coro=<Event.wait()" in message)


logging.getLogger("asyncio").addFilter(_is_not_of_a_lookup)

NUM_KEYS = 16
BEAM = 10
"""Nodes asked for each key, the nearest ones: twice as many as store it."""
OPERATION_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 3.0
"""For one question to one node."""
START_TIMEOUT_S = 5.0
SHUTDOWN_TIMEOUT_S = 1.0
MIN_EXPIRY_GAIN_S = 0.001
"""The DHT keeps the record that expires last, so a replacement must expire later than what it replaces."""


class SealValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Refuses records that are not their subkey's own."""

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey = unpack(record.subkey, 256)
            value = unpack(record.value, MAX_STAMPED_BYTES + 16)
            if not isinstance(value, bytes) or record.expiration_time > time.time() + MAX_LIFETIME_S:
                return False
            publisher, _ = read_stamped(value, record.expiration_time)
        except WireError as error:
            logger.debug("directory record refused: %s", error)
            return False
        return bool(subkey == publisher)


class HivemindDirectory:
    """A `Directory` on a `DHTNode`. Made by `hivemind_directory`."""

    def __init__(self, network: str, identity: Identity, transport: HivemindTransport) -> None:
        self._network = network
        self._identity = identity
        self._transport = transport
        self._node: DHTNode | None = None
        self._ready = False
        self._entries: set[PeerId] = set()
        self._expires_at = 0.0
        self._newest: dict[PeerId, int] = {}
        self.found: Mapping[PeerId, bytes] = {}
        """By the last look-up, whoever wanted it."""

    async def start(self, daemon: Daemon) -> None:
        """Begin on a daemon, or go on on a new one with what the node knew."""
        self._ready, previous = False, self._node
        try:
            async with asyncio.timeout(START_TIMEOUT_S):  # hivemind waits for ever when its daemon goes meanwhile
                node = await self._create(daemon, previous)
        except TimeoutError:
            raise NetworkError("the local network daemon p2pd does not take the directory's services") from None
        if previous is not None:
            node.protocol.storage = previous.protocol.storage
        self._node, self._ready = node, True
        await self.join(self._entries)

    async def _create(self, daemon: Daemon, previous: DHTNode | None) -> DHTNode:
        return await DHTNode.create(
            p2p=daemon.p2p,
            node_id=previous.node_id if previous else None,
            client_mode=self._transport.is_relayed,
            record_validator=SealValidator(),
            strict=False,
            wait_timeout=CALL_TIMEOUT_S,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
        )

    async def join(self, peers: Iterable[PeerId]) -> int:
        """Meet the DHT through connected peers; how many of them answered."""
        node, peers = self._running(), list(peers)
        self._entries.update(peers)
        answers = await asyncio.gather(*(node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))
        if any(answers):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await node.find_nearest_nodes([node.node_id])
        return sum(answer is not None for answer in answers)

    async def announce(self, record: bytes, *, lifetime_s: float) -> None:
        signer, _ = read_record(record)
        if signer != self._identity.peer_id or not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise ValueError(f"a directory publishes its own peer's records, for at most {MAX_LIFETIME_S:g} s")
        self._expires_at = max(time.time() + lifetime_s, self._expires_at + MIN_EXPIRY_GAIN_S)
        value = stamp(self._identity, record, self._expires_at)
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                stored = await self._running().store(
                    self._key_of(signer),
                    value,
                    self._expires_at,
                    subkey=str(signer),
                    exclude_self=self._transport.is_relayed,
                    beam_size=BEAM,
                )
                # hivemind reports the last node asked, which says no when another node passed the record on to it already.
                stored = stored or record == (await self._lookup([self._key_of(signer)])).get(signer)
        except TimeoutError:
            stored = False
        if not stored:
            raise NetworkError(
                "nobody in the directory stored our announcement: no other node answers, or its clock is far off"
            )

    async def lookup(self) -> Mapping[PeerId, bytes]:
        try:
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                self.found = await self._lookup([self._key(index) for index in range(NUM_KEYS)])
        except TimeoutError:
            raise NetworkError(f"the directory did not answer within {OPERATION_TIMEOUT_S:g} s") from None
        return self.found

    async def _lookup(self, keys: Sequence[bytes]) -> dict[PeerId, bytes]:
        found = await self._running().get_many(keys, sufficient_expiration_time=float("inf"), beam_size=BEAM)
        records: dict[PeerId, bytes] = {}
        for key in keys:
            entry = found.get(key)
            if entry is not None and isinstance(entry.value, dict):
                records |= self._read(entry.value)
        return records

    async def close(self) -> None:
        if self._node is not None and self._transport.daemon.alive:
            with contextlib.suppress(TimeoutError):  # hivemind waits for ever when its daemon goes meanwhile
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._node.shutdown()

    def _running(self) -> DHTNode:
        if self._node is None or not self._ready:
            raise NetworkError("the directory is being restarted with the local network daemon")
        return self._node

    def _read(self, entries: Mapping[object, object]) -> dict[PeerId, bytes]:
        """The valid and newest among the entries of one key; a peer's older record than one seen before is left out."""
        records: dict[PeerId, bytes] = {}
        for entry in entries.values():
            value, expires_at = entry.value, entry.expiration_time  # type: ignore[attr-defined]
            try:
                peer, record = read_stamped(value, expires_at)
                _, sequence = read_record(record)
            except WireError:
                continue
            if sequence >= self._newest.get(peer, 0):
                self._newest[peer] = sequence
                records[peer] = record
        return records

    def _key_of(self, peer: PeerId) -> bytes:
        return self._key(hashlib.blake2b(peer.encode(), digest_size=8).digest()[0] % NUM_KEYS)

    def _key(self, index: int) -> bytes:
        return f"fusion_p2p/{self._network}/{index}".encode()


@contextlib.asynccontextmanager
async def hivemind_directory(
    network: str, identity: Identity, transport: HivemindTransport
) -> AsyncIterator[HivemindDirectory]:
    """A running directory on a running transport; follows it when its daemon is restarted."""
    directory = HivemindDirectory(network, identity, transport)
    await directory.start(transport.daemon)
    transport.on_restart(directory.start)
    try:
        yield directory
    finally:
        await directory.close()
