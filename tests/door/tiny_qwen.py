# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny Qwen2 with random weights, a tokenizer of characters, and sums as its data."""

import json
import random
from pathlib import Path


def make_model(folder: Path) -> None:
    """Write the model in the form of Hugging Face, and data.jsonl next to it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

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
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=0,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    numbers = random.Random(1)
    pairs = [(numbers.randint(0, 99), numbers.randint(0, 99)) for _ in range(256)]
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{a}+{b}="},
                {"role": "assistant", "content": f"{a + b}"},
            ]
        }
        for a, b in pairs
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
