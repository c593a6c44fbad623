# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ways to break the code, each with the smallest fast test that notices."""

from dataclasses import dataclass

PACKAGE = "megatron_asynchzp"


@dataclass(frozen=True)
class Mutant:
    """One deliberate fault.

    name: for the command line; breaks: the law or promise that no longer holds; file: in the
    package; old, new: text that occurs exactly once in the file, and what replaces it; test: the
    pytest address of the one test that must fail.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        return f"{PACKAGE}/{self.file}"

    @property
    def test_function(self) -> tuple[str, str]:
        """File and function of the test, without parameters."""
        file, _, function = self.test.partition("::")
        return file, function.partition("[")[0]


# ---- where every byte lives -------------------------------------------------------------------

_TOPOLOGY = "tests/sharding/test_topology.py::test_"
_LAYOUT = "tests/sharding/test_layout.py::test_"

SHARDING = [
    Mutant(
        "shard-axis-order",
        "law 1: a rank's shard is cut axis by axis, the inner one first",
        "sharding/topology.py",
        "for axis in self.axes_between(1, shard_size):",
        "for axis in reversed(self.axes_between(1, shard_size)):",
        f"{_TOPOLOGY}a_ranks_optimizer_shard_lies_within_its_gradient_and_its_parameter_shard",
    ),
    Mutant(
        "sizes-that-do-not-nest",
        "law 1: sizes that do not nest are refused",
        "sharding/topology.py",
        "if large % small:",
        "if False:",
        f"{_TOPOLOGY}exactly_the_nested_sizes_are_accepted",
    ),
    Mutant(
        "replica-index",
        "one replica of each optimizer shard counts in norms",
        "sharding/topology.py",
        "return self.rank // self.sizes.optim",
        "return self.rank % self.sizes.optim",
        f"{_TOPOLOGY}ranks_with_the_same_optimizer_shard_are_the_replicas_and_one_of_them_counts",
    ),
    Mutant(
        "expert-sizes",
        "the sizes of experts nest in their smaller group",
        "sharding/topology.py",
        "ShardSizes(*(gcd(size, world_size)",
        "ShardSizes(*(min(size, world_size)",
        f"{_TOPOLOGY}sizes_restricted_to_a_smaller_group_still_nest",
    ),
    Mutant(
        "range-intersection",
        "an empty part of a parameter has no elements",
        "sharding/topology.py",
        "return Range(start, max(start, min(self.stop, other.stop)))",
        "return Range(start, min(self.stop, other.stop))",
        f"{_LAYOUT}a_shard_filled_from_parameters_holds_exactly_its_part_of_each",
    ),
    Mutant(
        "param-offsets",
        "every parameter begins at an aligned offset",
        "sharding/layout.py",
        "offset = round_up(offset + count, PARAM_ALIGNMENT_NUMEL)",
        "offset = offset + count",
        f"{_LAYOUT}parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides",
    ),
    Mutant(
        "layout-padding",
        "the flat buffer divides over the optimizer shards",
        "sharding/layout.py",
        "num_shards * PARAM_ALIGNMENT_NUMEL)",
        "PARAM_ALIGNMENT_NUMEL)",
        f"{_LAYOUT}parameters_are_aligned_disjoint_and_in_order_and_the_whole_divides",
    ),
    Mutant(
        "checkpoint-boxes",
        "the boxes of a shard in a checkpoint are its elements",
        "sharding/boxes.py",
        "first, last = -(-start // row_numel), stop // row_numel",
        "first, last = start // row_numel, stop // row_numel",
        "tests/sharding/test_boxes.py::"
        "test_the_boxes_are_the_elements_of_the_range_one_after_another",
    ),
]

# ---- when bytes move --------------------------------------------------------------------------

_COLLECTIVES = (
    "tests/comm/test_collectives.py::"
    "test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner"
)
_TRAFFIC = (
    "tests/zero/test_traffic.py::"
    "test_parameters_travel_in_the_models_dtype_and_gradients_in_fp32_as_often_as_the_sizes_ask"
)
_RACES_OF_STREAMS = (
    "tests/zero/test_happens_before.py::test_every_two_conflicting_accesses_of_streams_are_ordered"
)
_RACES_OF_THREADS = (
    "tests/zero/test_happens_before.py::"
    "test_every_two_conflicting_accesses_of_threads_on_a_cpu_are_ordered"
)
_SWAPPED = (
    "tests/zero/test_divergent_order.py::"
    "test_two_swapped_modules_of_one_size_are_named_with_one_message_on_all_ranks[threaded]"
)

COMMUNICATION = [
    Mutant(
        "sum-in-bf16",
        "gradients that travel in bf16 are summed in fp32",
        "comm/collectives.py",
        "        result.add_(piece)",
        "        result.copy_(result.to(piece.dtype).add_(piece))",
        "tests/zero/test_grad_dtype.py::"
        "test_every_contribution_is_rounded_once_and_the_sum_is_made_in_fp32",
    ),
    Mutant(
        "gather-axis-order",
        "law 2: the outermost axis is gathered first",
        "comm/collectives.py",
        "inner, outer = axes[0], axes[1:]",
        "inner, outer = axes[-1], axes[:-1]",
        _COLLECTIVES,
    ),
    Mutant(
        "reduce-axis-order",
        "law 2: the innermost axis is reduced first",
        "comm/collectives.py",
        "in zip(axes, shards, strict=True):",
        "in zip(reversed(axes), shards, strict=True):",
        _COLLECTIVES,
    ),
    Mutant(
        "shared-communicator",
        "gathers and reductions have communicators of their own",
        "comm/groups.py",
        'grad_reduce=along("reduce"',
        'grad_reduce=along("gather"',
        f"{_TRAFFIC}[sizes3-dtype3]",
    ),
    Mutant(
        "order-check-of-the-last-entry",
        "law 3: what the ranks compare covers all that was issued",
        "comm/driver.py",
        "value = zlib.crc32(entry.encode(), value)",
        "value = zlib.crc32(entry.encode())",
        _SWAPPED,
    ),
    Mutant(
        "no-order-check",
        "law 3: the ranks compare what they issued",
        "zero/step.py",
        "if not self._checks_order:",
        "if True:",
        _SWAPPED,
    ),
    Mutant(
        "views-are-overwritten",
        "law 5: memory that somebody still views is not reused",
        "comm/arena.py",
        "            time.sleep(_VIEW_CHECK_PAUSE_S)\n        return True",
        "            time.sleep(_VIEW_CHECK_PAUSE_S)\n        return False",
        "tests/zero/test_saved_views.py::"
        "test_a_view_that_hooks_cannot_see_keeps_its_memory_and_without_that_guard_would_be_wrong",
    ),
    Mutant(
        "early-slot-release",
        "law 5: memory is rewritten only after its last reader",
        "comm/arena.py",
        "self._last_users.append((place.span, last_user))",
        "pass",
        _RACES_OF_STREAMS,
    ),
    Mutant(
        "submit-waits",
        "law 6: submitting never waits for the network",
        "comm/thread_driver.py",
        "self._queues[task.lane].put(task)",
        "self._queues[task.lane].put(task)\n        task.await_usable()",
        "tests/comm/test_driver.py::"
        "test_submit_returns_in_the_threaded_schedule_while_every_lane_waits_for_the_network",
    ),
    Mutant(
        "submit-waits-for-gathers",
        "law 6: computation goes on while the next gather is in flight",
        "zero/gathers.py",
        "            self._start_gather(unit, place)\n        return place is not None",
        "            self._start_gather(unit, place)\n"
        "            self._gathers[unit].await_usable()\n"
        "        return place is not None",
        "tests/zero/test_asynchrony.py::"
        "test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_reduction_is",
    ),
    Mutant(
        "backward-waits-for-reductions",
        "law 6: backward goes on while gradients are on their way",
        "zero/reductions.py",
        "self._last_reduction[unit] = task",
        "self._last_reduction[unit] = task\n        task.wait()",
        "tests/zero/test_asynchrony.py::"
        "test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_reduction_is",
    ),
    Mutant(
        "streams-ignore-earlier-jobs",
        "a task begins after those whose results it reads",
        "comm/driver.py",
        "for task in self.after:\n            device",
        "for task in ():\n            device",
        _RACES_OF_STREAMS,
    ),
    Mutant(
        "threads-ignore-earlier-jobs",
        "a task begins after those whose results it reads",
        "comm/thread_driver.py",
        "for other in task.after:\n            other.await_usable()",
        "for other in ():\n            other.await_usable()",
        _RACES_OF_THREADS,
    ),
    Mutant(
        "earlier-reductions-of-a-unit",
        "the last reduction of a unit is complete after all of its reductions",
        "comm/driver.py",
        "if other.lane == task.lane:",
        "if False:",
        _RACES_OF_THREADS,
    ),
]

# ---- who asks ---------------------------------------------------------------------------------

_FIRST_GRADIENTS = (
    "tests/zero/test_traffic.py::"
    "test_the_first_gradients_of_a_bf16_model_are_those_of_plain_torch_summed_in_fp32"
)
_MAIN_PARAMS = (
    "tests/zero/test_main_params.py::"
    "test_updates_smaller_than_bf16_can_see_add_up_as_in_a_plain_fp32_adam"
)
_UNIT = "tests/zero/test_unit.py::test_"
_SCHEDULES = "tests/zero/test_schedules.py::test_"
_DDP = "tests/zero/test_engine_parity.py::test_every_nesting_on_2_and_4_ranks_follows_ddp"

ENGINE = [
    Mutant(
        "grad-scale",
        "gradients are the mean over the sharding group",
        "zero/unit.py",
        "own.mul_(scale)",
        "own.mul_(1.0)",
        _FIRST_GRADIENTS,
    ),
    Mutant(
        "replicas-keep-their-own-sum",
        "replicas of an optimizer shard hold the same gradient",
        "zero/unit.py",
        "yield from all_reduce_steps(shard, groups.replica_sync)",
        "yield from ()",
        _FIRST_GRADIENTS,
    ),
    Mutant(
        "reduced-in-the-models-dtype",
        "gradients are reduced in fp32",
        "zero/reductions.py",
        "nbytes // FP32_NBYTES, torch.float32)",
        "nbytes // FP32_NBYTES, unit.dtype)",
        f"{_TRAFFIC}[sizes3-dtype3]",
    ),
    Mutant(
        "main-grad-dtype",
        "gradients of micro-batches are added up in fp32",
        "zero/unit.py",
        "self._new_buffer(self._range(sizes.grad), torch.float32)",
        "self._new_buffer(self._range(sizes.grad), self.dtype)",
        _FIRST_GRADIENTS,
    ),
    Mutant(
        "main-param-dtype",
        "main parameters are fp32",
        "zero/unit.py",
        "self._new_buffer(self.optim_range, torch.float32)",
        "self._new_buffer(self.optim_range, self.dtype)",
        _MAIN_PARAMS,
    ),
    Mutant(
        "main-params-from-the-model",
        "what an update adds to a main parameter stays, seen by the model or not",
        "zero/unit.py",
        "copy_(self.main_param.storage)",
        "copy_(self.main_param.storage)\n            self.copy_model_to_main()",
        _MAIN_PARAMS,
    ),
    Mutant(
        "gradients-replace-each-other",
        "gradients of one parameter add up",
        "zero/unit.py",
        "torch._foreach_add_(*more)",
        "torch._foreach_copy_(*more)",
        _FIRST_GRADIENTS,
    ),
    Mutant(
        "stale-gradients-in-a-slot",
        "a weight without a gradient counts as zero",
        "zero/unit.py",
        "torch._foreach_zero_(tensors)",
        "pass",
        f"{_UNIT}weights_without_a_gradient_count_as_zero",
    ),
    Mutant(
        "gradients-of-the-last-step",
        "a step begins without gradients",
        "zero/unit.py",
        "self.main_grad.storage.zero_()",
        "pass",
        _MAIN_PARAMS,
    ),
    Mutant(
        "no-param-sync",
        "what the optimizer writes is what every rank gathers",
        "zero/unit.py",
        "yield from self.complete_param_steps()",
        "yield from ()",
        _MAIN_PARAMS,
    ),
    Mutant(
        "placeholder-of-zeros",
        "law 5: a parameter that is not gathered reads as NaN",
        "zero/unit.py",
        'float("nan")',
        "0.0",
        f"{_UNIT}a_sharded_parameter_keeps_its_shape_and_reads_as_nan_until_it_is_gathered",
    ),
    Mutant(
        "saved-view-offset",
        "law 5: a view that autograd saved is the same part of the unit in backward",
        "zero/autograd.py",
        "offset = int(tensor.storage_offset())",
        "offset = 0",
        f"{_UNIT}views_of_weights_that_autograd_saved_are_right_in_backward",
    ),
    Mutant(
        "recompute-gathers-again",
        "recomputation costs no communication",
        "zero/autograd.py",
        "is_kept = self._batch.in_backward and not unit.part",
        "is_kept = False",
        "tests/zero/test_traffic.py::test_recomputation_sends_nothing",
    ),
    Mutant(
        "tied-weights-reduced-early",
        "the gradient of a tied weight is complete when it is reduced",
        "zero/autograd.py",
        "if unit not in self._reduce_last:",
        "if True:",
        _DDP,
    ),
    Mutant(
        "sync-before-reduction",
        "the sum over the sharding group has all micro-batches in it",
        "zero/reductions.py",
        "after=(self._last_reduction.get(unit), *after),",
        "after=(*after,),",
        _RACES_OF_THREADS,
    ),
    Mutant(
        "grad-slot-returned-early",
        "memory for gradients is rewritten only after their reduction",
        "zero/reductions.py",
        "        reduction.task.wait()\n",
        "",
        _RACES_OF_THREADS,
    ),
    Mutant(
        "gather-before-the-optimizer",
        "a gather reads shards that the optimizer has finished",
        "zero/gathers.py",
        '(self._shards_written.pop("gather", None), *place.ready)',
        "place.ready",
        _RACES_OF_STREAMS,
    ),
    Mutant(
        "optimizer-before-the-last-sync",
        "the optimizer waits for a shard that is still being read",
        "zero/step.py",
        "            self.gathers.drop_spares()\n            self.gathers.join_syncs()",
        "            self.gathers.drop_spares()",
        _RACES_OF_THREADS,
    ),
    Mutant(
        "order-of-rebuilding",
        "shards are rebuilt in the order of their first use",
        "zero/gathers.py",
        "for unit in dict.fromkeys([*self._used, *self._units]):",
        "for unit in self._units:",
        f"{_SCHEDULES}parameter_shards_are_rebuilt_in_the_order_of_their_first_use[sizes3]",
    ),
    Mutant(
        "dropped-at-the-turn",
        "the last unit of forward stays gathered for backward",
        "zero/gathers.py",
        "if self._is_next(unit) or self._is_to_stay(unit):",
        "if self._is_to_stay(unit):",
        f"{_SCHEDULES}a_unit_stays_gathered_until_something_else_has_to_be_gathered_first",
    ),
    Mutant(
        "no-prefetch",
        "law 6: the next unit is gathered while this one computes",
        "zero/config.py",
        'return 0 if self.kind == "inline" else self.prefetch_depth',
        "return 0",
        "tests/zero/test_asynchrony.py::"
        "test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_reduction_is",
    ),
]

# ---- what Megatron sees -----------------------------------------------------------------------

_CONTEXT = (
    "tests/mcore/test_context_parallel.py::"
    "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
)
_PER_TOKEN = (
    "tests/mcore/test_context_parallel.py::"
    "test_a_loss_per_token_and_ranks_that_start_differently_are_stock_ddp"
)

ADAPTER = [
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

# ---- PASA -------------------------------------------------------------------------------------

_EXACT = "tests/attention/test_equivalence.py::test_in_fp64_every_mode_is_softmax_attention"

ATTENTION = [
    Mutant(
        "psi-term",
        "scores of blocks with different shifts are compared in one frame",
        "attention/reference/block.py",
        "score = score + scale * gemm(q_BGND.to(vector), c_BGD1, vector)",
        "pass",
        _EXACT,
    ),
    Mutant(
        "r-term",
        "dQ has the part that the shift took off the keys",
        "attention/reference/block.py",
        "return ds_BGNn.sum(-1, keepdim=True) * c_BG1D",
        "return 0 * c_BG1D",
        _EXACT,
    ),
    Mutant(
        "shifted-lse",
        "the LSE is that of the true scores",
        "attention/reference/block.py",
        "true_lse_BGN = lse_BGN + frame_BGN[..., 0]",
        "true_lse_BGN = lse_BGN",
        _EXACT,
    ),
    Mutant(
        "published-psi-term",
        "scores of blocks with different means are compared in one frame",
        "attention/reference/paper.py",
        "new = block_maximum + inv * (block.mean_BGN - new_average)",
        "new = block_maximum",
        _EXACT,
    ),
    Mutant(
        "recovery-factor",
        "Inv = beta / (1 - beta)",
        "attention/shifting.py",
        "return beta / (1 - beta)",
        "return 1 / (1 - beta)",
        "tests/attention/test_shifting.py::"
        "test_the_recovery_factors_of_blocks_of_128_are_those_of_the_paper",
    ),
    Mutant(
        "shift-of-masked-keys",
        "keys that nobody attends do not reach the mean",
        "attention/key_shift.py",
        "k_BGTD = zero_unused(k_BGTD, used_BT)\n    with torch.no_grad():\n"
        "        shift_BGJD, mean_BG1D = _means",
        "pass\n    with torch.no_grad():\n        shift_BGJD, mean_BG1D = _means",
        "tests/attention/test_delegate.py::test_padding_may_hold_anything",
    ),
    Mutant(
        "values-are-not-restored",
        "what is taken off the values is added to the output",
        "attention/key_shift.py",
        "return output_BHSE + shift_BHSE",
        "return output_BHSE",
        "tests/attention/test_delegate.py::test_in_fp64_it_is_softmax_attention_and_its_gradients",
    ),
]

_PIECES = "tests/zero/test_grad_pieces.py::test_"
_ARENA = "tests/comm/test_arena.py::test_"
_IN_FLIGHT = "tests/sharding/test_in_flight.py::test_"

IN_FLIGHT = [
    Mutant(
        "readers-of-overlapping-places",
        "law 5: a writer waits for the readers of every byte it writes",
        "comm/arena.py",
        "if _overlap(other[0], span):",
        "if other[0] == span:",
        f"{_ARENA}the_next_writer_waits_for_the_last_user_of_every_byte_and_for_no_one_before_it",
    ),
    Mutant(
        "places-across-their-neighbours",
        "law 5: two units never hold the same byte",
        "sharding/in_flight.py",
        "                start = taken[1]\n",
        "",
        f"{_ARENA}places_never_overlap_lie_within_and_depend_on_the_order_of_calls_alone",
    ),
    Mutant(
        "one-end-of-the-arena",
        "what is free stays in one piece between the two ends",
        "sharding/in_flight.py",
        "return stop - nbytes if from_top else start",
        "return start",
        f"{_ARENA}users_in_turn_at_opposite_ends_leave_room_for_the_next_whatever_their_sizes",
    ),
    Mutant(
        "views-of-neighbours-count",
        "law 5: views of one place are told from those of others",
        "comm/arena.py",
        "return torch.from_dlpack(part.view(dtype))",
        "return part.view(dtype)",
        f"{_ARENA}views_of_a_place_are_seen_whoever_views_its_neighbours",
    ),
    Mutant(
        "a-place-apart-is-in-the-arena",
        "law 5: memory that is viewed is not rewritten by another unit",
        "comm/arena.py",
        "        if is_apart:\n",
        "        if False:\n",
        f"{_ARENA}a_place_apart_takes_its_part_of_the_arena_but_none_of_its_memory",
    ),
    Mutant(
        "a-piece-of-a-neighbour",
        "a piece holds the same part of every rank's shard",
        "sharding/pieces.py",
        "offset = number * part.numel - here.start",
        "offset = number * part.numel - number * shard",
        "tests/sharding/test_pieces.py::test_a_reduce_scatter_of_every_piece_is_one_of_the_whole",
    ),
    Mutant(
        "pieces-at-the-start-of-the-shard",
        "the sum of a piece goes to its part of the gradient shard",
        "zero/reductions.py",
        "unit.main_grad.storage[slice(*piece.part)]",
        "unit.main_grad.storage[: piece.part.numel]",
        f"{_PIECES}gradients_in_pieces_are_those_in_one_piece_in_every_bit",
    ),
    Mutant(
        "gradients-gone-before-the-last-piece",
        "gradients stay until their last piece is packed",
        "zero/reductions.py",
        "{} if len(pieces) == 1 else collected.grads",
        "{}",
        f"{_PIECES}gradients_in_pieces_are_those_in_one_piece_in_every_bit",
    ),
    Mutant(
        "added-in-the-models-dtype",
        "another gradient of a parameter is added in fp32",
        "zero/unit.py",
        "before.float().add_(grad)",
        "before + grad",
        f"{_PIECES}another_gradient_of_the_same_parameter_is_added_in_fp32",
    ),
    Mutant(
        "a-budget-that-is-not-kept",
        "memory in flight stays within its budget",
        "sharding/in_flight.py",
        "        grads = min(grads, aligned(budget - params))\n",
        "",
        f"{_IN_FLIGHT}every_budget_from_the_least_to_the_default_is_kept",
    ),
    Mutant(
        "memory-per-size",
        "layers that are never needed together share memory",
        "sharding/in_flight.py",
        "                break\n",
        "                continue\n",
        f"{_IN_FLIGHT}equal_layers_need_two_and_an_embedding_shares_its_memory_with_the_output_layer",
    ),
]

_LEFT_BEHIND = "tests/zero/test_left_behind.py::test_"

_STAND_INS = "tests/zero/test_te_stand_ins.py::test_"

DEVICES = [
    Mutant(
        "submission-holds-up-computation",
        "on a device only the lanes' streams wait for what a task reads",
        "comm/driver.py",
        "with self.device.on_stream(self._streams[task.lane]):\n                self.run(task)",
        "with self.device.on_stream(self._streams[task.lane]):\n                pass\n"
        "            self.run(task)",
        "tests/zero/test_merged_order.py::"
        "test_a_submission_makes_the_stream_that_computes_wait_for_nothing",
    ),
    Mutant(
        "nobody-watches-streams",
        "law 7: what does not end in time is named, in every schedule",
        "comm/watchdog.py",
        "return item if time.monotonic() > deadline else None",
        "return None",
        "tests/comm/test_watchdog.py::"
        "test_a_task_that_does_not_end_is_named_and_ends_the_driver_though_nobody_waits_for_it",
    ),
    Mutant(
        "the-comparison-holds-the-host",
        "a step on a device does not hold the host",
        "zero/step.py",
        "if self.update is None and not self.driver.device.runs_ahead:",
        "if self.update is None:",
        "tests/comm/test_order_check.py::"
        "test_no_step_holds_the_host_for_its_own_comparison_but_the_last_is_read_at_the_end",
    ),
    Mutant(
        "accumulators-are-left-to-chance",
        "a gradient from another stream is on the one that computes before it is taken",
        "zero/autograd.py",
        "[node for unit in self.units for node in _accumulators_of(unit)]",
        "[None]",
        "tests/zero/test_side_streams.py::"
        "test_gradients_from_a_side_stream_are_neither_reduced_too_early_nor_overwritten",
    ),
    Mutant(
        "no-memory-for-fused-gradients",
        "law 4: memory grows where layers write more gradients at once than there is memory for",
        "zero/reductions.py",
        "                self.arena.grow(nbytes)\n",
        '                raise RuntimeError("full")\n',
        f"{_PIECES}where_layers_write_gradients_themselves_memory_grows_for_those_that_come_late",
    ),
    Mutant(
        "views-are-not-noticed",
        "law 5: saved-tensor hooks are off only where no view is saved",
        "zero/autograd.py",
        "        if type(tensor) is torch.Tensor:\n            self.note_view(unit)\n",
        "",
        "tests/zero/test_saved_views.py::"
        "test_linear_layers_get_the_same_gradients_whatever_memory_and_depth",
    ),
    Mutant(
        "outputs-hold-their-graph",
        "a graph that no backward goes through is freed",
        "zero/autograd.py",
        "return tensor if tensor.grad_fn is None else tensor.detach()",
        "return tensor",
        f"{_LEFT_BEHIND}graphs_that_no_backward_goes_through_are_freed_without_the_collector",
    ),
    Mutant(
        "evaluation-is-timed",
        "evaluation leaves no records behind",
        "zero/gathers.py",
        "self._driver.timeline.pause()",
        "pass",
        f"{_LEFT_BEHIND}forty_evaluations_leave_no_more_behind_than_two",
    ),
    Mutant(
        "evaluation-lengthens-the-record",
        "the record of what was submitted does not grow with an evaluation",
        "comm/driver.py",
        "if len(self.submitted) > _LONG_RECORD:",
        "if False:",
        "tests/comm/test_driver.py::"
        "test_an_evaluation_of_any_length_leaves_a_short_record_that_shows_each_difference",
    ),
    Mutant(
        "fused-second-call-overwrites",
        "fused gradients of a unit that is called twice add up",
        "zero/autograd.py",
        "can_overwrite = not unit.reduces_in_place and unit not in self._reduce_last",
        "can_overwrite = not unit.reduces_in_place",
        f"{_STAND_INS}stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_"
        "themselves",
    ),
    Mutant(
        "fused-dummies-are-gradients",
        "the dummy that a layer gives autograd for a gradient it has written is not read",
        "zero/unit.py",
        'return was_added and not getattr(param, "zero_out_wgrad", False)',
        "return False",
        f"{_STAND_INS}stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_"
        "themselves",
    ),
    Mutant(
        "fused-zeros-are-forgotten",
        "what a tied weight gets from a layer that does not fuse is added to what is fused",
        "zero/unit.py",
        'return was_added and not getattr(param, "zero_out_wgrad", False)',
        "return was_added",
        f"{_STAND_INS}stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_"
        "themselves",
    ),
    Mutant(
        "fused-places-hold-another-unit",
        "a layer that adds to its gradient's place finds zeros there",
        "zero/reductions.py",
        "unit.zero_rest(places, collected.written)",
        "pass",
        f"{_STAND_INS}stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_"
        "themselves",
    ),
    Mutant(
        "fused-gradient-is-lost",
        "a second call that would overwrite a fused gradient is refused",
        "zero/autograd.py",
        "        if unit.overwrites_main_grads:\n            raise",
        "        if False:\n            raise",
        f"{_STAND_INS}a_second_call_that_would_overwrite_the_gradient_of_the_first_is_refused",
    ),
    Mutant(
        "fused-places-reach-megatron",
        "Megatron finds this rank's fragment of a gradient in main_grad after the reduction",
        "mcore/data_parallel.py",
        "if self.config.gradient_accumulation_fusion:",
        "if False:",
        "tests/mcore/test_data_parallel.py::test_gradients_that_a_layer_writes_itself_are_found_"
        "where_megatron_reduces_them",
    ),
]

# ---- the CPU platform, on which stock Megatron is the reference ----------------------------------

_LAYERS = "tests/cpu_platform/test_layers.py::test_"

PLATFORM = [
    Mutant(
        "a-chunk-forgets-the-one-before",
        "a Mamba layer's state goes from chunk to chunk",
        "cpu_platform/state_space.py",
        "outputs.append(inside + carried)",
        "outputs.append(inside)",
        f"{_LAYERS}a_scan_in_chunks_is_the_recurrence_in_value_and_gradient",
    ),
    Mutant(
        "a-convolution-that-looks-ahead",
        "a Mamba layer is causal",
        "cpu_platform/state_space.py",
        "(taps - 1, 0)",
        "(taps - 2, 1)",
        f"{_LAYERS}no_step_sees_a_later_one",
    ),
    Mutant(
        "norms-of-a-split-sequence-are-not-summed",
        "gradients of norms are summed over tensor-parallel ranks with sequence parallelism",
        "cpu_platform/norms.py",
        "param.sequence_parallel = config.sequence_parallel",
        "param.sequence_parallel = False",
        f"{_LAYERS}every_parameter_of_a_norm_says_whether_its_gradient_is_summed_over_a_split_sequence",
    ),
    Mutant(
        "every-piece-comes-from-the-first-rank",
        "tensors that differ in size between ranks are gathered in rank order",
        "cpu_platform/devices.py",
        "dist.broadcast(piece, group=group, async_op=async_op, group_src=rank)",
        "dist.broadcast(piece, group=group, async_op=async_op, group_src=0)",
        "tests/cpu_platform/test_cpu_platform.py::"
        "test_tensors_that_differ_in_size_between_ranks_are_gathered_and_scattered",
    ),
]

# ---- matrices that are whole on one rank ------------------------------------------------------

_WHOLE = "tests/zero/test_whole_matrices.py::test_"
_MUON = "tests/mcore/test_muon.py::test_"

MATRICES = [
    Mutant(
        "a-matrix-has-no-owner",
        "every matrix is whole on exactly one owner of each copy of the state",
        "zero/whole_matrices.py",
        "if owner == rank]",
        "if owner == topology.rank]",
        f"{_WHOLE}each_copy_of_the_state_has_one_owner_per_matrix_and_none_owns_much_at_once",
    ),
    Mutant(
        "pieces-return-to-the-neighbour",
        "what an owner sends back goes where it came from",
        "zero/whole_matrices.py",
        "for rank in range(hop.axis.axis.size) for part in parts)",
        "for rank in reversed(range(hop.axis.axis.size)) for part in parts)",
        f"{_WHOLE}owners_get_the_whole_matrix_and_every_piece_returns_to_its_place",
    ),
    Mutant(
        "the-inner-axis-hops-first",
        "pieces that meet on a rank lie next to each other in the matrix",
        "zero/whole_matrices.py",
        "for axis_group in reversed(axes):",
        "for axis_group in axes:",
        f"{_WHOLE}owners_get_the_whole_matrix_and_every_piece_returns_to_its_place",
    ),
    Mutant(
        "a-round-without-limit",
        "no rank owns more than the largest matrix at once",
        "zero/whole_matrices.py",
        "if used and used + numel > limit:",
        "if False:",
        f"{_WHOLE}rounds_hold_everything_once_and_of_each_owner_at_most_the_limit",
    ),
    Mutant(
        "work-in-any-order",
        "owners are balanced by cost",
        "zero/whole_matrices.py",
        "for index in sorted(range(len(costs)), key=lambda index: -costs[index]):",
        "for index in range(len(costs)):",
        f"{_WHOLE}the_dearest_pieces_of_work_are_given_out_first",
    ),
    Mutant(
        "the-momentum-is-lost",
        "Muon on shards takes the steps of Muon on whole matrices",
        "mcore/muon.py",
        "return momentum.clone()",
        "return momentum",
        f"{_MUON}twenty_steps_on_shards_of_every_nesting_are_those_of_muon_on_whole_matrices[False]",
    ),
    Mutant(
        "queries-with-keys",
        "queries, keys and values are orthogonalised apart",
        "mcore/muon.py",
        "marked.is_qkv, marked.qkv_split_shapes = True, qkv_split_shapes",
        "marked.is_qkv, marked.qkv_split_shapes = False, qkv_split_shapes",
        f"{_MUON}queries_keys_and_values_are_orthogonalised_apart",
    ),
    Mutant(
        "norms-have-muon",
        "norms, biases and embeddings have Adam",
        "mcore/muon.py",
        'return _EMERGING_OPTIMIZERS["muon"].default_param_overrides',
        "return {}",
        f"{_MUON}embeddings_norms_biases_and_tensors_that_are_no_matrices_have_adam",
    ),
]

# ---- what a run will need, and moments in bf16 --------------------------------------------------

_MEMORY = "tests/planner/test_memory.py::test_"
_ACTIVATIONS = "tests/planner/test_activations.py::test_"
_ROUNDED = "tests/mcore/test_rounded_adam.py::test_"

PLANNER = [
    Mutant(
        "gradients-at-rest-over-the-wrong-ranks",
        "a rank holds 2N/P + 4N/G + 12N/O bytes at rest",
        "planner/memory.py",
        '"main_grad": _FP32 * numel / sizes.grad,',
        '"main_grad": _FP32 * numel / sizes.param,',
        f"{_MEMORY}at_rest_a_rank_holds_2n_over_p_4n_over_g_and_12n_over_o_bytes",
    ),
    Mutant(
        "planned-arena-of-another-depth",
        "the planner's bytes of one rank are those of the engine's counters",
        "planner/costs.py",
        "memory = memory_in_flight(needs, schedule.depth, budget=schedule.in_flight_nbytes)",
        "memory = memory_in_flight(needs, 1, budget=schedule.in_flight_nbytes)",
        f"{_MEMORY}100_random_plans_take_the_bytes_that_the_engines_counters_have",
    ),
    Mutant(
        "planned-states-without-padding",
        "the planner's bytes of one rank are those of the engine's counters",
        "planner/costs.py",
        "replace(unit, numel=self.padded(unit)) for unit in self.units[stage] if unit.numel]",
        "replace(unit, numel=unit.numel) for unit in self.units[stage] if unit.numel]",
        f"{_MEMORY}100_random_plans_take_the_bytes_that_the_engines_counters_have",
    ),
    Mutant(
        "chosen-sizes-that-forget-what-was-given",
        "a size that is given stays while the others are chosen",
        "mcore/chosen_sizes.py",
        "state: size for state, size in given.items() if size is not None and size != AUTO",
        "state: size for state, size in given.items() if size == 0",
        "tests/mcore/test_chosen_sizes.py::"
        "test_sizes_that_are_auto_are_chosen_for_the_cluster_and_logged_in_one_line",
    ),
    Mutant(
        "a-unit-that-launches-for-nothing",
        "what a unit and a step take beside their FLOPs is part of a step",
        "planner/costs.py",
        "launch_s = 1e-6 * cluster.device.launch_us",
        "launch_s = 0e-6 * cluster.device.launch_us",
        "tests/planner/test_testbed_errors.py::"
        "test_what_a_machine_adds_is_found_from_two_numbers_of_micro_batches",
    ),
    Mutant(
        "peak-without-backward",
        "the predicted total is the highest of all peaks",
        "planner/memory.py",
        "beside = max(self.activations.logits, self.working)",
        "beside = self.activations.logits",
        f"{_MEMORY}the_total_is_the_higher_of_the_start_and_of_the_two_peaks_of_a_step",
    ),
    Mutant(
        "warm-up-of-half-a-pipeline",
        "a stage keeps the micro-batches that its schedule starts before it goes back",
        "planner/memory.py",
        "warm_up = 2 * (pp - stage - 1) + (virtual - 1) * pp",
        "warm_up = (pp - stage - 1) + (virtual - 1) * pp",
        f"{_ACTIVATIONS}a_stage_keeps_as_many_micro_batches_as_the_schedule_starts_before_it_goes_back",
    ),
    Mutant(
        "norms-that-keep-nothing",
        "a layer's activations are those that autograd saves",
        "planner/activations.py",
        "nbytes += norms * norm",
        "nbytes += norm",
        f"{_ACTIVATIONS}a_layer_keeps_the_bytes_that_were_counted",
    ),
    Mutant(
        "experts-on-every-rank",
        "expert parallelism divides the experts of a layer",
        "planner/model.py",
        "return round(of.num_experts / parallel.ep * one)",
        "return round(of.num_experts * one)",
        f"{_MEMORY}tensor_and_expert_parallelism_divide_parameters_and_flops",
    ),
    Mutant(
        "moments-that-stay-zero",
        "Adam stores the moments that it has computed in fp32",
        "mcore/rounded_adam.py",
        "if moment is not place:",
        "if False:",
        f"{_ROUNDED}the_parameter_moves_by_moments_that_are_rounded_only_when_they_are_stored",
    ),
    Mutant(
        "a-step-per-chunk",
        "a step of Adam counts once, however many chunks compute it",
        "mcore/rounded_adam.py",
        'state_steps=[state["step"].clone()],',
        'state_steps=[state["step"]],',
        f"{_ROUNDED}chunks_change_no_bit",
    ),
    Mutant(
        "dtypes-without-effect",
        "dtypes of moments that Megatron would not use are refused",
        "mcore/flags/moments.py",
        "if word != _FP32 and not args.use_precision_aware_optimizer:",
        "if False:",
        f"{_ROUNDED}dtypes_that_cannot_be_are_refused_in_one_line",
    ),
    Mutant(
        "a-device-that-is-always-large-enough",
        "a dry run ends with status 1 where a rank needs more than its device has",
        "dry_run/command.py",
        "return 0 if fits else EXIT_TOO_LARGE",
        "return 0",
        "tests/dry_run/test_command.py::test_a_device_that_is_too_small_ends_in_one_line_with_status_1",
    ),
]

# ---- what a user meets --------------------------------------------------------------------------

_TIMELINE = "tests/test_plot_timeline.py::test_"
_MISTAKE = "tests/test_mistakes.py::test_a_mistake_ends_in_one_line_and_not_with_0"
_COMMAND_LINE = "tests/mcore/flags/test_command_line.py::test_"

DAILY_USE = [
    Mutant(
        "mistyped-flags-pass",
        "a mistyped flag of ours is refused with the nearest name",
        "mcore/flags/command_line.py",
        "if meant := mistyped(flag, own):",
        "if (meant := mistyped(flag, own)) and False:",
        f"{_MISTAKE}[our main flag mistyped]",
    ),
    Mutant(
        "flags-without-effect-pass",
        "sizes without --use-asynchzp are refused",
        "mcore/flags/command_line.py",
        "if not (args.use_pasa_attention if is_pasa else args.use_asynchzp):",
        "if False:",
        f"{_MISTAKE}[sizes without the main flag]",
    ),
    Mutant(
        "megatrons-flags-look-mistyped",
        "no flag of Megatron is taken for a mistyped one of ours",
        "mcore/flags/command_line.py",
        "_ALIKE = 0.9",
        "_ALIKE = 0.5",
        f"{_COMMAND_LINE}no_flag_of_megatron_is_taken_for_a_mistyped_flag_of_ours",
    ),
    Mutant(
        "checks-import-torch",
        "a refusal loads neither torch nor Megatron",
        "mcore/flags/checks.py",
        "import os\nimport re\nfrom argparse import Namespace",
        "import os\nimport re\n\nimport torch as torch\nfrom argparse import Namespace",
        f"{_COMMAND_LINE}checking_a_command_line_loads_neither_torch_nor_megatron",
    ),
    Mutant(
        "any-file-is-an-index",
        "a foreign file is not taken for a dataset",
        "mcore/flags/checks.py",
        "if header != _INDEX_HEADER:",
        "if not header:",
        f"{_MISTAKE}[a foreign index]",
    ),
    Mutant(
        "torchrun-gets-no-line",
        "torchrun repeats the line at its end",
        "mcore/process/refusal.py",
        "_leave_for_torchrun(str(error))",
        "pass",
        "tests/test_mistakes.py::test_torchrun_gets_the_line_for_the_table_that_it_ends_with",
    ),
    Mutant(
        "waits-are-drawn-as-computing",
        "a unit that waits is not drawn as computing",
        "tools/step_trace.py",
        "if other.start >= whole.end:",
        "if True:",
        f"{_TIMELINE}a_unit_that_waits_is_not_drawn_as_computing",
    ),
    Mutant(
        "a-root-computes-what-its-layers-do",
        "a module that mostly waits is not drawn as computing",
        "tools/step_trace.py",
        "outside(outer, [*self.lane(WAIT), *within])",
        "outside(outer, self.lane(WAIT))",
        f"{_TIMELINE}a_module_that_mostly_waits_is_not_drawn_as_computing",
    ),
    Mutant(
        "no-row-for-muon",
        "every lane that moves bytes has a row in the picture",
        "tools/plot_timeline.py",
        '    "matrices": "matrices to their owners and back (Muon)",\n',
        "",
        f"{_TIMELINE}every_lane_that_moves_bytes_has_a_row_a_colour_and_a_meaning",
    ),
    Mutant(
        "dry-run-with-nodes-of-eight",
        "a dry run has the nodes of the launch",
        "launch.py",
        'os.environ["LOCAL_WORLD_SIZE"] = per_node',
        "pass",
        "tests/test_packaging.py::test_a_dry_run_has_the_ranks_and_the_nodes_of_the_launch",
    ),
    Mutant(
        "older-format-is-interrupted",
        "a checkpoint of another format is not called an interrupted save",
        "checkpoint_files/choice.py",
        "and not is_of_format_torch(folder)",
        "",
        "tests/checkpoint_files/test_choice.py::"
        "test_a_checkpoint_of_megatrons_older_format_is_not_called_interrupted",
    ),
    Mutant(
        "older-format-is-found-late",
        "a --load that cannot be read is refused before Megatron is imported",
        "mcore/flags/command_line.py",
        "checks.refuse_useless_load(args)",
        "pass",
        f"{_MISTAKE}[a checkpoint of the older format]",
    ),
    Mutant(
        "workers-out-of-order",
        "several processes write the dataset that one writes",
        "tools/prepare_data.py",
        "yield from pending.popleft().result()\n        while pending:",
        "yield from pending.pop().result()\n        while pending:",
        "tests/test_prepare_data.py::test_two_processes_write_the_same_dataset_as_one",
    ),
    Mutant(
        "layers-in-the-order-of-letters",
        "the inspector shows layer 2 before layer 10",
        "attention/inspect.py",
        "sorted(layers, key=_layer_order)",
        "sorted(layers, key=str)",
        "tests/attention/test_inspect.py::test_layers_may_have_names_whose_numbers_are_in_order",
    ),
]

# ---- the planner ------------------------------------------------------------------------------

_TRAFFIC = "tests/planner/test_traffic.py::test_"
_SIMULATE = "tests/planner/test_simulate.py::test_"
_CLUSTER = "tests/planner/test_cluster.py::test_"
_SEARCH = "tests/planner/test_search.py::test_"

PLANS = [
    Mutant(
        "planned-depth",
        "the planner gathers as far ahead as the engine",
        "planner/order.py",
        "if self._ahead[self._all[unit].size] >= depth:",
        "if self._ahead[self._all[unit].size] > depth:",
        f"{_TRAFFIC}the_planner_submits_what_the_engine_submits_in_the_same_order",
    ),
    Mutant(
        "planned-turn",
        "the planner keeps the unit at the turn, as the engine does",
        "planner/order.py",
        "            self.kept.setdefault(unit)\n",
        "            self._drop(unit)\n",
        f"{_TRAFFIC}the_planner_submits_what_the_engine_submits_in_the_same_order",
    ),
    Mutant(
        "planned-collectives",
        "the planner reduces over the axes that the engine reduces over",
        "planner/traffic.py",
        "_reductions(numel, group.wire, group.axes(1, sizes.grad))",
        "_reductions(numel, group.wire, group.axes(1, sizes.param))",
        f"{_TRAFFIC}every_collective_has_the_ranks_and_the_elements_that_the_engines_has",
    ),
    Mutant(
        "planned-all-reduce",
        "an all-reduce goes round its ring twice",
        "planner/traffic.py",
        "return 2 if self.operation == ALL_REDUCE else 1",
        "return 1",
        f"{_TRAFFIC}a_ring_sends_the_bytes_and_messages_that_the_test_bed_counts",
    ),
    Mutant(
        "planned-node-bytes",
        "every ring that a node is part of leaves it once",
        "planner/cluster.py",
        "return self.rings_per_node * nbytes * (self.size - 1) / self.size",
        "return nbytes * (self.size - 1) / self.size",
        f"{_TRAFFIC}what_leaves_a_node_is_what_the_ranks_of_a_ring_send_across_its_border",
    ),
    Mutant(
        "simulated-links",
        "operations on one link take turns",
        "planner/simulate.py",
        "                if free[one] > begin:",
        "                if False:",
        f"{_SIMULATE}lanes_that_share_a_link_take_turns_and_lanes_on_two_links_do_not",
    ),
    Mutant(
        "simulated-latencies",
        "a link carries what there is while a collective waits for a latency",
        "planner/simulate.py",
        "node = add(links[link], busy_s, deps if first < 0 else (node,), latency_s)",
        "node = add(links[link], busy_s + latency_s, deps if first < 0 else (node,))",
        f"{_SIMULATE}a_lane_moves_what_it_has_while_another_waits_for_a_latency",
    ),
    Mutant(
        "simulated-host",
        "parameters are rebuilt while the host prepares a step",
        "planner/simulate.py",
        "if not self.computing and stage.host_s:",
        "if not self.computing and not stage.host_s:",
        f"{_SIMULATE}parameters_are_rebuilt_while_the_host_prepares_the_step",
    ),
    Mutant(
        "shared-latencies",
        "ranks that share a link fill each other's latencies",
        "planner/cluster.py",
        "hidden_s = busy_s - busy_s / sharing",
        "hidden_s = 0.0",
        f"{_CLUSTER}ranks_that_share_a_link_fill_each_others_latencies_but_for_the_last_hop",
    ),
    Mutant(
        "cards-that-wait",
        "an emulated card that waits for a busy peer serves others meanwhile",
        "testbed/fabric/nic.py",
        "first_free(sorted(chain.from_iterable(taken)), now, duration_s)",
        "first_free([(now, max(max(chain.from_iterable(taken), default=(now,))))], now, duration_s)",
        "tests/testbed/test_model.py::test_"
        "a_card_that_waits_for_a_busy_peer_serves_others_meanwhile",
    ),
    Mutant(
        "simulated-pipeline",
        "a stage waits for what the one before it hands over",
        "planner/pipeline.py",
        "        return stage + 1, phase.chunk\n",
        "        return None\n",
        f"{_SIMULATE}a_pipeline_without_communication_has_the_bubble_of_1f1b",
    ),
    Mutant(
        "cluster-numbers",
        "a senseless number in a cluster file is refused",
        "planner/cluster.py",
        "if value < low or (above and value == low) or value > high:",
        "if value > high:",
        f"{_CLUSTER}a_fault_in_a_file_is_one_line_with_the_file_and_the_field",
    ),
    Mutant(
        "plain-plans",
        "plain sharding is returned where hierarchy gains nothing",
        "planner/search.py",
        "if one.scheme in _FLAT and is_as_fast",
        "if one.scheme in () and is_as_fast",
        f"{_SEARCH}plain_sharding_is_returned_where_hierarchy_gains_nothing",
    ),
]

# ---- what stays in memory between micro-batches --------------------------------------------------

_RESIDENCY = "tests/sharding/test_residency.py::test_"
_STAYING = "tests/zero/test_staying.py::test_"

STAYING = [
    Mutant(
        "chunks-that-do-not-yield",
        "what another chunk has gathered ahead yields to what is needed now",
        "zero/gathers.py",
        "            *((chunk, unit) for chunk in others for unit in chunk._gathers),\n",
        "",
        f"{_STAYING}what_one_chunk_gathers_ahead_yields_to_what_another_needs_now",
    ),
    Mutant(
        "a-budget-without-limit",
        "what is kept never exceeds its budget",
        "sharding/residency.py",
        "while nbytes > budget:",
        "while False:",
        f"{_RESIDENCY}what_is_kept_never_exceeds_the_budget",
    ),
    Mutant(
        "what-is-needed-first-goes",
        "where memory is short, what is used last in the future goes",
        "sharding/residency.py",
        "drop(max(open_gaps, key=open_gaps.__getitem__))",
        "drop(min(open_gaps, key=open_gaps.__getitem__))",
        f"{_RESIDENCY}of_equal_units_no_choice_keeps_more",
    ),
    Mutant(
        "a-sum-that-does-not-count",
        "the sum of gradients that is added to counts as kept",
        "sharding/residency.py",
        "if counts_own:\n            shrink()",
        "if False:\n            shrink()",
        f"{_STAYING}the_allocator_counts_no_more_for_what_is_kept_than_the_budgets",
    ),
    Mutant(
        "kept-after-a-departure",
        "a step that departs from the one before keeps nothing more",
        "sharding/residency.py",
        "return self._is_followed and self._last.get(user) in self._gaps",
        "return self._last.get(user) in self._gaps",
        f"{_RESIDENCY}after_a_departure_nothing_more_is_kept_and_the_step_is_the_next_ones_record",
    ),
    Mutant(
        "kept-places-are-taken-first",
        "a unit that is to stay loses its place last",
        "zero/gathers.py",
        "*((chunk, unit) for chunk, unit in all_kept if not chunk._is_to_stay(unit)),",
        "",
        f"{_STAYING}a_stage_gathers_and_reduces_no_more_often_than_the_best_choice_does",
    ),
    Mutant(
        "the-most-that-a-rank-has-left",
        "all ranks keep within the least that any of them has left",
        "zero/gathers.py",
        "dist.all_reduce(least, dist.ReduceOp.MIN)",
        "dist.all_reduce(least, dist.ReduceOp.MAX)",
        f"{_STAYING}what_stays_changes_no_bit_but_by_the_order_in_which_gradients_are_added",
    ),
    Mutant(
        "sums-in-16-bits",
        "gradients that are kept are added up in fp32",
        "zero/reductions.py",
        "        self.take(unit, range(len(unit.params)))\n        self._kept.add(unit)",
        "        self._collect(unit)\n        self._kept.add(unit)",
        "tests/zero/test_random_schedules.py::test_4_random_schedules_and_budgets_give_the_bits_of_"
        "the_inline_schedule_and_lose_no_place",
    ),
    Mutant(
        "a-plan-that-keeps-no-gradients",
        "the planner keeps the gradients that the engine keeps",
        "planner/order.py",
        "if not is_last and self.kept_grads.keeps(unit):",
        "if False:",
        "tests/planner/test_traffic.py::test_the_planner_submits_what_the_engine_submits_in_the_same_"
        "order",
    ),
    Mutant(
        "gradients-kept-past-the-last-micro-batch",
        "what is kept for a micro-batch that does not come is reduced at the end",
        "zero/step.py",
        "if self.reductions.is_kept(unit):",
        "if False:",
        f"{_STAYING}gradients_kept_for_a_micro_batch_that_does_not_come_are_reduced_at_the_end",
    ),
]

# ---- experts in groups -------------------------------------------------------------------------

_PARTS = "tests/zero/test_parts.py::test_"
_SAME_BITS = f"{_PARTS}experts_in_groups_are_the_same_in_every_bit_whatever_is_computed_again"
_NO_MORE = f"{_PARTS}from_the_least_memory_to_the_default_no_more_groups_are_there_than_it_holds"

PARTS = [
    Mutant(
        "groups-stay-when-computed-again",
        "a group of experts that was computed again is released until its backward",
        "zero/autograd.py",
        "is_kept = self._batch.in_backward and not unit.part",
        "is_kept = self._batch.in_backward",
        _NO_MORE,
    ),
    Mutant(
        "group-released-by-each-expert",
        "a group of experts is gathered once for all its experts",
        "zero/autograd.py",
        "if is_last and self._batch.depth[unit] == 0",
        "if self._batch.depth[unit] == 0",
        f"{_PARTS}a_group_is_gathered_once_for_all_its_experts_before_their_order_is_known",
    ),
    Mutant(
        "group-reduced-before-its-first-expert",
        "a group of experts is reduced when the first of them has its gradients",
        "zero/autograd.py",
        "if is_first and torch.is_grad_enabled():",
        "if is_last and torch.is_grad_enabled():",
        _SAME_BITS,
    ),
    Mutant(
        "no-room-for-the-layer",
        "what is placed ahead of its use leaves room for the other units of its layer",
        "zero/gathers.py",
        "if leaves_room and not self._leaves_room(unit):",
        "if False:",
        _NO_MORE,
    ),
    Mutant(
        "groups-without-the-rest-of-their-layer",
        "memory in flight has the rest of a layer beside each of its parts",
        "sharding/in_flight.py",
        "taken[False, layers[layer][0]] += 1",
        "taken[False, layers[layer][0]] += 0",
        f"{_IN_FLIGHT}parts_of_a_layer_are_needed_one_after_another_beside_the_rest_of_it",
    ),
    Mutant(
        "all-experts-at-a-time",
        "groups of experts are parts of their layer that are needed one after another",
        "zero/plan.py",
        'plan_part = path if part else ""',
        'plan_part = ""',
        f"{_PARTS}experts_form_units_within_their_layer_in_the_order_of_their_calls",
    ),
    Mutant(
        "groups-of-grouped-gemm",
        "groups of experts that are computed together are refused",
        "mcore/flags/checks.py",
        "if args.moe_grouped_gemm:",
        "if False:",
        "tests/mcore/flags/test_checks.py::"
        "test_groups_of_experts_that_cannot_be_are_refused_with_the_remedy",
    ),
    Mutant(
        "groups-whole-until-their-layer-is",
        "a group of experts is sharded as soon as it is complete",
        "mcore/construction.py",
        "if len(experts) % self._per_unit == 0:",
        "if False:",
        "tests/mcore/test_construction.py::"
        "test_no_rank_holds_more_than_its_shards_and_a_unit_of_a_model_that_is_built",
    ),
    Mutant(
        "groups-computed-again-at-no-cost",
        "the dry run counts the gathers of experts that are computed again",
        "dry_run/expert_groups.py",
        "gathers += max(0, groups - 1 - schedule.depth)",
        "gathers += 0",
        "tests/dry_run/test_command.py::"
        "test_what_each_group_of_experts_costs_is_what_a_run_with_it_takes",
    ),
]

MUTANTS = [
    *PARTS,
    *STAYING,
    *SHARDING,
    *COMMUNICATION,
    *ENGINE,
    *IN_FLIGHT,
    *DEVICES,
    *ADAPTER,
    *ATTENTION,
    *PLATFORM,
    *MATRICES,
    *PLANNER,
    *DAILY_USE,
    *PLANS,
]
