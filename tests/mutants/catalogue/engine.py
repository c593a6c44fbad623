# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: who asks for what: units, autograd, the step."""

from tests.mutants.catalogue.communication import RACES_OF_STREAMS, RACES_OF_THREADS, TRAFFIC
from tests.mutants.catalogue.mutant import Mutant

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

MUTANTS = [
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
        f"{TRAFFIC}[sizes3-dtype3]",
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
        "zero/saved_views.py",
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
        RACES_OF_THREADS,
    ),
    Mutant(
        "grad-slot-returned-early",
        "memory for gradients is rewritten only after their reduction",
        "zero/reductions.py",
        "        reduction.task.wait()\n",
        "",
        RACES_OF_THREADS,
    ),
    Mutant(
        "gather-before-the-optimizer",
        "a gather reads shards that the optimizer has finished",
        "zero/gathers.py",
        '(self._shards_written.pop("gather", None), *place.ready)',
        "place.ready",
        RACES_OF_STREAMS,
    ),
    Mutant(
        "optimizer-before-the-last-sync",
        "the optimizer waits for a shard that is still being read",
        "zero/step.py",
        "            self.gathers.drop_spares()\n            self.gathers.join_syncs()",
        "            self.gathers.drop_spares()",
        RACES_OF_THREADS,
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
        "schedule.py",
        "return 0 if self.is_inline else self.prefetch_depth",
        "return 0",
        "tests/zero/test_asynchrony.py::"
        "test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_reduction_is",
    ),
]
