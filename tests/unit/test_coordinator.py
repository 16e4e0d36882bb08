"""The coordinator's decisions: who waits for what, who gets which peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.swarm.coordinator import (
    MAX_JOBS,
    MOST_SPARES,
    Action,
    Event,
    Jobs,
    Look,
    MakePlan,
    NotImproved,
    NotPlanned,
    OwnerGone,
    Planned,
    Refuse,
    Registered,
    Seat,
    Stay,
    Wait,
    Wish,
    step,
)
from fusion_p2p.swarm.settings import WAN

ONE, TWO = JobId("11" * 16), JobId("22" * 16)
PURPOSES: tuple[Literal["begin", "mend", "improve"], ...] = ("begin", "mend", "improve")
OWNER, OTHER = PeerId("owner"), PeerId("other")
A, B, C, D = (PeerId(name) for name in "abcd")


def seat(peer: PeerId, joined_at: float = 0.0, flops: float = 1.0, **more: object) -> Seat:
    return replace(Seat(peer, joined_at, flops, None), **more)  # type: ignore[arg-type]


def wish(job: JobId = ONE, peers: int | None = None, owner: PeerId = OWNER, incarnation: int = 1) -> Registered:
    return Registered(Wish(job, owner, incarnation, peers))


def play(*events: tuple[float, Event], state: Jobs | None = None) -> tuple[Jobs, list[Action]]:
    actions: list[Action] = []
    state = state or Jobs()
    for now, event in events:
        state, more = step(state, event, now, WAN)
        actions += more
    return state, actions


def look(*seats: Seat, job: JobId = ONE, since: float = 0.0) -> Look:
    return Look(job, seats, since)


@pytest.mark.parametrize(
    ("wanted", "now", "seats", "since", "expected"),
    [
        (None, 9.0, (), 0.0, "nobody can take a slice: 0 peers free, 0 busy or unfit"),
        (None, 4.9, (seat(A),), 0.0, "1 peer here, until nobody new has come for 5 s"),
        (None, 5.0, (seat(A),), 0.0, (A,)),
        (None, 9.0, (seat(A), seat(B, 6.0)), 0.0, "2 peers here, until nobody new has come for 5 s"),
        (None, 9.0, (seat(A),), 6.0, "1 peer here, until nobody new has come for 5 s"),
        (None, 11.0, (seat(A), seat(B, 6.0, flops=9.0)), 0.0, (B, A)),
        (3, 0.0, (seat(A), seat(B)), 0.0, "3 peers wanted: 2 peers free, 0 busy or unfit"),
        (3, 0.0, (seat(A), seat(B), seat(C, holds=TWO)), 0.0, "3 peers wanted: 2 peers free, 1 busy or unfit"),
        (3, 0.0, (seat(A), seat(B), seat(C, unusable="is paused")), 0.0, "3 peers wanted: 2 peers free, 1 busy or unfit"),
        (3, 0.0, (seat(A), seat(B), seat(C, holds=ONE)), 0.0, (A, B, C)),
        (2, 0.0, (seat(A), seat(B, flops=3.0), seat(C, flops=2.0)), 0.0, (B, C)),
    ],
)
def test_when_a_job_is_planned(
    wanted: int | None, now: float, seats: tuple[Seat, ...], since: float, expected: str | tuple[PeerId, ...]
) -> None:
    _, actions = play((0.0, wish(peers=wanted)), (now, look(*seats, since=since)))
    (action,) = actions
    assert (action.reason if isinstance(action, Wait) else action.peers if isinstance(action, MakePlan) else None) == expected


@pytest.mark.row(20)
def test_who_is_left_out_is_told_why() -> None:
    seats = (seat(A), seat(B, unusable="is paused"), seat(C, holds=TWO), seat(PeerId("d"), flops=0.5))
    _, actions = play((0.0, wish(peers=1)), (9.0, look(*seats)))
    (action,) = actions
    assert isinstance(action, MakePlan)
    assert dict(action.left_out) == {
        B: "is paused",
        C: "works for job 22222222",
        "d": "the owner asked for 1 peers only",
    }


def test_the_next_job_gets_what_is_free() -> None:
    seats = (seat(A), seat(B), seat(C))
    state, _ = play((0.0, wish(peers=2)), (9.0, look(*seats)), (9.0, Planned(ONE, frozenset({A, B}))))
    state, actions = play((10.0, wish(TWO, owner=OTHER)), (10.0, look(*seats, job=TWO)), state=state)
    assert isinstance(actions[0], MakePlan)
    assert actions[0].peers == (C,)
    assert (A, "is kept for job 11111111") in actions[0].left_out


def test_peers_are_kept_for_a_proposed_job_until_they_hold_it_or_the_lease_ends() -> None:
    busy = (seat(A, holds=ONE), seat(B, holds=ONE))
    proposed, _ = play((0.0, wish(peers=2)), (0.0, look(seat(A), seat(B))), (0.0, Planned(ONE, frozenset({A, B}))))
    waiting, actions = play((29.0, wish(TWO, owner=OTHER)), (29.0, look(seat(A), seat(B), job=TWO)), state=proposed)
    assert isinstance(actions[0], Wait)
    free, actions = play((31.0, look(seat(A), seat(B), job=TWO)), state=waiting)
    assert isinstance(actions[0], MakePlan)
    assert ONE not in free.jobs
    working, actions = play((31.0, look(*busy, job=TWO)), state=waiting)
    assert isinstance(actions[0], Wait)
    assert ONE in working.jobs


def test_jobs_are_served_in_order_unless_the_earlier_one_cannot_be() -> None:
    seats = (seat(A), seat(B))
    state, _ = play((0.0, wish(peers=5)), (0.0, wish(TWO, owner=OTHER, peers=1)), (9.0, look(*seats)))
    _, actions = play((9.0, look(*seats, job=TWO)), state=state)
    assert actions == [Wait(TWO, "job 11111111 registered earlier and is served first")]
    state, _ = play((0.0, wish(peers=2)), (0.0, wish(TWO, owner=OTHER, peers=1)), (9.0, look(*seats)))
    state, _ = play((9.0, NotPlanned(ONE, "slice 0 needs 3.1 GiB more", lasting=True)), state=state)
    _, actions = play((9.0, look(*seats, job=TWO)), state=state)
    assert isinstance(actions[0], MakePlan)
    state, _ = play((0.0, wish(peers=2)), (0.0, wish(TWO, owner=OTHER, peers=1)), (1.0, OwnerGone(ONE)))
    _, actions = play((9.0, look(*seats, job=TWO)), state=state)
    assert isinstance(actions[0], MakePlan)


@pytest.mark.row(18)
def test_a_plan_that_does_not_fit_is_tried_again_when_somebody_comes() -> None:
    reason = "slice 0 needs 3.1 GiB more"
    state, actions = play((0.0, wish()), (9.0, look(seat(A))), (9.0, NotPlanned(ONE, reason, lasting=True)))
    assert actions[-1] == Wait(ONE, reason)
    _, actions = play((60.0, look(seat(A))), state=state)
    assert actions == [Wait(ONE, reason)]
    _, actions = play((60.0, look(seat(A), seat(B))), state=state)
    assert isinstance(actions[0], MakePlan)


def test_a_passing_failure_is_tried_again_with_the_same_peers() -> None:
    state, _ = play((0.0, wish()), (9.0, look(seat(A))), (9.0, NotPlanned(ONE, "owner too slow", lasting=False)))
    _, actions = play((9.5, look(seat(A))), state=state)
    assert isinstance(actions[0], MakePlan)


def test_registering_twice_and_for_others() -> None:
    state, actions = play((0.0, wish()), (1.0, wish(peers=2)))
    assert actions == []
    assert state.jobs[ONE].wish.peers == 2
    for incarnation in (1, 2):  # job ids are public: no incarnation makes a stranger the owner
        same, actions = play((2.0, wish(owner=OTHER, incarnation=incarnation)), state=state)
        assert actions == [Refuse(ONE, "this job is registered by another owner")]
        assert same.jobs[ONE].wish.owner != OTHER


def test_bounds() -> None:
    many = [(0.0, wish(JobId(f"{i:032x}"))) for i in range(MAX_JOBS + 1)]
    state, actions = play(*many)
    assert len(state.jobs) == MAX_JOBS
    assert isinstance(actions[0], Refuse)
    assert play((0.0, look(seat(A))))[1] == [Refuse(ONE, "this job is not registered")]


def mending(job: JobId = ONE, **more: object) -> Registered:
    return Registered(replace(Wish(job, OWNER, 1, None, "mend"), **more))  # type: ignore[arg-type]


def improving(job: JobId = ONE, peers: int | None = None) -> Registered:
    return Registered(Wish(job, OWNER, 1, peers, "improve"))


def planned(action: Action) -> tuple[PeerId, ...]:
    assert isinstance(action, MakePlan), action
    return action.peers


def test_a_job_that_lost_peers_is_planned_at_once_with_its_own_and_who_is_free() -> None:
    seats = (seat(A, 9.0, holds=ONE), seat(B, 9.0), seat(C, 9.0, holds=TWO), seat(D, 9.0, unusable="is paused"))
    _, (action,) = play((9.0, mending(peers=7)), (9.0, look(*seats, since=8.0)))
    assert planned(action) == (A, B)


def test_neither_lost_peers_nor_those_of_others_are_used_and_guards_come_first() -> None:
    seats = (seat(A, flops=9.0), seat(B), seat(C, flops=5.0), seat(D, holds=ONE))
    _, (action,) = play((0.0, mending(without=frozenset({A}), guards=frozenset({B}))), (0.0, look(*seats)))
    assert planned(action) == (D, B, C)
    assert isinstance(action, MakePlan)
    assert dict(action.left_out)[A] == "is lost, leaves, or failed in this job"


def test_of_very_many_spares_a_part_is_asked() -> None:
    spares = [seat(PeerId(f"s{index:03}")) for index in range(200)]
    own = [seat(PeerId(f"o{index:03}"), holds=ONE) for index in range(100)]
    _, (action,) = play((0.0, mending(guards=frozenset({PeerId("s199")}))), (0.0, look(*spares, *own)))
    assert len(planned(action)) == 100 + MOST_SPARES
    assert "s199" in planned(action)


def test_a_job_that_lost_peers_comes_before_an_earlier_one_that_waits_and_gets_who_comes() -> None:
    busy = seat(A, holds=ONE)
    state, _ = play((0.0, wish(TWO, owner=OTHER, peers=1)), (0.0, look(busy, job=TWO)))
    state, (action,) = play((1.0, mending()), (1.0, look(busy)), state=state)
    assert planned(action) == (A,)
    state, _ = play((1.0, NotPlanned(ONE, "slice 1 needs 3.1 GiB more", lasting=True)), state=state)
    same, (action,) = play((2.0, look(busy)), state=state)
    assert action == Wait(ONE, "slice 1 needs 3.1 GiB more")
    _, (action,) = play((3.0, look(busy, seat(B), job=TWO)), state=same)
    assert action == Wait(TWO, "job 11111111 has lost peers and is served first")
    tried, (action,) = play((3.0, look(busy, seat(B))), state=same)
    assert planned(action) == (A, B)
    tried, _ = play((3.0, NotPlanned(ONE, "slice 1 needs 2.0 GiB more", lasting=True)), state=tried)
    _, (action,) = play((3.0, look(busy, seat(B), job=TWO)), state=tried)
    assert planned(action) == (B,), "one that does not help the first job helps the second"


def test_with_nobody_here_a_job_that_lost_peers_is_still_looked_at() -> None:
    """Its owner may know of survivors that have not reported yet."""
    _, (action,) = play((9.0, mending()), (9.0, look()))
    assert planned(action) == ()
    _, (action,) = play((9.0, mending()), (9.0, look(since=8.9)))
    assert action == Wait(ONE, "elected a moment ago: who is here reports within a second")


def test_improving_keeps_the_job_as_it_is_meanwhile() -> None:
    seats = (seat(A, holds=ONE), seat(B), seat(C))
    state, _ = play((0.0, wish(peers=1)), (0.0, look(seat(A))), (0.0, Planned(ONE, frozenset({A}))))
    state, actions = play((40.0, improving()), (40.0, look(*seats)), state=state)
    assert planned(actions[-1]) == (A, B, C)
    assert state.jobs[ONE].phase == "proposed"
    _, (action,) = play((40.0, wish(TWO, owner=OTHER, peers=1)), (40.0, look(*seats, job=TWO)), state=state)
    assert isinstance(action, Wait), "they are kept while a better plan is looked for"
    state, _ = play((41.0, NotImproved(ONE)), state=state)
    _, (action,) = play((41.0, wish(TWO, owner=OTHER, peers=1)), (41.0, look(*seats, job=TWO)), state=state)
    assert planned(action) == (B,)


def test_a_better_plan_is_proposed_like_any_other() -> None:
    state, _ = play((0.0, improving()), (0.0, look(seat(A, holds=ONE), seat(B))), (0.0, Planned(ONE, frozenset({A, B}))))
    _, (action,) = play((1.0, wish(TWO, owner=OTHER, peers=1)), (1.0, look(seat(B), job=TWO)), state=state)
    assert action == Wait(TWO, "1 peers wanted: 0 peers free, 1 busy or unfit")


def test_who_improves_waits_for_nobody_and_takes_nobody_from_those_who_wait() -> None:
    seats = (seat(A, holds=ONE), seat(B))
    state, _ = play((0.0, wish(TWO, owner=OTHER, peers=2)), (0.0, look(*seats, job=TWO)))
    state, (action,) = play((0.0, improving()), (0.0, look(*seats)), state=state)
    assert action == Stay(ONE, "job 22222222 waits for peers and is served first")
    lasting = NotPlanned(TWO, "slice 0 needs 3.1 GiB more", lasting=True)
    _, actions = play((0.0, lasting), (0.0, look(*seats)), state=state)
    assert planned(actions[-1]) == (A, B), "a job that peers do not help does not keep them from others"


def test_a_peer_that_a_refused_plan_wanted_is_free_again_after_a_while() -> None:
    state, _ = play((0.0, improving()), (0.0, look(seat(A, holds=ONE), seat(B))), (0.0, Planned(ONE, frozenset({A, B}))))
    _, (action,) = play(
        (31.0, wish(TWO, owner=OTHER, peers=1)), (31.0, look(seat(A, holds=ONE), seat(B), job=TWO)), state=state
    )
    assert planned(action) == (B,)


def test_with_fewer_peers_than_wanted_a_plan_that_was_mended_stays_as_it_is() -> None:
    """Else the cut would be another one, and another one again when they are back."""
    _, (action,) = play((0.0, improving(peers=3)), (0.0, look(seat(A, holds=ONE), seat(B), seat(C, holds=TWO))))
    assert action == Stay(ONE, "3 peers wanted: 2 peers free or its own")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_peer_is_ever_planned_for_two_jobs_at_once(data: st.DataObject) -> None:
    state, now = Jobs(), 0.0
    peers, names = (A, B, C, D), (ONE, TWO, JobId("33" * 16))
    holds: dict[PeerId, JobId | None] = dict.fromkeys(peers)
    promised: dict[JobId, tuple[frozenset[PeerId], float]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 0.5, 6.0, 40.0]))
        job = data.draw(st.sampled_from(names))
        kind = data.draw(st.sampled_from(["register", "look", "look", "plan", "fail", "same", "gone", "hold", "free"]))
        event: Event
        match kind:
            case "hold" if job in promised:
                for peer in promised[job][0]:
                    holds[peer] = job
                continue
            case "free":
                holds = {peer: None if held == job else held for peer, held in holds.items()}
                continue
            case "register":
                purpose = data.draw(st.sampled_from(PURPOSES))
                without = frozenset(data.draw(st.sets(st.sampled_from(peers))))
                event = Registered(Wish(job, OWNER, 1, data.draw(st.sampled_from([None, 1, 2])), purpose, without))
                promised.pop(job, None) if purpose != "improve" else None
            case "plan" if job in state.jobs and (chosen := state.jobs[job].trying or state.jobs[job].peers):
                event = Planned(job, chosen)
                promised[job] = chosen, now + WAN.reserve_s
            case "fail":
                event = NotPlanned(job, "no room", lasting=data.draw(st.booleans()))
                promised.pop(job, None)
            case "same":
                event = NotImproved(job)
            case "gone":
                event = OwnerGone(job)
                promised.pop(job, None)
            case _:
                event = look(*(seat(peer, holds=held) for peer, held in holds.items()), job=job)
        state, actions = step(state, event, now, WAN)
        for action in actions:
            if isinstance(action, MakePlan):
                assert state.jobs[job].wish.without.isdisjoint(action.peers)
                for peer in action.peers:
                    assert holds[peer] in (None, job)
                    for other, (kept, until) in promised.items():
                        assert other == job or peer not in kept or now >= until
