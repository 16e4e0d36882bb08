"""Finding the first peer: every address tried at once, again and again, with one reason per address.

Works on any `Transport`; needs no clock but the event loop's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fusion_p2p.errors import AddressError, ConfigError, NetworkError, SwarmUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import PeerAddress, parse_peer_address
from fusion_p2p.net.base import Transport

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 5.0
STRAGGLERS_S = 1.0
"""After the first answer the other addresses get this much longer."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 8.0
MAX_REMEMBERED = 32

Report = Callable[[str], None]


async def reach_first(
    transport: Transport, given: Sequence[str], remembered: Sequence[str], *, timeout_s: float, report: Report
) -> list[PeerAddress]:
    """The addresses that answered, at least one. SwarmUnreachable names the reason of each after `timeout_s`."""
    targets = [parse_peer_address(address, own=transport.peer_id) for address in given]
    spares = [target for target in _valid(remembered, transport.peer_id) if target not in targets]
    reasons: dict[str, str] = {}
    backoff_s = FIRST_BACKOFF_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                reached, failed = await _round(transport, [*targets, *spares])
                for target in targets:
                    reason = failed.get(target.text)
                    if not reached and reason is not None and reasons.get(target.text) != reason:
                        report(f"bootstrap {target.text}: {reason}")
                reasons |= failed
                if reached:
                    return reached
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    except TimeoutError:
        said = "; ".join(f"{target.text}: {reasons.get(target.text, 'no answer')}" for target in targets or spares)
        raise SwarmUnreachable(f"no bootstrap answered within {timeout_s:g} s: {said or 'no address was given'}") from None


def remembered_peers(path: Path) -> list[str]:
    """Addresses kept by `remember_peers`; none when the file is missing or damaged."""
    try:
        addresses = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [address for address in addresses if isinstance(address, str)] if isinstance(addresses, list) else []


def remember_peers(path: Path, addresses: Iterable[str]) -> None:
    """Keep some addresses for the next start; a full disk is no reason to stop."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(list(dict.fromkeys(addresses))[:MAX_REMEMBERED]))
        part.replace(path)
    except OSError as error:
        logger.warning("cannot remember peers in %s: %s", path, error.strerror)


def _valid(addresses: Sequence[str], own: PeerId) -> list[PeerAddress]:
    found = []
    for address in addresses[:MAX_REMEMBERED]:
        try:
            found.append(parse_peer_address(address, own=own))
        except AddressError:
            continue
    return found


async def _round(transport: Transport, targets: Sequence[PeerAddress]) -> tuple[list[PeerAddress], dict[str, str]]:
    """Dial all at once: who answered, and why the others did not."""
    dials = {asyncio.ensure_future(transport.connect([target.text], timeout_s=DIAL_TIMEOUT_S)): target for target in targets}
    reached, failed, timeout_s = [], {}, None
    pending = set(dials)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for dial in done:
                error = dial.exception()
                if error is None:
                    reached.append(dials[dial])
                    timeout_s = STRAGGLERS_S
                elif isinstance(error, NetworkError | ConfigError):
                    failed[dials[dial].text] = str(error).removeprefix(f"{dials[dial].text}: ")
                else:
                    raise error
    finally:
        for dial in pending:
            dial.cancel()
        if pending:
            await asyncio.wait(pending)
    return reached, failed
