# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What notices a bit that changes on one rank of a Megatron run, and after how many steps: in a
shard of parameters, gradients, main parameters or moments, between two steps, or in what one rank
receives; a GPT in bf16 on 4 ranks.

    python -m scripts.bench.bit_flips --sizes 1 2 2 --out runs/flips.jsonl
    python -m scripts.report.add_record bit_flips runs/flips.jsonl

Looked for are: values that are not finite (Megatron's check for NaN), gradient norms and losses ten
times as large as any before (what --check-for-large-grads and --check-for-spiky-loss call
unexpectedly large; they begin after a hundred values), and replicas that differ. Where a value is
not finite the same run is repeated with --rerun-mode validate_results; one that is to be resumed on
another device is resumed, on what the rerun machine takes for another.
"""

import argparse
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scripts.report.flip_table import flip_table
from scripts.report.records import append
from scripts.testbed import megatron_runs
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import BF16, size_flags
from scripts.testbed.megatron_runs import RunRecord, gpt_args, listening, run_pretrain
from scripts.testbed.ranks import run_ranks

RANKS = 4
STEPS, BEFORE = 5, 3  # the bit changes before this step, counted from 1, or within it
MANY_TIMES = 10
BITS = {
    "sign": lambda num_bits: num_bits - 1,
    "exponent, highest": lambda num_bits: num_bits - 2,
    "mantissa, lowest": lambda num_bits: 0,
}
AT_REST = ("parameters, own", "parameters, others'", "main parameters", "moment 1", "moment 2")
ON_WIRE = ("gather", "reduction", "sum over replicas", "parameters' return")
PLACES = (*AT_REST, "gradients", *ON_WIRE)
# The last thing that the rerun machine noted, most telling first: ranks may see different things.
VERDICTS = {
    "SECOND_RERUN_REPRODUCIBLE": "correct",
    "SECOND_RERUN_NOT_REPRODUCIBLE": "persistent",
    "FIRST_RERUN_REPRODUCIBLE": "reproducible",
    "FIRST_RERUN_NOT_REPRODUCIBLE": "transient",
}
_NOTE = re.compile(r" rank=(\d+) iteration=(\d+) status=\S*?([A-Z_]+) .* message='(.*)'")
_TO_BE_RESUMED = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--sizes", type=int, nargs=3, default=(1, 2, 2), metavar=("P", "G", "O"))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--out", type=Path, help="append records to this file")
    args = parser.parse_args()
    sizes: tuple[int, int, int] = tuple(args.sizes)
    if args.out:
        append(args.out, machine_record())
    print(flip_table(run_ranks(measure, RANKS, sizes, args.places, args.out, timeout_s=900.0)[0]))


def measure(sizes: tuple[int, int, int], places: list[str], out: Path | None) -> list[dict]:
    """A line for each place and bit, each written to `out` as soon as it is known."""
    undisturbed, _ = _run(sizes)
    lines: list[dict] = []
    for place in places:
        for bit in BITS:
            flip = _Flip(place, bit)
            record, differ = _run(sizes, flip)
            if not flip.is_there:
                break  # there is no such shard or message with these sizes
            line = {"kind": "flip", "sizes": list(sizes), "place": place, "bit": bit}
            line |= _noticed(record, undisturbed) | {"replicas": _num_steps(differ)}
            if line["not_finite"] is not None:
                line["rerun"] = _rerun(sizes, place, bit)
            lines.append(line)
            if out is not None and dist.get_rank() == 0:
                append(out, line)
    return lines


class _Flip:
    """Changes a bit of the largest element, once, on the last rank. is_there: whether it had
    something to change."""

    def __init__(self, place: str, bit: str):
        self.place, self._bit = place, BITS[bit]
        self.is_armed = self.is_there = False

    def __call__(self, values: torch.Tensor) -> None:
        """values: 1-D."""
        if not self.is_armed or not values.numel():
            return
        self.is_armed, self.is_there = False, True
        if dist.get_rank() == dist.get_world_size() - 1:
            kind = {2: torch.int16, 4: torch.int32}[values.element_size()]
            num_bits = 8 * values.element_size()
            bit = self._bit(num_bits) if num_bits == 32 else max(0, self._bit(32) - 16)
            mask = (1 << bit) - (1 << num_bits if bit == num_bits - 1 else 0)
            values.view(kind)[values.abs().argmax()] ^= mask


def _run(
    sizes: tuple[int, int, int], flip: _Flip | None = None, *more: str
) -> tuple[RunRecord, list[int]]:
    """Also the steps after which replicas differ. more: in place of a run that looks for nothing
    else."""
    from megatron_asynchzp.mcore import replicas

    compare, differ, num_steps = replicas.compare_replicas, list[int](), 0

    def compared(runtimes: Any, moments_of: Any, step: int) -> None:
        try:
            compare(runtimes, moments_of, step)
        except replicas.ReplicasDiffer:
            differ.append(step)

    def begin_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if flip is not None and num_steps == BEFORE:
            flip.is_armed = True
            if flip.place in AT_REST:
                flip(_at_rest(flip.place))

    flags = ["--train-iters", str(STEPS), *(more or ["--no-check-for-nan-in-loss-and-grad"])]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "1", *size_flags(sizes)]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(replicas, "compare_replicas", compared))
        stack.enter_context(listening(begin_step, lambda _: None))
        if flip is not None and flip.place not in AT_REST:
            stack.enter_context(_within_a_step(flip))
        record = run_pretrain(gpt_args(*BF16, *flags))
    return record, differ


def _rerun(sizes: tuple[int, int, int], place: str, bit: str) -> dict[str, Any]:
    """What the rerun machine makes of a run: its verdict, after how many steps, the statuses with
    which the run and the one that resumes it end, and the ranks that it names, those apart that it
    names for their loss."""
    with _shared_folder() as folder:
        notes, saved = folder / "rejected", str(folder / "saved")
        flags = ["--save", saved, "--save-interval", str(2 * STEPS)]
        flags += ["--result-rejected-tracker-filename", str(notes)]
        statuses = [_status_of(sizes, _Flip(place, bit), *flags)]
        if statuses == [_TO_BE_RESUMED]:
            machine = list(os.uname())
            machine[1] = "another"
            with mock.patch.object(os, "uname", lambda: tuple(machine)):
                statuses.append(_status_of(sizes, None, *flags, "--load", saved))
        dist.barrier()
        found = _NOTE.findall(notes.read_text())
    steps = [int(step) for _, step, what, _ in found if what == "INITIAL_RUN"]
    verdict = next((name for name in VERDICTS if any(name == note[2] for note in found)), None)
    named = [(int(rank), text) for rank, _, what, text in found if what == verdict]
    return {
        "said": verdict and VERDICTS[verdict],
        # The machine's own count is one ahead in a run that nothing resumes.
        "steps": min(steps) - BEFORE if steps else None,
        "status": statuses,
        "ranks": sorted({rank for rank, _ in named}),
        "loss_ranks": sorted({rank for rank, text in named if "the loss of" in text}),
    }


def _status_of(sizes: tuple[int, int, int], flip: _Flip | None, *flags: str) -> int:
    """Of a run in which the loss is checked, too."""
    from scripts.train.loss_checks import check_loss

    loss_of = megatron_runs._loss

    def checked(*args: Any) -> tuple:
        total, *rest = loss_of(*args)
        check_loss(total)
        return total, *rest

    try:
        with mock.patch.object(megatron_runs, "_loss", checked):
            _run(sizes, flip, *flags)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """One of all ranks, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="asynchzp-flips-") as own:
        names = [own]
        dist.broadcast_object_list(names, src=0)
        yield Path(names[0])
        dist.barrier()


