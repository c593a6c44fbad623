# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what Megatron sees."""

from tests.mutants.catalogue.mutant import Mutant

_CONTEXT = (
    "tests/mcore/test_context_parallel.py::"
    "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
)
_PER_TOKEN = (
    "tests/mcore/test_context_parallel.py::"
    "test_a_loss_per_token_and_ranks_that_start_differently_are_stock_ddp"
)

MUTANTS = [
    Mutant(
        "replicas-not-compared",
        "what several ranks hold of a parameter is compared between all of them",
        "mcore/whole_tensors.py",
        "if axis.axis.stride >= param_size]",
        "if axis.axis.stride > param_size]",
        "tests/mcore/test_whole_tensors.py::"
        "test_a_change_on_one_rank_is_seen_by_all_wherever_another_rank_holds_the_same",
    ),
    Mutant(
        "dump-axes",
        "a dump of gradients has every element at its place",
        "mcore/whole_tensors.py",
        "axes = (*unit.groups.unshard, *unit.groups.param_sync)",
        "axes = (*unit.groups.unshard, *unit.groups.param_sync)[::-1]",
        "tests/mcore/test_whole_tensors.py::"
        "test_dumps_hold_the_whole_tensors_of_stock_megatron[experts]",
    ),
    Mutant(
        "translated-strategy",
        "the strategies of Megatron-FSDP shard one state more each, gradients before parameters",
        "mcore/flags/shard_sizes.py",
        'sharded = ("optim", "grad", "param")',
        'sharded = ("optim", "param", "grad")',
        "tests/mcore/flags/test_shard_sizes.py::"
        "test_the_flags_of_other_wrappers_become_sizes_unless_ours_are_given",
    ),
    Mutant(
        "dp-for-dp-x-cp",
        "states are sharded over data x context parallel ranks",
        "mcore/shard_groups.py",
        'over("dp_cp", pg_collection.dp_cp, sizes)',
        'over("dp_cp", pg_collection.dp, sizes)',
        _CONTEXT,
    ),
    Mutant(
        "mean-over-dp",
        "gradients are the mean over data x context parallel ranks",
        "mcore/data_parallel.py",
        "1.0 / self.dp_cp_group.size()",
        "1.0 / pg_collection.dp.size()",
        _CONTEXT,
    ),
    Mutant(
        "norm-of-replicas",
        "each element counts once in the gradient norm",
        "mcore/optimizer.py",
        "if unit.groups.topology.replica_index == 0:",
        "if True:",
        _CONTEXT,
    ),
    Mutant(
        "norm-of-one-shard",
        "the gradient norm is that of the whole model",
        "mcore/optimizer.py",
        "self.grad_stats_parallel_group = dist.group.WORLD",
        "self.grad_stats_parallel_group = pg_collection.tp",
        _CONTEXT,
    ),
    Mutant(
        "step-count",
        "an iteration is one step of the optimizer",
        "mcore/optimizer.py",
        "return self.step_with_ready_grads(), grad_norm, num_zeros",
        "self.step_with_ready_grads()\n"
        "        return self.step_with_ready_grads(), grad_norm, num_zeros",
        _CONTEXT,
    ),
    Mutant(
        "weight-decay",
        "biases and norms do not decay",
        "mcore/optimizer.py",
        'group["params"] = [fragment for fragment in owned if fragment is not None]',
        'group["params"] = [fragment for fragment in owned if fragment is not None]\n'
        '        group["wd_mult"] = 1.0',
        _CONTEXT,
    ),
    Mutant(
        "clipping",
        "gradients are clipped at --clip-grad",
        "mcore/optimizer.py",
        "self.clip_grad_norm(self.config.clip_grad)",
        "self.clip_grad_norm(0.5 * self.config.clip_grad)",
        _CONTEXT,
    ),
    Mutant(
        "zeros-of-replicas",
        "each element counts once in the number of zeros",
        "mcore/optimizer.py",
        "[*self._parameters.counted(self.get_parameters())],",
        "[*self.get_parameters()],",
        _CONTEXT,
    ),
    Mutant(
        "mean-of-a-sum-per-token",
        "a loss per token is a sum that Megatron divides itself",
        "mcore/data_parallel.py",
        "1.0 if config.calculate_per_token_loss else",
        "1.0 if False else",
        _PER_TOKEN,
    ),
    Mutant(
        "gradients-are-not-scaled",
        "Megatron's own scaling of gradients reaches the shards",
        "mcore/data_parallel.py",
        "mul_(scaling_factor)",
        "mul_(1.0)",
        _PER_TOKEN,
    ),
    Mutant(
        "no-broadcast",
        "ranks that were initialised differently start as the first of them",
        "mcore/data_parallel.py",
        "        if data_parallel_random_init:",
        "        if False:",
        _PER_TOKEN,
    ),
    Mutant(
        "gradients-that-are-not-numbers",
        "a NaN in the gradients stops the run",
        "mcore/data_parallel.py",
        "if self.ddp_config.check_for_nan_in_grad:",
        "if False:",
        "tests/mcore/test_odd_ranks.py::"
        "test_a_gradient_that_is_not_a_number_stops_the_run_before_it_reaches_the_weights",
    ),
]
