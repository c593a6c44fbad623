# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What PASA relies on in Transformer Engine, by the sources of each minor version. Its layers and
optimizers run, in tests/device/test_transformer_engine.py."""

import pytest

from tests.support.sources import parameters_of_method, sources

VERSIONS = ["2.15", "2.16", "2.17", "2.18", "2.19", "2.20"]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_attention_takes_what_pasa_gives_it(tmp_path, version):
    files = (sources(tmp_path, "transformer_engine", version) / "pytorch").rglob(
        "dot_product_attention.py"
    )
    (file,) = [one for one in files if "class DotProductAttention" in one.read_text()]
    found = parameters_of_method(file, "DotProductAttention", "__init__")
    assert found[:2] == ["num_attention_heads", "kv_channels"]
    wanted = {"num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type"}
    assert wanted | {"softmax_scale"} <= set(found)
    call = parameters_of_method(file, "DotProductAttention", "forward")
    assert call[:3] == ["query_layer", "key_layer", "value_layer"]
