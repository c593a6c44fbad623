# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: who asks for what: units, autograd, the step, and what is sent before the update."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "grad-scale",
        "gradients are the mean over the sharding group",
        "engine/zero/unit.py",
        "shard.mul_(scale)\n            if",
        "if",
        (
            "tests/zero/test_traffic.py::"
            "test_the_first_gradients_of_a_bf16_model_are_those_of_plain_torch_summed_in_fp32"
        ),
    ),
    Mutant(
        "no-param-sync",
        "what the optimizer writes is what every rank gathers",
        "engine/zero/unit.py",
        (
            "            self.sent_record.note_sent()\n"
            "        return (yield from self.complete_param_steps())"
        ),
        "            self.sent_record.note_sent()\n        yield from ()",
        (
            "tests/zero/test_main_params.py::"
            "test_updates_smaller_than_bf16_can_see_add_up_as_in_a_plain_fp32_adam"
        ),
    ),
    Mutant(
        "placeholder-of-zeros",
        "law 5: a parameter that is not gathered reads as NaN",
        "engine/zero/unit.py",
        'float("nan")',
        "0.0",
        (
            "tests/zero/test_unit.py::"
            "test_a_sharded_parameter_keeps_its_shape_and_reads_as_nan_until_it_is_gathered"
        ),
    ),
    Mutant(
        "saved-view-offset",
        "law 5: a view that autograd saved is the same part of the unit in backward",
        "engine/zero/saved_views.py",
        "offset = int(tensor.storage_offset())",
        "offset = 0",
        (
            "tests/zero/test_unit.py::"
            "test_views_of_weights_that_autograd_saved_are_right_in_backward"
        ),
    ),
    Mutant(
        "hooks-of-others-see-nothing",
        "what is no view of a unit goes to the hooks of others",
        "engine/zero/saved_views.py",
        "if self.theirs is None else _Theirs(self.theirs[0](tensor))",
        "",
        (
            "tests/library/forward/test_modules.py::"
            "test_what_modules_are_handed_return_and_keep_trains_or_is_refused_by_name"
        ),
    ),
    Mutant(
        "tied-weights-reduced-early",
        "the gradient of a weight that two modules use is complete when it is reduced",
        "engine/zero/autograd.py",
        "            if unit not in self._reduce_last:",
        "            if True:",
        (
            "tests/zero/test_traffic.py::"
            "test_a_weight_that_two_modules_use_is_reduced_once_for_each_micro_batch"
        ),
    ),
    Mutant(
        "pieces-at-the-start-of-the-shard",
        "the sum of a piece goes to its part of the gradient shard",
        "engine/zero/reductions.py",
        "unit.main_grad.storage[slice(*piece.part)]",
        "unit.main_grad.storage[: piece.part.numel]",
        (
            "tests/zero/test_grad_pieces.py::"
            "test_gradients_in_pieces_are_those_in_one_piece_in_every_bit"
        ),
    ),
    Mutant(
        "fused-second-call-overwrites",
        "fused gradients of a unit that is called twice add up",
        "engine/zero/autograd.py",
        "can_overwrite = not unit.reduces_in_place and unit not in self._reduce_last",
        "can_overwrite = not unit.reduces_in_place",
        (
            "tests/zero/test_te_stand_ins.py::"
            "test_stand_ins_follow_stock_torch_and_bit_for_bit_where_they_write_gradients_"
            "themselves"
        ),
    ),
    Mutant(
        "pieces-return-to-the-neighbour",
        "what an owner sends back goes where it came from",
        "engine/zero/whole_matrices.py",
        "for rank in range(hop.axis.axis.size) for part in parts)",
        "for rank in reversed(range(hop.axis.axis.size)) for part in parts)",
        (
            "tests/zero/test_whole_matrices.py::"
            "test_owners_get_the_whole_matrix_and_every_piece_returns_to_its_place"
        ),
    ),
    Mutant(
        "changes-by-value",
        "a delta has every bit: 0.0 is not -0.0",
        "engine/zero/marks.py",
        "packed(old.view(torch.int16) != new.view(torch.int16))",
        "packed(old != new)",
        (
            "tests/at_rest/test_unit_stream.py::"
            "test_every_bit_pattern_that_becomes_another_one_is_marked_and_no_other"
        ),
    ),
    Mutant(
        "three-units-of-a-stream",
        "a stream has two units in memory",
        "engine/at_rest/unit_stream.py",
        "(gathered[0::2], gathered[1::2])",
        "(gathered[0::3], gathered[1::3], gathered[2::3])",
        (
            "tests/at_rest/test_unit_stream.py::"
            "test_a_copy_follows_what_is_sent_early_and_loaded_within_two_units_and_to_receivers_alone"
        ),
    ),
    Mutant(
        "seat-of-a-unit-in-use",
        "units of one seat are not in use together",
        "engine/sharding/decisions.py",
        "if self._stage_of(holder) is Stage.IN_USE:",
        "if False:",
        "tests/zero/test_seats.py::test_two_units_of_one_seat_are_not_in_use_together",
    ),
    Mutant(
        "captured-grads-in-pieces",
        "no gradient of a captured layer is read after the next layer has begun to write there",
        "engine/zero/autograd.py",
        "if fuses_grads or any(plan.is_seated for plan in plans):",
        "if fuses_grads:",
        (
            "tests/zero/test_captured_grads.py::"
            "test_gradients_that_captured_backwards_add_to_their_places_train_bit_for_bit"
        ),
    ),
    Mutant(
        "graph-of-old-shards",
        "a graph of a whole step rebuilds the shards that the optimizer has updated",
        "engine/zero/captured_step.py",
        "chunk.gathers.enter_graph(rebuilds=self._is_training)",
        "chunk.gathers.enter_graph(rebuilds=False)",
        (
            "tests/device/test_captured_step.py::"
            "test_steps_in_one_graph_have_the_bits_of_those_without"
        ),
    ),
    Mutant(
        "replay-beside-gathers",
        "nothing is in flight before a replay",
        "engine/zero/captured_step.py",
        "chunk.settle(reads_values=False)",
        "pass",
        (
            "tests/device/test_captured_step.py::"
            "test_steps_in_one_graph_have_the_bits_of_those_without"
        ),
    ),
    Mutant(
        "replay-that-nothing-watches",
        "a rank that does not replay is named",
        "engine/zero/captured_step.py",
        'chunk.order_check.start(chunk.settings_of_update(), "the graph")',
        "pass",
        (
            "tests/device/test_captured_step.py::"
            "test_a_rank_that_does_not_replay_is_named_within_the_limit"
        ),
    ),
    Mutant(
        "codes-by-the-scale-of-one-rank",
        "weights travel as codes by the scale of the whole weight",
        "engine/comm/low_precision_gather.py",
        "yield from completed(all_reduce_steps(most, axes, dist.ReduceOp.MAX))",
        "yield from ()",
        (
            "tests/zero/test_codes.py::"
            "test_layers_make_the_same_codes_of_what_arrives_and_nothing_else_changes"
        ),
    ),
    Mutant(
        "codes-with-half-the-exponent",
        "a layer makes the codes that travelled of the weights that arrive",
        "engine/comm/block_formats.py",
        "torch.where(values.abs() == 224, values * (225 / 224), values)",
        "values",
        "tests/zero/test_block_formats.py::test_an_mxfp8_block_comes_back_with_its_exponent_and_its_codes[97]",
    ),
    Mutant(
        "four-bit-codes-with-another-scale",
        "a layer makes the scales that travelled of the weights that arrive",
        "engine/comm/block_formats.py",
        "raised = 0.25 *",
        "raised = 0.0 *",
        "tests/zero/test_block_formats.py::test_an_nvfp4_block_comes_back_with_its_scale_and_its_codes[sample]",
    ),
    Mutant(
        "four-bit-codes-by-the-largest-of-one-rank",
        "weights travel as codes by the largest magnitude of the whole weight",
        "engine/comm/low_precision_gather.py",
        "yield from completed(all_reduce_steps(wholes, axes, dist.ReduceOp.MAX))",
        "yield from ()",
        "tests/zero/test_codes.py::test_layers_make_the_same_codes_of_what_arrives_and_nothing_else_changes[2-sizes0]",
    ),
    Mutant(
        "codes-overwritten-before-they-are-read",
        "each byte of a message is read before it is written",
        "engine/comm/low_precision_gather.py",
        "late, offset = message[ahead:].clone(), 0",
        "late, offset = message[ahead:], 0",
        "tests/zero/test_codes.py::test_layers_make_the_same_codes_of_what_arrives_and_nothing_else_changes[2-sizes0]",
    ),
    Mutant(
        "codes-of-the-other-direction",
        "a use for which other codes were gathered gathers again",
        "engine/zero/gathers.py",
        "if handle.direction is not None and handle.read != {handle.direction}:",
        "if False:",
        "tests/zero/test_directions.py::test_training_has_the_bits_of_gathers_in_bf16",
    ),
    Mutant(
        "codes-for-what-backward-calls-again",
        "what backward calls again reads weights, not codes of one direction",
        "mcore/start/low_precision.py",
        '**dict.fromkeys(("mlp", "moe"), ("mlp.",)),',
        '**dict.fromkeys(("mlp", "moe"), ()),',
        "tests/mcore/test_low_precision.py::test_parts_that_backward_calls_again_stay_in_bf16_where_it_reads_other_codes",
    ),
    Mutant(
        "codes-read-as-weights",
        "a layer that is called outside FP8 gets no codes",
        "engine/zero/autograd.py",
        "unit.check_called_in_fp8()",
        "pass",
        "tests/zero/test_codes.py::test_training_has_the_bits_of_gathers_in_bf16",
    ),
    Mutant(
        "parts-never-complete",
        "a unit that is run in parts is reduced when its part says so",
        "engine/zero/calls.py",
        "self.engine.complete(self.completes)",
        "pass",
        "tests/zero/test_parts.py::test_a_model_in_parts_has_the_gradients_of_its_calls_in_every_bit",
    ),
    Mutant(
        "host-states-not-stored",
        "an update of states that are on the host goes back there",
        "engine/at_rest/host_states.py",
        "            self.on_host[kind].copy_(values, non_blocking=True)",
        "            pass",
        (
            "tests/at_rest/test_host_states.py::"
            "test_losses_norms_weights_and_states_are_those_without_it[sizes0-dtype0-groups-schedule0]"
        ),
    ),
    Mutant(
        "host-states-place-not-free",
        "states come into a place on the device when its last ones have gone",
        "engine/at_rest/host_states.py",
        """            self._device.wait_event(place.is_free)
            self""",
        "            self",
        (
            "tests/device/test_host_states.py::"
            "test_under_delays_no_bit_is_other_than_without_it_on_gloo[few laws]"
        ),
    ),
    Mutant(
        "qk-clip-scales-other-rows",
        "a row that several ranks hold is scaled by the number of its own head on each",
        "mcore/step/qk_clip.py",
        "    start = held.start - first * columns",
        "    start = 0",
        (
            "tests/mcore/test_qk_clip.py::"
            "test_each_shard_has_the_bits_of_its_part_of_a_weight_that_stock_has_clipped[False-dtype0-2]"
        ),
    ),
    Mutant(
        "weights-set-between-steps-go-unseen",
        "weights that are set between two steps are refused where parameters do not notice it",
        "engine/zero/sent_record.py",
        "            if param.numel() and param.data_ptr() != place:",
        "            if param.numel() and param.data_ptr() < 0:",
        (
            "tests/mcore/test_data_parallel.py::"
            "test_weights_that_are_set_between_two_steps_are_refused_by_name_and_not_lost"
        ),
    ),
    Mutant(
        "preview-in-the-place-of-main-params",
        "main parameters are those of the last step until the next one",
        "engine/zero/unit.py",
        "for part in (slice(own.start), slice(own.stop, None)):",
        "for part in (slice(None),):",
        (
            "tests/library/optimizers/test_changed_behind.py::"
            "test_until_the_step_the_optimizer_s_values_are_those_of_the_last_one"
        ),
    ),
    Mutant(
        "what-differs-is-not-sent-again",
        "what the update did not make of a unit that was sent is sent again",
        "engine/zero/sent_check.py",
        "return [unit for unit in sent if unit not in differing]",
        "return sent",
        (
            "tests/zero/test_early_update.py::"
            "test_the_bits_are_those_of_an_update_after_the_norm_whatever_becomes_of_a_step"
        ),
    ),
    Mutant(
        "written-parameters-are-not-seen",
        "values that are written after the step are refused at their next use",
        "engine/zero/autograd.py",
        "                self.sent_check.check_unwritten(unit)\n",
        "",
        "tests/library/optimizers/test_changed_behind.py::"
        "test_values_that_are_written_after_the_step_are_refused_at_their_next_use",
    ),
    Mutant(
        "written-part-is-plain",
        "a tensor that a rank's part is written to is no tensor of all ranks",
        "library/grads.py",
        "if tensor._version != version:",
        "if False:",
        (
            "tests/library/values/test_saved_parts.py::"
            "test_parts_that_are_written_to_a_tensor_of_the_loop_are_refused_as_well"
        ),
    ),
    Mutant(
        "written-view-is-alone",
        "neither is the tensor that it is a view of",
        "library/grads.py",
        "(tensor, tensor._base)",
        "(tensor,)",
        (
            "tests/library/values/test_saved_parts.py::"
            "test_parts_that_are_written_to_a_tensor_of_the_loop_are_refused_as_well"
        ),
    ),
    Mutant(
        "values-of-ranks-not-compared",
        "a checkpoint drops no values of a rank in silence",
        "checkpoint_files/parts.py",
        "if words != expected:",
        "if words[:2] != expected[:2]:",
        (
            "tests/library/values/test_saved_parts.py::"
            "test_parts_that_are_written_to_a_tensor_of_the_loop_are_refused_as_well"
        ),
    ),
    Mutant(
        "cached-plan-hides-values",
        "a plan that is kept says nothing of values",
        "checkpoint_files/parts.py",
        "self.plan if compared else plan",
        "plan",
        (
            "tests/library/values/test_saved_parts.py::"
            "test_parts_that_are_written_to_a_tensor_of_the_loop_are_refused_as_well"
        ),
    ),
]
