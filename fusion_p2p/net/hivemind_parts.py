"""The parts of hivemind that we use, without those that we do not.

hivemind's own `__init__` loads averaging, experts and optimisers, and with them scipy: as much time and memory again as all the
rest of a peer besides torch. So its package is put in place empty, and only the modules below are loaded into it.
"""

# ruff: noqa: E402  (the package has to be in its place before anything is loaded into it)
from __future__ import annotations

import functools
import importlib.util
import sys
from types import SimpleNamespace

import base58

MAX_IDS = 4096
"""Whose base58 forms are remembered."""


def _put_in_place() -> None:
    spec = None if "hivemind" in sys.modules else importlib.util.find_spec("hivemind")
    if spec is not None:
        sys.modules["hivemind"] = importlib.util.module_from_spec(spec)


_put_in_place()

from hivemind.dht.node import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import datastructures
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr

# Every id that is read is written in base58 at once, in pure Python: thousands in a look-up, of the same few peers.
datastructures.base58 = SimpleNamespace(
    b58encode=functools.lru_cache(MAX_IDS)(base58.b58encode), b58decode=functools.lru_cache(MAX_IDS)(base58.b58decode)
)

__all__ = [
    "P2P",
    "DHTNode",
    "DHTRecord",
    "HivemindMultiaddr",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "p2pd_pb2",
    "read_pbmsg_safe",
    "use_hivemind_log_handler",
]
