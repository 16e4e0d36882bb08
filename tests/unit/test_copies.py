from __future__ import annotations

import torch
from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from fusion_p2p.execute.state import SliceState
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.peer.copies import MAX_STEPS, Copies, Copy, CopyKey, Lineage, digest_of_state

RUN = Lineage(PeerId("owner"), JobId("1" * 32), 1)
OTHER = Lineage(PeerId("owner"), JobId("1" * 32), 2)


def copy(index: int, step: int, *, own: bool = True, run: Lineage = RUN, name: str = "w") -> Copy:
    return Copy(CopyKey(run, index, step), {f"parameter/{name}{index}": torch.full((25,), float(step))}, own)


def steps(copies: Copies, index: int = 0, run: Lineage = RUN) -> list[int]:
    return [kept.key.step for kept in copies.of(run) if kept.key.slice == index]


def test_a_step_is_found_by_the_names_of_its_tensors_whatever_the_cut() -> None:
    copies = Copies(10_000)
    for index in range(3):
        copies.put(copy(index, 5))
    assert copies.at(RUN, 5).keys() == {"parameter/w0", "parameter/w1", "parameter/w2"}
    assert copies.at(RUN, 4) == copies.at(OTHER, 5) == {}
    assert copies.find(RUN, 5, "parameter/w2") is copies.get(CopyKey(RUN, 2, 5))
    assert copies.find(RUN, 5, "parameter/w9") is None


def test_the_durable_copy_and_one_that_is_being_fetched_outlive_newer_ones() -> None:
    copies = Copies(10_000)
    copies.put(copy(0, 10))
    copies.durable(RUN, 10)
    copies.put(fetched := copy(0, 20))
    fetched.fetched = True
    for step in (22, 24, 26):
        copies.put(copy(0, step))
    assert steps(copies) == [10, 20, 26]
    copies.durable(RUN, 20)
    assert steps(copies) == [20, 26]


def test_a_run_that_went_back_never_had_the_steps_after() -> None:
    copies = Copies(10_000)
    for step in (1, 2, 3):
        copies.put(copy(0, step))
    copies.put(copy(0, 3, run=OTHER))
    copies.rolled_back(RUN, 2)
    assert (steps(copies), steps(copies, run=OTHER)) == ([1, 2], [3])
    copies.forget(RUN)
    assert (steps(copies), steps(copies, run=OTHER)) == ([], [3])


def test_only_guarded_copies_make_room_the_oldest_first() -> None:
    copies = Copies(400)
    for index, step, own in ((0, 1, True), (1, 2, False), (2, 3, False), (3, 4, True)):
        copies.put(copy(index, step, own=own))
    assert (copies.missing_bytes(0), copies.missing_bytes(100)) == (0, 100)
    copies.limit_bytes = 300
    assert [gone.key.slice for gone in copies.shrink()] == [1]
    copies.limit_bytes = 0
    assert [gone.key.slice for gone in copies.shrink()] == [2]
    assert copies.num_bytes == 200
    copies.disown(RUN)
    assert [gone.key.slice for gone in copies.shrink()] == [0, 3]


@given(lists(tuples(integers(0, 2), integers(0, 60), integers(0, 60)), max_size=40))
def test_however_copies_come_they_are_bounded_and_the_newest_stays(puts: list[tuple[int, int, int]]) -> None:
    copies, durable = Copies(1 << 40), 0
    for index, step, floor in puts:
        newest = max([step, *steps(copies, index)])
        copies.put(copy(index, step))
        kept = steps(copies, index)
        assert len(kept) <= MAX_STEPS
        assert newest in kept
        if floor > durable and floor in kept:
            durable = floor
            copies.durable(RUN, durable)
            assert min(steps(copies, index)) == durable


def test_a_digest_is_of_names_types_and_every_byte() -> None:
    one = [torch.arange(4.0), torch.arange(3)]
    digest = digest_of_state(b"manifest", one)
    assert digest == digest_of_state(b"manifest", [tensor.clone() for tensor in one])
    changed = [one[0].clone(), one[1]]
    changed[0][3] = -3.0
    assert digest not in {digest_of_state(b"manifest", changed), digest_of_state(b"another", one)}


def test_a_retired_state_is_not_copied_and_one_half_way_is_none() -> None:
    tensor = torch.ones(4, requires_grad=True)
    state = SliceState(3, {7: "w"}, {7: tensor}, {"momentum": {7: torch.zeros(4)}}, torch.device("cpu"))
    snapshot = state.retired()
    assert snapshot is not None
    assert snapshot.tensors["parameter/w"].data_ptr() == tensor.data_ptr()
    taken = state.copied("parameter/w")
    assert taken is not None
    assert taken.data_ptr() != tensor.data_ptr()
    assert state.copied("parameter/other") is None
    state.step = -1
    assert state.retired() is None
