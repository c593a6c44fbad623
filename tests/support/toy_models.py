# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Small models with every shape of parameter use the engine must serve, and their batches."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Norm, two linears (each saves a view of its weight), residual; one odd-sized bias."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class ToyLM(nn.Module):
    """Embedding, blocks, final norm, output layer (tied or not); recompute as asked."""

    def __init__(self, vocab=37, width=16, depth=3, is_tied=False, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.output = Output(width, vocab, is_tied)
        self.is_tied = is_tied
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.recompute else block(x)
        return self.output(self.norm(x), self.embedding.weight if self.is_tied else None)


class RoutedLM(ToyLM):
    """Each call runs the blocks that `routes` holds next, and all of them once it is empty."""

    def __init__(self, depth=4):
        super().__init__(depth=depth)
        self.routes: list[list[int]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.routes.pop(0) if self.routes else range(len(self.blocks)):
            x = self.blocks[index](x)
        return self.output(self.norm(x), None)


class Output(nn.Module):
    """A linear layer whose weight is its own or handed in, as Megatron's output layer."""

    def __init__(self, width: int, vocab: int, is_tied: bool):
        super().__init__()
        self.weight = None if is_tied else nn.Parameter(torch.randn(vocab, width) * 0.1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight if weight is None else weight)


def toy_batch(step: int, micro_batch: int, rank: int, vocab=37) -> torch.Tensor:
    """Tokens [4, 9], different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + 7919 * rank)
    return torch.randint(0, vocab, (4, 9), generator=generator)


def toy_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def toy_llama_config() -> Any:
    """Two layers of transformers' Llama, with grouped queries and tied embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
