"""Membership and election together, without I/O: peers that start, die, return, lose messages and get them late or twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusion_p2p.ids import PeerId
from fusion_p2p.peer.presence_messages import changes_since, sample_of
from fusion_p2p.swarm import election, membership, node
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.membership import Listed, RosterTold
from fusion_p2p.swarm.settings import WAN

PEERS = tuple(PeerId(f"p{i}") for i in range(4))
INDEX = st.integers(0, len(PEERS) - 1)
SETTLED_S = WAN.heard_lately_s + WAN.suspect_after_s + 2 * WAN.vote_s + 3 * WAN.random_beat_s + 3 * WAN.suspect_after_s


class SwarmMachine(RuleBasedStateMachine):
    """Four peers. What is on its way may be delivered in any order, twice, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.nodes: dict[PeerId, node.Node] = {}
        self.beats = 0
        self.mail: list[tuple[PeerId, Callable[[], None]]] = []
        for index in range(len(PEERS)):
            self.start(index, 0)

    def apply(self, peer: PeerId, event: node.Event) -> tuple[node.Action, ...]:
        before = self.nodes[peer]
        self.nodes[peer], actions = node.step(before, event, self.now, WAN)
        after = self.nodes[peer]
        assert after.incarnation >= before.incarnation
        assert after.membership.version >= before.membership.version
        for action in actions:
            self.act(peer, action)
        return actions

    def act(self, peer: PeerId, action: node.Action) -> None:
        match action:
            case election.AskVotes(term, voters):
                for voter in sorted(voters):
                    self.send(voter, lambda voter=voter, term=term: self.vote(voter, Token(term, peer)))
            case election.Elected():
                for other in PEERS:
                    self.beat_to(peer, other)
            case election.Followed(token) | election.Rumoured(token):
                self.beat_to(peer, token.peer)
            case membership.Suspected(suspect):
                reached = suspect in self.nodes
                self.send(peer, lambda: self.apply(peer, (node.SuspectAnswered if reached else node.SuspectDenied)(suspect)))
            case _:
                pass

    def send(self, target: PeerId, deliver: Callable[[], object]) -> None:
        self.mail.append((target, lambda: deliver() and None))

    def vote(self, voter: PeerId, candidate: Token) -> None:
        answers = [a for a in self.apply(voter, node.VoteRequestArrived(candidate)) if isinstance(a, election.AnswerVote)]
        (answer,) = answers
        reply = node.VoteReplyArrived(voter, answer.term, answer.granted, answer.alive)
        self.send(candidate.peer, lambda: self.apply(candidate.peer, reply))

    def beat_to(self, peer: PeerId, target: PeerId) -> None:
        if peer == target:
            return
        self.beats += 1
        state = self.nodes[peer]
        beat = node.BeatArrived(peer, state.incarnation, self.beats, False, state.election.coordinator)
        known, asked_at = state.membership.followed_version(target), self.now
        self.send(target, lambda: self.answer(target, beat, known, asked_at))

    def answer(self, target: PeerId, beat: node.BeatArrived, known: int, asked_at: float) -> None:
        self.apply(target, beat)
        state = self.nodes[target]
        roster = None
        if state.election.coordinating:
            told = changes_since(state.membership, known, self.now, beat.peer)
            entries = told.members
            roster = RosterTold(target, told.since, told.version, (), frozenset(told.gone), complete=not told.more)
        else:
            entries = sample_of(state.membership, self.now, beat.peer, WAN.heard_lately_s)
        listed = tuple(Listed(PeerId(e.peer), e.incarnation, e.holds, e.heard_ago_s) for e in entries)
        over = state.membership.superseded_by(beat.peer, beat.incarnation)
        reply = node.ReplyArrived(target, state.incarnation, False, state.election.coordinator, over, listed, roster, asked_at)
        self.send(beat.peer, lambda: self.apply(beat.peer, reply))

    def deliver_one(self, index: int) -> None:
        target, deliver = self.mail[index]
        if target in self.nodes:
            deliver()

    @rule(index=INDEX, clock_s=st.integers(-100, 100))
    def start(self, index: int, clock_s: int) -> None:
        """Also after a crash, with the clock set back or ahead."""
        if PEERS[index] not in self.nodes:
            incarnation = max(0, int(1000 * (self.now + clock_s)))
            self.nodes[PEERS[index]] = node.begin(PEERS[index], incarnation, self.now, WAN)

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(index=INDEX, polite=st.booleans())
    def end(self, index: int, polite: bool) -> None:
        state = self.nodes.pop(PEERS[index], None)
        if polite and state is not None:
            for other in self.nodes:
                self.send(other, lambda o=other: self.apply(o, node.LeaveArrived(PEERS[index], state.incarnation)))

    @rule(seconds=st.sampled_from((0.1, 0.3, 1.0, 4.0, 20.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=INDEX)
    def tick(self, index: int) -> None:
        if PEERS[index] in self.nodes:
            self.apply(PEERS[index], node.Tick(False, frozenset()))

    @rule(seconds=st.integers(1, 8))
    def all_is_well_for(self, seconds: int) -> None:
        for _ in range(4 * seconds):
            self.live_on()

    @rule(source=INDEX, other=INDEX)
    def beat(self, source: int, other: int) -> None:
        if PEERS[source] in self.nodes:
            self.beat_to(PEERS[source], PEERS[other])

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 1 << 16), keep=st.booleans())
    def deliver(self, choice: int, keep: bool) -> None:
        index = choice % len(self.mail)
        self.deliver_one(index)
        if not keep:
            del self.mail[index]

    @precondition(lambda self: self.mail)
    @rule(choice=st.integers(0, 1 << 16))
    def lose(self, choice: int) -> None:
        del self.mail[choice % len(self.mail)]

    def live_on(self) -> None:
        """A quarter of a second in which all messages arrive."""
        self.now += 0.25
        for peer in PEERS:
            if peer in self.nodes:
                self.apply(peer, node.Tick(False, frozenset()))
                self.beat_as_they_do(peer)
        while self.mail:
            self.deliver_one(0)
            del self.mail[0]

    def beat_as_they_do(self, peer: PeerId) -> None:
        leader = self.nodes[peer].election.coordinator
        if self.now % 1 < 0.25 and leader is not None:
            self.beat_to(peer, leader.peer)
        if self.now % (5 if leader is not None else 1) < 0.25:
            for other in PEERS:
                self.beat_to(peer, other)

    @invariant()
    def nobody_believes_in_the_gone_or_in_itself(self) -> None:
        for peer, state in self.nodes.items():
            assert peer not in state.membership.members
            for other, member in state.membership.members.items():
                assert not state.membership.is_gone(other, member.incarnation)
                assert other not in state.membership.departed

    def teardown(self) -> None:
        """Once faults stop, one coordinator whom all follow, and everybody is known."""
        self.mail = []
        for _ in range(int(4 * SETTLED_S)):
            self.live_on()
        tokens = {state.election.coordinator for state in self.nodes.values()}
        assert len(tokens) == 1, tokens
        assert next(iter(tokens)) is not None
        for peer, state in self.nodes.items():
            lately = state.membership.heard_since(self.now - WAN.heard_lately_s)
            assert lately == frozenset(self.nodes) - {peer}, (peer, lately)


