# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Import and export take the memory of a few tensors, whatever the size of the model."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_asynchzp.hf.config import read_config
from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from megatron_asynchzp.hf.mapping import rules_of
from scripts.testbed.memory import ResidentMemory
from scripts.testbed.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def make_directory(folder: Path, config: transformers.PretrainedConfig) -> int:
    """A model in bf16 whose weight file is one hole of the file system; returns its bytes."""
    config.save_pretrained(folder)
    shape = read_config(folder, 8)
    header, end = {}, 0
    for rule in rules_of(shape):
        for place in rule.places(shape):
            for name, size in zip(rule.names_of(place), rule.hf_sizes(shape), strict=True):
                start, end = end, end + 2 * size.numel()
                header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return end


def beyond_of(convert: Callable[[], object]) -> int:
    """Resident bytes of this process at their highest, above those before `convert` ran."""
    import megatron.core.dist_checkpointing  # noqa: F401  its memory is no conversion's

    torch.set_num_threads(1)
    memory = ResidentMemory()
    convert()
    return memory.peak().beyond_nbytes


_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "intermediate_size": 3 * 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**_SIZES, num_hidden_layers=24),
        transformers.MixtralConfig(**_SIZES, num_hidden_layers=4, num_local_experts=8),
    ],
    ids=["llama", "mixtral"],
)
def test_both_ways_take_less_than_the_model(config, tmp_path):
    nbytes = make_directory(tmp_path / "hf", config)
    largest = 2 * 2 * 3 * 768 * 768  # the gated half of an MLP, or of an expert, and the other
    for convert in (
        partial(import_model, tmp_path / "hf", tmp_path / "megatron"),
        partial(export_model, tmp_path / "megatron", tmp_path / "again"),
    ):
        (beyond,) = run_ranks(beyond_of, 1, convert, timeout_s=500)
        assert beyond < 16 * largest < 0.35 * nbytes, (beyond / 2**20, largest / 2**20, nbytes)
