"""A plan as a picture: above, who holds what and what crosses each link; below, one step as a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before anything asks for a display

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from fusion_p2p.plan.explain import seconds, short_peer, size
from fusion_p2p.plan.forecast import EdgeForecast, Forecast, SliceForecast
from fusion_p2p.plan.memory import gib
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline
from fusion_p2p.plan.testbed import site_names
from fusion_p2p.plan.timeline import Timeline

BOXES_IN_A_ROW = 6
BUSY_LINK = 0.1
"""A link gets a row of its own in the Gantt chart if it carries something for at least this share of the step."""
FORWARD, BACKWARD, FORWARD_LINK, BACKWARD_LINK = "#4878a8", "#d08a3c", "#9fbcd6", "#ecc79c"
BOX_WIDTH, BOX_HEIGHT, STEP_X, STEP_Y = 0.66, 0.62, 1.0, 1.0


def draw(figures: Forecast, pipeline: Pipeline, timeline: Timeline, path: Path) -> None:
    """Draw into a file; the ending of its name says the format. `timeline` is the traced simulation of `pipeline`."""
    network = pipeline.network
    rows = -(-len(figures.slices) // BOXES_IN_A_ROW)
    bars = _bars(pipeline, timeline)
    heights = (1.75 * rows + 0.5, max(2.0, 0.26 * len(bars) + 0.9))
    figure = Figure(figsize=(15, sum(heights) + 0.8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_holders(above, figures, network, rows)
    _draw_step(below, bars, figures, timeline)
    figure.suptitle(_title(figures, network), fontsize=11)
    figure.savefig(path, dpi=110)


def _title(figures: Forecast, network: Network) -> str:
    idle = len(network.peers) - len(figures.peers)
    return (
        f"{figures.scheduler}: {len(figures.slices)} slices on {len(figures.peers)} of {len(network.peers)} peers "
        f"({idle} idle), {figures.micro_batches} micro-batches, {figures.schedule}, {seconds(figures.step_s)} a step"
    )


def _draw_holders(axes: Axes, figures: Forecast, network: Network, rows: int) -> None:
    """Slices as boxes in reading order, coloured by site, with arrows along the edges between neighbours."""
    names = site_names(network)
    sites = [int(network.sites[network.peers.index(part.members[0])]) for part in figures.slices]
    for part, site in zip(figures.slices, sites, strict=True):
        _draw_box(axes, part, site)
    for edge in figures.edges:
        if edge.source != OWNER_STAGE:
            _draw_edge(axes, edge, network, figures)
    used = sorted(set(sites))
    patches = [Patch(color=_colour(site), label=names[site]) for site in used[:12]]
    axes.legend(handles=patches, loc="lower right", fontsize=8, title="site of the first member", title_fontsize=8, ncols=6)
    axes.set_xlim(-0.5, BOXES_IN_A_ROW - 0.25)
    axes.set_ylim(-rows + 0.2, 0.5)
    axes.set_axis_off()


def _centre(index: int) -> tuple[float, float]:
    row, column = divmod(index, BOXES_IN_A_ROW)
    return column * STEP_X, -row * STEP_Y


def _colour(site: int) -> tuple[float, float, float, float]:
    red, green, blue, _ = colormaps["Set3"](site % 12)
    return red, green, blue, 1.0


def _draw_box(axes: Axes, part: SliceForecast, site: int) -> None:
    x, y = _centre(part.index)
    box = FancyBboxPatch(
        (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
        BOX_WIDTH,
        BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.04",
        facecolor=_colour(site),
        edgecolor="#555555",
    )
    axes.add_patch(box)
    members = [short_peer(peer) for peer in part.members]
    who = members[0] if len(members) == 1 else f"{members[0]} + {len(members) - 1} more"
    busy = f", busy {min(part.busy):.0%}" if part.busy else ""
    lines = (f"slice {part.index}", who, *_layers(part), f"{gib(part.num_bytes)}{busy}")
    axes.text(x, y, "\n".join(lines), ha="center", va="center", fontsize=7)


def _layers(part: SliceForecast) -> Sequence[str]:
    first, _, last = part.layers.partition(" .. ")
    return (first, f".. {last}") if last else (first,)


def _draw_edge(axes: Axes, edge: EdgeForecast, network: Network, figures: Forecast) -> None:
    """An arrow with bytes, time and rate; edges that skip slices are arcs without words."""
    (x, y), (to_x, to_y) = _centre(edge.source), _centre(edge.target)
    style = {"arrowstyle": "->", "color": "#555555", "lw": 1.0}
    if edge.target != edge.source + 1:
        arc = style | {"connectionstyle": "arc3,rad=-0.25", "ls": ":"}
        axes.annotate("", (to_x, to_y + BOX_HEIGHT / 2), (x, y + BOX_HEIGHT / 2), arrowprops=arc)
        return
    words = _edge_words(edge, network, figures)
    if y == to_y:
        axes.annotate("", (to_x - BOX_WIDTH / 2, to_y), (x + BOX_WIDTH / 2, y), arrowprops=style)
        axes.text((x + to_x) / 2, y + 0.02, words, ha="center", va="bottom", fontsize=5.5)
        return
    axes.annotate("", (to_x, to_y + BOX_HEIGHT / 2), (x, y - BOX_HEIGHT / 2), arrowprops=style)
    axes.text(to_x + 0.03, to_y + BOX_HEIGHT / 2 + 0.08, words.replace("\n", ", "), ha="left", va="bottom", fontsize=5.5)


def _edge_words(edge: EdgeForecast, network: Network, figures: Forecast) -> str:
    sender, reader = (network.peers.index(figures.slices[index].members[0]) for index in (edge.source, edge.target))
    pace = network.pace(sender, reader)
    codec = "" if edge.codecs == ("none",) else f"\n{edge.codecs[0]}"
    mbit_per_s = 8e-6 / pace if pace else 0.0
    rate = f"\n{mbit_per_s / 1e3:.3g} Gbit/s" if mbit_per_s >= 1e3 else f"\n{mbit_per_s:.3g} Mbit/s" if pace else ""
    took = f"\n{seconds(edge.forward_s)}" if edge.forward_s is not None else ""
    return f"{size(edge.forward_bytes)}{took}{rate}{codec}"


Bar = tuple[str, list[tuple[float, float, str, str]]]
"""A row of the chart: its name, and (start, duration, colour, word) of what happens in it."""


def _bars(pipeline: Pipeline, timeline: Timeline) -> list[Bar]:
    """A row for every member of every slice; below it what it sends on and gets back, where that takes long."""
    rows: dict[tuple[int, int, int], Bar] = {}
    for task in timeline.tasks:
        member = f".{task.member}" if len(pipeline.stages[task.stage].nodes) > 1 else ""
        _, spans = rows.setdefault((task.stage, 0, task.member), (f"slice {task.stage}{member}", []))
        colour = FORWARD if task.kind == "F" else BACKWARD
        spans.append((task.start_s, task.end_s - task.start_s, colour, str(task.micro_batch)))
    links: dict[tuple[int, int, int], Bar] = {}
    for transfer in timeline.transfers:
        source = pipeline.edges[transfer.edge].source
        forward = transfer.kind == "F"
        name = ("owner feeds" if source == OWNER_STAGE else "sends on") if forward else "gets back"
        _, spans = links.setdefault((source, 1 if forward else 2, 0), (name, []))
        colour = FORWARD_LINK if forward else BACKWARD_LINK
        spans.append((transfer.start_s, transfer.end_s - transfer.start_s, colour, ""))
    rows |= {key: row for key, row in links.items() if sum(span[1] for span in row[1]) >= BUSY_LINK * timeline.step_s}
    return [rows[key] for key in sorted(rows)]


def _draw_step(axes: Axes, bars: Sequence[Bar], figures: Forecast, timeline: Timeline) -> None:
    for row, (_, spans) in enumerate(bars):
        axes.broken_barh(
            [(start, duration) for start, duration, _, _ in spans],
            (row - 0.4, 0.8),
            facecolors=[colour for _, _, colour, _ in spans],
            edgecolor="white",
            linewidth=0.3,
        )
        for start, duration, _, word in spans:
            if word and duration > timeline.step_s / 110:
                axes.text(start + duration / 2, row, word, ha="center", va="center", fontsize=6, color="white", clip_on=True)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, timeline.step_s)
    axes.set_xlabel(f"seconds of one step of {figures.micro_batches} micro-batches (their numbers in the bars)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    colours = ((FORWARD, "forward"), (BACKWARD, "backward"), (FORWARD_LINK, "values on a link"), (BACKWARD_LINK, "gradients"))
    patches = [Patch(color=colour, label=label) for colour, label in colours]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=7, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
