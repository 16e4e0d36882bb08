"""The connections of a daemon to peers: dialled by the ways we know, and streams on them.

p2pd finds ways by itself, too, but none through a relay, and it tries addresses that swallow everything for 5 s. What it
failed to dial it refuses to dial again for 5 s, and for longer after some more failures: so we knock first (`knocking.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from fusion_p2p.errors import PeerUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.net.dialling import BACKOFF, lasts, reason_of, reasons_by_address
from fusion_p2p.net.hivemind_control import ControlSocket, DaemonGone, DaemonRefused, RawStream
from fusion_p2p.net.knocking import knock
from fusion_p2p.net.ways import Ways

REUSE_TIMEOUT_S = 2.0
"""For a stream over a connection that is said to be there."""
STALE_CONNECTION = "connection failed"
"""What p2pd says of a connection that is closed, and that it would list as open for 2 s more."""
WILLING_S = 0.2
"""How often p2pd is asked again to dial what it does not want to dial again yet."""
MET_LATELY_S = 120.0
MEET_AGAIN_S = 5.0
MEET_AGAIN_PEERS = 64
MEET_AGAIN_AT_ONCE = 16


class Connections:
    """Opens streams. `control` gives the socket of the daemon of the moment."""

    def __init__(self, control: Callable[[], ControlSocket]) -> None:
        self._control = control
        self.ways = Ways()

    async def open(self, peer: PeerId, protocol: str, timeout_s: float) -> RawStream:
        """A stream over the connection there is, or else over a new one by the way we know. PeerUnreachable."""
        dials = self.ways.to(peer)
        try:
            if dials:
                if (stream := await self._open_connected(peer, protocol)) is not None:
                    return stream
                await self.dial(peer, dials, timeout_s)
            return await self._control().open(peer, protocol)
        except DaemonRefused as error:
            if "protocols not supported" in str(error):
                raise PeerUnreachable(f"{peer} does not serve {protocol}") from None
            raise PeerUnreachable(f"{peer} cannot be reached: {reason_of(str(error))}") from None
        except DaemonGone as error:
            raise PeerUnreachable(f"{peer}: {error}") from None

    async def dial(self, peer: PeerId, dials: Sequence[str], timeout_s: float) -> None:
        """Connect to a peer at any of these addresses. PeerUnreachable says why not, per address."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        knocked = await knock(dials, timeout_s)
        reasons, worth = dict(knocked.reasons), knocked.worth_dialling
        try:
            async with asyncio.timeout_at(deadline):
                if worth:
                    await self._connect(peer, worth)
                    return
        except TimeoutError:
            reasons |= dict.fromkeys(worth, f"no answer within {timeout_s:g} s")
        except DaemonRefused as error:
            said = reasons_by_address(str(error), worth, self.ways.reasons)
            self.ways.failed(said)
            reasons |= said
        except DaemonGone as error:
            reasons |= dict.fromkeys(worth, str(error))
        raise PeerUnreachable("; ".join(f"{dial}/p2p/{peer}: {reasons[dial]}" for dial in dials))

    async def disconnect(self, peer: PeerId) -> None:
        """Drop the connections to a peer, so that the next dial is a fresh one."""
        with contextlib.suppress(DaemonRefused, DaemonGone):
            await self._control().disconnect(peer)

    async def meet_again(self, now: float) -> None:
        """From a new daemon, dial those with whom there were streams: theirs remember that we were gone, and wait."""
        places = asyncio.Semaphore(MEET_AGAIN_AT_ONCE)

        async def dial(peer: PeerId) -> None:
            async with places:
                with contextlib.suppress(PeerUnreachable):
                    await self.dial(peer, self.ways.to(peer), MEET_AGAIN_S)

        met = self.ways.met_since(now - MET_LATELY_S)
        await asyncio.gather(*(dial(peer) for peer in met[:MEET_AGAIN_PEERS]))

    async def _connect(self, peer: PeerId, dials: Sequence[str]) -> None:
        """Have p2pd dial. Something listens there, so what it does not want to repeat yet is asked of it until it does."""
        while True:
            try:
                await self._control().connect(peer, dials)
            except DaemonRefused as error:
                if BACKOFF not in str(error) or any(lasts(self.ways.reasons.get(dial, "")) for dial in dials):
                    raise
                await asyncio.sleep(WILLING_S)
            else:
                return

    async def _open_connected(self, peer: PeerId, protocol: str) -> RawStream | None:
        """A stream over the connection there is; None when there is none, or it is gone and p2pd does not know it yet."""
        control = self._control()
        if not await control.is_connected(peer):
            return None
        try:
            async with asyncio.timeout(REUSE_TIMEOUT_S):
                return await control.open(peer, protocol)
        except TimeoutError:
            return None
        except DaemonRefused as error:
            if STALE_CONNECTION not in str(error):
                raise
        await control.disconnect(peer)
        return None
