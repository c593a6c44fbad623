# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Memory in flight in windows of NCCL: bits, offsets, order and lifetime.

The emulated NCCL ends a run that the real one would not survive: where ranks differ in what they
register or in where a collective's buffers lie, and where memory is registered twice, freed while
it is registered, or deregistered while a collective uses it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from scripts.testbed.device.delays import LAWS, Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args
from tests.device import registered_programs as programs
from tests.device.programs import Case
from tests.device.registered_programs import train_and_sleep, train_with_and_without
from tests.device.test_megatron import LAYOUTS
from tests.device.test_transformer_engine import (
    BASE,
    BLACKWELL,
    CODES,
    FEWER,
    FOUR_BIT_CODES,
    RECIPES,
)
from tests.support.selection import slow_unless

PAIR = [Case((1, 2, 2)), Case((2, 2, 2), recomputes=True), Case((2, 1, 2), "inline", 1)]
FOUR = [Case((2, 2, 4)), Case((4, 4, 4), "inline", 1), Case((2, 4, 4)), Case((4, 2, 4))]
CUT = [Case((4, 4, 4, (2,)))]  # pyright: ignore[reportArgumentType]
EIGHT = [Case((2, 4, 8)), Case((8, 8, 8, (2, 4)))]  # pyright: ignore[reportArgumentType]
FEW = [Delays("uniform", 3), Delays("on-demand", 4)]


def many(num_seeds: int, law: str) -> list[Delays]:
    return [Delays(law, seed) for seed in range(num_seeds)]


@pytest.mark.parametrize(
    ("num_ranks", "cases", "laws", "dtype"),
    [
        slow_unless(True, 2, PAIR[1:2], FEW[1:], torch.float32, id="2 ranks, one law"),
        slow_unless(False, 2, PAIR, FEW, torch.float32, id="2 ranks, few laws"),
        slow_unless(False, 4, FOUR + CUT, FEW, torch.bfloat16, id="4 ranks, bf16"),
        slow_unless(False, 8, EIGHT, FEW[:1], torch.float32, id="8 ranks"),
        *(slow_unless(False, 2, PAIR[:2], many(20, law), torch.float32, id=f"2 ranks, {law}")
          for law in LAWS[1:]),
        *(slow_unless(False, 4, FOUR[:1] + CUT, many(5, law), torch.float32, id=f"4 ranks, {law}")
          for law in LAWS[1:]),
    ],
)  # fmt: skip
def test_bits_are_those_without_and_each_gather_and_reduction_is_in_a_window(
    worlds: DeviceWorlds,
    num_ranks: int,
    cases: Sequence[Case],
    laws: Sequence[Delays],
    dtype: torch.dtype,
):
    results = worlds.run(train_with_and_without, num_ranks, cases, laws, dtype, timeout_s=580)
    for rank in results:
        for case, plain, registered in rank:
            assert registered.seen == plain.seen, case
            assert_all_in_windows(registered.collectives, case.sizes)
            assert plain.num_windows == (0, 0) and plain.collectives == {}
            during, after = registered.num_windows
            assert during > after == 0


def assert_all_in_windows(collectives: dict[str, int], sizes: Sequence) -> None:
    gathers = [name.split() for name in collectives if name.startswith("all-gather")]
    reductions = [name.split() for name in collectives if name.startswith("reduce-scatter")]
    assert bool(gathers) == (sizes[0] > 1) and bool(reductions) == (sizes[1] > 1)
    assert {output for *_, output in gathers} <= {"window"}
    assert {given for *_, given, _ in reductions} <= {"window"}


@pytest.mark.slow
def test_kept_parameters_are_registered_too(worlds: DeviceWorlds):
    cases = [Case((2, 2, 2))]
    for rank in worlds.run(train_with_and_without, 2, cases, FEW[:1], torch.float32, 1 << 16):
        for case, plain, registered in rank:
            assert registered.seen == plain.seen
            assert_all_in_windows(registered.collectives, case.sizes)


