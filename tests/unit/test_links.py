"""A peer's table of links: whom it probes, how figures mix, what it tells."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.measured import LinkFigures
from fusion_p2p.swarm.links import (
    FAILED_PAUSE_S,
    NEAR_REFRESH_S,
    NEAR_TARGETS,
    REFRESH_S,
    SECOND_LOOK_S,
    TARGETS,
    TRAFFIC_WINDOW_S,
    Failed,
    Link,
    LinkTable,
    Look,
    Postponed,
    Probe,
    Probed,
    Traffic,
    entries,
    merged,
    step,
    summary,
)
from fusion_p2p.wire.swarm_messages import MAX_LINKS, SWARM_MESSAGES, LinkEntry, Links

ME = PeerId("me")


def peers(count: int, near: int = 0) -> dict[PeerId, bool]:
    return {PeerId(f"peer{i}"): i < near for i in range(count)}


def after(table: LinkTable, *events: Probed | Postponed | Failed | Traffic, now: float = 0.0) -> LinkTable:
    for event in events:
        table, actions = step(table, event, now)
        assert actions == ()
    return table


def look(table: LinkTable, others: dict[PeerId, bool], now: float = 0.0, idle: bool = True) -> tuple[LinkTable, PeerId | None]:
    table, actions = step(table, Look(others, idle), now)
    return table, actions[0].peer if actions else None


def probe_all(table: LinkTable, others: dict[PeerId, bool], now: float = 0.0) -> tuple[LinkTable, list[PeerId]]:
    """Look until there is nothing to do; every probe works."""
    probed: list[PeerId] = []
    while True:
        table, peer = look(table, others, now)
        if peer is None:
            return table, probed
        probed.append(peer)
        assert look(table, others, now)[1] is None, "one at a time"
        table = after(table, Probed(peer, 0.01, 1e6, 2e6), now=now)


def test_in_a_small_swarm_everybody_is_probed_once() -> None:
    table, probed = probe_all(LinkTable(ME), peers(5) | {ME: False})
    assert sorted(probed) == sorted(peers(5))
    assert not table.measuring


def test_in_a_large_swarm_a_few_are_and_some_of_them_near() -> None:
    others = peers(100, near=20)
    _, probed = probe_all(LinkTable(ME), others)
    assert len(probed) == TARGETS
    assert sum(others[peer] for peer in probed[:NEAR_TARGETS]) == NEAR_TARGETS
    assert sum(others[peer] for peer in probed) < TARGETS
    _, of_another = probe_all(LinkTable(PeerId("you")), others)
    assert set(probed) != set(of_another), "each in an order of its own"


def test_who_was_probed_by_the_other_side_need_not_probe() -> None:
    table = after(LinkTable(ME), *(Probed(peer, 0.01, 1e6, 1e6) for peer in peers(5)))
    table, nobody = look(table, peers(5))
    assert nobody is None
    assert not table.measuring


def test_who_has_seen_nobody_yet_has_still_to_measure() -> None:
    assert LinkTable(ME).measuring
    assert look(LinkTable(ME), {ME: True})[0].measuring


def test_nobody_is_probed_while_at_work() -> None:
    table, peer = look(LinkTable(ME), peers(3), idle=False)
    assert peer is None
    assert not table.measuring, "nothing to wait for"
    assert look(table, peers(3))[1] is not None


def test_a_busy_peer_is_asked_again_when_it_said_and_others_first() -> None:
    others = peers(2)
    table, first = look(LinkTable(ME), others)
    assert first is not None
    table = after(table, Postponed(first, 2.0))
    table, second = look(table, others)
    assert second not in (first, None)
    table = after(table, Probed(second, 0.01, 1e6, 1e6))
    table, nobody = look(table, others, 1.0)
    assert nobody is None
    assert table.measuring
    assert look(table, others, 2.0)[1] == first


def test_who_is_occupied_for_long_or_failed_is_not_waited_for() -> None:
    others = peers(1)
    for event in (Postponed(PeerId("peer0"), 60.0), Failed(PeerId("peer0"))):
        table, peer = look(LinkTable(ME), others)
        assert peer == "peer0"
        assert table.measuring
        table, peer = look(after(table, event), others, 1.0)
        assert peer is None
        assert not table.measuring
        assert look(table, others, FAILED_PAUSE_S)[1] == "peer0"


def test_every_link_is_looked_at_twice() -> None:
    others, now = peers(3), SECOND_LOOK_S
    table, _ = probe_all(LinkTable(ME), others)
    assert look(table, others, now - 1)[1] is None
    again: list[PeerId] = []
    while now < SECOND_LOOK_S + 30:
        table, peer = look(table, others, now)
        assert not table.measuring, "nobody waits for it"
        if peer is not None:
            again.append(peer)
            table = after(table, Probed(peer, 0.01, 1e6, 1e6), now=now)
        now += 1
    assert sorted(again) == sorted(others)


def test_the_oldest_link_is_measured_again_though_traffic_tells_of_one_direction() -> None:
    others = peers(3)
    table, _ = probe_all(LinkTable(ME), others)
    table = after(table, *(Probed(peer, 0.01, 1e6, 1e6) for peer in others))
    assert look(table, others, REFRESH_S - 1)[1] is None
    for now in (REFRESH_S - 1 - TRAFFIC_WINDOW_S, REFRESH_S - 1):
        table = after(table, Traffic(PeerId("peer0"), 1e6), now=now)
    again: list[PeerId] = []
    for minute in range(4):
        now = REFRESH_S + 1 + 61 * minute
        table, peer = look(table, others, now)
        if peer is not None:
            again.append(peer)
            table = after(table, Probed(peer, 0.01, 1e6, 1e6), now=now)
        assert look(table, others, now + 1)[1] is None, "not all at once"
    assert sorted(again) == sorted(others), "what we send to peer0 may have changed too"


def test_a_link_that_fell_is_told_as_it_is_though_the_other_end_saw_traffic_too() -> None:
    """A sends to B ever slower, B sends to A as before: A's rate out is as old as its probe, whatever it hears from B."""
    a, b = PeerId("a"), PeerId("b")
    at_a = after(LinkTable(a), Probed(b, 0.01, 12.5e6, 12.5e6))
    at_b = after(LinkTable(b), Probed(a, 0.01, 12.5e6, 12.5e6))
    for now in range(10, 3600, 10):
        at_b = after(at_b, Traffic(a, 1e5), now=now)
        at_a = after(at_a, Traffic(b, 12.5e6), now=now + 1)
    (told,) = entries(at_a, 3600.0)
    assert told.age_s == 3600.0
    assert told.in_age_s < 2 * TRAFFIC_WINDOW_S
    links = merged({a: entries(at_a, 3600.0), b: entries(at_b, 3600.0)})
    assert links[a, b].bytes_per_s == pytest.approx(1e5, rel=0.01)
    assert links[b, a].bytes_per_s == pytest.approx(12.5e6)
    assert look(at_a, {b: False}, 3600.0)[1] == b, "nobody has told A of what it sends"


