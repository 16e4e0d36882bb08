from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import Move, choose, moves, sources

PEERS = [PeerId(name) for name in "abcdef"]
steps = st.frozensets(st.integers(0, 12), max_size=4)
stocks = st.dictionaries(st.sampled_from(PEERS), st.dictionaries(st.integers(0, 3), steps, max_size=4))


@given(stocks, st.integers(0, 12), st.integers(0, 12), st.integers(1, 4))
def test_the_newest_step_is_chosen_that_somebody_has_of_every_slice(
    have: dict[PeerId, dict[int, frozenset[int]]], checkpoint: int, later: int, num_slices: int
) -> None:
    newest = checkpoint + later
    choice = choose(have, checkpoint, newest, num_slices)

    def possible(step: int) -> bool:
        return step == checkpoint or all(
            any(step in stock.get(index, frozenset()) for stock in have.values()) for index in range(num_slices)
        )

    assert possible(choice.step)
    assert checkpoint <= choice.step <= newest
    assert not any(possible(step) for step in range(choice.step + 1, newest + 1))
    for index in range(num_slices):
        assert all(choice.step in have[peer][index] for peer in choice.holders[index])
        assert choice.holders[index] or choice.step == checkpoint


@given(stocks, st.integers(0, 12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_lost_peer_never_leads_to_a_later_step_and_order_does_not_matter(
    have: dict[PeerId, dict[int, frozenset[int]]], checkpoint: int, num_slices: int, shuffle: random.Random
) -> None:
    names = list(have)
    shuffle.shuffle(names)
    assert choose({name: have[name] for name in names}, checkpoint, 20, num_slices) == choose(have, checkpoint, 20, num_slices)
    for lost in names:
        left = {name: stock for name, stock in have.items() if name != lost}
        assert choose(left, checkpoint, 20, num_slices).step <= choose(have, checkpoint, 20, num_slices).step


def test_who_claims_a_step_that_was_not_decided_is_not_believed() -> None:
    have = {PEERS[0]: {0: frozenset({3, 1 << 40})}}
    assert choose(have, 0, 3, 1).step == 3


def part(index: int, *parameters: int) -> Slice:
    return Slice(index, (), (), (), (), parameters, ())


def test_the_slices_of_a_new_cut_are_fetched_from_all_that_had_their_parameters() -> None:
    before = Cut((part(0, 1, 2), part(1, 3, 4), part(2)), ())
    after = Cut((part(0, 1), part(1, 2, 3), part(2, 4), part(3)), ())
    holders = {0: (PEERS[0], PEERS[1]), 1: (PEERS[1], PEERS[2]), 2: (PEERS[3],)}
    assert sources(before, after, holders) == {
        0: (PEERS[0], PEERS[1]),
        1: (PEERS[0], PEERS[1], PEERS[2]),
        2: (PEERS[1], PEERS[2]),
    }


def test_only_slices_with_new_members_move() -> None:
    a, b, c, d = PEERS[:4]
    assert moves([(a,), (b, c), (c,)], [(a,), (b, d), (d,)]) == (Move(1, (d,)), Move(2, (d,)))
    assert moves([(a,), (b, c)], [(a,), (b,)]) == ()