@pytest.mark.parametrize("num_turns", [slow_unless(True, 2), slow_unless(False, 10)])
def test_asleep_there_is_no_window_and_nothing_grows(worlds: DeviceWorlds, num_turns: int):
    plain = worlds.run(train_and_sleep, 2, (2, 2, 2), 0, num_turns)
    for rank, slept in enumerate(worlds.run(train_and_sleep, 2, (2, 2, 2), 8, num_turns)):
        assert slept.seen == plain[rank].seen
        assert slept.asleep == [0] * num_turns and slept.at_end == 0
        assert len(set(slept.awake)) == 1 and slept.awake[0] > 0
        assert slept.reserved == plain[rank].reserved


def test_memory_is_deregistered_only_when_the_device_is_done_with_it(worlds: DeviceWorlds):
    left = worlds.run(
        programs.deregister_what_a_collective_uses, 2, delays=Delays("on-demand"), timeout_s=60
    )
    assert left == [0, 0]


SEEN = "ALL of ranks 0 to 1: "


@pytest.mark.parametrize(
    ("domain", "has_windows", "env", "expected"),
    [
        (8, True, {}, (1, 0, [SEEN + "NCCL gave a window, symmetric kernels can run"])),
        (1, True, {}, (0, 0, [])),
        (
            8,
            True,
            {"NCCL_WIN_ENABLE": "0"},
            (0, 0, [SEEN + "NCCL gave no window, it copies (NCCL_DEBUG=INFO says why)"]),
        ),
        (8, False, {}, (0, 1, [SEEN + "registered; whether NCCL gave a window is not known"])),
    ],
)
def test_a_log_line_says_once_for_each_group_within_a_domain_what_nccl_gave(
    worlds: DeviceWorlds, domain: int, has_windows: bool, env: dict[str, str], expected: tuple
):
    first, second = worlds.run(programs.kinds_of_registration, 2, domain, has_windows, env=env)
    assert first == expected
    assert second == (*expected[:2], [])


def test_a_calibration_gathers_into_windows_if_it_is_asked_to(worlds: DeviceWorlds):
    for registers, names in ((True, {"all-gather uint8 plain window"}), (False, set())):
        for found in worlds.run(programs.calibrated, 2, registers):
            assert found.keys() == names


FAULTS: dict[Callable, str] = {
    programs.other_offset: "ranks differ in registered memory: the output of the all-gather",
    programs.other_size: "ranks differ in window 0",
    programs.other_order: "ranks differ in window 0",
    programs.one_rank_does_not_register: "which these ranks have not done after 2 s: 1",
    programs.registered_twice: "memory is registered twice with a communicator: window 0 and",
    programs.deregistered_twice: "no window of the communicator, or twice",
    programs.window_given_to_the_other_deregistration: "what ncclCommRegister did not return",
    programs.deregistered_under_way: "window 0 is deregistered while a collective uses it",
    programs.registered_in_a_capture: "a registration",
    programs.replayed_after_deregistration: "whose window 0 is not registered any more",
    programs.aborted_with_a_window: "a communicator is aborted that has windows",
    programs.window_of_torchs_own_memory: "a window of memory that is not of ncclMemAlloc",
    programs.beyond_the_end: "reach beyond its end",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_emulated_nccl_ends_by_name_what_the_real_one_would_not_survive(
    worlds: DeviceWorlds, fault: Callable
):
    law = Delays("on-demand" if fault is programs.deregistered_under_way else "none")
    env = {"ASYNCHZP_DEVICE_REGISTRATION_LIMIT_S": "2"}
    with pytest.raises(DeviceFailure, match=FAULTS[fault]):
        worlds.run(fault, 2, delays=law, env=env, timeout_s=30)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("growth", "a step needs 1.0 MiB more in flight"),
        ("views", "keeps views of its parameters outside autograd"),
        ("version", "NCCL 2.26.5 has no windows. Install 2.27 or later"),
        ("backend", "memory cannot be registered with gloo. Use NCCL on a GPU"),
        ("settings", "expandable_segments:True excludes registered memory"),
    ],
)
def test_what_cannot_be_registered_is_refused_in_a_line_with_a_remedy(
    worlds: DeviceWorlds, kind: str, expected: str
):
    for message in worlds.run(programs.message_of, 2, kind):
        assert expected in message
        assert "use-nccl-ub" in message and "\n" not in message


