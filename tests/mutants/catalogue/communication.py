# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what a collective moves, when, and in which order."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "the-store-closes-first",
        "the rank that may hold the store closes after the others",
        "comm/roll_call.py",
        "                self._part()\n",
        "                pass\n",
        (
            "tests/comm/test_roll_call.py::"
            "test_the_rank_that_may_hold_the_store_closes_when_the_others_have"
        ),
    ),
    Mutant(
        "gather-axis-order",
        "law 2: the outermost axis is gathered first",
        "comm/collectives.py",
        "inner, outer = axes[0], axes[1:]",
        "inner, outer = axes[-1], axes[:-1]",
        (
            "tests/comm/test_collectives.py::"
            "test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner"
        ),
    ),
    Mutant(
        "reduce-axis-order",
        "law 2: the innermost axis is reduced first",
        "comm/collectives.py",
        "in zip(axes, shards, strict=True):",
        "in zip(reversed(axes), shards, strict=True):",
        (
            "tests/comm/test_collectives.py::"
            "test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner"
        ),
    ),
    Mutant(
        "shared-communicator",
        "gathers and reductions have communicators of their own",
        "comm/groups.py",
        'grad_reduce=along("reduce"',
        'grad_reduce=along("gather"',
        (
            "tests/zero/test_traffic.py::"
            "test_parameters_travel_in_the_models_dtype_and_gradients_in_fp32_as_often_as_"
            "the_sizes_ask[sizes3-dtype3]"
        ),
    ),
    Mutant(
        "sum-in-bf16",
        "gradients that travel in bf16 are summed in fp32",
        "comm/collectives.py",
        "        result.add_(piece)",
        "        result.copy_(result.to(piece.dtype).add_(piece))",
        (
            "tests/zero/test_grad_dtype.py::"
            "test_every_contribution_is_rounded_once_and_the_sum_is_made_in_fp32"
        ),
    ),
    Mutant(
        "order-check-of-the-last-entry",
        "law 3: what the ranks compare covers all that was issued",
        "comm/driver.py",
        "value = zlib.crc32(entry.encode(), value)",
        "value = zlib.crc32(entry.encode())",
        (
            "tests/zero/test_divergent_order.py::"
            "test_two_swapped_modules_of_one_size_are_named_with_one_message_on_all_"
            "ranks[threaded]"
        ),
    ),
    Mutant(
        "no-order-check",
        "law 3: the ranks compare what they issued",
        "zero/step.py",
        "if not self._checks_order:",
        "if True:",
        (
            "tests/zero/test_divergent_order.py::"
            "test_two_swapped_modules_of_one_size_are_named_with_one_message_on_all_"
            "ranks[threaded]"
        ),
    ),
    Mutant(
        "memory-of-the-comparison",
        "memory of a task is allocated on its lane, or somebody owns it until it was used",
        "comm/order_check.py",
        (
            "        def steps() -> Steps:\n"
            "            # Allocated here, [Note: memory of a task]. Filled on the "
            "device: a copy from the host\n"
            "            # would hold it until the device has caught up.\n"
            "            own = [\n"
            "                torch.full((1,), value, dtype=torch.int64, device=self._device)"
            " for value in values\n"
            "            ]\n"
            "            extremes = torch.stack([*own, *(-value for value in own)]).view(2, 2)\n"
        ),
        (
            "        own = [\n"
            "            torch.full((1,), value, dtype=torch.int64, device=self._device) for "
            "value in values\n"
            "        ]\n"
            "        extremes = torch.stack([*own, *(-value for value in own)]).view(2, 2)\n"
            "\n"
            "        def steps() -> Steps:\n"
        ),
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "what-crosses-groups-is-not-compared",
        "law 3: groups compare what crosses them",
        "comm/driver.py",
        'return entry.partition(" ")[0] not in _OF_MICRO_BATCHES',
        "return False",
        (
            "tests/zero/test_divergent_order.py::"
            "test_the_comparison_names_the_first_difference_and_who_did_what_on_every_rank"
        ),
    ),
    Mutant(
        "groups-in-step",
        "groups may have different numbers of micro-batches",
        "comm/groups.py",
        "stop = max(sizes.param, sizes.grad)",
        "stop = self.topology.world_size",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_groups_with_different_numbers_of_micro_batches_train_as_one_process"
        ),
    ),
    Mutant(
        "a-group-without-micro-batches-goes-its-own-way",
        "law 3: a group without a micro-batch completes gradients in the order of the others",
        "zero/step.py",
        "            self._follow_others()",
        "            pass",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_a_group_without_a_micro_batch_does_what_the_others_do"
        ),
    ),
    Mutant(
        "no-forward-no-order-of-parameters",
        "law 3: a group without a micro-batch rebuilds parameters in the order of the others",
        "zero/gathers.py",
        "[*(self._used or self._order), *self._units]",
        "[*self._used, *self._units]",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_a_group_without_a_micro_batch_does_what_the_others_do"
        ),
    ),
    Mutant(
        "no-forward-no-parameters-ahead-of-gradients",
        "law 3: a group without a micro-batch rebuilds parameters where the others do",
        "zero/step.py",
        "self.gathers.follow_others()",
        "pass",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_a_group_without_a_micro_batch_does_what_the_others_do"
        ),
    ),
    Mutant(
        "a-group-without-micro-batches-sends-nothing-early",
        "law 3: a group without a micro-batch sends early what the others send",
        "zero/step.py",
        (
            "self.reductions.reopen(unit)  # where a micro-batch has several backwards\n"
            "            self._complete_grads(unit)"
        ),
        "self._start_grad_sync(unit)",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_a_group_without_a_micro_batch_does_what_the_others_do"
        ),
    ),
    Mutant(
        "a-difference-within-a-group-stays-there",
        "law 3: a difference ends the step on all ranks",
        "comm/order_check.py",
        "extremes[:, 0] = (extremes[0, 0] != -extremes[1, 0]).to(torch.int64)",
        "extremes[:, 0] = 0",
        (
            "tests/zero/test_divergent_order.py::"
            "test_the_comparison_names_the_first_difference_and_who_did_what_on_every_rank"
        ),
    ),
    Mutant(
        "memory-in-flight-stays-asleep",
        "a sharded model that sleeps leaves nothing on the device",
        "zero/step.py",
        "self.reductions.arena.free()",
        "pass",
        (
            "tests/device/test_sleep.py::"
            "test_ten_times_nothing_is_left_on_the_device_and_nothing_grows"
        ),
    ),
    Mutant(
        "parts-of-a-pack",
        "a sharded model that wakes has its bits",
        "zero/host_copy.py",
        "begin = -(-stops[-1] // _ALIGNMENT) * _ALIGNMENT if stops else 0",
        "begin = stops[-1] // _ALIGNMENT * _ALIGNMENT if stops else 0",
        (
            "tests/zero/test_sleep.py::"
            "test_any_tensors_are_at_most_ten_copies_and_come_back_with_their_bits"
        ),
    ),
    Mutant(
        "readers-of-overlapping-places",
        "law 5: a writer waits for the readers of every byte it writes",
        "sharding/memory_map.py",
        "if overlap(used, extent):",
        "if used == extent:",
        (
            "tests/comm/test_arena.py::"
            "test_the_next_writer_waits_for_the_last_user_of_every_byte_and_for_no_one_"
            "before_it"
        ),
    ),
    Mutant(
        "views-are-overwritten",
        "law 5: memory that somebody still views is not reused",
        "comm/arena.py",
        "return self._count_owners() > self._num_owners",
        "return False",
        (
            "tests/zero/test_saved_views.py::"
            "test_a_view_that_hooks_cannot_see_keeps_its_memory_and_without_that_guard_would_"
            "be_wrong"
        ),
    ),
    Mutant(
        "early-slot-release",
        "law 5: memory is rewritten only after its last reader",
        "sharding/memory_map.py",
        "            self.note_user(extent, last_user)",
        "            pass",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "backward-waits-for-reductions",
        "law 6: backward goes on while gradients are on their way",
        "zero/reductions.py",
        "self._last_reduction[unit] = task",
        "self._last_reduction[unit] = task\n        task.wait()",
        (
            "tests/zero/test_asynchrony.py::"
            "test_forward_goes_on_while_the_next_gather_is_held_and_backward_while_a_"
            "reduction_is"
        ),
    ),
    Mutant(
        "streams-ignore-earlier-jobs",
        "a task begins after those whose results it reads",
        "comm/driver.py",
        "for task in self.after:\n            task.order",
        "for task in ():\n            task.order",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "threads-ignore-earlier-jobs",
        "a task begins after those whose results it reads",
        "comm/thread_driver.py",
        "for other in task.after:\n            other.await_usable()",
        "for other in ():\n            other.await_usable()",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_threads_on_a_cpu_are_ordered"
        ),
    ),
    Mutant(
        "nobody-watches-streams",
        "law 7: what does not end in time is named, in every schedule",
        "comm/watchdog.py",
        "return item if time.monotonic() > deadline else None",
        "return None",
        (
            "tests/comm/test_watchdog.py::"
            "test_a_task_that_does_not_end_is_named_and_ends_the_driver_though_nobody_waits_"
            "for_it"
        ),
    ),
    Mutant(
        "nothing-is-put-off",
        "nothing stands behind a collective before it is needed",
        "comm/driver.py",
        "if not task.is_on_its_way:",
        "if True:",
        (
            "tests/comm/test_driver.py::"
            "test_on_a_device_nothing_waits_for_a_collective_until_its_result_is_needed"
        ),
    ),
    Mutant(
        "readers-wait-to-the-end",
        "what reads a result is issued when the next task of that lane is",
        "comm/driver.py",
        "if is_due and other in self._postponed:",
        "if False:",
        (
            "tests/comm/test_driver.py::"
            "test_on_a_device_what_reads_a_result_is_issued_when_the_next_of_that_lane_is"
        ),
    ),
    Mutant(
        "a-lane-overtakes-itself",
        "a lane issues its tasks in the order of submission",
        "comm/driver.py",
        "            if other.lane == task.lane and other in self._postponed:\n"
        "                self._issue(other)",
        "            pass",
        ("tests/comm/test_driver.py::test_a_lane_issues_its_tasks_in_the_order_of_submission"),
    ),
    Mutant(
        "a-lane-completes-nothing",
        "a lane leaves at most two tasks unfinished",
        "comm/driver.py",
        "if len(of_lane) > 1:",
        "if False:",
        ("tests/comm/test_driver.py::test_on_a_device_a_lane_leaves_at_most_two_tasks_unfinished"),
    ),
    Mutant(
        "no-wait-for-the-collective-itself",
        "law 5: a reader of a gather waits for the collective's own end",
        "comm/driver.py",
        "        self._complete(self._end)",
        "        pass",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "all-shards-at-once",
        "a shard is rebuilt a few units ahead of its use",
        "sharding/decisions.py",
        "if self._depth and num_ahead >= self._depth + 2:",
        "if False:",
        (
            "tests/zero/test_schedules.py::"
            "test_a_shard_is_rebuilt_a_few_units_ahead_of_its_use_and_not_all_at_once"
        ),
    ),
    Mutant(
        "a-failure-asks-nobody",
        "law 7: a failure names the ranks that are missing",
        "comm/driver.py",
        "asks if is_of_peer else None",
        "None",
        (
            "tests/comm/test_asking.py::"
            "test_a_failure_that_a_peer_may_have_caused_names_the_missing_ranks_and_asks_once[inline]"
        ),
    ),
    Mutant(
        "the-others-do-not-end",
        "law 7: a rank ends with another that has failed",
        "comm/driver.py",
        "        if self._is_closed.wait(OTHERS_FIRST_S):",
        "        if True:",
        (
            "tests/comm/test_asking.py::"
            "test_a_rank_ends_with_another_that_has_failed_and_names_where_it_was"
        ),
    ),
    Mutant(
        "nobody-hears-the-call",
        "law 7: all ranks hear of a failure",
        "comm/roll_call.py",
        "if not self._has_answered and self._store.check([_CALLED]):",
        "if False:",
        (
            "tests/comm/test_roll_call.py::"
            "test_the_ranks_that_do_not_answer_are_named_and_all_others_hear_of_the_failure"
        ),
    ),
    Mutant(
        "a-dead-store-holds-a-rank",
        "law 7: nobody waits for a store whose host is gone",
        "comm/roll_call.py",
        "self._is_over.wait(ANSWERS_WITHIN_S + _STORE_S)",
        "self._is_over.wait()",
        "tests/comm/test_roll_call.py::test_a_store_that_never_answers_holds_no_rank",
    ),
    Mutant(
        "the-store-goes-first",
        "law 7: the rank that holds the store ends last",
        "comm/roll_call.py",
        "while self._num_read < self._num_answered and",
        "while False and",
        (
            "tests/comm/test_roll_call.py::"
            "test_the_rank_that_may_hold_the_store_leaves_when_the_others_have_read"
        ),
    ),
    Mutant(
        "nobody-writes",
        "law 7: a failure in a save names who was writing",
        "comm/roll_call.py",
        "self._answer(self._is_found_writing())",
        "self._answer(False)",
        (
            "tests/comm/test_roll_call.py::"
            "test_who_writes_a_checkpoint_is_named_where_a_collective_is_not_the_engines"
        ),
    ),
    Mutant(
        "who-waits-writes",
        "law 7: a rank that waits in a save is not named as one that writes",
        "comm/driver.py",
        "self.saves.current is not None and not is_main_thread_waiting()",
        "self.saves.current is not None",
        "tests/comm/test_asking.py::test_a_rank_that_waits_in_a_save_is_not_one_that_writes",
    ),
    Mutant(
        "the-save-has-no-name",
        "law 7: a rank that hears of a failure in a save names the save",
        "comm/driver.py",
        "if where is None and title is None and self.last_task is not None:",
        "if where is None and self.last_task is not None:",
        (
            "tests/comm/test_asking.py::"
            "test_a_rank_that_writes_a_checkpoint_names_it_when_another_has_failed"
        ),
    ),
]
