# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks were started with the same settings, and names the ranks that differ.

Ranks with different settings would wait for each other, or silently train a mixture.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_asynchzp.engine.sharding.value_hash import value_hash
from megatron_asynchzp.errors import ConfigurationError, name_ranks

Settings = Mapping[str, str]
"""Settings by name, as text that does not depend on the process."""

PATH = "a path"
"""Stands for every path: folders have different names on different nodes."""
_MISSING = "not given"
_MOST_KINDS = 8  # different sets of settings that are compared
_MOST_CHARACTERS = 60  # of a value, in the message
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Variables that change numbers or the order of collectives.
_VARIABLES = re.compile(
    r"(NVTE|ASYNCHZP|FLASH_ATTENTION)_\w+|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|NCCL_(ALGO|PROTO|NVLS_ENABLE"
    r"|COLLNET_ENABLE)|HCCL_(ALGO|DETERMINISTIC)|LCCL_DETERMINISTIC"
)
_ONLY_REPORT = re.compile(r"NVTE_DEBUG\w*|ASYNCHZP_\w+_LOG")


def text_of(value: Any) -> str:
    """Return `value` as text for Settings; every path becomes PATH."""
    if isinstance(value, str):
        return PATH if "/" in value else value
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, cast('Sequence[Any]', value)))}]"
    if isinstance(value, torch.Tensor):
        # Values on another device would make the host wait for it.
        known = value.tolist() if value.device.type == "cpu" else tuple(value.shape)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return f"tensor {known}"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return _ADDRESS.sub("", repr(value))


def process_settings() -> dict[str, str]:
    """Return versions and environment variables that change numbers or the order of collectives."""
    variables = {
        name: text_of(value)
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not _ONLY_REPORT.fullmatch(name)
    }
    return {"the version of torch": str(torch.__version__), **variables}


def settings_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in group if key not in ("params", "param_names")}


def optimizer_settings(groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"{key} of the optimizer's group {index}": text_of(value)
        for index, group in enumerate(groups)
        for key, value in settings_of_group(group).items()
    }


def hash_of_text(text: str) -> int:
    """Return a hash of at most 56 bits that is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def is_same_everywhere(hash_: int, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether all ranks of `group` pass the same hash. Collective: reduces 16 bytes."""
    extremes = torch.tensor([hash_, -hash_], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)  # pyright: ignore[reportUnknownMemberType]
    return bool(extremes[0] == -extremes[1])


def check_same_settings(
    settings: Settings,
    group: dist.ProcessGroup | None,
    device: torch.device,
    remedy: str,
    spelt: Callable[[str], str] = str,
) -> None:
    """Check that `settings` are the same on all ranks of `group`.

    Collective over `group`: reduces 16 bytes, and exchanges settings only if they differ. Then
    every rank raises ConfigurationError with one message, which spells names by `spelt` and ends
    with `remedy`.
    """
    mine = hash_of_text(repr(list(settings.items())))
    if is_same_everywhere(mine, group, device):
        return
    own = torch.tensor([mine], device=device)
    hashes = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(hashes, own, group=group)  # pyright: ignore[reportUnknownMemberType]
    ranks_of: dict[int, list[int]] = {}
    for rank, hash_ in enumerate(hashes):
        ranks_of.setdefault(int(hash_[0]), []).append(rank)
    kinds: list[tuple[list[int], Settings]] = []
    for ranks in list(ranks_of.values())[:_MOST_KINDS]:
        message: list[Any] = [dict(settings)]
        ranks = [dist.get_global_rank(group, rank) if group else rank for rank in ranks]
        dist.broadcast_object_list(message, ranks[0], group=group)
        kinds.append((ranks, message[0]))
    raise ConfigurationError(f"{_describe(kinds, spelt)}; {remedy}")


def _describe(kinds: list[tuple[list[int], Settings]], spelt: Callable[[str], str]) -> str:
    names = list(dict.fromkeys(name for _, settings in kinds for name in settings))
    differing = [name for name in names if len({settings.get(name) for _, settings in kinds}) > 1]
    if not differing:
        return "the ranks have the same settings in different orders"
    first, *rest = differing
    ranks_of: dict[str, list[int]] = {}
    for ranks, settings in kinds:
        ranks_of.setdefault(settings.get(first, _MISSING), []).extend(ranks)
    start = _first_difference(list(ranks_of))
    parts = [f"{_cut(value, start)} on {name_ranks(sorted(r))}" for value, r in ranks_of.items()]
    more = ", ".join(spelt(name) for name in rest[:3])
    more += f" and {len(rest) - 3} more" if len(rest) > 3 else ""
    return f"{spelt(first)} is {' and '.join(parts)}" + (
        f" ({more} {'differ' if len(rest) > 1 else 'differs'} too)" if rest else ""
    )


def _first_difference(values: list[str]) -> int:
    columns = enumerate(zip_longest(*values))
    return next((place for place, column in columns if len(set(column)) > 1), 0)


def _cut(value: str, start: int) -> str:
    begin = max(0, start - _MOST_CHARACTERS // 2) if len(value) > _MOST_CHARACTERS else 0
    part = value[begin : begin + _MOST_CHARACTERS]
    end = "..." if begin + _MOST_CHARACTERS < len(value) else ""
    return f"{'...' if begin else ''}{part}{end}"


Description = tuple[str, int]
"""A tensor's dtype, shape and kind in words, and a hash of its values."""


def describe(tensor: torch.Tensor) -> Description:
    """Describe a parameter or buffer that is whole."""
    words = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    if not isinstance(tensor, torch.nn.Parameter):
        words += ", a buffer"
    elif not tensor.requires_grad:
        words += ", not trained"
    # A wrapper (a DTensor, a quantized tensor) has no elements of its own to look at.
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return words, 0
    return words, int(value_hash([tensor], tensor.device))
