# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes tiny models with random weights, a tokenizer of characters, and sums as their data."""

import json
import random
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The settings in which a model differs, by the beginning of its class's name in transformers.
_MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {  # as Llama 3.2 1B, with a shorter context
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "Qwen3Moe": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


def make_model(folder: Path, name: str = "Qwen2", num_layers: int = 2) -> None:
    """Write a model and its tokenizer in the form of Hugging Face."""
    import torch
    import transformers

    _make_tokenizer(folder)
    torch.manual_seed(0)
    settings = _SMALL | _MODELS[name] | {"num_hidden_layers": num_layers}
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = [*marks, *map(chr, range(32, 127))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    ).save_pretrained(folder)


def write_sums(file: Path) -> None:
    """Write conversations about sums, one a line, and a wrong answer to each."""
    numbers = random.Random(1)
    pairs = [(numbers.randint(0, 99), numbers.randint(0, 99)) for _ in range(256)]
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{a}+{b}="},
                {"role": "assistant", "content": f"{a + b}"},
            ],
            "rejected_response": f"{a + b + 1}",
        }
        for a, b in pairs
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
