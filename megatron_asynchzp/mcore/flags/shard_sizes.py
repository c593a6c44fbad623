# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The three shard sizes: their defaults, and the line for sizes that do not nest."""

import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

from megatron_asynchzp.engine.sharding.topology import LONGEST_AXIS, ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import AUTO, NODE, STATES, WORLD, AsyncHZPConfig

# What a size has that is not given.
_DEFAULTS = {"param": NODE, "grad": NODE, "optim": WORLD}

# Flags of Megatron's generalized tensor parallelism (GTP). Their values are multiples of these
# tensor-parallel sizes.
WEIGHT_SHARDS = {
    "tensor_parallel_num_weight_shards": "tensor_model_parallel_size",
    "expert_tensor_parallel_num_weight_shards": "expert_tensor_parallel_size",
}

# Each shards one state more than the one before.
_FSDP_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def sharding_group_size(args: Any) -> int:
    """Return the number of ranks that shard dense parameters: data x context parallel."""
    return args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)


def node_size(args: Any) -> int:
    """Return the ranks on this node, which torchrun tells each; without it there is one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(args.world_size)))


def sharding_ranks_per_node(args: Any, on_node: int | None = None) -> int:
    """Return how many ranks of a sharding group a node holds, reduced to a divisor of the group.

    Megatron orders ranks tp-cp-dp-pp, or tp-cp-pp-dp with --use-tp-pp-dp-mapping.
    """
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    pipeline = args.pipeline_model_parallel_size if args.use_tp_pp_dp_mapping else 1
    on_node = on_node or node_size(args)
    group_size = sharding_group_size(args)
    ranks = (
        replica * tensor * context * pipeline + part * tensor
        for replica in range(group_size // context)
        for part in range(context)
    )
    return gcd(sum(rank < on_node for rank in ranks), group_size)


def translated_sizes(args: Any, group_size: int) -> dict[str, int]:
    """Return the shard sizes, by state, that the flags of Megatron's other wrappers ask for.

        Megatron-FSDP       param     grad      optim       instance: group / --num-distributed-
        no_shard            1         1         1           optimizer-instances ranks
        optim               1         1         instance
        optim_grads         1         instance  instance
        optim_grads_params  instance  instance  instance
        (torch FSDP2)       group     group     group
        (GTP)               shards    shards    instance    shards: num-weight-shards / TP

    --outer-dp-sharding-strategy optim makes the optimizer shard the whole group. Without
    Megatron-FSDP, optimizer instances ask for an optimizer shard size alone.
    Raises ConfigurationError for what the group cannot be divided into.
    """
    instances = args.num_distributed_optimizer_instances
    instance, rest = divmod(group_size, instances)
    if rest:
        raise ConfigurationError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {group_size} "
            "ranks of the sharding group (data x context parallel)"
        )
    if args.use_torch_fsdp2:
        return dict.fromkeys(STATES, group_size)
    if not args.use_megatron_fsdp:
        # Experts have the sizes of all others: their flag counts where it is alone.
        for name, shards in weight_shards(args).items():
            if group_size % shards:
                raise ConfigurationError(
                    f"{_given(args, name)} asks for {shards} shards, which do not divide the "
                    f"{group_size} ranks of the sharding group (data x context parallel)"
                )
            return {"param": shards, "grad": shards, "optim": instance}
        return {"optim": instance} if instances > 1 else {}
    strategy = args.data_parallel_sharding_strategy
    is_outer_sharded = args.outer_dp_sharding_strategy != "no_shard"
    sharded = ("optim", "grad", "param")[: _FSDP_STRATEGIES.index(strategy)]
    sizes = {state: instance if state in sharded else 1 for state in STATES}
    return sizes | {"optim": group_size} if is_outer_sharded else sizes


def weight_shards(args: Any) -> dict[str, int]:
    """Return over how many ranks GTP would shard each weight; Megatron wants multiples of TP."""
    shards_of: dict[str, int] = {}
    for name, tensor in WEIGHT_SHARDS.items():
        asked = getattr(args, name, None) or 0  # megatron-core 0.18 has no such argument
        shards, rest = divmod(asked, getattr(args, tensor) or args.tensor_model_parallel_size)
        if shards > 1 and not rest:
            shards_of[name] = shards
    return shards_of


def _given(args: Any, name: str) -> str:
    return f"--{name.replace('_', '-')} {getattr(args, name)}"


def describe_translation(args: Any, sizes: ShardSizes, group_size: int) -> list[str]:
    """Return the line to log if flags of another wrapper have become `sizes`."""
    if not translated_sizes(args, group_size):
        return []
    flags = [f"--asynchzp-{state}-shard-size {getattr(sizes, state)}" for state in STATES]
    line = "the flags of another wrapper have become " + " ".join(flags)
    if names := weight_shards(args):
        line += f" ({', '.join(_given(args, name) for name in names)})"
    return [line]


def held_sizes(args: Any, group_size: int) -> ShardSizes:
    """Return the sizes of Megatron's own wrappers for a dense layer, by the user's own `args`."""
    optim = group_size if args.use_distributed_optimizer else 1
    sizes = {"param": 1, "grad": 1, "optim": optim} | translated_sizes(args, group_size)
    if weight_shards(args) and not (args.use_megatron_fsdp or args.use_torch_fsdp2):
        tensor = args.tensor_model_parallel_size
        shards = max(1, (args.tensor_parallel_num_weight_shards or 1) // tensor)
        sizes = {"param": shards, "grad": shards, "optim": max(optim, shards)}
    return ShardSizes(sizes["param"], sizes["grad"], sizes["optim"])


def resolve_shard_sizes(
    config: AsyncHZPConfig, megatron: Any, group_size: int, ranks_per_node: int
) -> ShardSizes:
    """Return the three sizes with defaults filled in, for a sharding group of `group_size` ranks.

    Flags of other wrappers stand in for those of ours that were not given. A default follows the
    flags that were given: it is reduced until it nests with them. A rule is a default that was
    given, or the number that it stands for. A size that is auto has its default until it is chosen.
    Long axes are cut. Experts use `ShardSizes.restricted_to` of their own group.

    Raises ConfigurationError, one line, naming the flag and the values that are valid for it.
    """
    given: dict[str, int | None] = dict.fromkeys(STATES)
    given |= translated_sizes(megatron, group_size)
    words = {NODE: gcd(ranks_per_node, group_size), WORLD: group_size}
    for state, size in config.shard_sizes.items():
        if size is not None and size != AUTO:
            number = words[size] if isinstance(size, str) else size
            given[state] = None if size == _DEFAULTS[state] else number
    optim = group_size if given["optim"] is None else given["optim"]
    on_node = gcd(ranks_per_node, optim)
    param = _nested_default(on_node, given["grad"]) if given["param"] is None else given["param"]
    grad = _nested_default(on_node, param) if given["grad"] is None else given["grad"]
    sizes = ShardSizes(param, grad, optim)
    try:
        sizes.check(group_size)
    except ConfigurationError as error:
        raise ConfigurationError(_explain(sizes, given, group_size, error)) from error
    return sizes.with_short_axes(ranks_per_node)


def describe_cuts(sizes: ShardSizes, group_size: int) -> list[str]:
    """Return the line to log if axes of a sharding group of `group_size` ranks are cut."""
    if not sizes.cuts:
        return []
    meshes = [
        [outer // inner for inner, outer in pairwise(one.boundaries(sizes.optim))]
        for one in (sizes, replace(sizes, cuts=()))
    ]
    hops, hops_uncut = (sum(mesh) - len(mesh) for mesh in meshes)
    return [
        f"the optimizer shard of {sizes.optim} ranks (of {group_size}) has axes of "
        f"{' x '.join(map(str, meshes[0]))} ranks, innermost first: axes of more than "
        f"{LONGEST_AXIS} are cut, so that what is sent along all of them waits for {hops} hops "
        f"in place of {hops_uncut}"
    ]


def _nested_default(default: int, other: int | None) -> int:
    if other is None or other < 1:
        return default
    small, large = sorted((default, other))
    return default if large % small == 0 else gcd(small, large)


def _explain(sizes: ShardSizes, given: dict, group_size: int, error: ConfigurationError) -> str:
    """Return one line for the user: which flag to change, and to which values."""
    divisors = [d for d in range(1, group_size + 1) if group_size % d == 0]
    blamed = [state for state in STATES if given[state] is not None]
    for state in blamed:
        if getattr(sizes, state) not in divisors:
            return _line(state, sizes, f"does not divide the {group_size} ranks", divisors)
    for state in reversed(blamed):
        valid = [d for d in divisors if _is_nested(sizes, state, d, group_size)]
        if valid:
            return _line(state, sizes, f"does not nest ({error})", valid, group_size)
    return f"{error} (sharding group of {group_size} ranks)"


def _line(state, sizes, fault, valid: Iterable[int], group_size: int | None = None) -> str:
    where = "" if group_size is None else f" in the {group_size} ranks"
    return (
        f"--asynchzp-{state}-shard-size {getattr(sizes, state)} {fault}{where} of the sharding "
        f"group (data x context parallel); valid values: {', '.join(map(str, valid))}, or "
        f"{_DEFAULTS[state]}, which fits any number of ranks"
    )


def _is_nested(sizes: ShardSizes, state: str, value: int, group_size: int) -> bool:
    try:
        replace(sizes, **{state: value}).check(group_size)
    except ConfigurationError:
        return False
    return True
