# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformer Engine that compute in FP8 with weights that are gathered in bf16: what
they need of the machine, and the quantised copies of weights that outlive a layer's call."""

from argparse import Namespace
from typing import Any

from torch import nn

from megatron_asynchzp.errors import ConfigurationError

# Before, layers look for the place of a gradient at a copy of the weight.
_LEAST = "2.15.0"
# From here on a layer can be told to quantise its weight again in backward.
_LEAST_FORGETFUL = "2.16.0"
_ANSWERS = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}


def refuse_missing_fp8(args: Namespace) -> None:
    """Raise ConfigurationError where this machine cannot compute what --fp8-format asks for."""
    if not args.fp8:
        return
    what = f"--fp8-format {args.fp8} --fp8-recipe {args.fp8_recipe}"
    from megatron.core.utils import get_te_version, is_te_min_version

    try:
        import transformer_engine.pytorch as te
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
    is_available = getattr(te, _ANSWERS.get(args.fp8_recipe, "is_fp8_available"))
    is_possible, reason = is_available(return_reason=True)
    if not is_possible:
        raise ConfigurationError(f"{what}: {reason} Choose another --fp8-recipe, or leave it out")


def forget_copies(module: nn.Module, config: Any) -> None:
    """Have layers quantise the gathered weight again in backward instead of keeping a copy until
    then, which would be of every weight. With delayed scaling they keep it: backward would find
    another scale."""
    from megatron.core.utils import is_te_min_version

    if not config.fp8 or config.fp8_recipe == "delayed" or not is_te_min_version(_LEAST_FORGETFUL):
        return
    for layer in module.modules():
        if hasattr(layer, "is_fsdp2"):  # a property of Transformer Engine's layers
            layer._is_fsdp2 = True