TestSwarmMachine = SwarmMachine.TestCase
TestSwarmMachine.settings = hypothesis_settings(derandomize=True, deadline=None, max_examples=50, stateful_step_count=30)


A, B = PeerId("a"), PeerId("b")


def following(now: float) -> node.Node:
    """A peer that hears B coordinate."""
    state = node.begin(A, 1, now - 100, WAN)
    return node.step(state, node.BeatArrived(B, 1, 7, False, Token(3, B)), now, WAN)[0]


def test_a_beat_that_comes_late_takes_nothing_back() -> None:
    state, actions = node.step(following(0.0), node.BeatArrived(B, 1, 6, False, None), 0.5, WAN)
    assert state.election.coordinator == Token(3, B)
    assert actions == (membership.Ignored(B, "a later beat came first"),)
    state, _ = node.step(state, node.BeatArrived(B, 1, 8, False, None), 0.6, WAN)
    assert state.election.coordinator is None


def test_an_answer_from_before_an_election_takes_nothing_back() -> None:
    reply = node.ReplyArrived(B, 1, False, None, None, (), asked_at=-0.1)
    state, _ = node.step(following(0.0), reply, 0.5, WAN)
    assert state.election.coordinator == Token(3, B)
    state, _ = node.step(state, replace(reply, asked_at=0.4), 0.6, WAN)
    assert state.election.coordinator is None
