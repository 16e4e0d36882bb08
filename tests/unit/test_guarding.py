"""Keeping copies of slices elsewhere: scenes by hand, and a machine that tries everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, booleans, data, integers, sampled_from, sets

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job import guarding
from fusion_p2p.job.guard_choice import Candidate
from fusion_p2p.job.guard_terms import (
    Action,
    AskCopy,
    Began,
    Broken,
    Copy,
    Deciding,
    Durable,
    Event,
    FetchingBy,
    GoBack,
    HeldBy,
    KeptBy,
    Lost,
    NotHeldBy,
    Part,
    Seen,
    SendGuard,
    Tick,
)
from fusion_p2p.job.guarding import AVOID_S, KEPT_S, RETRY_S, STILL_S, TICK_S, Guarding, describe

A, B, C = map(PeerId, ("worker-a", "worker-b", "worker-c"))
S, T = map(PeerId, ("spare-s", "spare-t"))
MIB = 1 << 20
LARGE = 1 << 34
CUT = (0, 0, 1, 1)
TWO = (Part(frozenset({A}), MIB), Part(frozenset({B}), 2 * MIB))


def digest(index: int, step: int) -> Digest:
    return Digest(f"{index:032x}{step:032x}")


def spare(peer: PeerId, free_bytes: int = LARGE) -> Candidate:
    return Candidate(peer, True, free_bytes)


def at_work(peer: PeerId) -> Candidate:
    return Candidate(peer, False, LARGE)


def drive(state: Guarding, *events: Event, now: float = 0.0) -> tuple[Guarding, list[Action]]:
    happened: list[Action] = []
    for event in events:
        state, actions = guarding.step(state, event, now)
        happened += actions
    return state, happened


def kept(index: int, step: int, peer: PeerId) -> KeptBy:
    return KeptBy(peer, index, step, digest(index, step))


def held(index: int, step: int, peer: PeerId) -> HeldBy:
    return HeldBy(peer, index, step, digest(index, step))


def begun(*candidates: Candidate, every: int | None = None) -> Guarding:
    return drive(Guarding(every=every), Began(CUT, TWO, 0), Seen(candidates))[0]


def covered(step: int = 1, now: float = 0.0) -> Guarding:
    """Spare S holds both slices as of a step."""
    state, _ = drive(begun(spare(S)), Deciding(step), kept(0, step, A), kept(1, step, B), now=now)
    return drive(state, held(0, step, S), held(1, step, S), now=now)[0]


def test_a_copy_goes_from_each_slice_to_a_spare_and_is_durable_when_all_are_held() -> None:
    state, actions = drive(begun(spare(S), spare(T)), Deciding(1))
    assert actions == [AskCopy(1)]
    state, actions = drive(state, kept(1, 1, B), kept(0, 1, A))
    assert actions == [SendGuard(T, 1, 1, digest(1, 1), (B,)), SendGuard(S, 0, 1, digest(0, 1), (A,))]  # spread
    state, actions = drive(state, held(0, 1, S))
    assert actions == []
    state, actions = drive(state, held(1, 1, T))
    assert actions == [Durable(1)]
    assert state.round is None
    assert state.copies == {Copy(0, 1, S), Copy(1, 1, T)}
    assert describe(state) == "copies of step 1: 2 of 2 slices held by 2 spares"


def test_while_an_epoch_is_broken_no_copy_is_ousted() -> None:
    state, _ = drive(begun(spare(S), every=1), Deciding(1), kept(0, 1, A), kept(1, 1, B), held(0, 1, S), held(1, 1, S))
    state, _ = drive(state, Deciding(4), kept(0, 4, A), kept(1, 4, B), held(0, 4, S))
    state, actions = drive(state, Broken(), held(1, 4, S), Tick(), now=1.0)
    assert actions == []
    assert {copy.step for copy in state.copies} == {1, 4}

    on, actions = drive(state, Began(CUT, TWO, 4), now=2.0)
    assert actions == [Durable(4)]
    assert {copy.step for copy in on.copies} == {4}
    back, actions = drive(state, Began(CUT, TWO, 1), now=2.0)
    assert actions == [GoBack(1, frozenset({S}))]
    assert {copy.step for copy in back.copies} == {1}
    assert back.round is None


def test_without_a_spare_the_peers_guard_each_other() -> None:
    state, _ = drive(begun(at_work(A), at_work(B)), Deciding(1))
    state, actions = drive(state, kept(0, 1, A), kept(1, 1, B))
    assert actions == [SendGuard(B, 0, 1, digest(0, 1), (A,)), SendGuard(A, 1, 1, digest(1, 1), (B,))]
    state, _ = drive(state, held(0, 1, B), held(1, 1, A))
    assert describe(state) == "copies of step 1: 2 of 2 slices held by 2 peers"
    assert state.guards == frozenset()


def test_nothing_is_copied_when_nobody_could_hold_it() -> None:
    assert drive(begun(), Deciding(1))[1] == []
    assert drive(begun(spare(S, MIB)), Deciding(1))[1] == []
    assert describe(begun()) == "copies: nobody could hold one"


def test_the_next_round_waits_for_its_interval_and_a_new_spare_does_not() -> None:
    state = covered()
    waiting_s = state.interval_s
    assert 1.0 < waiting_s < 30.0
    later = state
    for number, now in enumerate((0.5, 1.0, 1.5, 2.0, waiting_s - 0.5), 2):
        later, actions = drive(later, Deciding(number), now=now)
        assert actions == []
    assert drive(later, Deciding(7), now=waiting_s + 0.5)[1] == [AskCopy(7)]
    assert drive(state, Deciding(2), now=waiting_s + 0.5)[1] == []  # what steps take without a copy is not known yet
    state, _ = drive(state, Seen((spare(S), spare(T))))
    assert drive(state, Deciding(2), now=0.1)[1] == []  # the budget holds for it, too
    assert drive(state, Deciding(2), now=1.0)[1] == [AskCopy(2)]


def test_a_slice_without_a_copy_is_more_urgent_than_a_new_spare() -> None:
    state = replace(covered(), took_s=0.0)
    new, _ = drive(state, Seen((spare(S), spare(T))))
    bare, _ = drive(state, Lost(S))
    assert bare.interval_s < new.interval_s < state.interval_s


def test_every_n_steps_and_never_are_taken_literally() -> None:
    state = begun(spare(S), every=3)
    assert [bool(drive(state, Deciding(step))[1]) for step in range(1, 7)] == [False, False, True, False, False, True]
    state, _ = drive(state, Deciding(3))
    assert drive(state, Deciding(6))[1] == []  # the last round is on its way
    assert drive(begun(spare(S), every=0), Deciding(1), Deciding(2), now=1e6)[1] == []


def test_a_guard_that_refuses_or_is_lost_is_replaced() -> None:
    state, _ = drive(begun(spare(S), spare(T)), Deciding(1), kept(0, 1, A), kept(1, 1, B))
    state, actions = drive(state, NotHeldBy(S, 0, 1))
    assert actions == [SendGuard(T, 0, 1, digest(0, 1), (A,))]
    state, actions = drive(state, held(0, 1, T), Lost(T))
    assert actions == []  # S has just refused, nobody else is here: the round ends without
    assert state.round is None
    assert state.copies == frozenset()


def test_other_bytes_than_those_that_were_kept_are_no_copy() -> None:
    state, _ = drive(begun(spare(S), spare(T)), Deciding(1), kept(0, 1, A), kept(1, 1, B))
    state, actions = drive(state, HeldBy(S, 0, 1, digest(0, 9)))
    assert actions == [SendGuard(T, 0, 1, digest(0, 1), (A,))]
    assert state.copies == frozenset()


def test_a_member_that_keeps_nothing_in_time_ends_the_round() -> None:
    state, _ = drive(begun(spare(S)), Deciding(1), kept(0, 1, A), held(0, 1, S))
    state, actions = drive(state, Tick(), now=KEPT_S - 1)
    assert state.round is not None
    state, actions = drive(state, Tick(), now=KEPT_S + 1)
    assert (state.round, actions) == (None, [])
    assert state.copies == {Copy(0, 1, S)}  # of use when slice 0 is lost: the others keep theirs


def test_a_guard_that_moves_is_borne_and_one_that_does_not_is_replaced() -> None:
    state, _ = drive(begun(spare(S), spare(T)), Deciding(1), kept(0, 1, A), kept(1, 1, B))
    for now in range(1, 200):
        state, actions = drive(state, FetchingBy(S, (0,), 1, now), FetchingBy(T, (1,), 1, min(now, 20)), Tick(), now=now)
        if actions:
            break
    assert actions == [SendGuard(S, 1, 1, digest(1, 1), (B,))]
    assert 20 + STILL_S <= now <= 20 + STILL_S + 2
    for later in range(now, now + 100):  # it fetches the one after the other: what waits moves, too
        state, actions = drive(state, FetchingBy(S, (0, 1), 1, later), Tick(), now=later)
        assert actions == []


def test_an_errand_that_its_guard_does_not_know_of_was_lost() -> None:
    state, _ = drive(begun(spare(S), spare(T)), Deciding(1), kept(0, 1, A), kept(1, 1, B))
    sent = []
    for now in range(1, 13):
        state, actions = drive(state, FetchingBy(S, (), 1, now), FetchingBy(T, (1,), 1, now), Tick(), now=now)
        sent += actions
    assert sent == [SendGuard(T, 0, 1, digest(0, 1), (A,))]


def test_an_owner_that_was_held_up_itself_gives_up_nobody() -> None:
    state, _ = drive(begun(spare(S), spare(T)), Deciding(1), kept(0, 1, A), kept(1, 1, B), Tick())
    state, actions = drive(state, Tick(), now=300.0)
    assert actions == []
    for now in range(301, 316):
        state, more = drive(state, Tick(), now=now)
        actions += more
    assert {type(action) for action in actions} == {SendGuard}


def test_a_round_that_failed_is_made_again_soon_then_less_and_less_often() -> None:
    state, begun_at = begun(spare(S), every=100), []
    for now in range(100, 400):
        state, actions = drive(state, Deciding(now), now=now)
        if actions:
            begun_at.append(now)
            state, _ = drive(state, kept(0, now, A), kept(1, now, B), NotHeldBy(S, 0, now), NotHeldBy(S, 1, now), now=now)
            assert state.round is None
    pauses = [after - before for before, after in itertools.pairwise(begun_at)]
    assert pauses[:2] == [AVOID_S, AVOID_S]
    assert pauses[2:5] == [4 * RETRY_S, 8 * RETRY_S, 16 * RETRY_S]


def test_a_copy_that_is_lost_is_made_again_early() -> None:
    state, _ = drive(covered(), Seen((spare(S), spare(T))))
    state = replace(state, early=False)
    assert drive(state, Deciding(2), now=1.0)[1] == []
    assert drive(state, Lost(S), Deciding(2), now=1.0)[1] == [AskCopy(2)]
    assert drive(state, NotHeldBy(S, 0, 1), Deciding(2), now=1.0)[1] == [AskCopy(2)]


def test_after_a_loss_copies_of_the_steps_before_are_kept_and_later_ones_go() -> None:
    state, _ = drive(covered(), Seen((spare(S), spare(T))))
    state, _ = drive(state, Deciding(9), kept(1, 9, B), kept(0, 9, A), held(1, 9, T), now=50.0)
    moved = (TWO[0], Part(frozenset({S}), 2 * MIB))
    state, actions = drive(state, Lost(B), Began(CUT, moved, 1), now=50.0)
    assert actions[-1] == GoBack(1, frozenset({T}))  # S executes: it hears it from the new epoch
    assert state.copies == {Copy(0, 1, S)}  # S executes slice 1 now
    assert state.round is None
    assert drive(state, Deciding(2), now=52.0)[1] == [AskCopy(2)]


def test_another_cut_makes_all_copies_worthless() -> None:
    state, actions = drive(covered(4), Began((0, 1, 1, 1), TWO, 7))
    assert state.copies == frozenset()
    assert actions == []
    assert state.guards == frozenset()


def test_a_change_of_codecs_does_not_disturb_a_round() -> None:
    state, _ = drive(begun(spare(S)), Deciding(1), kept(0, 1, A))
    state, _ = drive(state, Began(CUT, TWO, 2), kept(1, 1, B), held(0, 1, S))
    assert drive(state, held(1, 1, S))[1] == [Durable(1)]


def test_losses_shorten_the_interval_and_departures_do_not() -> None:
    state = covered()
    usual = state.interval_s
    assert drive(state, Lost(A, left=True))[0].interval_s == usual
    for _ in range(30):
        state, _ = drive(state, Lost(A))
    assert state.interval_s < usual / 3


def test_old_copies_stay_until_the_new_ones_are_complete() -> None:
    state = replace(covered(), early=True)
    state, _ = drive(state, Deciding(9), kept(0, 9, A), kept(1, 9, B), held(0, 9, S), now=50.0)
    assert state.copies == {Copy(0, 1, S), Copy(1, 1, S), Copy(0, 9, S)}
    assert describe(state) == "copies of step 1: 2 of 2 slices held by 1 spare"
    state, _ = drive(state, held(1, 9, S), now=50.0)
    assert state.copies == {Copy(0, 9, S), Copy(1, 9, S)}


PEERS = [A, B, C, S, T]


class GuardingMachine(RuleBasedStateMachine):
    """Whatever happens: one round at a time, no guard on what it executes, nothing durable before all is held elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.now, self.step = Guarding(), 0.0, 0
        self.parts: tuple[Part, ...] = ()
        self.open: int | None = None
        self.broken = False
        self.sent: dict[tuple[int, int], PeerId] = {}
        self.told: set[tuple[int, int, PeerId]] = set()
        """What guards said that they hold, and have not lost since."""

    def feed(self, event: Event) -> None:
        before = self.state.round
        self.state, actions = guarding.step(self.state, event, self.now)
        if self.state.round is None or (before is not None and self.state.round != before and isinstance(event, Began)):
            self.open = None if self.state.round is None else self.open
        for action in actions:
            self.check(action, in_flight=before is not None)

    def check(self, action: Action, *, in_flight: bool) -> None:
        match action:
            case AskCopy(step):
                assert not in_flight
                assert step == self.step
            case SendGuard(peer, index, step, sent_digest, sources):
                assert peer not in self.parts[index].members
                assert sources
                assert sent_digest == digest(index, step)
                assert self.state.round is None or self.state.round.step == step
                self.sent[index, step] = peer
            case Durable(step):
                assert not self.broken
                for index, part in enumerate(self.parts):
                    assert any((index, step, peer) in self.told for peer in PEERS if peer not in part.members)
            case GoBack(peers=peers):
                assert peers.isdisjoint(self.state.members)

    @rule(first=sampled_from(PEERS), others=sets(sampled_from(PEERS), max_size=2), back=integers(0, 3), same=booleans())
    def begin(self, first: PeerId, others: set[PeerId], back: int, same: bool) -> None:
        self.step = max(0, self.step - back)
        if not same or not self.parts:
            self.parts = (Part(frozenset({first}), MIB), Part(frozenset(others or {first}), 2 * MIB))
        self.told = {told for told in self.told if told[1] <= self.step}
        self.broken = False
        self.feed(Began(CUT, self.parts, self.step))

    @precondition(lambda self: self.parts)
    @rule()
    def break_(self) -> None:
        self.broken = True
        self.feed(Broken())

    @precondition(lambda self: self.parts and not self.broken)
    @rule()
    def decide(self) -> None:
        self.step += 1
        self.feed(Deciding(self.step))

    @precondition(lambda self: self.state.round is not None)
    @rule(index=integers(0, 1), peer=sampled_from(PEERS))
    def keep(self, index: int, peer: PeerId) -> None:
        assert self.state.round is not None
        self.feed(kept(index, self.state.round.step, peer))

    @precondition(lambda self: self.sent)
    @rule(choice=data(), right=booleans())
    def hold(self, choice: DataObject, right: bool) -> None:
        index, step = choice.draw(sampled_from(sorted(self.sent)))
        peer = self.sent[index, step]
        if right:
            self.told.add((index, step, peer))
        self.feed(held(index, step, peer) if right else HeldBy(peer, index, step, digest(7, 7)))

    @precondition(lambda self: self.sent)
    @rule(choice=data())
    def refuse(self, choice: DataObject) -> None:
        index, step = choice.draw(sampled_from(sorted(self.sent)))
        peer = self.sent[index, step]
        self.told.discard((index, step, peer))
        self.feed(NotHeldBy(peer, index, step))

    @rule(peers=sets(sampled_from(PEERS)))
    def see(self, peers: set[PeerId]) -> None:
        self.feed(Seen(tuple(Candidate(peer, peer in (S, T), LARGE) for peer in sorted(peers))))

    @rule(peer=sampled_from(PEERS))
    def lose(self, peer: PeerId) -> None:
        self.told = {told for told in self.told if told[2] != peer}
        self.feed(Lost(peer))

    @rule(seconds=sampled_from([0.1, 1.0, 20.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def copies_are_what_was_told_and_elsewhere(self) -> None:
        for copy in self.state.copies:
            assert (copy.slice, copy.step, copy.peer) in self.told
            assert copy.step <= self.step
            assert copy.peer not in self.parts[copy.slice].members

    @invariant()
    def no_round_waits_for_nothing(self) -> None:
        if self.state.round is not None:
            assert self.broken or any(errand.is_open for errand in self.state.round.errands)
            for errand, part in zip(self.state.round.errands, self.parts, strict=True):
                assert errand.guard not in part.members

    def teardown(self) -> None:
        """An epoch runs, and nobody says a word any more: whoever is asked is given up in turn."""
        if self.broken:
            self.begin(A, {B}, 0, same=True)
        for _ in range(len(PEERS) * 15 + 30):
            self.now += TICK_S
            self.feed(Tick())
        assert self.state.round is None


TestGuardingMachine = GuardingMachine.TestCase
TestGuardingMachine.settings = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=40)
