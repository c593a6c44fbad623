# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's own CUDA path on the emulated device, without the CPU platform: pretrain() with stock
DDP and with the engine, local layers, NCCL."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from scripts.testbed.device.delays import LAWS as LAW_NAMES
from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import (
    DISTRIBUTED_OPTIMIZER,
    MEGATRON_FSDP,
    MIXTURE_OF_EXPERTS,
    TENSOR_PARALLEL,
    size_flags,
)
from scripts.testbed.megatron_runs import Steps, gpt_args, on_device, run_pretrain
from scripts.testbed.ranks import run_ranks
from tests.device.programs import is_emulated
from tests.support.journal import Attempt, read_journal

ROOT = Path(__file__).resolve().parents[2]
"""Loss and gradient norm of each step."""


class Layout(NamedTuple):
    """flags: of both sides; sizes: of ours; is_gloos: whether a sum never has more than two addends
    that differ, so that gloo, which adds in another order, has the same bits."""

    world_size: int
    flags: tuple[str, ...]
    sizes: tuple[int, int, int]
    is_gloos: bool = False

    @property
    def env(self) -> dict[str, str]:
        """Megatron demands one hardware queue of tensor and context parallelism."""
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.flags[:1] in _ONE_QUEUE else {}


_ONE_QUEUE = (("--tensor-model-parallel-size",), ("--context-parallel-size",))

# fmt: off
INTERLEAVED = ("--num-layers", "4", "--pipeline-model-parallel-size", "2",
               "--num-layers-per-virtual-pipeline-stage", "1")
