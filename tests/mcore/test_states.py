# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a --use-asynchzp run holds after its last step: bytes, step counts, groups, replicas."""

from typing import Any, NamedTuple

import pytest
import torch

from scripts.testbed.megatron_runs import BF16, MIXTURE_OF_EXPERTS, gpt_args, run_pretrain
from tests.support.parity import size_flags
from tests.support.world import on_ranks

NUM_STEPS = 3  # two steps like the others, after the one that records the order of units
STEPS = ("--train-iters", str(NUM_STEPS))
WIDE = ("--hidden-size", "128", "--vocab-size", "1023")  # so that padding is a small part


def held_nbytes(chunks: list, optimizer: Any) -> dict[str, int]:
    """Bytes of the distinct storages reachable from parameters, gradients and optimizer state."""
    storages: dict[int, int] = {}

    def add(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()

    for param in (p for chunk in chunks for p in chunk.parameters()):
        for tensor in (param, param.grad, getattr(param, "main_grad", None)):
            add(tensor)
    for group in optimizer.param_groups:
        for fragment in group["params"]:
            for tensor in (fragment, fragment.grad, *optimizer.state[fragment].values()):
                add(tensor)
    for unit in (unit for chunk in chunks for unit in chunk.units):
        add(unit.model_param.storage)
    placeholders = sum(n for n in storages.values() if n <= 4)
    return {"held": sum(storages.values()) - placeholders}


def inspect_states(chunks: list, optimizer: Any) -> dict[str, Any]:
    from megatron_asynchzp.mcore.start_table import format_start_table
    from megatron_asynchzp.mcore.state_bytes import state_nbytes_allocated, state_nbytes_by_formula

    units = [unit for chunk in chunks for unit in chunk.units]
    dense = [u for c in chunks for u in c.units if c.runtime.group_keys[u] == "dense"]
    return held_nbytes(chunks, optimizer) | {
        "formula": sum(state_nbytes_by_formula(units).values()),
        "allocated": sum(state_nbytes_allocated(units).values()),
        "padding": sum(unit.layout.padding_numel for unit in units),
        "dense_numel": sum(unit.layout.numel for unit in dense),
        "phases": {unit.phase.value for unit in units if not unit.is_always_unsharded},
        "steps": {float(state["step"]) for state in optimizer.state.values()},
        "wd_mults": sorted(
            (group["wd_mult"], sum(p.numel() for p in group["params"]))
            for group in optimizer.param_groups
        ),
        "table": format_start_table(chunks, ranks_per_node=2),
    }


def run_and_inspect(flags: tuple[str, ...], sizes: tuple[int, int, int]) -> dict[str, Any]:
    argv = gpt_args(*STEPS, *WIDE, *flags, *size_flags(sizes))
    return run_pretrain(argv, inspect=inspect_states).inspected


def stock_groups() -> list[tuple[float, int]]:
    def groups(_chunks: list, optimizer: Any) -> list[tuple[float, int]]:
        return [
            (group["wd_mult"], sum(p.numel() for p in group["params"]))
            for group in optimizer.param_groups
        ]

    return run_pretrain(gpt_args(*STEPS, *WIDE, *BF16), inspect=groups).inspected


def memory_of_steps() -> list[tuple[list[str], int]]:
    """After each backward: units gathered and how many units' gradients have not been sent."""
    seen: list[tuple[list[str], int]] = []
    from megatron_asynchzp.zero.autograd import HZPRuntime

    original = HZPRuntime.end_backward

    def counted(self: HZPRuntime) -> None:
        original(self)
        gathered = sorted(u.name for u in self.units if u.phase.value == "unsharded")
        pending = sum(self.reductions.has_pending(u) for u in self.units)
        seen.append((gathered, pending))

    HZPRuntime.end_backward = counted
    try:
        run_pretrain(gpt_args(*STEPS, *BF16, *size_flags((2, 2, 4))))
    finally:
        HZPRuntime.end_backward = original
    return seen


Case = tuple[tuple[str, ...], tuple[int, int, int]]
TYPICAL: Case = (tuple(BF16), (2, 2, 4))
CASES: list[Case] = [
    TYPICAL,
    *((tuple(BF16), sizes) for sizes in ((1, 1, 4), (4, 2, 4))),
    ((), (2, 4, 4)),
    ((*BF16, *MIXTURE_OF_EXPERTS), (2, 2, 4)),
]


def gradients_in_bf16() -> tuple[set, list, list]:
    """dtypes in which gradients travel with the flag, and the losses with and without it."""

    def dtypes(chunks: list, _optimizer: Any) -> set:
        return {unit.groups.grad_dtype for chunk in chunks for unit in chunk.units}

    argv = gpt_args(*STEPS, *BF16, *size_flags((1, 2, 4)))
    rounded = run_pretrain([*argv, "--grad-reduce-in-bf16"], inspect=dtypes)
    return rounded.inspected, rounded.losses, run_pretrain(argv).losses


class Output(NamedTuple):
    """What all runs held, on one rank."""

    states: dict[Case, dict[str, Any]]
    stock: list
    seen: list
    in_bf16: tuple[set, list, list]


def all_runs() -> Output:
    states = {case: run_and_inspect(*case) for case in CASES}
    return Output(states, stock_groups(), memory_of_steps(), gradients_in_bf16())


@pytest.fixture(scope="module")
def output() -> list[Output]:
    """By rank; one set of ranks runs them all."""
    return on_ranks(all_runs, 4)


def test_bytes_at_rest_follow_the_formula_within_one_percent_on_every_rank(output):
    for (flags, sizes), state in [pair for held in output for pair in held.states.items()]:
        bytes_per_element = state["formula"] / state["dense_numel"]
        assert abs(state["held"] - state["allocated"]) <= 4096, (flags, sizes)  # step counters
        assert state["held"] >= 0.99 * state["formula"], (flags, sizes)
        stated_padding = bytes_per_element * state["padding"]
        assert state["held"] <= 1.01 * state["formula"] + stated_padding, (flags, sizes)
        if flags == tuple(BF16):
            param, grad, optim = sizes
            law = 2 / param + 4 / grad + 12 / optim
            assert abs(state["formula"] - law * state["dense_numel"]) < 1
        assert state["phases"] <= {"sharded"}


def test_every_fragment_was_stepped_once_per_iteration_and_decays_as_in_stock(output):
    summed: dict[float, int] = {}
    for held in output:
        assert held.states[TYPICAL]["steps"] == {float(NUM_STEPS)}
        for mult, numel in held.states[TYPICAL]["wd_mults"]:
            summed[mult] = summed.get(mult, 0) + numel
    assert summed == dict(output[0].stock)


def test_the_start_table_names_groups_nodes_states_and_units(output):
    table = output[0].states[TYPICAL]["table"]
    for fragment in (
        "between nodes",
        "in one node",
        "main_param",
        "optimizer_moments",
        "by formula",
        "allocated",
        "all, at rest",
        "in flight, together",
        "autograd's own gradients, at most",
        "decoder.layers.0",
        "once per step",
        "0 2",
        "0 1",
    ):
        assert fragment in table, fragment


def test_after_every_backward_only_what_the_next_forward_starts_with_is_gathered(output):
    for seen in (held.seen for held in output):
        assert len(seen) == 2 * NUM_STEPS and {pending for _, pending in seen} == {0}
        # Within a step the next micro-batch is known; after the last one nothing is left.
        first = ["module.embedding", "module.embedding.word_embeddings.weight", "root"]
        assert [names for names, _ in seen[2:4]] == [first, []]
        assert all(names in (first, []) for names, _ in seen)


def test_the_flag_for_gradients_in_bf16_changes_what_travels_and_hardly_the_losses(output):
    for dtypes, rounded, exact in (held.in_bf16 for held in output):
        assert dtypes == {torch.bfloat16}
        assert rounded[-1] != exact[-1] and rounded == pytest.approx(exact, rel=1e-3)