def test_better_figures_count_more_when_recent_and_old_ones_are_replaced() -> None:
    a = PeerId("a")
    table = after(LinkTable(ME), Probed(a, 0.02, 1e6, 4e6))
    table = after(table, Probed(a, 0.03, 2e6, 3e6), now=10)
    link = table.links[a]
    assert (link.probed_at, link.in_at, link.probes) == (10, 10, 2)
    assert (link.latency_s, link.out_bytes_per_s, link.in_bytes_per_s) == pytest.approx((0.022, 1.8e6, 3.8e6))
    assert after(table, Probed(a, 0.012, 2e6, 3e6), now=11).links[a].latency_s == pytest.approx(0.014)
    table = after(table, Probed(a, 0.05, 1e6, 1e6), now=11 + REFRESH_S)
    assert table.links[a] == Link(11 + REFRESH_S, 11 + REFRESH_S, 0.05, 1e6, 1e6, probes=3)


def test_the_fastest_value_of_a_while_is_a_measurement() -> None:
    a = PeerId("a")
    table = after(LinkTable(ME), Probed(a, 0.02, 1e6, 4e6))
    for now, rate in ((1, 1e6), (10, 8e6), (20, 2e6)):
        table = after(table, Traffic(a, rate), now=now)
        assert table.links[a].in_bytes_per_s == 4e6, "values share the line"
    table = after(table, Traffic(a, 3e6), now=1 + TRAFFIC_WINDOW_S)
    assert table.links[a].in_bytes_per_s == pytest.approx(7.2e6)
    for now in (40, 62):
        table = after(table, Traffic(a, 2.2e6), now=now)
    assert table.links[a].in_bytes_per_s == pytest.approx(6.2e6), "and it may be less"
    assert (table.links[a].latency_s, table.links[a].out_bytes_per_s) == (0.02, 1e6)
    new = after(after(LinkTable(ME), Traffic(a, 5e6)), Traffic(a, 1e6), now=TRAFFIC_WINDOW_S)
    assert (new.links[a].in_bytes_per_s, new.links[a].probed) == (5e6, False)
    assert entries(after(LinkTable(ME), Traffic(a, 5e6)), 1.0) == (), "nothing is known yet"
    assert [entry.in_bytes_per_s for entry in entries(new, 1.0)] == [5e6]


def test_the_announced_rates_are_those_to_the_world() -> None:
    lan = Probed(PeerId("near"), 0.0002, 1.2e8, 1.1e8)
    assert summary(LinkTable(ME)) == (None, None)
    assert summary(after(LinkTable(ME), lan)) == (1.2e8, 1.1e8)
    assert summary(after(LinkTable(ME), lan, Probed(PeerId("far"), 0.02, 1e6, 6e6))) == (1e6, 6e6)


def entry(of: str, latency_s: float | None, out: float | None, into: float | None, *ages_s: float) -> LinkEntry:
    """ages_s: of latency and rate out, and of the rate in."""
    age_s, in_age_s = ages_s
    return LinkEntry(peer=of, latency_s=latency_s, out_bytes_per_s=out, in_bytes_per_s=into, age_s=age_s, in_age_s=in_age_s)