def _unit() -> Any:
    """The last layer."""
    from megatron_asynchzp.mcore.communication import Communication

    communication = Communication.current()
    assert communication is not None
    units = communication.runtimes[0].units
    return next(unit for unit in reversed(units) if "layers" in unit.name)


def _at_rest(place: str) -> torch.Tensor:
    from megatron_asynchzp.mcore.communication import Communication

    communication, unit = Communication.current(), _unit()
    assert communication is not None
    for runtime in communication.runtimes:
        runtime.settle()
    own = unit.model_param.view(unit.optim_range)
    if place == "parameters, own":
        return own
    if place == "parameters, others'":
        whole = unit.model_param.storage
        first = (own.data_ptr() - whole.data_ptr()) // whole.element_size()
        return max((whole[:first], whole[first + own.numel() :]), key=torch.Tensor.numel)
    if place == "main parameters":
        return unit.main_param.storage
    return communication.moments_of(unit)[0 if place == "moment 1" else 1]


@contextmanager
def _within_a_step(flip: _Flip) -> Iterator[None]:
    """Of gradients after their last reduction, or of what the first operation of a kind brings."""
    from megatron_asynchzp.comm import collectives
    from megatron_asynchzp.mcore.data_parallel import AsyncHZPDataParallel

    finish = AsyncHZPDataParallel.finish_grad_sync

    def finished(self: Any, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        if flip.place == "gradients":
            unit = _unit()
            flip(unit.main_grad.view(unit.optim_range))

    def received(original: Callable, *places: str) -> Callable:
        def call(result: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            work = original(result, *args, group=group, **kwargs)
            if flip.is_armed and flip.place in places and group in _groups(flip.place):
                if work is not None:
                    work.wait()
                if result.dtype != torch.int64:  # the comparison of replicas
                    flip(result.view(-1))
                return None if work is None else _Ended()  # gloo's copies its result in each wait
            return work

        return call

    gathers, reductions = ("gather", "parameters' return"), ("reduction",)
    with (
        mock.patch.object(AsyncHZPDataParallel, "finish_grad_sync", finished),
        mock.patch.multiple(
            collectives,
            all_gather_flat=received(collectives.all_gather_flat, *gathers),
            reduce_scatter_flat=received(collectives.reduce_scatter_flat, *reductions),
        ),
        mock.patch.object(dist, "all_reduce", received(dist.all_reduce, "sum over replicas")),
    ):
        yield


class _Ended:
    """The handle of an operation that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _groups(place: str) -> list[Any]:
    """Communicators that an operation of this kind uses."""
    groups = _unit().groups
    axes = {
        "gather": groups.unshard,
        "parameters' return": groups.param_sync,
        "reduction": (*groups.grad_reduce, *groups.grad_sync),
        "sum over replicas": groups.replica_sync,
    }
    return [one.group for one in axes[place]]


def _noticed(record: RunRecord, undisturbed: RunRecord) -> dict[str, Any]:
    """After how many steps, None: never; how far apart the losses are, relative."""
    values = [(float(step.loss or 0.0), float(step.grad_norm or 0.0)) for step in record.steps]
    before = [max(column) for column in zip(*values[: BEFORE - 1])]
    not_finite = [step for step, pair in enumerate(values, 1) if not all(map(math.isfinite, pair))]
    large = [
        step
        for step, pair in enumerate(values, 1)
        if any(one > MANY_TIMES * most for one, most in zip(pair, before, strict=True))
    ]
    apart = [
        abs(mine - theirs) / abs(theirs) if mine is not None and theirs else 0.0
        for mine, theirs in zip(record.losses, undisturbed.losses, strict=True)
    ]
    worst = max(apart) if all(map(math.isfinite, apart)) else None
    return {"not_finite": _num_steps(not_finite), "large": _num_steps(large), "loss_apart": worst}


def _num_steps(steps: list[int]) -> int | None:
    return min(steps) - BEFORE + 1 if steps else None


if __name__ == "__main__":
    main()
