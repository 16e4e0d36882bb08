"""The swarm as a table and as JSON."""

from __future__ import annotations

import io
import json

from rich.console import Console

from fusion_p2p.monitor.swarm_table import swarm_json, swarm_picture
from fusion_p2p.wire.swarm_messages import Coordinator, Holding, JobStatus, PeerStatus, StatusReply

JOB = "ab" * 16


def peer(name: str, holding: Holding | None = None, device: str = "cpu") -> PeerStatus:
    return PeerStatus(
        peer=name,
        state="working" if holding else "standby",
        reachability="direct",
        device=device,
        fusion_version="0.1.0",
        free_bytes=2 << 30,
        flops_per_s=5e10,
        up_bytes_per_s=1.1e6,
        down_bytes_per_s=None if holding else 11.5e6,
        holding=holding,
        progress=7,
        heard_ago_s=1.0,
        standing="" if holding else "spare 1 of 1: all slices are covered",
    )


REPLY = StatusReply(
    network="fusion",
    asked="12D3KooWaaaaaaaa",
    coordinator=Coordinator(term=3, peer="12D3KooWbbbbbbbb"),
    peers=(peer("12D3KooWaaaaaaaa", Holding(job=JOB, slices=(0, 2))), peer("12D3KooWbbbbbbbb", device="evil\x1b[2J")),
    peers_left_out=4,
    jobs=(JobStatus(job=JOB, owner="12D3KooWcccccccc", state="waiting", reason="1 of 3 peers are here"),),
)


def test_the_table_says_who_holds_what_and_who_coordinates() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(swarm_picture(REPLY))
    shown = console.export_text()
    for part in (
        "swarm fusion: 6 peers, bbbbbbbb coordinates in term 3",
        "bbbbbbbb *",
        "0,2 of abababab",
        "direct",
        "2.0 GiB",
        "50",
        "8.8/92",
        "8.8/-",
    ):
        assert part in shown
    assert "and 4 more peers" in shown
    assert "bbbbbbbb: spare 1 of 1: all slices are covered" in shown
    assert "aaaaaaaa: " not in shown
    assert "job abababab of cccccccc: waiting: 1 of 3 peers are here" in shown
    assert "\x1b" not in shown


def test_a_job_that_runs_is_said_to() -> None:
    proposed = JobStatus(job=JOB, owner="12D3KooWcccccccc", state="proposed", reason="a plan over 1 peer was proposed")
    other = proposed.model_copy(update={"job": "cd" * 16})
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(swarm_picture(REPLY.model_copy(update={"jobs": (proposed, other)})))
    shown = console.export_text()
    assert "job abababab of cccccccc: runs on 1 peer\n" in shown
    assert "job cdcdcdcd of cccccccc: a plan over 1 peer was proposed" in shown


def test_the_json_is_the_whole_answer() -> None:
    decoded = json.loads(swarm_json(REPLY))
    assert decoded["coordinator"] == {"term": 3, "peer": "12D3KooWbbbbbbbb"}
    assert [entry["peer"] for entry in decoded["peers"]] == ["12D3KooWaaaaaaaa", "12D3KooWbbbbbbbb"]
    assert decoded["peers"][0]["holding"] == {"job": JOB, "slices": [0, 2]}
