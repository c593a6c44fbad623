# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What Megatron asks of whole parameters and gradients. Their norm is compared by every test of
tests/mcore/test_parity.py.
"""

import pytest
import torch

from scripts.testbed.log_lines import log_lines
from scripts.testbed.megatron_flags import BF16, MIXTURE_OF_EXPERTS
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from tests.mcore.test_data_parallel import tiny_config, wrap
from tests.support.parity import size_flags
from tests.support.selection import slow_unless
from tests.support.world import on_ranks


def _wrapped_linear(sizes: tuple[int, int, int], **ddp_options: bool):
    """A bf16 model of one layer, wrapped."""
    from megatron.core.transformer.module import MegatronModule

    torch.manual_seed(1)
    chunk = MegatronModule(tiny_config())
    chunk.linear = torch.nn.Linear(8, 8)
    chunk.forward = lambda x: chunk.linear(x)
    return wrap([chunk.bfloat16()], sizes, **ddp_options)


# ---- large gradients


def _warnings_of_steps(is_asked: bool) -> list[list[str]]:
    """What is logged in each of 102 steps, the last of which has gradients 100 times as large."""
    from megatron.core import rerun_state_machine

    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    (chunk,) = _wrapped_linear((1, 2, 2), check_for_large_grads=is_asked)
    logged: list[list[str]] = []
    for step in range(102):
        chunk.zero_grad_buffer()
        scale = 100 if step == 101 else 1
        with log_lines(rerun_state_machine.__name__) as lines:
            (chunk(torch.ones(2, 8, dtype=torch.bfloat16)) * scale).sum().backward()
            chunk.finish_grad_sync()
        logged.append(lines)
    chunk.communication.close()
    return [[line for line in lines if "unexpectedly large" in line] for lines in logged]


def _both_warnings() -> tuple:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    return _warnings_of_steps(True), _warnings_of_steps(False)


def test_gradients_that_are_unexpectedly_large_are_reported_where_that_was_asked_for():
    for asked, not_asked in on_ranks(_both_warnings, 2):
        assert [len(lines) for lines in asked] == [0] * 101 + [1] and "unit root" in asked[-1][0]
        assert not any(not_asked)


# ---- dumps

DUMPED = ("--save-params-interval", "2", "--save-wgrads-interval", "2")
CHECKED = ("--check-weight-hash-across-dp-replicas-interval", "2", "--check-for-large-grads")


def _run_with_dumps(folder: str, flags: tuple[str, ...]) -> RunRecord:
    where = ("--save", folder, "--save-interval", "100", "--no-save-optim", "--no-save-rng")
    return run_pretrain(gpt_args("--train-iters", "2", *flags, *CHECKED, *DUMPED, *where))


def _dump_twice(folder: str, flags: tuple[str, ...], sizes: tuple[int, int, int]) -> str:
    _run_with_dumps(f"{folder}/stock", flags)
    return _run_with_dumps(f"{folder}/ours", (*flags, *size_flags(sizes))).log


@pytest.mark.parametrize(
    "flags, sizes",
    [
        slow_unless(False, ("--pipeline-model-parallel-size", "2"), (2, 1, 2), id="pipeline"),
        slow_unless(
            True,
            (*BF16, *MIXTURE_OF_EXPERTS, "--expert-model-parallel-size", "2"),
            (1, 2, 4),
            id="experts",
        ),
    ],
)
def test_dumps_hold_the_whole_tensors_of_stock_megatron(tmp_path, flags, sizes):
    logs = on_ranks(_dump_twice, 4, str(tmp_path), flags, sizes)
    assert "Weight hashes match after 2 iterations" in logs[0]
    for label in ("params", "wgrads"):
        files = sorted((tmp_path / "stock" / label).rglob("*.pth"))
        assert files
        for path in files:
            stock = torch.load(path)
            ours = torch.load(tmp_path / "ours" / path.relative_to(tmp_path / "stock"))
            assert ours.keys() == stock.keys()
            for chunk, tensors in stock.items():
                assert ours[chunk].keys() == tensors.keys() and tensors
                for name, tensor in tensors.items():
                    mine = ours[chunk][name]
                    assert mine.dtype == tensor.dtype
                    # Of gradients Megatron may keep the copy that another rank's sum is added to.
                    torch.testing.assert_close(mine, tensor, rtol=1e-2, atol=1e-5, msg=name)
