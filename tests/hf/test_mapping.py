# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The tables are exact: what goes one way comes back with the same bits."""

import pytest
import torch
from safetensors import safe_open

from megatron_asynchzp.hf.mapping import join_qkv, rules_of, split_qkv
from tests.hf.models import NAMES, configs, random_model, shapes


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_there_and_back_gives_the_same_bits(name):
    shape = shapes()[name]
    for rule in rules_of(shape):
        whole = torch.randn(rule.megatron_size(shape))
        if rule.dims[0] == "vocab":
            whole[shape.vocab_size :] = 0
        pieces = rule.to_hf(whole, shape)
        assert torch.equal(rule.to_megatron(pieces, shape), whole), rule.key
        assert [piece.shape for piece in pieces] == rule.hf_sizes(shape)
        assert all(piece.is_contiguous() for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
def test_the_rules_name_the_parameters_of_the_model_in_transformers_and_no_others(name, tmp_path):
    shape, model = shapes()[name], random_model(name)
    assert model.config.model_type == configs()[name].model_type == shape.family
    sizes = {
        hf_name: size
        for rule in rules_of(shape)
        for place in rule.places(shape)
        for hf_name, size in zip(rule.names_of(place), rule.hf_sizes(shape), strict=True)
    }
    model.save_pretrained(tmp_path)  # transformers holds experts otherwise than directories do
    with safe_open(tmp_path / "model.safetensors", framework="pt") as tensors:
        stored = {key: torch.Size(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    assert sizes == stored


def test_queries_keys_and_values_lie_group_by_group_in_megatron():
    shape = shapes()["llama"]  # 4 query heads in 2 groups, of 16 rows each
    rows = torch.arange(8 * 16).float()
    q, k, v = split_qkv(rows, shape)
    heads = rows.view(8, 16)  # q q k v q q k v
    assert torch.equal(q, heads[[0, 1, 4, 5]].flatten())
    assert torch.equal(k, heads[[2, 6]].flatten())
    assert torch.equal(v, heads[[3, 7]].flatten())
    assert torch.equal(join_qkv((q, k, v), shape), rows)
