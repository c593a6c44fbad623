# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Draws a step of three shardings as the planner simulates it.

ZeRO-3, the distributed optimizer's sizes and the default here: a rank's computation, and the load
of the links within a node and between nodes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_asynchzp.commands import styles
from megatron_asynchzp.commands.styles import BLUE, GREEN, GREY, INK, ORANGE, PINK, RED, SKY, bare
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner.cluster_files import load_cluster
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.simulate import LANE_NAMES
from megatron_asynchzp.planner.traffic import BETWEEN
from scripts.report.legends import add_legend

# Llama 3 8B, as in the table of README.
_MODEL = Model(4096, 128256, (Layer(Attention(32, 8, 128), Mlp(14336, True)),) * 32, (), False)
_MICRO_BATCHES = 4
_NODES, _CARDS, _CARD_GB_S = 8, 1, 12.5
_SIZES = {
    "ZeRO-3: P, G, O = 64, 64, 64": (64, 64, 64),
    "The distributed optimizer's sizes, run here: 1, 1, 64": (1, 1, 64),
    "AsyncHZP's default: 8, 8, 64": (8, 8, 64),
}
_LANES = ("computes", "within a node", "between nodes")
_COLOURS = {
    "forward": BLUE,
    "backward": GREEN,
    "wait": RED,
    "gather": SKY,
    "reduce": ORANGE,
    "grad-sync": PINK,
    "param-sync": GREY,
}
_MEANINGS = {
    "wait": "waits",
    "gather": "gathers parameters",
    "reduce": "reduces gradients",
    "grad-sync": "sums gradients, once",
    "param-sync": "sends parameters, once",
}
_CAPTION = (
    f"Simulated by the planner, not measured: Llama 3 8B, {_MICRO_BATCHES} micro-batches of 8192 "
    f"tokens on a rank, {_NODES} nodes of 8 A100 whose GPUs share 100 Gbit/s.",
    "ZeRO-3 gathers and reduces across nodes in each micro-batch, the others send across nodes "
    "once in a step.",
    "With 100 Gbit/s for each GPU the difference is smaller: asynchzp plan computes yours.",
)


def costing(sizes: tuple[int, int, int]) -> Costing:
    """Of the picture's model and cluster."""
    cluster = load_cluster("a100")
    between = replace(cluster.between, gb_s=_CARD_GB_S, cards=_CARDS)
    cluster = replace(cluster, nodes=_NODES, between=between)
    batch = Batch(1, 8192, _MICRO_BATCHES)
    return Costing(_MODEL, Plan(ShardSizes(*sizes), Parallel(), batch), cluster)


def draw(file: Path) -> None:
    """Write the picture as a PNG to `file`."""
    from matplotlib.patches import Patch

    figure = styles.new_figure(6.6)
    panels = figure.subplots(len(_SIZES), 1, sharex=True)
    for (title, sizes), axes in zip(_SIZES.items(), panels, strict=True):
        _draw_step(axes, title, costing(sizes))
    handles = [
        Patch(color=colour, label=_MEANINGS.get(kind, kind)) for kind, colour in _COLOURS.items()
    ]
    add_legend(figure, handles, ncols=4)
    panels[-1].set_xlabel("seconds of a step", fontsize=styles.NORMAL, color=INK)
    styles.add_caption(figure, *_CAPTION)
    figure.savefig(file, dpi=styles.DPI)


def _draw_step(axes: Any, title: str, one: Costing) -> None:
    step = one.simulate(_MICRO_BATCHES, with_spans=True)
    units = {unit.name: unit for unit in one.units[0]}
    works = {lane: kind for kind, lane in LANE_NAMES.items()}
    for lane, name, start, end in step.spans[0]:
        if lane in works:
            links = {transfer[0] for transfer in one.work(works[lane], units[name])}
            kind, row = lane, 2 if BETWEEN in links else 1
        else:
            kind, row = lane if lane == "wait" else name.partition(" ")[0], 0
        if kind in _COLOURS:
            piece = [(start, end - start)]
            axes.broken_barh(piece, (row - 0.4, 0.8), facecolors=_COLOURS[kind])
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    left, held = one.node_nbytes / 2**30, one.memory.states / 2**30
    facts = f"{step.step_s:.1f} s, {left:.0f} GiB leave a node, {held:.1f} GiB of states a rank"
    styles.set_title(axes, f"{title}: {facts}")
    bare(axes)
