# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what a device needs: streams, saved views, layers that write gradients."""

from tests.mutants.catalogue.in_flight import PIECES
from tests.mutants.catalogue.mutant import Mutant

_LEFT_BEHIND = "tests/zero/test_left_behind.py::test_"
_STAND_INS = "tests/zero/test_te_stand_ins.py::test_"

MUTANTS = [
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
        f"{PIECES}where_layers_write_gradients_themselves_memory_grows_for_those_that_come_late",
    ),
    Mutant(
        "views-are-not-noticed",
        "law 5: saved-tensor hooks are off only where no view is saved",
        "zero/saved_views.py",
        "        if type(tensor) is torch.Tensor:\n            self.note_view(unit)\n",
        "",
        "tests/zero/test_saved_views.py::"
        "test_linear_layers_get_the_same_gradients_whatever_memory_and_depth",
    ),
    Mutant(
        "outputs-hold-their-graph",
        "a graph that no backward goes through is freed",
        "zero/saved_views.py",
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
