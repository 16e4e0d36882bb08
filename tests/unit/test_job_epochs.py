from __future__ import annotations

from fusion_p2p.ids import PeerId
from fusion_p2p.job import epochs
from fusion_p2p.job.epochs import (
    EpochBroke,
    EpochRuns,
    Epochs,
    PeerGone,
    PeerPrepared,
    PeerProgressed,
    PeerStarted,
    Phase,
    ProposalRefused,
    Proposed,
    RecordStart,
    SendAbort,
    SendPrepare,
    Tick,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
BOTH = frozenset((A, B))
PROPOSAL = Proposed(term=3, coordinator=C, base_epoch=0, peers=BOTH)


def drive(state: Epochs, *events: epochs.Event, now: float = 0.0) -> tuple[Epochs, list[epochs.Action]]:
    actions: list[epochs.Action] = []
    for event in events:
        state, new = epochs.step(state, event, now)
        actions += new
    return state, actions


def test_an_epoch_starts_when_all_are_prepared_and_runs_when_all_have_started() -> None:
    state, actions = drive(Epochs(), PROPOSAL, PeerPrepared(A, 1), PeerPrepared(A, 1))
    assert actions == [SendPrepare(1, BOTH)]
    state, actions = drive(state, PeerPrepared(B, 1))
    assert actions == [RecordStart(1, BOTH)]
    state, actions = drive(state, PeerStarted(B, 1), PeerStarted(A, 1))
    assert actions == [EpochRuns(1)]
    assert state.phase is Phase.RUNNING


def test_a_refusal_aborts_and_uses_the_number_up() -> None:
    state, actions = drive(Epochs(), PROPOSAL, PeerGone(B, "too little memory"))
    assert actions[-1] == SendAbort(1, frozenset((A,)), "b: too little memory", frozenset((B,)))
    state, actions = drive(state, Proposed(3, C, 1, BOTH))
    assert actions == [SendPrepare(2, BOTH)]


def test_silence_beyond_the_lease_aborts_and_names_who_was_silent() -> None:
    state, _ = drive(Epochs(), PROPOSAL, PeerPrepared(A, 1), now=10.0)
    assert drive(state, Tick(), now=39.0)[1] == []
    state, actions = drive(state, Tick(), now=40.0)
    assert actions == [SendAbort(1, BOTH, "no answer within 30 s from b", frozenset((B,)))]
    assert drive(state, PeerPrepared(B, 1), now=41.0)[1] == []


def test_a_peer_that_makes_progress_is_waited_for() -> None:
    state, _ = drive(Epochs(), PROPOSAL, now=0.0)
    state, _ = drive(state, PeerProgressed(A), PeerProgressed(C), now=25.0)
    assert drive(state, Tick(), now=54.0)[1] == []
    assert isinstance(drive(state, Tick(), now=55.0)[1][0], SendAbort)


def test_an_epoch_whose_start_is_written_down_is_not_aborted_but_broken() -> None:
    """Who has started it has no other state: taking it back would lose that."""
    state, _ = drive(Epochs(), PROPOSAL, PeerPrepared(A, 1), PeerPrepared(B, 1), PeerStarted(A, 1))
    state, actions = drive(state, PeerGone(B, "lost"))
    assert actions == [EpochBroke(1, "b: lost", frozenset((B,)))]
    assert drive(state, PeerStarted(B, 1), PeerGone(A, "lost"), Tick(), now=99.0)[1] == []
    assert drive(state, Proposed(3, C, 1, BOTH))[1] == [SendPrepare(2, BOTH)]


def test_proposals_of_older_terms_or_of_another_base_are_refused_with_a_reason() -> None:
    state, _ = drive(Epochs(), PROPOSAL, PeerPrepared(A, 1), PeerPrepared(B, 1), PeerGone(A, "left"))
    for proposal, reason in [
        (Proposed(2, A, 1, BOTH), "term 2 is older than term 3"),
        (Proposed(3, C, 0, BOTH), "built on epoch 0, but 1 is the newest"),
    ]:
        same, actions = drive(state, proposal)
        assert actions == [ProposalRefused(reason)]
        assert same == state


def test_a_term_counts_only_once_its_peers_were_ready() -> None:
    state, _ = drive(Epochs(), Proposed(1 << 52, A, 0, BOTH), PeerGone(B, "never heard of it"))
    assert drive(state, Proposed(3, C, 1, BOTH))[1] == [SendPrepare(2, BOTH)]


def test_nothing_is_accepted_while_an_epoch_is_being_prepared() -> None:
    state, _ = drive(Epochs(), PROPOSAL)
    assert drive(state, Proposed(9, A, 1, BOTH))[1] == [ProposalRefused("epoch 1 is being prepared")]
