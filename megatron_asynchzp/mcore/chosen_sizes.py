# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the shard sizes that are auto: what the planner finds best for a run on its cluster, before
anything is built. A function of the flags and the cluster file alone, so the same on every rank.
"""

from argparse import Namespace
from copy import copy

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.asynchzp import AUTO
from megatron_asynchzp.mcore.flags.shard_sizes import STATES, automatic_states, node_size
from megatron_asynchzp.mcore.planned_model import setting_of
from megatron_asynchzp.mcore.start_table import moments_nbytes
from megatron_asynchzp.planner.cluster import GIB, Cluster, load_cluster
from megatron_asynchzp.planner.costs import Plan
from megatron_asynchzp.planner.program import Schedule
from megatron_asynchzp.planner.search import Space, search
from megatron_asynchzp.planner.traffic import Wire
from megatron_asynchzp.sharding.topology import ShardSizes


def choose_sizes(args: Namespace) -> list[str]:
    """Write the best sizes into `args` where one is auto; the line to log. Sizes that were given as
    numbers stay, the others are chosen together.

    args: validated by Megatron. Raises ConfigurationError, one line, for a cluster that is not the
    run's and for a model that does not fit.
    """
    if not automatic_states(args):
        return []
    cluster = _cluster(args)
    outcome = search(_space(args, cluster))
    best = outcome.best
    if best is None:
        raise ConfigurationError(
            f"--asynchzp-{automatic_states(args)[0]}-shard-size auto: none of "
            f"{outcome.num_plans} plans fits into the {cluster.device.memory_gib:g} GiB of "
            f"--asynchzp-cluster {args.asynchzp_cluster}; start more ranks, or give other numbers"
        )
    flags = []
    for state in STATES:
        size = getattr(best.plan.sizes, state)
        setattr(args, f"asynchzp_{state}_shard_size", size)
        flags.append(f"--asynchzp-{state}-shard-size {size}")
    return [
        f"chosen of {outcome.num_plans} plans for {args.asynchzp_cluster}: {' '.join(flags)} "
        f"(planned: {best.step_s:.3g} s a step, {best.costing.memory.total / GIB:.3g} GiB a rank)"
    ]


def _cluster(args: Namespace) -> Cluster:
    cluster = load_cluster(args.asynchzp_cluster).with_ranks(args.world_size)
    if cluster.ranks_per_node != node_size(args):
        raise ConfigurationError(
            f"--asynchzp-cluster {args.asynchzp_cluster}: its nodes have {cluster.ranks_per_node} "
            f"ranks, those of this run {node_size(args)}; set ranks_per_node in the file"
        )
    return cluster


def _space(args: Namespace, cluster: Cluster) -> Space:
    """All sizes, for the flags as they are."""
    setting = setting_of(_with_vocabulary(args))
    batch = setting.batch
    given = {state: getattr(args, f"asynchzp_{state}_shard_size") for state in STATES}
    start = Plan(
        ShardSizes(1, 1, 1),
        setting.parallel,
        batch,
        Schedule(0 if args.asynchzp_schedule == "inline" else args.asynchzp_prefetch_depth),
        setting.recompute,
        wire=Wire(2 if args.grad_reduce_in_bf16 else 4),
        moments_nbytes=moments_nbytes(args).most_params,
    )
    parallel = setting.parallel
    replicas = cluster.num_ranks // (parallel.tp * parallel.pp * parallel.cp)
    return Space(
        setting.model,
        cluster,
        batch.size * batch.num_micro_batches * replicas,
        start,
        setting.kernels,
        depths=(start.schedule.depth,),
        micro_batch_sizes=(batch.size,),
        recomputes=(setting.recompute,),
        kept_sizes={
            state: size for state, size in given.items() if size is not None and size != AUTO
        },
    )


def _with_vocabulary(args: Namespace) -> Namespace:
    """With the padded size that the run will have. Megatron finds it when it builds its tokenizer,
    which is after this."""
    if args.padded_vocab_size is not None:
        return args
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = copy(args)
    build_tokenizer(args)
    return args
