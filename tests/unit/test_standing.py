"""What volunteers read about the part that they play."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.swarm.coordinator import Job, Jobs, Seat, Wish
from fusion_p2p.swarm.standing import MAX_LETTERS, standings

ONE, TWO = JobId("11" * 16), JobId("22" * 16)
A, B, C, D = (PeerId(name) for name in "abcd")
NOBODY = Jobs()


def seat(peer: PeerId, **more: object) -> Seat:
    return replace(Seat(peer, 0.0, 1.0, None), **more)  # type: ignore[arg-type]


def job(name: JobId = ONE, **more: object) -> Job:
    return replace(Job(Wish(name, PeerId("owner"), 1, None)), **more)  # type: ignore[arg-type]


def jobs(*entries: Job) -> Jobs:
    return Jobs({entry.wish.job: entry for entry in entries})


@pytest.mark.row(20)
def test_spares_are_numbered_by_speed_and_told_why() -> None:
    seats = (seat(A, holds=ONE), seat(B), seat(C, flops_per_s=3.0), seat(D, unusable="is paused"))
    said = standings(jobs(job(phase="proposed")), seats, {}, {B: "slower than the plan needs"}, 99.0)
    assert said == {
        A: "",
        B: "spare 2 of 2: slower than the plan needs",
        C: "spare 1 of 2: all slices are covered",
        D: "gets no slice: it is paused",
    }


def test_without_jobs() -> None:
    assert standings(NOBODY, (seat(A),), {}, {A: "of a job that is over"}, 0.0) == {A: "spare 1 of 1: no job is registered"}


def test_copies_are_told() -> None:
    state = jobs(job(phase="proposed"), job(TWO, phase="proposed"))
    said = standings(state, (seat(A), seat(B)), {ONE: {A: (1, 3)}, TWO: {A: (0,)}}, {}, 99.0)
    assert said[A] == "spare 1 of 2: holds copies of slices 1, 3 of job 11111111, slice 0 of job 22222222"
    assert said[B] == "spare 2 of 2: all slices are covered"


def test_what_is_waited_for_is_told_to_those_who_hold_and_to_those_who_could() -> None:
    state = jobs(job(reason="slice 3 needs 3.1 GiB more"))
    said = standings(state, (seat(A, holds=ONE), seat(B)), {}, {}, 0.0)
    assert said == {
        A: "waiting: slice 3 needs 3.1 GiB more",
        B: "spare 1 of 1, waiting: job 11111111: slice 3 needs 3.1 GiB more",
    }


def test_who_is_kept_for_a_job_is_no_spare() -> None:
    state = jobs(job(phase="proposed", peers=frozenset({A}), kept_until=30.0))
    assert standings(state, (seat(A), seat(B)), {}, {}, 29.0)[A] == "kept for job 11111111"
    assert standings(state, (seat(A), seat(B)), {}, {}, 31.0)[A] == "spare 1 of 2: all slices are covered"


def test_it_fits_a_message_for_everybody() -> None:
    said = standings(jobs(job(reason="x" * 1024)), (seat(A),), {}, {}, 0.0)
    assert len(said[A]) == MAX_LETTERS
