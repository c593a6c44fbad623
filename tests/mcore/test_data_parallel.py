# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The wrapper as Megatron's schedules see it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from tests.support.world import on_ranks


def tiny_config(**config: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **config)


def wrap(chunks: list, sizes: tuple[int, int, int] = (1, 2, 2), **ddp_options: bool) -> list:
    """The chunks of a rank's model, wrapped, over a sharding group that is the world."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.utils import get_model_config

    from megatron_asynchzp.mcore.run.settings import RunSettings
    from megatron_asynchzp.mcore.step.data_parallel import (
        AsyncHZPDataParallel,
        reduce_last_micro_batch,
        shard_chunks,
    )

    world = dist.group.WORLD
    groups = SimpleNamespace(dp_cp=world, tp=world, pp=world, expt_dp=world)
    config = DistributedDataParallelConfig(**ddp_options)
    wrapped = [AsyncHZPDataParallel(get_model_config(chunk), config, chunk) for chunk in chunks]
    shard_chunks(wrapped, groups, RunSettings(ShardSizes(*sizes)))
    reduce_last_micro_batch(wrapped)
    return wrapped


def _held_back(num_chunks: int, has_one_config: bool) -> list[list[int]]:
    """For the config of each chunk: which chunks its no_sync_func holds back."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.utils import get_model_config

    shared, chunks, found = tiny_config(), [], []
    for _ in range(num_chunks):
        chunks.append(MegatronModule(shared if has_one_config else tiny_config()))
        chunks[-1].linear = torch.nn.Linear(8, 8)
    chunks = wrap(chunks)
    for chunk in chunks:
        functions = get_model_config(chunk).no_sync_func
        # As the schedules take it: a list for several chunks, one function for one.
        assert callable(functions) is (num_chunks == 1)
        functions = [functions] if num_chunks == 1 else functions
        found.append([chunks.index(function.__self__) for function in functions])
        for function in functions:
            with function():
                pass
    chunks[0].communication.close()
    return found


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("has_one_config", [True, False])
def test_the_config_of_every_chunk_holds_back_the_last_reduction_of_all(num_chunks, has_one_config):
    everyone = list(range(num_chunks))
    ranks = on_ranks(_held_back, 2, num_chunks, has_one_config)
    assert ranks == [[everyone] * num_chunks] * 2


def _train_fused_layer() -> tuple[list[bool], bool, list[float]]:
    """Of a layer that writes its gradient itself beside one of Megatron's own: whether each fuses
    when it is wrapped; whether main_grad is this rank's fragment after the gradients were synced;
    and what is in it."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    from tests.support.te_stand_ins import Linear

    torch.manual_seed(1)
    fused, own = Linear(8, 8), ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(own)
    fused.is_fused = own.gradient_accumulation_fusion = True
    fused.own = own
    model = MegatronModule(tiny_config(gradient_accumulation_fusion=True))
    model.linear = fused
    (chunk,) = wrap([model])
    chunk.zero_grad_buffer()
    chunk.module.forward = fused.forward
    chunk(torch.eye(8)).sum().backward()
    chunk.finish_grad_sync()
    fragment = chunk.units[0].main_grad_fragments()[0]
    main_grad = fused.weight.main_grad
    is_fragment = main_grad.data_ptr() == fragment.data_ptr() and main_grad.shape == fragment.shape
    chunk.communication.close()
    return [fused.is_fused, own.gradient_accumulation_fusion], is_fragment, main_grad.tolist()


def test_gradients_that_a_layer_writes_itself_are_found_where_megatron_reduces_them():
    ranks = on_ranks(_train_fused_layer, 2)
    for fuses, is_fragment, _grad in ranks:
        assert fuses == [True, False]
        assert is_fragment
    assert [value for _, _, grad in ranks for value in grad] == [1.0] * 64


WRITES: dict[str, Any] = {
    "set": lambda param: setattr(param, "data", param.data * 0.5),
    "filled": lambda param: param.data.zero_(),
    "scaled": lambda param: param.data.mul_(0.5),
}


def _write_between_steps(sizes: tuple[int, int, int]) -> dict[str, list[str]]:
    """What the next step and the next save say of each write."""
    from megatron.core.transformer.module import MegatronModule

    found: dict[str, list[str]] = {}
    for name, write in WRITES.items():
        module: Any = MegatronModule(tiny_config())
        module.linear = torch.nn.Linear(8, 8)
        chunk = wrap([module], sizes)[0]
        chunk.zero_grad_buffer()
        found[name] = []
        try:
            with torch.no_grad():
                write(module.linear.weight)
        except RuntimeError as error:  # torch's own
            found[name].append(str(error))
        for use in (chunk.zero_grad_buffer, chunk.runtime.settle):
            try:
                use()
            except ConfigurationError as error:
                found[name].append(str(error))
        chunk.communication.driver.close()
    return found


def test_weights_that_are_set_between_two_steps_are_refused_by_name_and_not_lost():
    for found in on_ranks(_write_between_steps, 2, (2, 2, 2)):
        for name in ("set", "filled"):
            assert len(found[name]) == 2
            assert all("was set or filled between two steps" in line for line in found[name])
        assert "refers to a single memory location" in found["scaled"][0]
    for found in on_ranks(_write_between_steps, 2, (1, 2, 2)):  # in place each rank has the whole
        assert [len(found[name]) for name in WRITES] == [2, 0, 0]
