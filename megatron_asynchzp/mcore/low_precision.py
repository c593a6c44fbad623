# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformer Engine that compute in FP8 with weights that are gathered in bf16: what
they need of the machine, and the quantised copies of weights that outlive a layer's call."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from torch import nn

from megatron_asynchzp.errors import ConfigurationError

# Before, layers look for the place of a gradient at a copy of the weight.
_LEAST = "2.15.0"
_ANSWERS = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}


def refuse_missing_te(args: Namespace) -> None:
    """Raise ConfigurationError where this machine cannot compute what --fp8-format asks for, or has
    nothing that captures the layers of --cuda-graph-impl."""
    if not args.fp8 and args.cuda_graph_impl != "transformer_engine":
        return
    what = f"--fp8-format {args.fp8} --fp8-recipe {args.fp8_recipe}"
    if not args.fp8:
        what = "--cuda-graph-impl transformer_engine"
    from megatron.core.utils import get_te_version, is_te_min_version

    try:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs Transformer Engine {_LEAST} or later ({error}); "
            'pip install "transformer_engine[pytorch]", or leave the flags out'
        ) from error
    if not is_te_min_version(_LEAST):
        raise ConfigurationError(
            f"{what} needs Transformer Engine {_LEAST} or later, and {get_te_version()} is "
            "installed; install a later one, or leave the flags out"
        )
    if not args.fp8:
        return
    is_available = getattr(te, _ANSWERS.get(args.fp8_recipe, "is_fp8_available"))
    is_possible, reason = is_available(return_reason=True)
    if not is_possible:
        raise ConfigurationError(f"{what}: {reason} Choose another --fp8-recipe, or leave it out")


def forget_copies(module: nn.Module, config: Any) -> None:
    """Have layers quantise the gathered weight again in backward instead of keeping a copy until
    then, which would be of every weight."""
    for layer in _quantising(module, config):
        if not _keeps(layer, config):
            layer._is_fsdp2 = True


def kept_nbytes(module: nn.Module, config: Any) -> int:
    """Bytes of the copies that a model's layers still keep, at most: two of a weight, one of them
    transposed."""
    layers = [layer for layer in _quantising(module, config) if _keeps(layer, config)]
    weights = [param for layer in layers for param in layer.parameters(recurse=False)]
    return sum(2 * weight.numel() for weight in weights if weight.dim() == 2)


def _quantising(module: nn.Module, config: Any) -> Iterator[Any]:
    """The layers of Transformer Engine that have weights, where the model computes in FP8."""
    if config.fp8:
        yield from (one for one in module.modules() if hasattr(one, "_fp8_workspaces"))


def _keeps(layer: Any, config: Any) -> bool:
    """With delayed scaling backward would find another scale; layers of experts in groups, and all
    of earlier versions, cannot quantise again."""
    is_grouped = hasattr(layer, "num_gemms")
    return config.fp8_recipe == "delayed" or is_grouped or not hasattr(type(layer), "is_fsdp2")
