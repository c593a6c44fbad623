# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Explains the choice of a plan: its limit, and how far plainer plans are behind."""

from math import ceil, inf

from megatron_asynchzp.planner.cluster import GIB
from megatron_asynchzp.planner.costs import Costing
from megatron_asynchzp.planner.search import FLAT, PLAIN, Candidate, Outcome
from megatron_asynchzp.planner.space import Space
from megatron_asynchzp.planner.traffic import BETWEEN, INSIDE

MEAN_ERROR = 0.056
"""Of predicted steps, over all published runs (docs/planner.md): a smaller gain may be none."""
_NAMED, _MUCH = 0.005, 0.1  # shares of a step: to be named, and to be its limit
_BUSY = 0.9  # of a step: a link that is busy for longer limits it


def limit(best: Candidate) -> str:
    step, step_s, costing = best.step, best.step_s, best.costing
    assert step is not None
    times = step.worst
    units = costing.units[step.stages.index(times)]
    count = costing.plan.batch.num_micro_batches
    links = {link: times.links_s.get(link, 0.0) / step_s for link in (INSIDE, BETWEEN)}
    sent: dict[str, float] = {}
    for (cause, link), (waited_s, busy_s) in costing.compute.sent_in(units).items():
        links[link] += count * busy_s / step_s
        sent[cause] = sent.get(cause, 0.0) + count * waited_s / step_s
    exposed, bubble = times.exposed_s / step_s, times.bubble_s / step_s
    computing = times.compute_s / step_s - sum(sent.values())
    named = [f"{cause} {share:.0%}" for cause, share in sent.items() if share >= _NAMED]
    parts = (
        f"computing takes {computing:.0%} of the step, waiting for "
        f"{', '.join([f'communication {exposed:.0%}', *named])}, for other stages {bubble:.0%}; "
        f"the links inside a node are busy for {links[INSIDE]:.0%} of it, those between nodes for "
        f"{links[BETWEEN]:.0%}"
    )
    link = max(links, key=lambda name: links[name])
    ours = "communication that nothing runs beside (the ends of a step, latencies)"
    if links[link] > _BUSY:
        ours = "the bandwidth between nodes" if link == BETWEEN else "the bandwidth inside nodes"
    # In a pipeline some waiting for neighbours is the order of things.
    waits_for = {**sent, ours: exposed, "the pipeline's bubble": bubble if bubble > 0.2 else 0.0}
    cause = max(waits_for, key=lambda name: waits_for[name])
    cause = cause if waits_for[cause] >= _MUCH else "computing"
    return f"limited by {cause}: {parts}"


def comparisons(outcome: Outcome, best: Candidate) -> list[str]:
    """Compare each other system in one line: how much longer its step is, and why."""
    return [_against(system.name, plan, best) for system, plan in outcome.contenders.items()]


def stay(outcome: Outcome, best: Candidate) -> str:
    plans = outcome.contenders.items()
    gains = {it.name: plan.step_s / best.step_s - 1 for it, plan in plans if plan is not None}

    def named(least: float, most: float) -> str:
        return ", ".join(
            f"{it} ({gain:+.2%})" for it, gain in gains.items() if least < gain <= most
        )

    small, unsure = named(-inf, PLAIN), named(PLAIN, MEAN_ERROR)
    lines = [f"stay where you are with {small}: nothing is gained over it"] if small else []
    within = f"the gain is within the planner's error of {MEAN_ERROR:.1%}"
    return "; ".join([*lines, f"over {unsure} {within}"] if unsure else lines)


def worth(gain: float) -> str:
    if gain <= PLAIN:
        return "Stay where you are"
    if gain <= MEAN_ERROR:
        return f"Measure both, as this is within the planner's mean error of {MEAN_ERROR:.1%}"
    return "Worth a change"


def choice(outcome: Outcome) -> str:
    best, fastest = outcome.best, outcome.ranked[0]
    assert best is not None
    if best is fastest or best.step_s <= min(candidate.step_s for candidate in outcome.ranked):
        return "* the fastest plan, whose flags follow"
    first = min(outcome.ranked, key=lambda candidate: candidate.step_s)
    slower = best.step_s / first.step_s - 1
    reason = f"the sizes of {best.scheme}"
    if best.scheme not in FLAT:
        sent, sends = best.costing.node_nbytes / 1e9, first.costing.node_nbytes / 1e9
        reason = f"{sent:,.1f} GB off a node in place of {sends:,.1f}"
    return f"* the plan whose flags follow: {slower:.2%} slower than the fastest, with {reason}"


