# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what a run will need, and moments in bf16."""

from tests.mutants.catalogue.mutant import Mutant

_MEMORY = "tests/planner/test_memory.py::test_"
_ACTIVATIONS = "tests/planner/test_activations.py::test_"
_ROUNDED = "tests/mcore/test_rounded_adam.py::test_"

MUTANTS = [
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
        "return [memory_in_flight(each, of.depth, budget=of.in_flight_nbytes) for each in chunks]",
        "return [memory_in_flight(each, 1, budget=of.in_flight_nbytes) for each in chunks]",
        f"{_MEMORY}100_random_plans_take_the_bytes_that_the_engines_counters_have",
    ),
    Mutant(
        "planned-states-without-padding",
        "the planner's bytes of one rank are those of the engine's counters",
        "planner/costs.py",
        "return self._states_of(units, self.padded), self.model.itemsize * largest",
        "return self.states_by_formula(stage), self.model.itemsize * largest",
        f"{_MEMORY}100_random_plans_take_the_bytes_that_the_engines_counters_have",
    ),
    Mutant(
        "chosen-sizes-that-forget-what-was-given",
        "a size that is given stays while the others are chosen",
        "mcore/planned.py",
        "state: size for state, size in given.items() if size is not None and size != AUTO",
        "state: size for state, size in given.items() if size == 0",
        "tests/mcore/test_chosen_sizes.py::"
        "test_sizes_that_are_auto_are_chosen_for_the_cluster_and_logged_in_one_line",
    ),
    Mutant(
        "a-unit-that-launches-for-nothing",
        "what a unit and a step take beside their FLOPs is part of a step",
        "planner/compute.py",
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
        "each = round(layer.mlp.num_experts / parallel.ep / count)",
        "each = round(layer.mlp.num_experts / count)",
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
