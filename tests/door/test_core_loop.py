# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A plain megatron.core loop trains alike with stock DDP and, after install(), with AsyncHZP."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from tests.door.core_loop import Loop, Steps, inputs_of
from tests.support.world import on_ranks

Sizes = tuple[int, int, int]


def install(sizes: Sizes = (2, 2, 2), **choices: Any) -> None:
    from megatron_asynchzp import AsyncHZPConfig
    from megatron_asynchzp import install as install_door

    names = ("param_shard_size", "grad_shard_size", "optim_shard_size")
    install_door(AsyncHZPConfig(**dict(zip(names, sizes, strict=True)), **choices))


def stock_and_ours(sizes: Sizes, num_steps: int, options: dict) -> tuple[Steps, Steps, str]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    stock = Loop(**options).build().train(0, num_steps)
    install(sizes)
    loop = Loop(**options).build()
    steps = loop.train(0, num_steps)
    # Or each micro-batch would be reduced over the whole sharding group.
    assert loop.config.no_sync_func is not None
    return stock, steps, type(loop.model[0]).__name__


def check_parity(world: int, sizes: Sizes, num_steps: int = 6, **options: Any) -> None:
    for stock, ours, wrapper in on_ranks(stock_and_ours, world, sizes, num_steps, options):
        assert wrapper == "DoorDataParallel"
        (stock_losses, stock_norms), (losses, norms) = zip(*stock), zip(*ours)
        assert len(set(stock_losses)) == num_steps
        assert losses == pytest.approx(stock_losses, rel=1e-6)
        assert norms == pytest.approx(stock_norms, rel=1e-6)


def test_a_plain_loop_has_the_losses_and_norms_of_stock():
    check_parity(2, (2, 2, 2), 3)


def distil(batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """As DPO and distillation do: the model without its wrappers gives a reference, and the loss is
    taken from a layer, not from the model's output."""
    inputs, labels = inputs_of(batches)
    inner, found = unwrap_model(model), list[torch.Tensor]()
    layer: Any = inner.output_layer
    handle = layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
    with torch.no_grad():
        inner(*inputs, labels=labels)
    output = model(*inputs, labels=labels).detach()
    handle.remove()

    def loss(_: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        reference, logits = found
        mean = (logits.float().square() - 0.1 * reference.float() * logits.float()).mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def test_a_call_without_wrappers_and_a_loss_of_a_layer_train_as_with_stock():
    check_parity(2, (2, 2, 2), 3, **BF16, forward_step=distil)


BF16: dict[str, Any] = {"dtype": torch.bfloat16}
EXPERTS: dict[str, Any] = {"experts": 4, "expert_parallel": 2}
LIKE_A_FRAMEWORK: dict[str, Any] = {
    "is_distributed": True,
    "overlaps": True,
    "ddp_options": {"overlap_param_gather": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "sizes", "options"),
    [
        pytest.param(2, (1, 1, 2), {}, id="1,1,2"),
        pytest.param(2, (1, 1, 2), BF16, id="1,1,2-bf16"),
        pytest.param(2, (2, 2, 2), BF16, id="2,2,2-bf16"),
        pytest.param(2, (2, 2, 2), BF16 | LIKE_A_FRAMEWORK, id="overlap-bf16"),
        pytest.param(2, (2, 2, 2), {"num_micro_batches": 1}, id="one-micro-batch"),
        pytest.param(2, (2, 2, 2), {"clip": 0.05}, id="clipped"),
        pytest.param(2, (2, 2, 2), {"optimizer_options": {"optimizer": "sgd"}}, id="sgd"),
        pytest.param(4, (2, 2, 4), {}, id="2,2,4"),
        pytest.param(4, (2, 2, 4), BF16, id="2,2,4-bf16"),
        pytest.param(4, (1, 2, 4), {}, id="1,2,4"),
        pytest.param(4, (1, 2, 4), BF16, id="1,2,4-bf16"),
        pytest.param(4, (2, 2, 2), {"tensor": 2}, id="tp"),
        pytest.param(4, (2, 2, 2), BF16 | {"tensor": 2}, id="tp-bf16"),
        pytest.param(4, (2, 2, 2), {"pipeline": 2}, id="pp"),
        pytest.param(4, (2, 2, 2), BF16 | LIKE_A_FRAMEWORK | {"pipeline": 2}, id="pp-overlap"),
        pytest.param(
            4,
            (2, 2, 2),
            LIKE_A_FRAMEWORK
            | {"pipeline": 2, "virtual": 2, "num_layers": 4, "num_micro_batches": 4},
            id="pp-virtual",
        ),
        pytest.param(4, (2, 2, 4), EXPERTS, id="ep"),
        pytest.param(4, (2, 2, 4), EXPERTS | BF16, id="ep-bf16"),
    ],
)
def test_layouts_dtypes_and_sizes_train_as_stock(world: int, sizes: Sizes, options: dict):
    check_parity(world, sizes, **options)
