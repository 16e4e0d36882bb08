"""Makes the plan of a dry run and prints it: as text, as JSON, as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from fusion_p2p.cli.identity_file import claimed_identity
from fusion_p2p.cli.running import INTERRUPTED, run
from fusion_p2p.config import PlanConfig
from fusion_p2p.device.choose import choose
from fusion_p2p.device.rates import rates
from fusion_p2p.errors import ConfigError, FusionError
from fusion_p2p.owner.dry_run import DryRun, cost_model, dry_run
from fusion_p2p.plan.actions import rows, table
from fusion_p2p.plan.explain import in_words, seconds
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.testbed import REFERENCE_FLOPS, load_testbed

Report = Callable[[str], None]


def print_plan(config: PlanConfig, report: Report) -> int:
    """Plan, print, and draw when a picture is wanted; `report` is told what is being done."""
    network = _network(config, report)  # before the model: a wrong file should not take ten seconds to be refused
    model = cost_model(config)
    report(f"captured {model.name} in {seconds(model.capture_s)}")
    made = dry_run(config, model, network, report)
    actions = table(rows(made.timeline.tasks)).splitlines() if config.actions else []
    print(json.dumps(as_json(made) | {"actions": actions}) if config.json else "\n".join((*as_text(made), *actions)))
    if config.plot is not None:
        _draw(made, config.plot)
        report(f"drew {config.plot}")
    return 0


def as_text(made: DryRun) -> tuple[str, ...]:
    """The plan in words, after what it is a plan for."""
    sites = len(set(made.network.sites[: len(made.network.peers)].tolist()))
    return (
        f"{made.model.name}: {len(made.model.graph.nodes)} operators, {made.model.num_parameters:,} parameters; "
        f"{len(made.network.peers)} peers in {sites} {'site' if sites == 1 else 'sites'}; "
        f"planned in {seconds(made.planning_s)}",
        *in_words(made.figures, made.network),
    )


def as_json(made: DryRun) -> dict[str, object]:
    """The plan as one JSON object: the fields of `plan.forecast`, and what it is a plan for."""
    return {
        "model": made.model.name,
        "operators": len(made.model.graph.nodes),
        "parameters": made.model.num_parameters,
        "peers": list(made.network.peers),
        "sites": made.network.sites[: len(made.network.peers)].tolist(),
        "capture_s": made.model.capture_s,
        "planning_s": made.planning_s,
        **asdict(made.figures),
    }


def _network(config: PlanConfig, report: Report) -> Network:
    if config.testbed is not None:
        return load_testbed(config.testbed, reference=lambda: _own_rates(config, report))
    from fusion_p2p.cli.live_network import live_network  # imports hivemind

    found: list[Network] = []
    with claimed_identity(config, "plan") as claimed:
        code = run(live_network(claimed, report, found.append), stopped_code=INTERRUPTED)
    if not found:
        raise SystemExit(code)
    return found[0]


def _own_rates(config: PlanConfig, report: Report) -> tuple[float, float, float]:
    """This machine's rates where it was measured before: the testbed is relative to it."""
    try:
        known = rates(choose("auto"), config.state_directory, benchmark="off")
    except FusionError:
        report(
            f"this machine was never measured: devices that are `slower` than it are planned as if it did "
            f"{REFERENCE_FLOPS / 1e9:g} GFLOP/s; run `fusion-peer bench` once"
        )
        return (REFERENCE_FLOPS,) * 3
    return known.matmul_flops, known.convolution_flops, known.attention_flops


def _draw(made: DryRun, path: Path) -> None:
    from fusion_p2p.plan.charts import draw  # imports matplotlib

    try:
        draw(made.figures, made.pipeline, made.timeline, path)
    except OSError as error:
        raise ConfigError(f"plot: cannot write {path}: {error.strerror}") from None
