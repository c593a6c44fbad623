# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Import and export take the memory of a few tensors, whatever the size of the model."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

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


def make_directory(folder: Path, num_layers: int, hidden_size: int) -> int:
    """A Llama in bf16 whose weight file is one hole of the file system; returns its bytes."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shape = read_config(folder, 8)
    header, end = {}, 0
    for rule in rules_of(shape):
        for layer in range(num_layers if rule.is_per_layer else 1):
            for name, size in zip(rule.names_of(layer), rule.hf_sizes(shape), strict=True):
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


def test_both_ways_take_less_than_the_model(tmp_path):
    nbytes = make_directory(tmp_path / "hf", num_layers=24, hidden_size=768)
    largest = 2 * 2 * 3 * 768 * 768  # the gated half of an MLP and the other, bf16
    for convert in (
        partial(import_model, tmp_path / "hf", tmp_path / "megatron"),
        partial(export_model, tmp_path / "megatron", tmp_path / "again"),
    ):
        (beyond,) = run_ranks(beyond_of, 1, convert, timeout_s=500)
        assert beyond < 16 * largest < 0.35 * nbytes, (beyond / 2**20, largest / 2**20, nbytes)
