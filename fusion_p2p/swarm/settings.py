"""Times of the swarm, all in seconds, all derived from the beat."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmSettings:
    """How often peers are heard and how long silence is borne. WAN is the default; TEST is the same ten times faster."""

    beat_s: float = 1.0
    """Between two beats of a peer to its coordinator."""
    random_beat_s: float = 5.0
    """Between two rounds of beats to peers chosen at random: how partitions find each other again."""
    random_beats: int = 2
    """Peers per such round; far fewer while everybody who is announced is also a member."""
    suspect_after_s: float = 3.0
    """Silence after which a peer is suspected: 3 beats, so that two lost ones are no suspicion."""
    confirm_s: float = 3.0
    """How long a second observer has to hear a suspect before it is evicted."""
    heard_lately_s: float = 15.0
    """Who was heard so recently counts for a majority: 3 random rounds, so that the dead stop blocking elections."""
    quiet_s: float = 3.0
    """After a start neither candidate nor voter, because a vote given before the restart is forgotten: one suspect time."""
    stagger_s: float = 0.5
    """Added per rank before a candidacy: longer than a round trip, so that the first candidate is done when the next wakes."""
    vote_s: float = 2.0
    """How long a candidate waits for votes, and a voter for the result of the vote it gave."""
    announce_s: float = 180.0
    """Between two announcements in the directory when nothing changed."""
    announcement_life_s: float = 600.0
    """Announcements expire after this long: 3 are missed before a living peer disappears."""
    settle_s: float = 5.0
    """A job that takes all free peers is planned when nobody new came for this long."""
    reserve_s: float = 30.0
    """Peers of a proposed plan are kept for its job this long, until their beats say that they hold it: the owner's lease."""
    waiting_s: float = 5.0
    """An owner that waits hears from the coordinator at least this often."""
    first_lookup_s: float = 1.0
    """Between two directory look-ups while the peer knows nobody; it grows twofold up to `lookup_s`."""
    lookup_s: float = 120.0
    """The coordinator tells who is here; look-ups tell how they are reached, and of whom that coordinator does not know."""
    lookup_as_follower_s: float = 300.0
    """The same for who follows a coordinator, which looks up for all: short of what is left of any announcement found."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s < self.suspect_after_s <= self.heard_lately_s:
            raise ConfigError("swarm times: need 0 < beat < suspect after <= heard lately")
        if self.quiet_s < self.suspect_after_s:
            raise ConfigError("swarm times: a restarted peer must be quiet for at least the suspect time")


WAN = SwarmSettings()
TEST = SwarmSettings(
    beat_s=0.1,
    random_beat_s=0.5,
    suspect_after_s=0.3,
    confirm_s=0.3,
    heard_lately_s=1.5,
    quiet_s=0.3,
    stagger_s=0.1,
    vote_s=0.2,
    announce_s=18.0,
    announcement_life_s=60.0,
    first_lookup_s=0.1,
    lookup_s=12.0,
    lookup_as_follower_s=30.0,
)
