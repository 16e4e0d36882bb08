"""Emulated testbeds: what links do to packets, how a testbed becomes links, and peers that compute slower by waiting."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrib.benchmarks.emulated import Case, Run, figures_of, link_figures
from contrib.testbeds import slow_peer
from contrib.testbeds.calibration import busy_s
from contrib.testbeds.emulation import read_testbed, slowness
from contrib.testbeds.predictions import as_set_up
from contrib.testbeds.shaping import MAX_SITES, Shape, Shaper, read_shape, shape_of
from contrib.testbeds.task_times import TaskTimes, settle
from fusion_p2p.device import rates as device_rates
from fusion_p2p.device.rates import Rates
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.job.flow import TaskKind
from fusion_p2p.peer import tasks
from fusion_p2p.peer.tasks import Outcome
from fusion_p2p.plan.plan import Plan

T7 = Path(__file__).resolve().parents[2] / "contrib" / "testbeds" / "t7-emulated.json"
RATE, SLOW_RATE, LATENCY_S = 1e6, 1e5, 0.02
"""Bytes per second between and inside the sites of `SHAPE`."""
SHAPE = Shape(
    addresses=("10.77.1.1", "10.77.1.2", "10.77.2.3"),
    sites=(0, 0, 1),
    latency_s=((0.0, 0.001, LATENCY_S), (0.001, 0.0, LATENCY_S), (LATENCY_S, LATENCY_S, 0.0)),
    seconds_per_byte=((0.0, 1e-9, 1 / RATE), (1e-9, 0.0, 1 / RATE), (1 / SLOW_RATE, 1 / SLOW_RATE, 0.0)),
    uplink_s=(0.0, 0.0),
    downlink_s=(0.0, 0.0),
)


def test_packet_takes_its_bytes_and_the_latency():
    assert Shaper(SHAPE).arrival(0, 2, 9000, 5.0) == pytest.approx(5.0 + 9000 / RATE + LATENCY_S)


def test_directions_have_their_own_rates_and_queues():
    shaper = Shaper(SHAPE)
    assert shaper.arrival(2, 0, 9000, 0.0) == pytest.approx(9000 / SLOW_RATE + LATENCY_S)
    assert shaper.arrival(0, 2, 9000, 0.0) == pytest.approx(9000 / RATE + LATENCY_S)


def test_packets_of_a_pair_queue_and_those_of_another_do_not():
    shaper = Shaper(SHAPE)
    arrivals = [shaper.arrival(0, 2, 1000, 0.0) for _ in range(3)]
    assert arrivals == pytest.approx([LATENCY_S + 1e-3, LATENCY_S + 2e-3, LATENCY_S + 3e-3])
    assert shaper.arrival(1, 2, 1000, 0.0) == pytest.approx(LATENCY_S + 1e-3)


def test_half_duplex_is_one_queue_for_both_directions():
    shaper = Shaper(replace(SHAPE, full_duplex=False, seconds_per_byte=((1e-6,) * 3,) * 3))
    shaper.arrival(0, 2, 10_000, 0.0)
    assert shaper.arrival(2, 0, 10_000, 0.0) == pytest.approx(LATENCY_S + 0.02)


@pytest.mark.parametrize("limits", [{"uplink_s": (1e-5, 0.0)}, {"downlink_s": (0.0, 1e-5)}])
def test_flows_of_a_site_share_its_limit_and_its_lan_does_not(limits: dict[str, tuple[float, float]]):
    shaper = Shaper(replace(SHAPE, **limits))
    assert shaper.arrival(0, 2, 1000, 0.0) == pytest.approx(LATENCY_S + 0.01, rel=0.1)
    assert shaper.arrival(1, 2, 1000, 0.0) == pytest.approx(LATENCY_S + 0.02, rel=0.1)
    assert shaper.arrival(0, 1, 1000, 0.0) == pytest.approx(0.001, rel=0.01)


def test_full_queue_drops_and_then_takes_again():
    shaper = Shaper(replace(SHAPE, queue_s=0.05))
    kept = [shaper.arrival(0, 2, 10_000, 0.0) for _ in range(20)]
    assert sum(arrival is not None for arrival in kept) == 6
    assert shaper.dropped == 14
    assert shaper.arrival(0, 2, 10_000, 0.06) is not None


@given(st.lists(st.tuples(st.integers(40, 9000), st.floats(0, 0.05)), min_size=2, max_size=60))
def test_link_never_carries_more_than_its_rate_and_keeps_the_order(packets: list[tuple[int, float]]):
    shaper, now, sent, arrivals = Shaper(replace(SHAPE, queue_s=1e9)), 0.0, 0, []
    for num_bytes, pause_s in packets:
        now += pause_s
        arrivals.append(shaper.arrival(0, 2, num_bytes, now))
        sent += num_bytes
        assert arrivals[-1] >= sent / RATE + LATENCY_S - 1e-9
    assert arrivals == sorted(arrivals)


def test_testbed_becomes_links():
    bed = read_testbed(T7)
    shape = shape_of(bed)
    assert shape.addresses == ("10.77.1.1", "10.77.2.2", "10.77.3.3", "10.77.1.4", "10.77.2.5", "10.77.3.6", "10.77.1.7")
    mbit_per_s = 8e-6 / (np.array(shape.seconds_per_byte) + np.eye(7))
    assert mbit_per_s[0, 1:].tolist() == pytest.approx([30, 8, 1000, 30, 8, 1000])
    assert mbit_per_s[1, 2] == mbit_per_s[2, 1] == pytest.approx(100)
    assert shape.latency_s[0][2] == pytest.approx(0.02)
    assert shape.latency_s[6][0] == pytest.approx(0.0005)
    assert read_shape(shape.to_json()) == shape


def test_testbed_with_more_sites_than_addresses_is_refused():
    bed = read_testbed(T7)
    many = replace(bed, uplink_s=np.zeros(MAX_SITES + 1))
    with pytest.raises(ValueError, match="at most 250"):
        shape_of(many)


def test_peers_are_slowed_as_the_testbed_says_and_listed_in_its_order():
    slower = slowness(read_testbed(T7), 4.0)
    assert slower == pytest.approx([4, 4, 8, 8, 12, 16], rel=1e-4)
    assert slower == sorted(set(slower))


def run_of(scheduler: str, pipeline: str, codec: str, promised_s: float, measured_s: float) -> Run:
    plan = Plan(Digest("0" * 64), scheduler, 8, (), (), ())
    return Run(Case(scheduler, pipeline, 8, codec), plan, promised_s, promised_s, measured_s / 2, measured_s, cores=0.5)


def test_figures_compare_each_side_at_its_best():
    runs = [
        run_of("equal-number", "gpipe", "none", 11.0, 10.0),
        run_of("equal-compute", "1f1b", "none", 7.2, 8.0),
        run_of("equal-compute", "auto", "adaptive", 4.0, 4.0),
        run_of("auto", "gpipe", "none", 2.0, 2.0),
        run_of("auto", "1f1b", "none", 1.5, 2.5),
        run_of("auto", "auto", "adaptive", 1.6, 1.6),
    ]
    figures = figures_of(runs)
    assert figures["measured_speedup"] == pytest.approx(8 / 2)
    assert figures["measured_speedup_best_codecs"] == pytest.approx(4 / 1.6)
    assert figures["prediction_error_median"] == pytest.approx(0.05)
    assert figures["prediction_error_max"] == pytest.approx(0.4)
    assert figures["prediction_error_median_uncalibrated"] == pytest.approx(0.5)
    assert figures["best_prediction_over_best"] == pytest.approx(2.5 / 1.6)


def test_links_are_compared_between_sites_only():
    bed = read_testbed(T7)
    told = {
        "seconds_per_byte": (bed.beta_s * 1.25 + (bed.sites[:, None] == bed.sites[None, :])).tolist(),
        "latency_s": (bed.alpha_s + 0.002).tolist(),
    }
    told = {name: [row[:6] for row in rows[:6]] for name, rows in told.items()}
    assert link_figures(bed, told) == pytest.approx({"link_rate_error_median": 0.2, "link_latency_excess_ms": 2.0})


def test_simulator_is_told_how_the_emulator_was_set_up(tmp_path: Path):
    rates = {"matmul_flops": 60.0, "convolution_flops": 30.0, "attention_flops": 20.0, "memory_bytes_per_s": 10.0}
    (tmp_path / "rates-0.json").write_text(json.dumps({"key": {}, "rates": rates}))
    bed = read_testbed(T7)
    network = as_set_up(bed, [PeerId(f"peer {n}") for n in range(6)], slowness(bed, 5.0), tmp_path, rates_times=0.5)
    assert network.flops_per_s[0].tolist() == pytest.approx([6.0, 3.0, 2.0])
    assert network.flops_per_s[5].tolist() == pytest.approx([1.5, 0.75, 0.5], rel=1e-4)
    assert network.memory_bytes_per_s[2] == pytest.approx(0.5, rel=1e-4)
    assert network.peers[5] == "peer 5"


def test_busy_seconds_of_a_run_are_the_median_of_its_later_steps(tmp_path: Path):
    steps = [(9.0, (1.0, 1.0)), (4.0, (0.5, 0.25)), (2.0, (0.5, 0.75)), (5.0, (0.5, 0.25))]
    lines = [{"step_s": step_s, "peers": [{"busy_share": share} for share in shares]} for step_s, shares in steps]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert busy_s(tmp_path, warm_up=1) == pytest.approx(3.0)


def test_slow_task_waits_in_proportion_to_what_it_computed():
    def perform(seconds: float) -> Outcome:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return Outcome(loss=3.0, busy_s=seconds)

    begun, used = time.perf_counter(), time.thread_time()
    outcome = slow_peer.slowed(perform, 5.0)(0.02)
    wall_s, used = time.perf_counter() - begun, time.thread_time() - used
    assert wall_s >= 0.1
    assert used < 0.05
    assert outcome.loss == 3.0
    assert 0.1 <= outcome.busy_s <= wall_s


def test_tasks_take_as_long_as_those_of_their_kind_that_were_noted_before(tmp_path: Path):
    slices = [SimpleNamespace(_edges=SimpleNamespace(slice=index)) for index in range(2)]
    forward, backward = (SimpleNamespace(kind=kind) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
    noting = TaskTimes(tmp_path)
    for used_s in (0.5, 0.01, 0.02):
        assert noting(used_s, slices[1], forward, {}, None) == used_s
    noting(0.04, slices[1], backward, {}, None)
    assert settle(tmp_path) == {"1 F": 0.02, "1 B": 0.04}
    keeping = TaskTimes(tmp_path)
    assert [keeping(0.9, slices[1], task, {}, None) for task in (forward, backward)] == [0.02, 0.04]
    assert keeping(0.9, slices[0], forward, {}, None) == 0.9

    call = slow_peer.slowed(lambda tasks, task: Outcome(), 3.0, times=keeping)
    assert call(slices[1], backward).busy_s == pytest.approx(0.12, rel=0.2)


def test_slow_peer_slows_every_task_and_announces_what_is_left_of_its_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[Path] = []

    def measured(device: object, folder: Path, **options: object) -> Rates:
        asked.append(folder)
        return Rates(80.0, 40.0, 20.0, 10.0)

    monkeypatch.setattr(tasks.SliceTasks, "perform", lambda self: Outcome())
    monkeypatch.setattr(device_rates, "rates", measured)
    monkeypatch.setattr(device_rates, "time", time)
    slow_peer.slow_down(4.0, tmp_path, rates_times=2.0)
    assert device_rates.rates("cpu", Path("elsewhere"), benchmark="auto") == Rates(40.0, 20.0, 10.0, 5.0)
    assert device_rates.time.perf_counter is time.thread_time
    assert asked == [tmp_path]
    assert tasks.SliceTasks.perform(None).busy_s > 0  # type: ignore[call-arg, arg-type]
