# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""--qk-clip scales in shards the rows that stock Megatron scales in whole weights, to the bit."""

from collections.abc import Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp import ShardSizes, shard
from scripts.testbed.ranks import run_ranks
from tests.support.engine import nested_sizes
from tests.support.selection import slow_unless

HEADS, GROUPS, SIZE, HIDDEN = 4, 2, 4, 6
CONFIG = {"qk_clip": True, "qk_clip_threshold": 2.0, "qk_clip_alpha": 0.3, "q_lora_rank": None}
LATENT = {"qk_head_dim": 3, "qk_pos_emb_head_dim": 1, "v_head_dim": 2}


def new_attention(is_latent: bool, dtype: torch.dtype, scores: Sequence[float]) -> Any:
    """What Megatron's own code of an attention reads, with its weights."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    torch.manual_seed(3)
    made: Any = nn.Module()
    made.config = SimpleNamespace(**CONFIG, **LATENT)
    made.core_attention = SimpleNamespace(current_max_attn_logits=torch.tensor(scores))
    made.num_attention_heads_per_partition, made.num_query_groups_per_partition = HEADS, GROUPS
    made.query_projection_size, made.kv_projection_size = HEADS * SIZE, GROUPS * SIZE
    made.cache_mla_latents = False
    if is_latent:
        made.linear_q_proj = nn.Linear(HIDDEN, HEADS * 4, bias=False, dtype=dtype)
        made.linear_kv_up_proj = nn.Linear(HIDDEN, HEADS * 5, bias=False, dtype=dtype)
    else:
        made.linear_qkv = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * SIZE, dtype=dtype)
    kind: Any = MLASelfAttention if is_latent else SelfAttention
    for name in ("clip_qk", "_clip_q_proj_weight", "_clip_kv_proj_weight", "_clip_linear_qkv"):
        if hasattr(kind, name):
            setattr(made, name, MethodType(getattr(kind, name), made))
    return made


def new_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def new_model(
    is_latent: bool, dtype: torch.dtype, scores: Sequence[float], of_last: Sequence[float]
) -> Any:
    """Three layers with attention: with `scores`, with scores that nothing clips, with `of_last`;
    and one without attention."""
    model: Any = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(nn.Module() for _ in range(3))
    for layer, own in zip(model.decoder.layers, (scores, [1.0] * HEADS, of_last), strict=True):
        layer.self_attention = new_attention(is_latent, dtype, own)
    model.decoder.layers.append(nn.LayerNorm(HIDDEN, dtype=dtype))
    return model


def clip_both(
    is_latent: bool, dtype: torch.dtype, sizes: Sequence[Sequence[int]]
) -> list[tuple[Any, Any]]:
    """The names of weights, as they compute and as main parameters, that are not those of stock,
    for each sizes. All ranks have the same heads: half of them are context-parallel ranks. Odd ones
    have had no micro-batch in the last layer."""
    from unittest import mock

    from megatron.core import parallel_state
    from megatron.core.optimizer.qk_clip import clip_qk

    from megatron_asynchzp.mcore.step.qk_clip import clip_scores
    from megatron_asynchzp.mcore.step.whole_tensors import whole_marks, whole_params

    rank = dist.get_rank()
    scores = [[5.0, 1.0, 1.0, 2.5], [1.0, 3.0, 1.5, 2.0]][rank % 2]
    of_last = [[4.0, 1.0, 2.5, 1.0], [-torch.inf] * HEADS][rank % 2]
    found = []
    alone = dist.new_group([rank], use_local_synchronization=True)

    def group_of(with_context_parallel: bool = False) -> Any:
        return dist.group.WORLD if with_context_parallel else alone

    with mock.patch.object(parallel_state, "get_data_parallel_group", group_of):
        whole = new_model(is_latent, dtype, scores, of_last)
        for param in whole.parameters():
            param.main_param = param.detach().float().clone()
        wrapped = SimpleNamespace(module=SimpleNamespace(module=whole))
        del whole.decoder.layers[3]
        largest = clip_qk([wrapped])
        named = dict(whole.named_parameters())
        before = new_model(is_latent, dtype, scores, of_last)
        clipped = [n for n, p in before.named_parameters() if n in named and not p.equal(named[n])]
        expected = {name: (p.detach(), p.main_param) for name, p in named.items()}
        for each in sizes:
            model = new_model(is_latent, dtype, scores, of_last)
            if rank % 2:
                model.decoder.layers[2].self_attention.core_attention.current_max_attn_logits = None
            sharded = shard(
                model, model.decoder.layers, ShardSizes(each[0], each[1], each[2]), new_sgd
            )
            runtime = sharded.runtime
            sharded.mark_weights("unclipped")
            assert clip_scores([model], [runtime], False) == largest == 5.0
            same = {
                name: torch.equal(value, expected[name][0])
                for name, value in whole_params(runtime)
                if name in expected
            }
            for unit in runtime.units:
                for index, name in enumerate(unit.param_names):
                    held, values = unit.main_param.elements_of(index)
                    if name in expected:
                        main = expected[name][1].flatten()[held.start : held.stop]
                        same[f"main {name}"] = torch.equal(values, main)
            attention = model.decoder.layers[0].self_attention
            assert attention.core_attention.current_max_attn_logits is None
            assert clip_scores([model], [runtime], False) == 0.0
            for unit in runtime.units:  # a stream of the changes takes all of what was clipped
                if not set(unit.param_names).isdisjoint(clipped):
                    same[f"marks of {unit.name}"] = whole_marks(unit, "unclipped") is None
            found.append((each, [name for name, is_same in same.items() if not is_same]))
            sharded.close()
    assert {name.split(".")[2] for name in clipped} == {"0", "2"}
    assert not any("bias" in name for name in clipped)
    return found


@pytest.mark.parametrize(
    ("is_latent", "dtype", "ranks"),
    [
        slow_unless(True, False, torch.bfloat16, 2),
        slow_unless(True, True, torch.bfloat16, 2),
        slow_unless(False, False, torch.float32, 4),
        slow_unless(False, True, torch.float32, 4),
    ],
)
def test_each_shard_has_the_bits_of_its_part_of_a_weight_that_stock_has_clipped(
    is_latent, dtype, ranks
):
    sizes = nested_sizes(ranks)
    for found in run_ranks(clip_both, ranks, is_latent, dtype, sizes):
        assert found == [(each, []) for each in sizes]


def test_an_attention_that_does_not_say_what_to_clip_is_refused_when_the_model_is_sharded(
    monkeypatch,
):
    from megatron_asynchzp.engine.sharding.topology import ShardSizes
    from megatron_asynchzp.errors import ConfigurationError
    from megatron_asynchzp.mcore.checkpoint import save_guard
    from megatron_asynchzp.mcore.patches.model import _shard
    from megatron_asynchzp.mcore.run.settings import RunSettings
    from megatron_asynchzp.mcore.step import data_parallel

    called: list[str] = []
    steps = ("shard_chunks", "reduce_last_micro_batch")
    for name in steps:
        monkeypatch.setattr(data_parallel, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(save_guard, "claim_save_directory", lambda _: called.append("claim"))
    args, settings = SimpleNamespace(qk_clip=True, rank=1), RunSettings(ShardSizes(1, 1, 1))
    groups = SimpleNamespace(dp_cp=SimpleNamespace(size=lambda: 1, rank=lambda: 1))
    model = new_model(False, torch.float32, [1.0] * HEADS, [1.0] * HEADS)
    model.runtime = model.construction = None
    _shard(args, settings, [model], groups)
    assert called == ["claim", *steps]
    del model.decoder.layers[1].self_attention._clip_linear_qkv
    with pytest.raises(ConfigurationError, match="--qk-clip: Module does not say what to clip"):
        _shard(args, settings, [model], groups)
