"""Networks from testbed files: what the numbers become, and what a wrong file is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_p2p.errors import ConfigError
from fusion_p2p.plan.testbed import load_testbed, site_names

TESTBEDS = Path(__file__).resolve().parents[2] / "contrib" / "testbeds"


def two_sites() -> dict[str, Any]:
    return {
        "sites": [
            {"name": "A", "gpus": [{"device": "V100", "count": 2}], "lan": {"mbit_per_s": 1000, "latency_ms": 1}},
            {"name": "B", "gpus": [{"device": "RTX2080"}]},
        ],
        "wan": [{"between": ["A", "B"], "mbit_per_s": [8, 16], "latency_ms": 20}],
    }


def load(folder: Path, content: dict[str, Any], **options: Any):
    path = folder / "bed.json"
    path.write_text(json.dumps(content))
    return load_testbed(path, **options)


def test_rates_become_seconds_per_byte_in_each_direction(tmp_path: Path):
    network = load(tmp_path, two_sites())
    assert network.peers == ("A/0/V100", "A/1/V100", "B/0/RTX2080")
    assert network.flops_per_s[0] == pytest.approx([15.7e12 * 0.55] * 3)
    assert network.free_bytes.tolist() == [32e9, 32e9, 8e9]
    assert network.beta_s[0, 2] == pytest.approx(1e-6)
    assert network.beta_s[2, 0] == pytest.approx(0.5e-6)
    assert network.alpha_s[2, 1] == pytest.approx(0.020)
    assert network.link_s(0, 1, 1e6) == pytest.approx(0.001 + 0.008)
    assert not network.uplink_s.any()
    assert site_names(network) == ("A", "B")


def test_uplinks_are_shared_only_under_a_limit_per_site(tmp_path: Path):
    content = two_sites()
    for site in content["sites"]:
        site |= {"uplink_mbit_per_s": 4, "downlink_mbit_per_s": 80}
    with pytest.raises(ConfigError, match="site A has a limit for all its flows, which counts only with"):
        load(tmp_path, content)
    network = load(tmp_path, content | {"wan_limit": "per-site"})
    assert network.uplink_s == pytest.approx([2e-6, 2e-6])
    assert network.link_s(0, 2, 1e6) == pytest.approx(0.020 + 2)


def test_half_duplex_is_one_link_for_both_directions(tmp_path: Path):
    full, half = (load(tmp_path, two_sites() | {"duplex": duplex}) for duplex in ("full", "half"))
    assert {queue for queue, _ in full.queues(0, 2)}.isdisjoint(queue for queue, _ in full.queues(2, 0))
    assert {queue for queue, _ in half.queues(0, 2)} == {queue for queue, _ in half.queues(2, 0)}


def test_owner_is_a_node_in_its_site(tmp_path: Path):
    network = load(tmp_path, two_sites() | {"owner": "A"})
    assert network.owner == 3
    assert network.sites.tolist() == [0, 0, 1, 0]
    assert network.beta_s[3, 0] == network.beta_s[0, 1]
    assert np.diagonal(network.beta_s).tolist() == [0] * 4


def test_devices_of_the_file_win_and_may_be_relative_to_this_machine(tmp_path: Path):
    content = two_sites() | {"devices": {"V100": {"slower": 4, "memory_gb": 1}}}
    network = load(tmp_path, content, reference=[8.0, 4.0, 2.0])
    assert network.flops_per_s[0].tolist() == [2.0, 1.0, 0.5]
    assert network.flops_per_s[2][0] == pytest.approx(10.07e12 * 0.5)


def test_peer_order_decides_how_peers_are_listed():
    network = load_testbed(TESTBEDS / "t7-emulated.json")
    assert [peer[:3] for peer in network.peers] == ["A/0", "B/0", "C/0", "A/1", "B/1", "C/1"]
    assert network.flops_per_s[:, 0] / network.flops_per_s[0, 0] == pytest.approx([1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 4])


@pytest.mark.parametrize("path", sorted(TESTBEDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_testbed_here_loads(path: Path):
    network = load_testbed(path)
    count = len(network.peers)
    assert len(set(network.peers)) == count
    assert (network.beta_s[~np.eye(count, dtype=bool)] > 0).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wan": []}, "no link between 'A' and 'B'"),
        ({"wan": "uniform"}, "belong together"),
        ({"wan": [{"between": ["A", "C"], "mbit_per_s": 1, "latency_ms": 1}]}, "'A' - 'C' is not a pair"),
        ({"wan_limit": "per-site"}, "site A lacks uplink_mbit_per_s"),
        ({"owner": "B"}, 'site B has several nodes but no "lan"'),
        ({"peer_order": [["A", 0]]}, "list every"),
        ({"devices": {"V100": {"memory_gb": 1}}}, "device 'V100' needs"),
        ({"sites": [{"name": "A", "gpus": [{"device": "V101"}]}], "wan": []}, "no device 'V101'"),
        ({"sites": [{"name": "A", "gpus": [{"device": "V100", "count": 0}]}], "wan": []}, "sites.0.gpus.0.count"),
        ({"bandwidth": 3}, "bandwidth"),
        ({"duplex": "both"}, "duplex"),
        (
            {"sites": [{"name": "A", "gpus": [{"device": "V100"}], "lan": {"mbit_per_s": [1, 2], "latency_ms": 1}}], "wan": []},
            "site A: a lan has one rate",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, change: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=r"bed\.json: .*" + sentence.replace("[", r"\[")):
        load(tmp_path, two_sites() | change)


def test_a_file_that_is_not_there_or_not_json(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read the testbed"):
        load_testbed(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="Invalid JSON"):
        load_testbed(tmp_path / "bad.json")
