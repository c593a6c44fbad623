# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A model's tensors come in order of use, and one that has others is refused."""

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.mapping import jobs_in_order_of_use, match_keys, rules_of
from tests.hf.models import NAMES, shapes


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_come_first_then_layer_after_layer_then_what_makes_logits(name):
    shape = shapes()[name]
    names = [name for job in jobs_in_order_of_use(shape) for name in job.names]
    assert sorted(names) == sorted(
        hf_name
        for rule in rules_of(shape)
        for place in rule.places(shape)
        for hf_name in rule.names_of(place)
    )
    layers = [next((int(word) for word in one.split(".") if word.isdigit()), None) for one in names]
    first, last = layers.index(0), len(layers) - 1 - layers[::-1].index(shape.num_layers - 1)
    within = layers[first : last + 1]
    assert within == sorted(within, key=str) and None not in within
    assert all("emb" in one or "wte" in one or "wpe" in one for one in names[:first])
    assert all("norm" in one or "ln_f" in one or "head" in one for one in names[last + 1 :])


def test_a_tensor_too_many_too_few_or_of_another_size_is_named():
    shape = shapes()["llama"]
    sizes = {rule.key: [*rule.stack(shape), *rule.megatron_size(shape)] for rule in rules_of(shape)}
    assert match_keys("it", sizes, shape) == {key: key for key in sizes}
    with pytest.raises(ConfigurationError, match=r"it has, and no rule maps, lora"):
        match_keys("it", {**sizes, "lora": [1]}, shape)
    norm = sizes.pop("decoder.final_layernorm.weight")
    with pytest.raises(ConfigurationError, match=r"it lacks decoder.final_layernorm.weight"):
        match_keys("it", sizes, shape)
    with pytest.raises(ConfigurationError, match=r"has size \[65\], but \[64\]"):
        match_keys("it", {**sizes, "decoder.final_layernorm.weight": [norm[0] + 1]}, shape)
