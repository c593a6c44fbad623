# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Captures queries and keys of a running model by hooks on its core attention modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def capturing(model: nn.Module) -> Iterator[dict]:
    """Keep q and k of the last forward of every module that is a `core_attention` of another.

    Such a module is called with q, k, v of shape [s, b, heads, channels]. Yields a dictionary,
    layer -> {"q": [B, H, S, D], "k": [B, G, T, D]}, on the CPU, as torch.save and the command
    line take it. For one forward of a real batch:

        with capturing(model) as seen:
            model(batch)
        torch.save(seen, "qk.pt")
    """
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def keep(layer: int) -> Callable[[nn.Module, tuple], None]:
        def hook(_: nn.Module, arguments: tuple) -> None:
            seen[layer] = _queries_and_keys(arguments)

        return hook

    hooks = [
        core.register_forward_pre_hook(keep(layer), prepend=True)
        for layer, (_, core) in enumerate(_cores(model))
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def capture_when(
    model: nn.Module,
    is_due: Callable[[], bool],
    finish: Callable[[dict[str, dict[str, torch.Tensor]]], None],
) -> int:
    """While `is_due()`, keep q and k of the first forward of every core attention.

    After all have run, `finish` gets them by the names of their owners in `model`, and the hooks
    are removed. Returns the number of core attentions; with 0 `finish` is never called.
    """
    seen: dict[str, dict[str, torch.Tensor]] = {}
    hooks = []

    def keep(layer: str) -> Callable[[nn.Module, tuple], None]:
        def hook(_: nn.Module, arguments: tuple) -> None:
            if layer in seen or not is_due():
                return
            seen[layer] = _queries_and_keys(arguments)
            if len(seen) == len(hooks):
                for registered in hooks:
                    registered.remove()
                finish(seen)

        return hook

    for name, core in _cores(model):
        hooks.append(core.register_forward_pre_hook(keep(name), prepend=True))
    return len(hooks)


def _cores(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, owner in model.named_modules():
        if isinstance(core := getattr(owner, "core_attention", None), nn.Module):
            yield name, core


def _queries_and_keys(arguments: tuple) -> dict[str, torch.Tensor]:
    """Take q and k of shape [s, b, heads, channels], or packed [t, heads, channels], of a call."""
    q, k = arguments[:2]
    if q.dim() == 3:
        q, k = q.unsqueeze(1), k.unsqueeze(1)
    return {name: x.detach().permute(1, 2, 0, 3).cpu() for name, x in (("q", q), ("k", k))}