def _against(name: str, candidate: Candidate | None, best: Candidate) -> str:
    if candidate is None:
        return f"{name}: no plan of it fits into the memory"
    sizes = candidate.plan.sizes
    ours, theirs = best.step, candidate.step
    assert ours is not None and theirs is not None
    ratio = candidate.step_s / best.step_s
    reasons: list[str] = []
    for cause, seconds in (("waiting", "exposed_s"), ("computing", "compute_s")):
        more = getattr(theirs.worst, seconds) - getattr(ours.worst, seconds)
        if abs(more) > 0.005 * best.step_s:
            reasons.append(f"{abs(more):.3g} s {'more' if more > 0 else 'less'} {cause}")
    sent, sends = best.costing.node_nbytes, candidate.costing.node_nbytes
    if sends != sent:
        reasons.append(f"{sends / 1e9:.3g} against {sent / 1e9:.3g} GB that leave a node")
    held = (candidate.costing.memory.total - best.costing.memory.total) / GIB
    if abs(held) >= 0.1:
        reasons.append(f"{abs(held):.1f} GiB {'more' if held > 0 else 'less'} memory")
    text = f"{name} ({sizes.param}, {sizes.grad}, {sizes.optim}): {ratio:.3f} x the step"
    return f"{text}; {', '.join(reasons)}" if reasons else text


def hierarchy(outcome: Outcome, best: Candidate) -> str:
    flat = [it for name, it in outcome.baselines.items() if it is not None and name != "HSDP"]
    if best.scheme in FLAT:
        gain = best.step_s / outcome.ranked[0].step_s - 1
        behind = f"the fastest other sizes gain {gain:.2%}" if gain > 0 else "none is faster"
        return f"hierarchy does not pay here: {best.scheme} is as good ({behind})"
    if not flat:
        return "hierarchy pays here: neither ZeRO-3 nor the distributed optimizer fits"
    plain = min(flat, key=lambda candidate: candidate.step_s)
    gain = plain.step_s / best.step_s - 1
    links = (
        f"{plain.scheme}, whose busiest link is busy for {plain.busiest_link:.0%} of its step in "
        f"place of {best.busiest_link:.0%}"
    )
    if gain <= PLAIN:
        return f"hierarchy costs nothing here: as fast as {links}"
    if gain <= MEAN_ERROR:
        error = f"within the planner's error of {MEAN_ERROR:.1%}"
        return f"hierarchy may pay here, {error}: {gain:.1%} faster than {links}"
    return f"hierarchy pays here: {gain:.1%} faster than {links}"


def saving(costing: Costing, step_s: float, is_async: bool, interval: int | None) -> str:
    """Describe how often to save, by the failures in the cluster's file; "" without them.

    is_async and interval are the run's own; the interval counts steps, None without saves.
    """
    cluster, told = costing.cluster, list[str]()
    if cluster.failures is None:
        return ""
    for flag in dict.fromkeys(("--async-save " * is_async, "--async-save ")):
        size = costing.saved_nbytes, cluster.nodes, cluster.num_ranks
        saves = cluster.failures.saves(*size, bool(flag))
        own = [interval] if interval and not told else []
        for steps in (saves.best_steps(step_s), *own):
            part, minutes = saves.goodput(steps * step_s), steps * step_s / 60
            told.append(
                f"{part:.1%} of the time with {flag}--save-interval {steps} ({minutes:.3g} min)"
            )
    hours = cluster.failures.mtbf_hours / cluster.nodes
    return f"a failure every {hours:,.1f} hours leaves to training {', '.join(told)}"


def missed(outcome: Outcome, space: Space) -> str:
    """Describe a plan that may be faster and needs more memory than a device has; "" for none."""
    if outcome.out_of_memory is None or outcome.best is None:
        return ""
    best, bound_s = outcome.out_of_memory
    more = _amount(best.costing.memory.total - space.cluster.device.usable_nbytes)
    sizes = best.plan.sizes
    return (
        f"a faster plan may be out of memory: ({sizes.param}, {sizes.grad}, {sizes.optim}) in "
        f"micro-batches of {best.plan.batch.size} with recomputation "
        f"{best.plan.recompute.granularity} needs {more} more on a device, and its step takes at "
        f"least {bound_s:.3g} s"
    )


def _amount(nbytes: float) -> str:
    if nbytes >= 0.1 * GIB:
        return f"{ceil(10 * nbytes / GIB) / 10:.1f} GiB"
    return f"{ceil(nbytes / 2**20)} MiB"
