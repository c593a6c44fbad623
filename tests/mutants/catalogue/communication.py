# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: when bytes move."""

from tests.mutants.catalogue.mutant import Mutant

_COLLECTIVES = (
    "tests/comm/test_collectives.py::"
    "test_gathering_and_reducing_over_any_nesting_puts_every_element_at_its_owner"
)
TRAFFIC = (
    "tests/zero/test_traffic.py::"
    "test_parameters_travel_in_the_models_dtype_and_gradients_in_fp32_as_often_as_the_sizes_ask"
)
RACES_OF_STREAMS = (
    "tests/zero/test_happens_before.py::test_every_two_conflicting_accesses_of_streams_are_ordered"
)
RACES_OF_THREADS = (
    "tests/zero/test_happens_before.py::"
    "test_every_two_conflicting_accesses_of_threads_on_a_cpu_are_ordered"
)
_SWAPPED = (
    "tests/zero/test_divergent_order.py::"
    "test_two_swapped_modules_of_one_size_are_named_with_one_message_on_all_ranks[threaded]"
)

MUTANTS = [
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
        f"{TRAFFIC}[sizes3-dtype3]",
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
        RACES_OF_STREAMS,
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
        RACES_OF_STREAMS,
    ),
    Mutant(
        "threads-ignore-earlier-jobs",
        "a task begins after those whose results it reads",
        "comm/thread_driver.py",
        "for other in task.after:\n            other.await_usable()",
        "for other in ():\n            other.await_usable()",
        RACES_OF_THREADS,
    ),
    Mutant(
        "earlier-reductions-of-a-unit",
        "the last reduction of a unit is complete after all of its reductions",
        "comm/driver.py",
        "if other.lane == task.lane:",
        "if False:",
        RACES_OF_THREADS,
    ),
]
