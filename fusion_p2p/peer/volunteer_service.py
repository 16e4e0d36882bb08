"""Carries out what a volunteer wants of its peer: commands, signals and caps (`peer.volunteer` decides)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from fusion_p2p.clock import Clock
from fusion_p2p.device.power import on_battery
from fusion_p2p.peer import volunteer
from fusion_p2p.peer.control_socket import Answer, Command
from fusion_p2p.peer.traffic import MonthlyTraffic
from fusion_p2p.peer.volunteer import Allowed, Mode, Volunteer
from fusion_p2p.wire.swarm_messages import Holding, PeerState

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks at what the volunteer allows: nobody minds seconds, and an idle peer should cost next to nothing."""
COUNT_S = 10.0
"""Between two looks at the month's traffic."""
LEAVING_S = 5.0
"""What saying goodbye takes at most."""


class Work(Protocol):
    """What has to be known of the work this peer does, and how it is given away."""

    def holding(self) -> Holding | None:
        """The slices executed now."""

    def describe(self) -> str:
        """What this peer does, in one line."""

    async def drain(self, reason: str, timeout_s: float) -> bool:
        """Have the slices taken over; True when nothing is held any more."""

    def close(self, reason: str) -> None:
        """Give up what is held still, and take nothing new until `reopen`."""

    def reopen(self) -> None:
        """Take slices again."""


def local_time(clock: Clock) -> datetime:
    """The time of day here, aware of its zone."""
    return datetime.fromtimestamp(clock.wall(), UTC).astimezone()


class Farewell:
    """Between the signals and the peer: what the first signal asks for."""

    def __init__(self) -> None:
        self.leave: Callable[[], float] = lambda: 0.0
        """Begins to leave; seconds until the process will have ended by itself, 0 when nothing keeps it."""

    def asked(self) -> float:
        """A signal asks this process to end."""
        return self.leave()


class VolunteerService:
    """One volunteer's wishes. `run` until cancelled; `gone` is set when the process has nothing left to do."""

    def __init__(
        self,
        allowed: Allowed,
        work: Work,
        announce: Callable[[PeerState], None],
        traffic: MonthlyTraffic,
        clock: Clock,
        leave_process: Callable[[], None],
        name: str,
    ) -> None:
        """`leave_process` asks this process to end, as Ctrl+C does: that comes back as `leave`. name: of this peer."""
        self._state = Volunteer(allowed)
        self._drain_timeout_s = allowed.drain_timeout_s
        self._work, self._announce, self._traffic, self._clock = work, announce, traffic, clock
        self._leave_process, self._name = leave_process, name
        self._month_bytes = 0
        self._counted_at = -COUNT_S
        self._group: asyncio.TaskGroup | None = None
        self.changed = asyncio.Event()
        """Set whenever `describe` says something new."""
        self.gone = asyncio.Event()

    async def run(self) -> None:
        """Look at the clock, the battery and the traffic until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    self._count()
                    self._step(volunteer.Looked(on_battery(), self._month_bytes))
                    await asyncio.sleep(self._clock.pause_s(LOOK_S))
        finally:
            self._traffic.count(self._now())

    def describe(self) -> str:
        """What this peer does, in one line: paused, draining, or its work."""
        return volunteer.describe(self._state, self._now()) or self._draining() or self._work.describe()

    def leave(self) -> float:
        """Begin to leave. Seconds that handing over may take; 0: nothing is held, the process may end at once."""
        if self._group is None or self._work.holding() is None or not self._drain_timeout_s:
            return 0.0
        self._step(volunteer.LeaveAsked())
        return self._drain_timeout_s

    async def obey(self, command: Command) -> AsyncIterator[Answer]:
        """A command of the volunteer, and what comes of it."""
        match command.name:
            case "pause":
                self._step(volunteer.PauseAsked(None if command.for_s is None else timedelta(seconds=command.for_s)))
                if self._state.mode is Mode.HANDING_OVER and self._work.holding() is not None:
                    yield Answer(self.describe(), self._drain_timeout_s)
                await self._handed_over()
            case "resume":
                self._step(volunteer.ResumeAsked())
            case "leave":
                self._leave_process()
                yield Answer(f"leaving: {self._to_hand_over()}", self._drain_timeout_s + LEAVING_S)
                await asyncio.Event().wait()  # the end of the connection tells that this process has gone
        yield Answer(f"{self._name}: {self.describe()}")

    async def _handed_over(self) -> None:
        while self._state.mode is Mode.HANDING_OVER:
            self.changed.clear()
            await self.changed.wait()

    def _draining(self) -> str | None:
        if self._state.mode not in (Mode.HANDING_OVER, Mode.LEAVING):
            return None
        if self._work.holding() is None:
            return f"draining: {self._to_hand_over()}"
        again = "; Ctrl+C again leaves at once" if self._state.mode is Mode.LEAVING else ""
        then = f", then paused: {self._state.reason.described(self._now())}" if self._state.reason is not None else ""
        return f"draining: {self._to_hand_over()} (at most {self._drain_timeout_s:g} s{again}){then}"

    def _to_hand_over(self) -> str:
        holding = self._work.holding()
        if holding is None:
            return "nothing is left to hand over"
        slices = ", ".join(map(str, holding.slices))
        return f"handing over slice {slices}" if slices else "letting go of a job"

    def _count(self) -> None:
        if self._clock.now() - self._counted_at >= COUNT_S:
            self._counted_at = self._clock.now()
            self._month_bytes = self._traffic.count(self._now())

    def _now(self) -> datetime:
        return local_time(self._clock)

    def _step(self, event: volunteer.Event) -> None:
        before = self._state
        self._state, actions = volunteer.step(self._state, event, self._now())
        for action in actions:
            self._act(action)
        if self._state.mode is not before.mode:
            self.changed.set()

    def _act(self, action: volunteer.Action) -> None:
        match action:
            case volunteer.Announce(state):
                self._announce(state)
            case volunteer.HandOver(reason):
                if self._group is not None:
                    self._group.create_task(self._hand_over(reason))
            case volunteer.Resume():
                self._work.reopen()
            case volunteer.Go():
                self.gone.set()

    async def _hand_over(self, reason: str) -> None:
        if not await self._work.drain(reason, self._drain_timeout_s):
            log.warning("nobody took the slices over within %g s", self._drain_timeout_s)
        if self._state.mode is Mode.HANDING_OVER:  # who leaves takes leave of its owner when everything else has ended
            self._work.close(reason)
        self._step(volunteer.HandedOver())
