# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the adapter, the planner and attention."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "the-last-rule-decides",
        "of the rules for one setting the first that applies decides",
        "mcore/flags/rules.py",
        "first.setdefault(rule.setting, rule)",
        "first[rule.setting] = rule",
        (
            "tests/mcore/flags/test_changes.py::"
            "test_what_becomes_of_gathers_in_fp8_depends_on_what_stock_gathers"
        ),
    ),
    Mutant(
        "translated-to-nothing",
        "what a translated setting asked for becomes a setting of ours",
        "mcore/flags/rules.py",
        "values |= rule.becomes(settings)",
        "pass",
        (
            "tests/mcore/test_rounded_adam.py::"
            "test_the_flags_become_dtypes_and_megatrons_own_optimizer_is_switched_off"
        ),
    ),
    Mutant(
        "fields-by-the-arguments-name",
        "a rule says of Megatron's dataclasses what it says of its flags",
        "mcore/flags/megatron_settings.py",
        "dict.fromkeys((name, _FIELDS.get(name, name)))",
        "(name,)",
        (
            "tests/mcore/flags/test_megatron_settings.py::"
            "test_a_rule_says_of_megatrons_dataclasses_what_it_says_of_its_flags"
        ),
    ),
    Mutant(
        "unread-choices",
        "a choice that no run can have is refused when the config is made",
        "mcore/flags/config.py",
        "            if value == default_of(name):",
        "            if True:",
        (
            "tests/mcore/flags/test_config.py::"
            "test_a_choice_that_no_run_can_have_is_refused_when_it_is_made_and_names_its_flag"
        ),
    ),
    Mutant(
        "settings-of-an-earlier-run",
        "a process runs with the settings that were validated last",
        "mcore/run/settings.py",
        "            RunSettings.of_arguments(args) if is_ours else None,",
        "            RunSettings.of_arguments(args) if is_ours else Run.current_settings(),",
        (
            "tests/mcore/patches/test_patches.py::"
            "test_a_stock_run_in_the_process_of_ours_has_no_settings_of_it"
        ),
    ),
    Mutant(
        "groups-are-not-worked-out",
        "what Megatron's groups refuse is refused before a start",
        "commands/pretended_world.py",
        "initialize._initialize_distributed(None, None, None)",
        "pass",
        (
            "tests/commands/test_sizes.py::"
            "test_sizes_that_do_not_divide_are_refused_before_a_start[orders of ranks]"
        ),
    ),
    Mutant(
        "saved-at-by-the-clock",
        "a save is later than all that were there, whatever the clock says",
        "checkpoint_files/manifest.py",
        "now = max(now, math.nextafter(saved_at, math.inf))",
        "pass",
        (
            "tests/checkpoint_files/test_choice.py::"
            "test_where_the_clock_was_set_back_a_save_is_still_later_than_those_before"
        ),
    ),
    Mutant(
        "joined-runs-in-any-order",
        "the runs that neighbours bring together lie in the order of their ranks",
        "mcore/checkpoint/save_ranks.py",
        "begin = (place * runs[index].numel + start) * itemsize",
        "begin = ((factor - 1 - place) * runs[index].numel + start) * itemsize",
        "tests/mcore/checkpoint/test_save_ranks.py::test_what_one_exchange_brings_is_bounded",
    ),
    Mutant(
        "repeated-step-adds-up",
        "a step that the rerun machine repeats begins without gradients",
        "engine/zero/step.py",
        "            unit.zero_grads()",
        "            unit.zero_grads() if number is None else None",
        (
            "tests/mcore/test_reruns.py::"
            "test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed"
        ),
    ),
    Mutant(
        "mean-over-dp",
        "gradients are the mean over data x context parallel ranks",
        "mcore/step/data_parallel.py",
        "1.0 / self.dp_cp_group.size()",
        "1.0 / pg_collection.dp.size()",
        (
            "tests/mcore/test_context_parallel.py::"
            "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
        ),
    ),
    Mutant(
        "moments-that-stay-zero",
        "Adam stores the moments that it has computed in fp32",
        "mcore/step/rounded_adam.py",
        "if moment is not place:",
        "if False:",
        (
            "tests/mcore/test_rounded_adam.py::"
            "test_the_parameter_moves_by_moments_that_are_rounded_only_when_they_are_stored"
        ),
    ),
    Mutant(
        "gradients-at-rest-over-the-wrong-ranks",
        "a rank holds 2N/P + 4N/G + 12N/O bytes at rest",
        "planner/memory.py",
        '"main_grad": main_grad * trained / sizes.grad,',
        '"main_grad": main_grad * trained / sizes.param,',
        (
            "tests/planner/test_memory.py::"
            "test_at_rest_a_rank_holds_2n_over_p_4n_over_g_and_12n_over_o_bytes"
        ),
    ),
    Mutant(
        "planned-backward",
        "the planner goes back through the units as autograd does",
        "planner/order.py",
        "        for visit in reversed(visits):",
        "        for visit in visits:",
        (
            "tests/planner/test_traffic.py::"
            "test_the_planner_submits_what_the_engine_submits_in_the_same_order"
        ),
    ),
    Mutant(
        "psi-term",
        "scores of blocks with different shifts are compared in one frame",
        "attention/reference/block.py",
        "score = score + scale * gemm(q_BGND.to(vector), c_BGD1, vector)",
        "pass",
        ("tests/attention/test_equivalence.py::test_in_fp64_every_mode_is_softmax_attention"),
    ),
    Mutant(
        "one-expert-for-all",
        "each expert is streamed under its own number",
        "hf/mapping.py",
        "return self.rule.names_of(self.place)",
        "return self.rule.names_of((*self.place[:1], 0))",
        (
            "tests/hf/test_contents.py::"
            "test_embeddings_come_first_then_layer_after_layer_then_what_makes_logits"
        ),
    ),
    Mutant(
        "sigterm-without-a-line",
        "law 7: a rank that torchrun ends says where it was",
        "mcore/process/interrupts.py",
        "if signal.SIGTERM in received and is_ours:",
        "if False:",
        (
            "tests/mcore/process/test_interrupts.py::"
            "test_a_signal_ends_the_process_whether_or_not_the_main_thread_comes_back"
            "[SIGTERM-stuck]"
        ),
    ),
    Mutant(
        "adapters-scaled-by-alpha",
        "an adapter is merged times alpha / rank",
        "hf/export_model.py",
        "self._alpha / len(into) * (out @ into)",
        "self._alpha * (out @ into)",
        ("tests/hf/test_adapters.py::test_the_merged_weight_is_the_sum_in_fp32_rounded_once"),
    ),
]
