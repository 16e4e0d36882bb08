"""Who may fetch states of a run from the peers that hold some of them; the owner says it, and says it anew when it changes."""

from __future__ import annotations

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.owner.links import Links
from fusion_p2p.wire.job_messages import Admit

ADMITTED = "admit"


class Admissions:
    """What was said last to the peers of one run."""

    def __init__(self, job: JobId, incarnation: int, links: Links) -> None:
        self._job, self._incarnation, self._links = job, incarnation, links
        self._admitted: frozenset[PeerId] = frozenset()

    def admit(self, peers: frozenset[PeerId], *, again: bool = False) -> None:
        """Let these fetch, and nobody else. It is said to all that are linked when it is new, or `again`."""
        if peers == self._admitted and not again:
            return
        self._admitted = peers
        order = Admit(job=self._job, incarnation=self._incarnation, peers=tuple(sorted(peers)))
        for peer in self._links.peers:
            self._links.say(peer, order, until_settled=ADMITTED)
