"""Who guards a slice: spares first, then others elsewhere, quickly and spread."""

from __future__ import annotations

from hypothesis import given
from hypothesis.strategies import booleans, builds, dictionaries, frozensets, integers, lists, sampled_from, text

from fusion_p2p.ids import PeerId
from fusion_p2p.job.guard_choice import ROOM, Candidate, Load, choose

MIB = 1 << 20
WORKER, OTHER, SPARE, SECOND = map(PeerId, ("worker", "other", "spare", "spare-2"))
MEMBERS = frozenset({WORKER})
LARGE = 1 << 40


def chosen(*candidates: Candidate, loads: dict[PeerId, Load] | None = None, num_bytes: int = 100 * MIB) -> PeerId | None:
    found = choose(num_bytes, MEMBERS, candidates, loads or {})
    return None if found is None else found.peer


def test_a_spare_comes_before_a_faster_peer_at_work() -> None:
    assert chosen(Candidate(OTHER, False, LARGE, {WORKER: 1e9}), Candidate(SPARE, True, LARGE, {WORKER: 1e6})) == SPARE


def test_without_a_spare_a_peer_elsewhere_comes_before_one_in_the_same_room() -> None:
    near = Candidate(OTHER, False, LARGE, {WORKER: 1e9}, frozenset({WORKER}))
    assert chosen(near, Candidate(SECOND, False, LARGE, {WORKER: 1e6})) == SECOND
    assert chosen(near) == OTHER


def test_nobody_guards_what_it_executes_and_nobody_beyond_its_memory() -> None:
    assert chosen(Candidate(WORKER, False, LARGE)) is None
    assert chosen(Candidate(SPARE, True, 199 * MIB)) is None  # the old copy lies there until the new one is complete
    assert chosen(Candidate(SPARE, True, 200 * MIB)) == SPARE
    assert chosen(Candidate(SPARE, True, 399 * MIB), loads={SPARE: Load(100 * MIB, 0.0)}) is None


def test_the_faster_line_gets_as_much_more_as_it_is_faster() -> None:
    candidates = [Candidate(SPARE, True, LARGE, {WORKER: 4e6}), Candidate(SECOND, True, LARGE, {WORKER: 1e6})]
    loads: dict[PeerId, Load] = {}
    for _ in range(10):
        found = choose(MIB, MEMBERS, candidates, loads)
        assert found is not None
        loads[found.peer] = loads.get(found.peer, Load()).more(MIB, found.fetching_s(MIB, MEMBERS))
    assert {peer: load.num_bytes // MIB for peer, load in loads.items()} == {SPARE: 8, SECOND: 2}


names = text("abcd", min_size=1, max_size=1).map(PeerId)
candidates = builds(
    Candidate, names, booleans(), integers(0, 1000), dictionaries(names, sampled_from([0.0, 1.0, 50.0])), frozensets(names)
)


@given(lists(candidates, max_size=5), frozensets(names, max_size=2), integers(0, 300), dictionaries(names, integers(0, 400)))
def test_whoever_is_chosen_may_and_can(
    found: list[Candidate], members: frozenset[PeerId], num_bytes: int, given_out: dict[PeerId, int]
) -> None:
    loads = {peer: Load(size, 1.0) for peer, size in given_out.items()}
    able = [
        one for one in found if one.peer not in members and ROOM * (given_out.get(one.peer, 0) + num_bytes) <= one.free_bytes
    ]
    best = choose(num_bytes, members, found, loads)
    assert (best is None) == (not able)
    if best is not None:
        assert best in able
        assert best.spare or not any(one.spare for one in able)
