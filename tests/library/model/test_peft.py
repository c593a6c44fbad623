# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT in a frozen model train as in one process, and what is frozen costs its memory
and nothing else."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

from megatron_asynchzp import ShardedModel, ShardSizes, shard
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


def new_sharded(sizes: Sequence[int], adapters: float | None = None) -> ShardedModel:
    """adapters: what they are filled with, where it is not what they start from."""
    model = new_model("llama")
    with torch.no_grad():
        for param in model.parameters() if adapters is not None else ():
            if param.requires_grad:
                param.fill_(adapters)
    return shard(model, model.base_model.model.model.layers, ShardSizes(*sizes), new_adamw)


def save_and_resume(folder: str) -> dict[str, Any]:
    """What went on after step 3, and after resuming on the sizes of the keys; the names in the
    checkpoint; and what a load of the whole model from it ends with."""
    found: dict[str, Any] = {}
    with new_sharded((2, 2, 4)) as sharded:
        loops.train(sharded, losses_of, steps=range(3))
        checkpoint.save(sharded.state_dict(only_trained=True), checkpoint_id=folder)
        found["went on"] = loops.train(sharded, losses_of, steps=range(3, 6))
        try:
            checkpoint.load(sharded.state_dict(), checkpoint_id=folder)
        except checkpoint.CheckpointException as error:
            found["whole"] = str(error)
    for sizes in ((2, 2, 4), (1, 2, 4), (4, 4, 4)):
        with new_sharded(sizes, adapters=7.0) as sharded:
            state = sharded.state_dict(only_trained=True)
            checkpoint.load(state, checkpoint_id=folder)
            sharded.load_state_dict(state)
            found[str(sizes)] = loops.train(sharded, losses_of, steps=range(3, 6))
    stored = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return found | {"names": sorted(name for name in stored if name.startswith("model."))}


@pytest.mark.slow
def test_a_checkpoint_of_the_adapters_alone_goes_on_with_the_same_base_on_any_sizes(tmp_path):
    for found in run_ranks(save_and_resume, 4, str(tmp_path)):
        assert found["names"] and all(".lora_" in name for name in found["names"])
        assert found["(2, 2, 4)"] == found["went on"]
        for sizes in ("(1, 2, 4)", "(4, 4, 4)"):
            assert np.allclose(found[sizes], found["went on"], rtol=1e-6, atol=0)
        assert "Missing key" in found["whole"] and "embed_tokens.weight" in found["whole"]
