# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT in a frozen model train as in one process, and what is frozen costs its memory
and nothing else."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from scripts.testbed.ranks import run_ranks
from tests.support import loops
from tests.support.engine import on_submit
from tests.support.toy_models import toy_batch, toy_llama_config


def new_model(kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    if kind == "llama":
        base = LlamaForCausalLM(toy_llama_config())
    else:
        base = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=37,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
    adapters = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, adapters)


STEPS = 20


def new_adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def losses_of(model: nn.Module, step: int, rank: int) -> list[torch.Tensor]:
    tokens = toy_batch(step, 0, rank)
    return [model(input_ids=tokens, labels=tokens, use_cache=False).loss]


def train(kind: str, sizes: Sequence[int]) -> tuple[set[str], list[dict[str, int]], int]:
    """Compared with one process; the operations of frozen units, their bytes at rest, and how many
    trained units there are."""
    model = new_model(kind)
    layers = model.base_model.model.model.layers
    with shard(model, layers, ShardSizes(*sizes), new_adamw) as sharded:
        units = {unit.name: unit for unit in sharded.runtime.units}
        lanes: Counter[str] = Counter()
        on_submit(
            sharded.runtime.driver,
            lambda task: lanes.update(
                [task.lane] if task.unit in units and not units[task.unit].is_trained else []
            ),
        )
        expected = loops.train_plainly(
            new_model(kind), losses_of, steps=range(STEPS), new_optimizer=new_adamw
        )
        assert loops.train(sharded, losses_of, steps=range(STEPS)) == expected
        frozen = [unit.state_nbytes() for unit in units.values() if not unit.is_trained]
        return set(lanes), frozen, len(units) - len(frozen)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 2, 4), (1, 2, 4), (1, 1, 1)])
@pytest.mark.parametrize("kind, num_layers", [("llama", 2), ("qwen2", 3)])
def test_adapters_train_as_in_one_process_and_the_frozen_base_is_only_gathered(
    kind, num_layers, sizes
):
    for lanes, frozen, num_trained in run_ranks(train, 4, kind, sizes):
        assert lanes == ({"gather"} if sizes[0] > 1 else set())
        assert all(one["main_grad"] == one["main_param"] == 0 for one in frozen)
        assert num_trained == num_layers  # the adapters of a layer are one unit
