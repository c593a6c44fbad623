# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the adapter, the planner and attention."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "saved-at-by-the-clock",
        "a save is later than all that were there, whatever the clock says",
        "checkpoint_files/manifest.py",
        "now = max(now, math.nextafter(other.saved_at, math.inf))",
        "pass",
        (
            "tests/checkpoint_files/test_choice.py::"
            "test_where_the_clock_was_set_back_a_save_is_still_later_than_those_before"
        ),
    ),
    Mutant(
        "repeated-step-counts",
        "a step that the rerun machine repeats keeps its number",
        "mcore/data_parallel.py",
        "self.runtime.zero_grads(self.communication.number_of_step())",
        "self.runtime.zero_grads()",
        (
            "tests/mcore/test_reruns.py::"
            "test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed"
        ),
    ),
    Mutant(
        "comparisons-pass-over-nan",
        "a number that is none is infinitely far from every other",
        "scripts/testbed/differences.py",
        "error if isfinite(error) else inf",
        "error",
        ("tests/gpu_check/test_checks.py::test_series_are_equal_within_a_limit_or_the_check_fails"),
    ),
    Mutant(
        "ranks-leave-at-once",
        "a rank that has returned stays until all have",
        "scripts/testbed/ranks.py",
        "                _await_the_others(parent)\n",
        "                pass\n",
        "tests/testbed/test_ranks.py::test_a_rank_that_has_returned_stays_until_all_have",
    ),
    Mutant(
        "infinite-gradients-pass",
        "with Megatron's check a gradient that is infinite ends the run",
        "mcore/data_parallel.py",
        '(torch.isnan, "NaN", True), (torch.isinf, "Inf", True)',
        '(torch.isnan, "NaN", True)',
        (
            "tests/mcore/test_reruns.py::"
            "test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed"
        ),
    ),
    Mutant(
        "losses-of-nan-pass",
        "with Megatron's check a loss that is NaN ends the run",
        "scripts/train/loss_checks.py",
        '(torch.isnan, "NaN", True), (torch.isinf, "infinity", True)',
        '(torch.isinf, "infinity", True)',
        (
            "tests/mcore/test_reruns.py::"
            "test_a_loss_is_refused_where_it_is_not_finite_or_spiky_as_the_flags_ask"
        ),
    ),
    Mutant(
        "steps-counted-from-the-start",
        "messages count the steps of a run that goes on as Megatron's log does",
        "mcore/settings.py",
        "return None if done is None else done + 1",
        "return None",
        (
            "tests/mcore/checkpoint/test_guard.py::"
            "test_a_run_goes_on_from_the_newest_intact_checkpoint_as_if_it_had_not_stopped"
        ),
    ),
    Mutant(
        "trace-of-a-step-that-is-done",
        "--asynchzp-trace counts from the step that a run goes on with",
        "mcore/flags/asynchzp.py",
        "return max(first, min(first + _TRACED_STEP, self.num_steps) - 1)",
        "return max(1, min(1 + _TRACED_STEP, self.num_steps) - 1)",
        (
            "tests/mcore/test_trace.py::test_rank_0_traces_the_tenth_step_or_the_last_but_one_"
            "also_of_a_run_that_goes_on"
        ),
    ),
    Mutant(
        "reports-divide-by-all-steps",
        "the log's gathers per step are of the steps since the last report",
        "comm/report.py",
        "steps = max(1, driver.num_steps - self._reported_steps)",
        "steps = max(1, driver.step)",
        (
            "tests/comm/test_timeline.py::"
            "test_a_report_is_per_step_also_of_a_run_that_goes_on_from_thousands"
        ),
    ),
    Mutant(
        "repeated-step-adds-up",
        "a step that the rerun machine repeats begins without gradients",
        "zero/step.py",
        "            unit.zero_grads()",
        "            unit.zero_grads() if number is None else None",
        (
            "tests/mcore/test_reruns.py::"
            "test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed"
        ),
    ),
    Mutant(
        "large-gradients-end-a-run",
        "a gradient that is large, and finite, ends no run",
        "mcore/data_parallel.py",
        '"unexpectedly large values", False)',
        '"unexpectedly large values", True)',
        (
            "tests/mcore/test_reruns.py::"
            "test_a_step_is_repeated_with_its_number_and_the_bits_of_one_that_nothing_disturbed"
        ),
    ),
    Mutant(
        "spiky-loss-unseen",
        "--check-for-spiky-loss looks at every loss",
        "scripts/train/loss_checks.py",
        "if args.check_for_spiky_loss:",
        "if False:",
        (
            "tests/mcore/test_reruns.py::"
            "test_a_loss_is_refused_where_it_is_not_finite_or_spiky_as_the_flags_ask"
        ),
    ),
    Mutant(
        "dp-for-dp-x-cp",
        "states are sharded over data x context parallel ranks",
        "mcore/shard_groups.py",
        'over("dp_cp", pg_collection.dp_cp, settings.sizes)',
        'over("dp_cp", pg_collection.dp, settings.sizes)',
        (
            "tests/mcore/test_context_parallel.py::"
            "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
        ),
    ),
    Mutant(
        "mean-over-dp",
        "gradients are the mean over data x context parallel ranks",
        "mcore/data_parallel.py",
        "1.0 / self.dp_cp_group.size()",
        "1.0 / pg_collection.dp.size()",
        (
            "tests/mcore/test_context_parallel.py::"
            "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
        ),
    ),
    Mutant(
        "norm-of-replicas",
        "each element counts once in the gradient norm",
        "mcore/optimizer.py",
        "if unit.groups.topology.replica_index == 0:",
        "if True:",
        (
            "tests/mcore/test_context_parallel.py::"
            "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
        ),
    ),
    Mutant(
        "clipping",
        "gradients are clipped at --clip-grad",
        "mcore/optimizer.py",
        "self.clip_grad_norm(self.config.clip_grad)",
        "self.clip_grad_norm(0.5 * self.config.clip_grad)",
        (
            "tests/mcore/test_context_parallel.py::"
            "test_states_are_sharded_over_data_and_context_parallel_ranks_as_in_stock"
        ),
    ),
    Mutant(
        "moments-that-stay-zero",
        "Adam stores the moments that it has computed in fp32",
        "mcore/rounded_adam.py",
        "if moment is not place:",
        "if False:",
        (
            "tests/mcore/test_rounded_adam.py::"
            "test_the_parameter_moves_by_moments_that_are_rounded_only_when_they_are_stored"
        ),
    ),
    Mutant(
        "mistyped-flags-pass",
        "a mistyped flag of ours is refused with the nearest name",
        "mcore/flags/command_line.py",
        "if meant := mistyped(flag, own):",
        "if (meant := mistyped(flag, own)) and False:",
        (
            "tests/test_mistakes.py::"
            "test_a_mistake_ends_in_one_line_and_not_with_0[our main flag mistyped]"
        ),
    ),
    Mutant(
        "gradients-at-rest-over-the-wrong-ranks",
        "a rank holds 2N/P + 4N/G + 12N/O bytes at rest",
        "planner/memory.py",
        '"main_grad": _FP32 * numel / sizes.grad,',
        '"main_grad": _FP32 * numel / sizes.param,',
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
        "planned-collectives",
        "the planner reduces over the axes that the engine reduces over",
        "planner/traffic.py",
        "_reductions(numel, group.wire, group.axes(1, sizes.grad))",
        "_reductions(numel, group.wire, group.axes(1, sizes.param))",
        (
            "tests/planner/test_traffic.py::"
            "test_every_collective_has_the_ranks_and_the_elements_that_the_engines_has"
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
        "shift-of-masked-keys",
        "keys that nobody attends do not reach the mean",
        "attention/key_shift.py",
        (
            "k_BGTD = zero_unused(k_BGTD, used_BT)\n"
            "    with torch.no_grad():\n"
            "        shift_BGJD, mean_BG1D = _means"
        ),
        "pass\n    with torch.no_grad():\n        shift_BGJD, mean_BG1D = _means",
        "tests/attention/test_delegate.py::test_padding_may_hold_anything",
    ),
    Mutant(
        "tensor-parallel-parts-swapped",
        "each part of a streamed tensor lies where its tensor-parallel rank has it",
        "hf/pieces.py",
        "slice(start, start + length) for start, length in extents",
        "slice(n - s - k, n - s) for n, (s, k) in zip(size, extents, strict=True)",
        "tests/hf/test_pieces.py::test_boxes_make_up_the_tensor_that_was_cut_into_them",
    ),
    Mutant(
        "one-expert-for-all",
        "each expert is streamed under its own number",
        "hf/contents.py",
        "return self.rule.names_of(self.place)",
        "return self.rule.names_of((*self.place[:1], 0))",
        (
            "tests/hf/test_contents.py::"
            "test_embeddings_come_first_then_layer_after_layer_then_what_makes_logits"
        ),
    ),
    Mutant(
        "dropped-expert",
        "a model of which no rank describes a part is not streamed",
        "sharding/held_runs.py",
        "if held != wanted or",
        "if held > wanted or",
        (
            "tests/sharding/test_held_runs.py::"
            "test_a_tensor_of_which_nobody_describes_a_part_is_refused"
        ),
    ),
    Mutant(
        "first-holder-sends-all",
        "where all ranks receive weights, no holder sends more than another",
        "sharding/routes.py",
        "return holders[place * len(holders) // count]",
        "return holders[place * len(holders) // count // 2]",
        ("tests/sharding/test_routes.py::test_where_all_ranks_receive_holders_send_equally_often"),
    ),
    Mutant(
        "replicas-of-moments-may-differ",
        "replicas of every state are compared: parameters, main parameters and moments",
        "mcore/replicas.py",
        '            found += _differing("optimizer states", trained, moments_of, copies)\n',
        "",
        (
            "tests/mcore/test_replicas.py::"
            "test_a_change_on_one_rank_is_named_by_all_wherever_another_rank_holds_the_same"
        ),
    ),
    Mutant(
        "a-bit-that-is-not-hashed",
        "every bit of a state changes its hash",
        "mcore/replicas.py",
        "(2 * places + 1)",
        "(2 * places)",
        "tests/mcore/test_replicas.py::test_every_bit_of_a_state_changes_its_hash",
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
        "a-childs-sigterm-ends-its-parent",
        "law 7: what is sent to a forked process is not for its parent",
        "mcore/process/interrupts.py",
        "os.register_at_fork(after_in_child=_forget_in_child)\n",
        "",
        (
            "tests/mcore/process/test_interrupts.py::"
            "test_a_signal_ends_the_process_whether_or_not_the_main_thread_comes_back"
            "[SIGTERM-forks]"
        ),
    ),
    Mutant(
        "node-as-world",
        "a size that is node is the ranks of the sharding group on one node",
        "mcore/flags/shard_sizes.py",
        "{NODE: gcd(ranks_per_node, group_size),",
        "{NODE: group_size,",
        (
            "tests/mcore/flags/test_shard_sizes.py::"
            "test_defaults_follow_the_node_and_the_flags_that_were_given"
        ),
    ),
    Mutant(
        "all-nodes-alone",
        "sizes and batch are checked for every number of nodes before a run starts",
        "mcore/flags/command_line.py",
        "for number in nodes:",
        "for number in nodes[-1:]:",
        "tests/test_mistakes.py::test_a_mistake_ends_in_one_line_and_not_with_0",
    ),
    Mutant(
        "dead-addresses",
        "ranks that start anew because a node came do not meet those before them",
        "launch.py",
        "if not may_restart and not may_change:",
        "if not may_restart:",
        "tests/test_mistakes.py::test_torchrun_gets_the_restarts_that_can_meet_again",
    ),
    Mutant(
        "a-lost-rendezvous-holds-torchrun",
        "law 7: no process stays when the rendezvous' node is gone",
        "torchrun.py",
        "time.monotonic() - since > _HELD_S and are_ranks_gone()",
        "False",
        (
            "tests/test_torchrun.py::"
            "test_where_the_store_of_the_rendezvous_does_not_answer_it_ends_when_its_ranks_have"
        ),
    ),
    Mutant(
        "local-of-other-sizes",
        "a local checkpoint is loaded into the ranks and sizes that wrote it alone",
        "mcore/checkpoint/local.py",
        "if was != now:",
        "if False:",
        "tests/mcore/checkpoint/test_local.py::test_what_shards_depend_on_has_to_be_the_same",
    ),
    Mutant(
        "older-local",
        "a newer shared checkpoint comes before a local one",
        "mcore/checkpoint/local.py",
        "if iteration < shared:",
        "if False:",
        "tests/mcore/checkpoint/test_local.py::test_a_newer_shared_checkpoint_and_a_run_that_goes_back_leave_local_ones_alone",
    ),
    Mutant(
        "local-of-another-run",
        "local checkpoints of another run are refused and stay",
        "mcore/checkpoint/local.py",
        'if save is not None and os.path.abspath(save) != os.path.abspath(args.save or ""):',
        "if False:",
        "tests/mcore/checkpoint/test_local.py::test_the_checkpoints_of_another_run_are_refused_and_left_as_they_are",
    ),
    Mutant(
        "stale-local",
        "what is not loaded is removed, as the library would take it for newer",
        "mcore/checkpoint/local.py",
        "on_each(peers, partial(keep_only, place, found))",
        "pass",
        "tests/mcore/checkpoint/test_local.py::test_the_newest_that_fits_is_found_and_the_others_are_removed",
    ),
    Mutant(
        "half-written-local",
        "what an interrupted local save has left does not end the next one",
        "checkpoint_files/local_files.py",
        '_UNFINISHED = "iter_*_local.dirty.pt"',
        '_UNFINISHED = "nothing"',
        "tests/mcore/checkpoint/test_local.py::test_what_is_damaged_or_half_written_is_not_loaded",
    ),
    Mutant(
        "shard-of-nobody",
        "a local checkpoint of which a rank finds no copy is not loaded",
        "checkpoint_files/local_files.py",
        "for place in places)",
        "for place in range(len(held)))",
        "tests/mcore/checkpoint/test_local.py::test_a_shard_is_lacking_where_no_rank_that_is_asked_has_it",
    ),
    Mutant(
        "stolen-copies",
        "on storage that nodes share no rank takes what another finds",
        "checkpoint_files/local_files.py",
        "or (number < len(has_own) and has_own[number])",
        "",
        "tests/mcore/checkpoint/test_local.py::test_what_a_rank_kept_elsewhere_on_its_node_is_adopted_by_the_one_in_its_place",
    ),
]