CONTEXT = ("--context-parallel-size", "2", "--use-pasa-attention")
EXPERT = (*MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2")
# Adam on the device differs by a last bit, and bf16 makes 1e-3 of it.
OVERLAPPED = (*EXPERT, "--bf16", "--overlap-moe-expert-parallel-comm", "--clip-grad", "1000",
              "--optimizer", "sgd", "--lr", "0.1", "--min-lr", "0.01")
LAYOUTS = {
    "data": Layout(2, (), (1, 2, 2), is_gloos=True),
    "tensor": Layout(4, tuple(TENSOR_PARALLEL), (2, 2, 2)),
    "pipeline": Layout(4, INTERLEAVED, (2, 2, 2)),
    "context": Layout(2, CONTEXT, (1, 2, 2)),
    "expert": Layout(2, EXPERT, (1, 2, 2), is_gloos=True),
    "overlapped": Layout(2, OVERLAPPED, (2, 2, 2), is_gloos=True),
}
# fmt: on
# fp32, and sums in another order. Between ours and stock, and to gloo where it is not bit for bit.
CLOSE = 1e-5
LAWS = [Delays("uniform", 1), Delays("slow-stream", 2)]


def pretrain_each(command_lines: list[list[str]], delays: list[Delays]) -> list[Steps]:
    """Of each command line under each delay; on gloo once each, without any."""
    if not is_emulated():
        return [_steps(argv) for argv in command_lines]
    from scripts.testbed.device import inside

    results = []
    for law in delays:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        results += [_steps_on_device(argv) for argv in command_lines]
    return results


def _steps(argv: list[str]) -> Steps:
    return run_pretrain(argv).losses_and_norms


def _steps_on_device(argv: list[str]) -> Steps:
    with on_device():
        return _steps(argv)


def are_close(found: Steps, expected: Steps) -> bool:
    """Within CLOSE, number by number."""
    return len(found) == len(expected) and all(
        ours == pytest.approx(theirs, rel=CLOSE) for ours, theirs in zip(found, expected)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_on_cuda_trains_as_on_gloo_and_no_delay_changes_a_bit(
    worlds: DeviceWorlds, name: str
):
    layout, laws = LAYOUTS[name], LAWS
    base = gpt_args("--train-iters", "3", *layout.flags)
    lines = [base, [*base, *size_flags(layout.sizes)]]
    on_gloo = run_ranks(pretrain_each, layout.world_size, lines, [], timeout_s=300)[0]
    seen = worlds.run(
        pretrain_each, layout.world_size, lines, [Delays(), *laws], timeout_s=500, env=layout.env
    )[0]
    stock, ours = seen[:2]
    assert are_close(ours, stock)
    for found, expected in zip(seen[:2], on_gloo, strict=True):
        assert found == expected if layout.is_gloos else are_close(found, expected)
    for index, law in enumerate(laws, 1):
        assert seen[2 * index : 2 * index + 2] == [stock, ours], str(law)


def _sub_samples_under(laws: list[Delays], line: list[str]) -> list[Steps]:
    from scripts.testbed.device import inside
    from tests.mcore import test_hybrid_context_parallel as hybrid  # imports Megatron

    results = []
    for law in laws:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        with on_device():
            results.append(hybrid.run(line).losses_and_norms)
    return results


@pytest.mark.slow
def test_sub_samples_on_their_own_ranks_have_the_same_bits_under_four_laws(worlds: DeviceWorlds):
    from tests.mcore import test_hybrid_context_parallel as hybrid

    line = [*hybrid.BASE, *hybrid.HYBRID, *hybrid.ROPE, "--train-iters", "3"]
    line += size_flags((1, 2, 4))
    laws = [Delays(), *(Delays(law, 1) for law in LAW_NAMES[1:5])]
    first, *others = worlds.run(_sub_samples_under, 4, laws, line, timeout_s=800)[0]
    assert len(others) == 4 and others == [first] * 4
    assert are_close(first, run_ranks(hybrid.run, 4, line, timeout_s=300)[0].losses_and_norms)


@pytest.mark.slow
def test_stocks_distributed_optimizer_and_megatron_fsdp_train_on_cuda_as_stock_ddp_on_gloo(
    worlds: DeviceWorlds,
):
    """The distributed optimizer has its bits of gloo. Both free memory before its stream waits."""
    base = gpt_args("--train-iters", "3")
    lines = [base, [*base, *DISTRIBUTED_OPTIMIZER]]
    ddp, sharded = run_ranks(pretrain_each, 2, lines, [], timeout_s=300)[0]
    lines = [[*base, *DISTRIBUTED_OPTIMIZER], [*base, *MEGATRON_FSDP]]
    late = {"ASYNCHZP_DEVICE_FREES": "late"}
    laws = [Delays(), *LAWS]
    seen = worlds.run(pretrain_each, 2, lines, laws, timeout_s=500, env=late)[0]
    for law, found, fsdp in zip(laws, seen[::2], seen[1::2], strict=True):
        assert found == sharded, str(law)
        assert fsdp == seen[1] and are_close(fsdp, ddp), str(law)


def saved_and_resumed(base: list[str], folder: str, delays: Delays) -> list[Steps]:
    """Steps of a run, of one that saves after two, and of one that goes on from there."""
    save = ["--save", folder, "--save-interval", "2", "--ckpt-format", "torch_dist"]
    load = ["--load", folder, "--ckpt-step", "2"]
    return pretrain_each([base, [*base, *save], [*base, *load]], [delays])


def assert_it_goes_on(worlds: Any, layout: Layout, folder: Path, delays: Delays) -> None:
    """With dropout: the states of the device's generators are in the checkpoint too."""
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    base = gpt_args("--train-iters", "4", *layout.flags, *size_flags(layout.sizes), *dropout)
    whole, saving, resumed = worlds.run(
        saved_and_resumed,
        layout.world_size,
        base,
        str(folder),
        delays,
        timeout_s=500,
        env=layout.env,
    )[0]
    assert saving == whole
    assert resumed == whole[2:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "tensor"])
@pytest.mark.parametrize("delays", LAWS, ids=lambda delays: delays.law)
def test_a_run_that_is_saved_on_cuda_goes_on_bit_for_bit(
    worlds: DeviceWorlds, tmp_path: Path, name: str, delays: Delays
):
    assert_it_goes_on(worlds, LAYOUTS[name], tmp_path, delays)


def assert_it_moves_from_the_host(worlds: Any) -> None:
    """Megatron's builders do not move what --use-cpu-initialization built."""
    base, host = gpt_args("--train-iters", "2"), "--use-cpu-initialization"
    lines = [base, *([*base, host, *size_flags(sizes)] for sizes in ((1, 2, 2), (2, 2, 2)))]
    stock, *ours = worlds.run(pretrain_each, 2, lines, [Delays()], timeout_s=300)[0]
    assert ours == [stock, stock]
    with pytest.raises(DeviceFailure, match="got one on cpu"):
        worlds.run(pretrain_each, 2, [[*base, host]], [Delays()])


@pytest.mark.slow
def test_a_model_that_is_built_on_the_host_trains_on_the_device_where_stock_leaves_it_behind(
    worlds: DeviceWorlds,
):
    assert_it_moves_from_the_host(worlds)


# ---- processes of their own


_LAST = 6
_LINE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 100 --eval-iters 0 "
    "--eval-interval 100 --log-interval 1 --mock-data --num-workers 0 --transformer-impl local "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    f"--no-bias-gelu-fusion --no-bias-dropout-fusion --train-iters {_LAST}"
).split()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Attempt]:
    """Runs two ranks of Megatron, through the launcher, to their end with status 0."""

    def run(name: str, interrupt: str, *flags: str) -> Attempt:
        journal = tmp_path / name
        journal.mkdir()
        # fmt: off
        command = [sys.executable, "-m", "scripts.testbed.device", "--ranks", "2", "--law",
                   "uniform", "--seed", "3", "--timeout", "240", "--", "-m",
                   "megatron_asynchzp.launch", "tests/support/struck_pretrain.py", *_LINE,
                   *size_flags((1, 2, 2)), *flags]
        # fmt: on
        env = os.environ | {"INTERRUPT": interrupt, "JOURNAL": str(journal)}
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        assert "_timeout was specified" not in ended.stderr  # torch's warning about our groups
        return read_journal(journal)[0]

    return run


@pytest.mark.slow
def test_sigterm_on_cuda_saves_the_step_in_progress_and_the_run_goes_on_from_it(
    worlds: DeviceWorlds, tmp_path: Path, start: Callable[..., Attempt]
):
    place = str(tmp_path / "checkpoints")
    saving = ("--save", place, "--save-interval", "100")
    whole = start("whole", "")
    assert list(whole.losses) == list(range(1, _LAST + 1))
    first = start("first", "SIGTERM 1 forward 5", *saving)
    assert (first.struck, first.last_step) == (["forward"], 3)
    second = start("second", "", *saving, "--load", place)
    assert second.began == 3
    assert first.losses | second.losses == whole.losses
