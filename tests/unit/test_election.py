"""Election: votes, stickiness, stagger, hearsay, stepping down; and the safety of any order of messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm import node
from fusion_p2p.swarm.election import (
    LOT_STAGGERS,
    AnswerVote,
    AskVotes,
    CoordinatorGone,
    Elected,
    Election,
    Event,
    Followed,
    HeardCoordinator,
    Lost,
    Rumoured,
    SteppedDown,
    Tick,
    Token,
    ToldOfCoordinator,
    VoteAnswered,
    VoteAsked,
    begin,
    step,
)
from fusion_p2p.swarm.settings import WAN

A, B, C, D = (PeerId(name) for name in "abcd")
OTHERS = frozenset({B, C, D})


def awake(me: PeerId = A) -> Election:
    """A peer whose quiet time is over."""
    return begin(me, -100.0, WAN)


def after(state: Election, event: Event, now: float = 0.0) -> Election:
    return step(state, event, now, WAN)[0]


def refusal(state: Election, candidate: Token, now: float = 0.0) -> str | None:
    (answer,) = step(state, VoteAsked(candidate), now, WAN)[1]
    assert isinstance(answer, AnswerVote)
    return None if answer.granted else answer.reason


def test_a_peer_alone_is_a_swarm_of_one_once_it_has_listened() -> None:
    state = begin(A, 0.0, WAN)
    state, actions = step(state, Tick(frozenset(), 0), WAN.quiet_s - 0.1, WAN)
    assert actions == ()
    state, actions = step(state, Tick(frozenset(), 0), WAN.quiet_s, WAN)
    assert actions == (Elected(Token(1, A)),)
    assert state.coordinating


@pytest.mark.parametrize("number", range(20))
def test_two_that_stand_at_the_same_moments_do_not_do_so_for_ever(number: int) -> None:
    """Beats in bunches have the peers of a swarm look at the same moments, and after a partition two may have the same rank."""
    one, other = (PeerId(f"{name}{number}") for name in "ab")
    states = {one: awake(one), other: awake(other)}
    for tick in range(80):
        now = tick * 0.25
        asked = []
        for me, they in ((one, other), (other, one)):
            states[me], actions = step(states[me], Tick(frozenset({they}), 0), now, WAN)
            asked += [(me, they, action.term) for action in actions if isinstance(action, AskVotes)]
        for me, they, term in asked:
            states[they], answers = step(states[they], VoteAsked(Token(term, me)), now + 0.04, WAN)
            granted = any(isinstance(answer, AnswerVote) and answer.granted for answer in answers)
            states[me] = after(states[me], VoteAnswered(they, term, granted), now + 0.08)
        if any(state.coordinating for state in states.values()):
            return
    raise AssertionError("nobody elected in 20 s")


def test_a_majority_of_those_heard_lately_elects() -> None:
    state, actions = step(awake(), Tick(OTHERS, 0), 0.0, WAN)
    assert actions == (AskVotes(1, OTHERS),)
    state = after(state, VoteAnswered(B, 1, False))
    state = after(state, VoteAnswered(B, 1, True))
    state = after(state, VoteAnswered(B, 1, True))
    assert not state.coordinating, "the same vote counts once: 2 of 4 is no majority"
    state = after(state, VoteAnswered(PeerId("stranger"), 1, True))
    assert not state.coordinating
    _, actions = step(state, VoteAnswered(C, 1, True), 0.5, WAN)
    assert actions == (Elected(Token(1, A)),)
    _, actions = step(state, VoteAnswered(C, 1, True), WAN.vote_s + 0.1, WAN)
    assert actions == (), "a vote that comes too late is none"


def test_the_queue_of_candidates_is_staggered() -> None:
    third = 2 * WAN.stagger_s
    assert step(awake(), Tick(OTHERS, 2), -97.0 + third - 0.01, WAN)[1] == ()
    assert step(awake(), Tick(OTHERS, 2), -97.0 + third, WAN)[1] == (AskVotes(1, OTHERS),)


def test_a_candidate_that_does_not_win_tries_again_in_a_higher_term() -> None:
    state, _ = step(awake(), Tick(OTHERS, 0), 0.0, WAN)
    state, actions = step(state, Tick(OTHERS, 0), WAN.vote_s / 2, WAN)
    assert actions == ()
    state = after(state, VoteAnswered(B, 7, False), WAN.vote_s / 2)
    state, _ = step(state, Tick(OTHERS, 0), WAN.vote_s, WAN)
    assert state.candidacy is None or state.candidacy.term == 8
    latest = WAN.vote_s + LOT_STAGGERS * WAN.stagger_s
    for now in (latest - 1.0, latest):
        state = after(state, Tick(OTHERS, 0), now)
    assert state.candidacy is not None
    assert state.candidacy.term == 8


FOLLOWING = after(awake(), HeardCoordinator(Token(3, D)), 0.0)
VOTED = after(awake(), VoteAsked(Token(4, B)), 0.0)


@pytest.mark.parametrize(
    ("state", "candidate", "now", "says"),
    [
        (awake(), Token(1, B), 0.0, None),
        (begin(A, 0.0, WAN), Token(1, B), 1.0, "started a moment ago"),
        (FOLLOWING, Token(4, B), 1.0, "d coordinates"),
        (FOLLOWING, Token(4, B), 3.5, None),
        (FOLLOWING, Token(2, B), 3.5, "term 2 is over"),
        (VOTED, Token(4, B), 0.0, None),
        (VOTED, Token(4, C), 0.0, "voted for b in term 4"),
        (VOTED, Token(5, C), 0.0, None),
        (awake()._replace(coordinator=Token(2, A), term=2), Token(9, B), 99.0, "a coordinates"),
    ],
)
def test_votes(state: Election, candidate: Token, now: float, says: str | None) -> None:
    reason = refusal(state, candidate, now)
    assert (reason is None) if says is None else (reason is not None and says in reason)


def test_a_refusal_for_a_living_coordinator_names_it() -> None:
    (answer,) = step(FOLLOWING, VoteAsked(Token(9, B)), 1.0, WAN)[1]
    assert isinstance(answer, AnswerVote)
    assert answer.alive == Token(3, D)


def test_hearsay_earns_patience_but_refuses_no_vote() -> None:
    state = after(awake(), ToldOfCoordinator(Token(3, D)), 0.0)
    assert state.coordinator == Token(3, D)
    assert refusal(state, Token(4, B), 0.5) is None
    _, actions = step(state, Tick(OTHERS, 0), WAN.suspect_after_s + 0.1, WAN)
    assert actions == (Lost(Token(3, D), "not heard for 3 s"),)


def test_a_silent_coordinator_is_lost_and_hearsay_does_not_bring_it_back() -> None:
    state, actions = step(FOLLOWING, Tick(OTHERS, 0), WAN.suspect_after_s + 0.1, WAN)
    assert actions == (Lost(Token(3, D), "not heard for 3 s"),)
    assert step(state, ToldOfCoordinator(Token(3, D)), 4.0, WAN)[0].coordinator is None
    assert step(state, ToldOfCoordinator(Token(3, D), alive=True), 4.0, WAN)[1] == (Followed(Token(3, D)),)
    assert step(state, HeardCoordinator(Token(3, D)), 4.0, WAN)[1] == (Followed(Token(3, D)),)
    assert step(state, ToldOfCoordinator(Token(4, C)), 4.0, WAN)[1] == (Followed(Token(4, C)),)


def test_who_has_lost_a_coordinator_that_others_still_hear_asks_them_a_few_times_only() -> None:
    state, asked, now = after(awake(), HeardCoordinator(Token(3, D))), 0, 0.0
    while now < 1.0:  # as long as their next beat may take
        state, lost = step(state, CoordinatorGone(D), now, WAN)
        assert lost
        state, stood = step(state, Tick(OTHERS, 0), now, WAN)
        while not stood:
            now += 0.01
            assert now < 2.0
            state, stood = step(state, Tick(OTHERS, 0), now, WAN)
        asked += 1
        now += 0.01
        state = after(state, ToldOfCoordinator(Token(3, D), alive=True), now)
    assert 3 <= asked <= 5


def test_a_coordinator_of_a_lower_term_than_the_one_lost_is_asked_itself_once_a_beat() -> None:
    state, _ = step(FOLLOWING, Tick(OTHERS, 0), WAN.suspect_after_s + 0.1, WAN)
    told = ToldOfCoordinator(Token(2, B))
    state, actions = step(state, told, 4.0, WAN)
    assert actions == (Rumoured(Token(2, B)),)
    assert step(state, told, 4.9, WAN)[1] == ()
    assert step(state, told, 4.0 + WAN.beat_s, WAN)[1] == (Rumoured(Token(2, B)),)
    state, actions = step(state, HeardCoordinator(Token(2, B)), 4.1, WAN)
    assert actions == (Followed(Token(2, B)),)
    assert step(state, told, 9.0, WAN)[1] == ()


def test_a_coordinator_that_says_goodbye_is_replaced_at_once() -> None:
    state, actions = step(FOLLOWING, CoordinatorGone(D), 0.5, WAN)
    assert isinstance(actions[0], Lost)
    assert step(state, Tick(OTHERS, 0), 0.5, WAN)[1] == (AskVotes(4, OTHERS),)
    assert step(FOLLOWING, CoordinatorGone(B), 0.5, WAN)[1] == ()


@pytest.mark.row(13)
def test_the_lower_token_steps_down() -> None:
    low = awake()._replace(coordinator=Token(2, A), term=2)
    _, actions = step(low, ToldOfCoordinator(Token(2, B)), 0.0, WAN)
    assert actions == (SteppedDown(Token(2, A), "b coordinates in term 2"), Followed(Token(2, B)))
    high = awake()._replace(coordinator=Token(3, A), term=3)
    same, actions = step(high, HeardCoordinator(Token(2, B)), 0.0, WAN)
    assert actions == ()
    assert same.coordinating


def test_a_peer_that_slept_is_patient_first() -> None:
    state = after(FOLLOWING, Tick(OTHERS, 0), 0.5)
    state, actions = step(state, Tick(OTHERS, 0), 60.0, WAN)
    assert actions == ()
    assert step(state, Tick(OTHERS, 0), 61.0, WAN)[1] == ()
    assert state.coordinator == Token(3, D)
    assert refusal(state, Token(4, B), 61.0) is None


def test_who_voted_waits_for_the_result() -> None:
    assert step(VOTED, Tick(OTHERS, 0), WAN.vote_s - 0.1, WAN)[1] == ()
    waited = after(VOTED, Tick(OTHERS, 0), 1.0)
    assert step(waited, Tick(OTHERS, 0), WAN.vote_s, WAN)[1] == (AskVotes(5, OTHERS),)


def test_the_place_in_the_queue() -> None:
    """Standby before slice holders, reachable before relayed, longest here first; the fallen coordinator does not count."""
    state = node.begin(A, 50, -100.0, WAN)
    beats = [
        node.BeatArrived(B, 10, 1, True, None),
        node.BeatArrived(C, 60, 1, False, None),
        node.BeatArrived(D, 40, 1, False, None),
    ]
    for beat in beats:
        state, _ = node.step(state, beat, 0.0, WAN)
    assert node.candidate_rank(state, node.Tick(False, frozenset())) == 1
    assert node.candidate_rank(state, node.Tick(True, frozenset())) == 3
    assert node.candidate_rank(state, node.Tick(False, frozenset({D}))) == 0
    assert node.candidate_rank(state, node.Tick(False, frozenset({A}))) == 2
    fallen = replace(state, election=state.election._replace(fallen=Token(1, D)))
    assert node.candidate_rank(fallen, node.Tick(False, frozenset())) == 0


PEERS = tuple(PeerId(f"p{i}") for i in range(5))
INDEX = st.integers(0, len(PEERS) - 1)


class ElectionMachine(RuleBasedStateMachine):
    """Five peers that know each other; clocks jump, messages are lost, late or doubled. Nobody restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.states = {peer: begin(peer, -10.0, WAN) for peer in PEERS}
        self.mail: list[tuple[PeerId, Event]] = []
        self.winners: dict[int, set[PeerId]] = {}

    def apply(self, peer: PeerId, event: Event) -> None:
        before = self.states[peer]
        self.states[peer], actions = step(before, event, self.now, WAN)
        assert self.states[peer].term >= before.term, "terms never fall"
        for action in actions:
            if isinstance(action, AskVotes):
                self.mail += [(voter, VoteAsked(Token(action.term, peer))) for voter in sorted(action.voters)]
            elif isinstance(action, AnswerVote):
                self.mail.append((action.candidate, VoteAnswered(peer, action.term, action.granted)))
                if action.alive is not None:
                    self.mail.append((action.candidate, ToldOfCoordinator(action.alive, alive=True)))
            elif isinstance(action, Elected):
                self.winners.setdefault(action.token.term, set()).add(peer)

    @rule(seconds=st.floats(0.01, 1.4), index=INDEX, rank=st.integers(0, 4))
    def tick(self, seconds: float, index: int, rank: int) -> None:
        self.now += seconds
        peer = PEERS[index]
        self.apply(peer, Tick(frozenset(PEERS) - {peer}, rank))

    @rule(index=INDEX)
    def everybody_ticks(self, index: int) -> None:
        for place in range(len(PEERS)):
            peer = PEERS[(index + place) % len(PEERS)]
            self.apply(peer, Tick(frozenset(PEERS) - {peer}, place))

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 1 << 16), keep=st.booleans())
    def deliver(self, choice: int, keep: bool) -> None:
        index = choice % len(self.mail)
        peer, event = self.mail[index] if keep else self.mail.pop(index)
        self.apply(peer, event)

    @precondition(lambda self: self.mail)
    @rule()
    def deliver_all(self) -> None:
        mail, self.mail = self.mail, []
        for peer, event in mail:
            self.apply(peer, event)

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 1 << 16))
    def lose(self, choice: int) -> None:
        self.mail.pop(choice % len(self.mail))

    @rule(source=INDEX, other=INDEX)
    def beat(self, source: int, other: int) -> None:
        token = self.states[PEERS[source]].coordinator
        if token is not None and source != other:
            first_hand = token.peer == PEERS[source]
            self.apply(PEERS[other], HeardCoordinator(token) if first_hand else ToldOfCoordinator(token))

    @rule(index=INDEX, gone=INDEX)
    def goodbye(self, index: int, gone: int) -> None:
        self.apply(PEERS[index], CoordinatorGone(PEERS[gone]))

    @invariant()
    def one_winner_per_term(self) -> None:
        assert all(len(winners) == 1 for winners in self.winners.values()), self.winners

    @invariant()
    def nobody_coordinates_without_having_won(self) -> None:
        for peer, state in self.states.items():
            if state.coordinator is not None:
                assert state.coordinator.peer in self.winners.get(state.coordinator.term, set()), (peer, state)


TestElectionMachine = ElectionMachine.TestCase
TestElectionMachine.settings = hypothesis_settings(derandomize=True, deadline=None, max_examples=120, stateful_step_count=60)
