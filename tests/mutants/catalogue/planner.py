# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Mutants: the planner, and the test-bed that it is held against."""

from tests.mutants.catalogue.mutant import Mutant

_TRAFFIC = "tests/planner/test_traffic.py::test_"
_SIMULATE = "tests/planner/test_simulate.py::test_"
_CLUSTER = "tests/planner/test_cluster.py::test_"
_SEARCH = "tests/planner/test_search.py::test_"

MUTANTS = [
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
        "main = self.prepared = add(computes, stage.optimizer_s, ())",
        "main = self.prepared = add(computes, stage.optimizer_s + stage.host_s, ())",
        f"{_SIMULATE}parameters_are_rebuilt_while_the_host_prepares_the_step",
    ),
    Mutant(
        "shared-latencies",
        "ranks that share a link fill each other's latencies",
        "planner/cluster.py",
        "hidden_s = busy_s - busy_s / max(1.0, sharing)",
        "hidden_s = 0.0",
        f"{_CLUSTER}ranks_that_share_a_link_fill_each_others_latencies_but_for_the_last_hop",
    ),
    Mutant(
        "clocks-without-a-lock",
        "all ranks book the moments of one clock",
        "testbed/fabric/nic.py",
        "            fcntl.lockf(self._file, fcntl.LOCK_EX)\n",
        "",
        "tests/testbed/test_model.py::test_threads_and_processes_share_one_clock",
    ),
    Mutant(
        "cards-that-wait",
        "an emulated card that waits for a busy peer serves others meanwhile",
        "testbed/fabric/nic.py",
        "first_free(sorted(chain.from_iterable(taken)), now, duration_s)",
        "first_free([(now, max([now, *(s[1] for one in taken for s in one)]))], now, duration_s)",
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
        "if one.scheme in FLAT and is_as_fast",
        "if one.scheme in () and is_as_fast",
        f"{_SEARCH}plain_sharding_is_returned_where_hierarchy_gains_nothing",
    ),
]
