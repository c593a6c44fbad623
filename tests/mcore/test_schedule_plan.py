# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's overlapped schedule, which runs a layer in parts, trains on shards as in stock."""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_asynchzp.mcore.step.schedule_plan import keeping_late_grads, tell_of_parts
from scripts.testbed.differences import worst_difference
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.support.world import on_ranks

# Without clipping, and without Adam, which makes a step of 1e-3 of a last bit of a tiny gradient.
# fmt: off
OVERLAP = "--overlap-moe-expert-parallel-comm"
BASE = [*MIXTURE_OF_EXPERTS, "--bf16", OVERLAP, "--log-params-norm",
        "--clip-grad", "1000", "--optimizer", "sgd", "--lr", "0.1", "--min-lr", "0.01"]
TWO = ["--expert-model-parallel-size", "2"]
LAYOUTS = {
    "one micro-batch": (2, [*TWO, "--global-batch-size", "2"]),
    "4 micro-batches": (2, [*TWO, "--global-batch-size", "8"]),
    "dense layer, shared expert, one more token predicted": (2, [
        *TWO, "--num-layers", "3", "--moe-layer-freq", "[0,1,1]", "--mtp-num-layers", "1",
        "--moe-shared-expert-intermediate-size", "64", "--position-embedding-type", "rope"]),
    "latent attention, released early": (2, [
        *TWO, "--ep-overlap-early-attn-memory-release", "--multi-latent-attention",
        "--position-embedding-type", "rope", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "16",
        "--v-head-dim", "16", "--kv-lora-rank", "16"]),
    "interleaved pipeline": (4, [
        *TWO, "--num-layers", "4", "--pipeline-model-parallel-size", "2",
        "--num-layers-per-virtual-pipeline-stage", "1"]),
    "experts on 4 ranks": (4, ["--expert-model-parallel-size", "4"]),
    "tensor parallel": (4, [*TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"]),
}
# fmt: on
KEEP = ["--asynchzp-keep-params-gb", "0.01", "--asynchzp-keep-grads-gb", "0.01"]
OURS = [
    [*size_flags((1, 1, 1)), "--asynchzp-schedule", "inline"],
    size_flags((1, 1, 2)),
    [*size_flags((1, 2, 2)), "--asynchzp-early-update", "on"],
    [*size_flags((2, 2, 2)), *KEEP],
]


def numbers_of(lines: list[list[str]]) -> list[tuple]:
    runs = [run_pretrain(line) for line in lines]
    return [(run.losses, run.grad_norms, run.params_norms) for run in runs]


class Late(nn.Linear):
    """As a layer of Transformer Engine whose weight gradients come late."""

    def need_backward_dw(self) -> bool:
        return True

    def backward_dw(self) -> None:
        self.weight.grad = torch.full_like(self.weight, 2)


def test_gradients_that_come_late_in_a_graph_are_left_where_a_replay_leaves_them():
    model = nn.Sequential(nn.Linear(2, 2), Late(2, 2))
    weight: Any = model[1].weight
    weight.main_grad, kept = torch.zeros(2, 2), set()
    with keeping_late_grads(model.modules(), kept):
        model[1].backward_dw()  # pyright: ignore
        assert weight.main_grad.eq(2).all() and weight.grad is None and kept == {weight}
    model[1].backward_dw()  # pyright: ignore
    assert weight.grad is not None


class Tied(nn.Module):
    """A dense model of one layer whose output layer has the weight of the embedding, with a
    schedule plan as Megatron's."""

    pre_process = post_process = True

    def __init__(self, is_late: bool = False) -> None:
        super().__init__()
        self.is_late = is_late  # weight gradients are computed after the others
        self.embedding = nn.Embedding(4, 2)
        layer: Any = nn.Linear(2, 2)
        layer.is_moe_layer = layer.recompute_pre_mlp_layernorm = False
        self.decoder: Any = nn.Module()
        self.decoder.layers = nn.ModuleList([layer])
        self.decoder.final_layernorm = nn.LayerNorm(2)
        self.output_layer = nn.Module()

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        return self.embedding.weight

    def build_schedule_plan(self) -> Any:
        def node() -> Any:
            return SimpleNamespace(
                forward_func=lambda value: value + 1,
                backward_func=lambda grad: grad * 2,
                delay_wgrad_compute=self.is_late,
                bwd_dw_callables=[nn.Identity()],
            )

        layer = SimpleNamespace(
            layer=self.decoder.layers[0],
            moe_combine=None,
            pre_dispatch_computation=node(),
            mlp=node(),
        )
        return SimpleNamespace(
            pre_process=node(),
            post_process=node(),
            num_layers=lambda: 1,
            get_layer=lambda index: layer,
        )


class Units:
    """Records what each part of a plan needs and completes."""

    def __init__(self, model: Tied):
        Unit = namedtuple("Unit", "name params")
        self.units = [
            Unit("words", (model.embedding.weight,)),
            Unit("layer", tuple(model.decoder.layers.parameters())),
            Unit("norm", tuple(model.decoder.final_layernorm.parameters())),
        ]
        self.parts: list[tuple[list[str], list[str]]] = []
        self.calls: list[str] = []

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.calls.append(name)
        yield
        self.calls.append(f"end of {name}")

    def manual_region(self, units: list, completes: list, recomputed: list) -> Any:
        assert not recomputed
        self.parts.append(([one.name for one in units], [one.name for one in completes]))
        return SimpleNamespace(
            forward=lambda: self._within("forward"),
            backward=lambda: self._within("backward"),
            complete=lambda: self.calls.append("complete"),
        )


def test_the_output_of_a_tied_model_needs_the_embedding_whose_gradient_its_first_part_completes():
    model = Tied()
    units: Any = Units(model)
    tell_of_parts(model, units)
    model.build_schedule_plan()
    first, *of_layer, last = units.parts
    assert first == (["words"], ["words"])
    assert of_layer == [(["layer"], ["layer"]), (["layer"], [])]
    assert last == (["words"], [])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_part_is_complete_with_its_backward_or_with_weight_gradients_that_come_later(is_late):
    model = Tied(is_late)
    units: Any = Units(model)
    tell_of_parts(model, units)
    node = model.build_schedule_plan().get_layer(0).mlp
    assert node.forward_func(3) == 4 and node.backward_func(5) == 10
    ran = ["forward", "end of forward", "backward", "end of backward"]
    assert units.calls == (ran if is_late else [*ran, "complete"])
    for layer in node.bwd_dw_callables[1:]:
        assert list(layer.parameters()) == []  # Megatron looks at those of each
        layer.backward_dw()
    assert units.calls == [*ran, "complete"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_norms_and_parameters_are_those_of_stocks_overlapped_schedule(name: str):
    ranks, flags = LAYOUTS[name]
    ours = OURS if ranks == 2 else OURS[3:]
    stock_line = gpt_args("--train-iters", "20", *BASE, *flags)
    lines = [stock_line, *([*stock_line, *more] for more in ours)]
    stock, *found = on_ranks(numbers_of, ranks, lines, timeout_s=500)[0]
    assert len(set(stock[0])) == 20
    for numbers in found:
        for mine, theirs in zip(numbers, stock, strict=True):
            assert worst_difference(mine, theirs) < 1e-6


@pytest.mark.slow
def test_adam_drifts_from_stock_as_stock_from_itself_with_another_order_of_sums():
    """A last bit of a norm, which clipping divides by, is enough for both."""
    line = gpt_args("--train-iters", "12", *MIXTURE_OF_EXPERTS, *TWO, "--bf16", OVERLAP)
    lines = [line, [*line, "--use-distributed-optimizer"], *([*line, *more] for more in OURS)]
    stock, other, *found = (numbers[0] for numbers in on_ranks(numbers_of, 2, lines)[0])
    drift = worst_difference(other, stock)
    assert 1e-6 < drift < 1e-2
    assert all(worst_difference(mine, stock) < 3 * drift for mine in found)