def test_a_close_that_fails_leaves_no_window_where_the_device_is_done(worlds: DeviceWorlds):
    law = Delays("on-demand")  # so collectives are under way
    assert worlds.run(programs.close_after_a_failure, 2, delays=law) == [("it failed", 0)] * 2


# ---- Megatron


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "pipeline", "expert", "overlapped"])
def test_megatron_trains_with_the_bits_of_a_run_without(worlds: DeviceWorlds, name: str):
    layout = LAYOUTS[name]
    line = [*gpt_args("--train-iters", "3", *layout.flags), *size_flags(layout.sizes)]
    args = layout.world_size, line, Delays("uniform", 1)
    for plain, registered, collectives, left in worlds.run(
        programs.pretrain_with_and_without, *args, timeout_s=580, env=layout.env
    ):
        assert registered == plain and left == 0
        assert_all_in_windows(collectives, layout.sizes)


RECOMPUTED = ("--recompute-granularity", "full", "--recompute-method", "uniform")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("--grad-reduce-in-bf16", "--bf16"), (*RECOMPUTED, "--recompute-num-layers", "1")]
)
def test_gradients_in_bf16_and_recomputed_layers_have_their_bits(worlds: DeviceWorlds, more: tuple):
    line = [*gpt_args("--train-iters", "3", *more), *size_flags((2, 2, 2))]
    for plain, registered, collectives, left in worlds.run(
        programs.pretrain_with_and_without, 2, line, Delays("uniform", 1), timeout_s=580
    ):
        assert registered == plain and left == 0
        assert {name.split()[-1] for name in collectives if name.startswith("all-g")} == {"window"}


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_with_the_bits_of_one_without(
    worlds: DeviceWorlds, tmp_path: Path
):
    line, law = [*gpt_args("--train-iters", "4"), *size_flags((2, 2, 2))], Delays("uniform", 1)
    plain = worlds.run(programs.trained, 2, line, law)
    line += [programs.FLAG, "--ckpt-format", "torch_dist"]
    saves = [*line, "--save", str(tmp_path), "--save-interval", "2"]
    with pytest.raises(DeviceFailure, match="rank 1"):
        worlds.run(programs.trained, 2, saves, law, 10)  # of 4 in each step
    resumed = worlds.run(programs.trained, 2, [*line, "--load", str(tmp_path)], law)
    assert resumed == [steps[2:] for steps in plain]


TE_RUNS = {
    "codes of FP8": [*RECIPES["tensorwise"], *CODES],
    "codes of FP8 by direction": [*RECIPES["mxfp8"], *CODES],
    "codes of FP4": [*RECIPES["nvfp4"], *FOUR_BIT_CODES],
    "graphs": ["--bf16", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps",
               "1", "--te-rng-tracker"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TE_RUNS)
def test_codes_on_the_wire_and_graphs_of_layers_have_their_bits(te_worlds: DeviceWorlds, name: str):
    line = [*BASE, *FEWER, *TE_RUNS[name], *size_flags((2, 2, 2))]
    args, env = (2, line, Delays("uniform", 1), True), BLACKWELL if "codes" in name else {}
    for plain, registered, collectives, left in te_worlds.run(
        programs.pretrain_with_and_without, *args, timeout_s=580, env=env
    ):
        assert registered == plain and left == 0
        assert_all_in_windows(collectives, (2, 2, 2))
