# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns how queries and keys are taken from a running model: hooks on its core attention modules,
found by what they are called with.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def capturing(model: nn.Module, attribute: str = "core_attention") -> Iterator[dict]:
    """Keep q and k of the last forward of every module that is a `core_attention` of another.

    Such a module is called with q, k, v of shape [s, b, heads, channels]. Yields a dictionary,
    layer -> {"q": [B, H, S, D], "k": [B, G, T, D]}, on the CPU, as torch.save and the command
    line take it. For one forward of a real batch:

        with capturing(model) as seen:
            model(batch)
        torch.save(seen, "qk.pt")
    """
    seen: dict[int, dict[str, torch.Tensor]] = {}
    hooks = []
    owners = [m for m in model.modules() if isinstance(getattr(m, attribute, None), nn.Module)]
    for layer, owner in enumerate(owners):
        hooks.append(
            getattr(owner, attribute).register_forward_pre_hook(_keep(seen, layer), prepend=True)
        )
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _keep(seen: dict, layer: int):
    def hook(module: nn.Module, arguments: tuple) -> None:
        q, k = arguments[:2]
        if q.dim() == 3:  # packed: [t, heads, channels]
            q, k = q.unsqueeze(1), k.unsqueeze(1)
        seen[layer] = {
            name: x.detach().permute(1, 2, 0, 3).cpu() for name, x in (("q", q), ("k", k))
        }

    return hook
