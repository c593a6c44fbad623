# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: what a collective moves, when, and in which order."""

from tests.mutants.catalogue.mutant import Mutant

MUTANTS = [
    Mutant(
        "reduce-axis-order",
        "law 2: the innermost axis is reduced first",
        "engine/comm/collectives.py",
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
        "engine/comm/groups.py",
        'grad_reduce=along("reduce"',
        'grad_reduce=along("gather"',
        (
            "tests/zero/test_traffic.py::"
            "test_parameters_travel_in_the_models_dtype_and_gradients_in_fp32_as_often_as_"
            "the_sizes_ask[sizes3-dtype3]"
        ),
    ),
    Mutant(
        "torchs-group-names",
        "a group's name does not depend on how many others a rank has",
        "engine/comm/groups.py",
        "        return names.pop()",
        "        return names.pop() and torch_names(ranks)",
        (
            "tests/comm/test_groups.py::"
            "test_ranks_make_their_groups_alone_whatever_others_they_have_and_had"
        ),
    ),
    Mutant(
        "sum-in-bf16",
        "gradients that travel in bf16 are summed in fp32",
        "engine/comm/collectives.py",
        "        result.add_(piece)",
        "        result.copy_(result.to(piece.dtype).add_(piece))",
        (
            "tests/zero/test_grad_dtype.py::"
            "test_every_contribution_is_rounded_once_and_the_sum_is_made_in_fp32"
        ),
    ),
    Mutant(
        "no-order-check",
        "law 3: the ranks compare what they issued",
        "engine/zero/step.py",
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
        "law 4: memory of a task is allocated on its lane, or somebody owns it until it was used",
        "engine/comm/order_check.py",
        (
            "        def steps() -> Steps:\n"
            "            # Allocated here, [Note: memory of a task], and filled on the "
            "device, because a copy\n"
            "            # from the host would make the host wait for the device.\n"
            "            own = [torch.full((1,), v, dtype=torch.int64, device=self._device)"
            " for v in values]\n"
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
        "engine/comm/driver.py",
        "return not entry.startswith(_OF_MICRO_BATCHES)",
        "return False",
        (
            "tests/zero/test_divergent_order.py::"
            "test_the_comparison_names_the_first_difference_and_who_did_what_on_every_rank"
        ),
    ),
    Mutant(
        "no-forward-no-order-of-parameters",
        "law 3: a group without a micro-batch rebuilds parameters in the order of the others",
        "engine/zero/gathers.py",
        "[*(self._used or self.last_used), *self._units]",
        "[*self._used, *self._units]",
        (
            "tests/zero/test_unequal_micro_batches.py::"
            "test_a_group_without_a_micro_batch_does_what_the_others_do"
        ),
    ),
    Mutant(
        "memory-in-flight-stays-asleep",
        "a sharded model that sleeps leaves nothing on the device",
        "engine/zero/step.py",
        "self.reductions.arena.free()",
        "pass",
        (
            "tests/device/test_sleep.py::"
            "test_ten_times_nothing_is_left_on_the_device_and_nothing_grows"
        ),
    ),
    Mutant(
        "views-are-overwritten",
        "law 5: memory that somebody still views is not reused",
        "engine/comm/arena.py",
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
        "engine/sharding/memory_map.py",
        "            self.note_last_user(extent, last_user)",
        "            pass",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "backward-waits-for-reductions",
        "law 6: backward goes on while gradients are on their way",
        "engine/zero/reductions.py",
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
        "engine/comm/task.py",
        "for task in self.after:\n            task.order",
        "for task in ():\n            task.order",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_streams_are_ordered"
        ),
    ),
    Mutant(
        "threads-ignore-earlier-jobs",
        "law 6: a task on a thread begins after those whose results it reads",
        "engine/comm/drivers.py",
        "                    for source in task.after:\n                        source.await",
        "                    for source in ():\n                        source.await",
        (
            "tests/zero/test_happens_before.py::"
            "test_every_two_conflicting_accesses_of_threads_on_a_cpu_are_ordered"
        ),
    ),
    Mutant(
        "nobody-watches-streams",
        "law 7: what does not end in time is named, in every schedule",
        "engine/failure/watchdog.py",
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
        "engine/comm/drivers.py",
        "if not task.is_on_its_way:",
        "if True:",
        (
            "tests/comm/test_driver.py::"
            "test_on_a_device_nothing_waits_for_a_collective_until_its_result_is_needed"
        ),
    ),
    Mutant(
        "a-lane-overtakes-itself",
        "a lane issues its tasks in the order of submission",
        "engine/comm/drivers.py",
        "            if earlier.lane == task.lane and earlier in self._postponed:\n"
        "                self._issue(earlier)",
        "            pass",
        ("tests/comm/test_driver.py::test_a_lane_issues_its_tasks_in_the_order_of_submission"),
    ),
    Mutant(
        "all-shards-at-once",
        "a shard is rebuilt a few units ahead of its use",
        "engine/sharding/decisions.py",
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
        "engine/comm/driver.py",
        "suspect if is_of_peer else None",
        "None",
        (
            "tests/comm/test_asking.py::"
            "test_a_failure_that_a_peer_may_have_caused_names_the_missing_ranks_and_asks_once[inline]"
        ),
    ),
    Mutant(
        "nobody-hears-the-call",
        "law 7: all ranks hear of a failure",
        "engine/failure/roll_call.py",
        "elif self._store.check([_CALLED]):",
        "elif False:",
        (
            "tests/comm/test_roll_call.py::"
            "test_the_ranks_that_do_not_answer_are_named_and_all_others_hear_of_the_failure"
        ),
    ),
    Mutant(
        "the-closed-are-waited-for",
        "law 7: ranks that call the model differently say so",
        "engine/failure/standstill.py",
        "(peers.is_closed or _has_called_more(peers))",
        "_has_called_more(peers)",
        "tests/library/step/test_apart.py::test_another_order_an_early_end_and_a_wait_elsewhere_are_apart[True]",
    ),
    Mutant(
        "a-slow-rank-is-apart",
        "law 7: a slow peer is no fault",
        "engine/failure/standstill.py",
        " and (peers.is_closed or _has_called_more(peers))",
        "",
        "tests/library/step/test_apart.py::test_no_two_moments_of_one_program_are_apart[True]",
    ),
    Mutant(
        "windows-without-a-wait",
        "memory is deregistered only when the device is done with it",
        "engine/comm/registered.py",
        "(self._device.record_event(), *events) if self._registered else ()",
        "()",
        (
            "tests/device/test_registered.py::"
            "test_memory_is_deregistered_only_when_the_device_is_done_with_it"
        ),
    ),
    Mutant(
        "windows-left-asleep",
        "asleep there is no window",
        "engine/at_rest/sleep.py",
        "        driver.registered.deregister(limit_s)\n",
        "",
        ("tests/device/test_registered.py::test_asleep_there_is_no_window_and_nothing_grows[2]"),
    ),
]