def test_tables_merge_to_directed_links() -> None:
    a, b, c = map(PeerId, "abc")
    tables = {
        a: [entry("b", 0.01, 1e6, None, 50, 50)],
        b: [entry("a", 0.02, None, 2e6, 5, 5), entry("c", None, None, 3e6, 1, 1), entry("b", 9.0, 9.0, 9.0, 0, 0)],
    }
    assert merged(tables) == {
        (a, b): LinkFigures(0.02, 1e6),
        (b, a): LinkFigures(0.02, None, by_both=False),
        (b, c): LinkFigures(None, None, by_both=False),
        (c, b): LinkFigures(None, 3e6, by_both=False),
    }


def test_the_slower_end_is_believed_and_neither_when_much_older() -> None:
    a, b = PeerId("a"), PeerId("b")
    liar = [entry("b", 0.0, 1e12, 1e12, 0, 0)]
    for age_s in (1.0, REFRESH_S):
        links = merged({a: liar, b: [entry("a", 0.05, 2e6, 1e6, age_s, age_s)]})
        assert links == {(a, b): LinkFigures(0.05, 1e6), (b, a): LinkFigures(0.05, 2e6)}
    links = merged({a: [entry("b", 0.03, 4e6, 4e6, 0, 0)], b: [entry("a", 0.05, 2e6, 1e6, REFRESH_S + 1, 2)]})
    assert links == {(a, b): LinkFigures(0.03, 1e6), (b, a): LinkFigures(0.03, 4e6)}


def test_who_tells_twice_is_not_two() -> None:
    a, b = PeerId("a"), PeerId("b")
    links = merged({a: [entry("b", 0.0, 1e9, 1e9, 0, 0)] * 2, b: []})
    assert not links[a, b].by_both
    assert not links[b, a].by_both


def test_a_table_never_outgrows_its_message() -> None:
    table = LinkTable(ME)
    for number in range(MAX_LINKS + 50):
        table = after(table, Probed(PeerId(f"{number:052}"), 0.0123456789, 123456.789, 123456.789), now=float(number))
    told = entries(table, 1e6)
    assert len(told) == MAX_LINKS
    assert min(int(entry.peer) for entry in told) == 50, "the oldest went"
    assert told[0].age_s == told[0].in_age_s == 1e6 - MAX_LINKS - 49
    assert len(SWARM_MESSAGES.encode(Links(entries=told, measuring=False))) < 32 << 10


_PEERS = [PeerId(f"peer{i}") for i in range(12)]
_FIGURE = st.floats(0, 1e9)
_EVENTS = st.lists(
    st.one_of(
        st.builds(Probed, st.sampled_from(_PEERS), _FIGURE, _FIGURE, _FIGURE),
        st.builds(Postponed, st.sampled_from(_PEERS), st.floats(0, 100)),
        st.builds(Failed, st.sampled_from(_PEERS)),
        st.builds(Traffic, st.sampled_from(_PEERS), _FIGURE),
        st.builds(Look, st.dictionaries(st.sampled_from([*_PEERS, ME]), st.booleans()), st.booleans()),
    ),
    max_size=60,
)


@given(_EVENTS, st.randoms(use_true_random=False))
def test_whatever_happens_one_probe_at_a_time_and_never_to_oneself(
    events: list[Probed | Postponed | Failed | Traffic | Look], rng: random.Random
) -> None:
    table, now, running = LinkTable(ME), 0.0, None
    ended: list[Callable[[PeerId], Probed | Postponed | Failed]] = [
        lambda peer: Probed(peer, 0.1, 1.0, 1.0), lambda peer: Postponed(peer, 1.0), Failed
    ]  # fmt: skip
    for event in events:
        now += rng.random() * 100
        if running is not None and rng.random() < 0.5:
            table, actions = step(table, rng.choice(ended)(running), now)
            assert actions == ()
            running = None
        before = table.not_before
        table, actions = step(table, event, now)
        running = table.probing
        for action in actions:
            assert isinstance(event, Look)
            assert event.idle
            assert action.peer in event.others.keys() - {ME}
            assert before.get(action.peer, now) <= now
            assert action == Probe(table.probing)  # type: ignore[arg-type]
        assert len(table.links) <= MAX_LINKS


@pytest.mark.parametrize(("near", "due_s"), [(False, REFRESH_S), (True, NEAR_REFRESH_S)])
def test_links_within_one_place_are_measured_again_less_often(near: bool, due_s: float) -> None:
    others = peers(1, near=int(near))
    table, peer = LinkTable(ME), PeerId("peer0")
    for now in (0.0, 100.0):  # the second look is behind it
        table = after(table, Probed(peer, 0.05, 1e6, 1e6), now=now)
    assert look(table, others, 100.0 + due_s - 1)[1] is None
    assert look(table, others, 100.0 + due_s + 1)[1] == peer
