# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's layers in FP8 or FP4 with bf16 shards.

Owns the demands on the machine, the quantised copies of weights that outlive a layer's call, and
the weights that travel as codes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from megatron_asynchzp.engine.comm.block_formats import BlockFormat, Mxfp8, Nvfp4, ScaledFp8
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.mcore.patches.patch import found_version
from megatron_asynchzp.planner.activations import FP4_COPIES_NBYTES, FP8_COPIES_NBYTES
from megatron_asynchzp.versions import Version

# Before, layers look for the place of a gradient at a copy of the weight.
_LEAST = "2.15.0"
_OWN_GRAPHS = Version(0, 19)  # Megatron's own graphs of layers are tested from here on
# Parts of the names of linear layers within each of --recompute-modules; unknown: all.
_RECOMPUTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("core_attn", "moe_act", "layernorm", "gdn_norm_out"), ()),
    **dict.fromkeys(("mlp", "moe"), ("mlp.",)),
    "shared_experts": ("shared_experts.",),
    "mla_up_proj": ("_up_proj", "linear_q_proj"),
}
_ANSWERS = {
    "mxfp8": "is_mxfp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "nvfp4": "is_nvfp4_available",
}


def faults_of_machine(args: Any) -> Iterator[str]:
    """Name a library or a device that FP8, FP4 or CUDA graphs need and this machine lacks."""
    flags, recipe = f"--cuda-graph-impl {args.cuda_graph_impl}", None
    if args.cuda_graph_impl == "local" and Version.of(found_version()) < _OWN_GRAPHS:
        yield (
            f"{flags} needs megatron-core {_OWN_GRAPHS} or later, and {found_version()} is "
            "installed; use --cuda-graph-impl transformer_engine"
        )
    if args.fp8:
        recipe, flags = args.fp8_recipe, f"--fp8-format {args.fp8} --fp8-recipe {args.fp8_recipe}"
    elif args.fp4:
        recipe, flags = args.fp4_recipe, f"--fp4-format {args.fp4} --fp4-recipe {args.fp4_recipe}"
    elif args.cuda_graph_impl == "none":
        return
    from megatron.core.utils import get_te_version, is_te_min_version

    needs = f"{flags} needs Transformer Engine {_LEAST} or later"
    try:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        remedy = 'pip install "transformer_engine[pytorch]", or leave the flags out'
        yield f"{needs} ({error}); {remedy}"
        return
    if not is_te_min_version(_LEAST):
        yield (
            f"{needs}, and {get_te_version()} is installed; install a later one, or leave the "
            "flags out"
        )
    if recipe is not None:
        answer = getattr(te, _ANSWERS.get(recipe, "is_fp8_available"))
        is_possible, reason = answer(return_reason=True)
        if not is_possible:
            yield f"{flags}: {reason} Choose another recipe, or leave it out"


def forget_copies(module: nn.Module, config: Any) -> None:
    """Make layers quantise the gathered weight again in backward instead of keeping copies."""
    for _, layer in _quantising(module, config):
        if not _keeps(layer, config):
            layer._is_fsdp2 = True


def kept_nbytes(module: nn.Module, config: Any) -> int:
    """Return the most bytes of copies that layers still keep: two of a weight, one transposed."""
    layers = [layer for _, layer in _quantising(module, config) if _keeps(layer, config)]
    weights = [param for layer in layers for param in layer.parameters(recurse=False)]
    nbytes = FP4_COPIES_NBYTES if config.fp4 else FP8_COPIES_NBYTES
    return round(nbytes * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _quantising(module: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    if config.fp8 or config.fp4:
        yield from (n for n in module.named_modules() if hasattr(n[1], "_fp8_workspaces"))


def _keeps(layer: Any, config: Any) -> bool:
    """Return whether a layer cannot quantise again: delayed scaling, grouped or old layers."""
    is_delayed = config.fp8 and config.fp8_recipe == "delayed"
    return is_delayed or hasattr(layer, "num_gemms") or not hasattr(type(layer), "is_fsdp2")


# ---- gathers as codes


def send_codes(module: nn.Module, config: Any, units: Iterable[HZPUnit]) -> None:
    """Let weights of layers that compute in FP8 or FP4 travel as codes (can_gather_in_codes)."""
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe, is_first_last_bf16_layer
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer
    from transformer_engine.pytorch import fp8  # pyright: ignore[reportMissingImports]

    def is_computing() -> bool:
        state = fp8.FP8GlobalStateManager
        return state.is_fp8_enabled() and _forms_of(state.get_fp8_recipe()) == forms

    forms = _forms_of(get_fp4_recipe(config) if config.fp4 else get_fp8_recipe(config))
    if not forms:
        return
    layers: list[Any] = [m for m in module.modules() if isinstance(m, BaseTransformerLayer)]
    # Layers read one code set twice, or another one in backward unless they keep or recompute.
    weights = {
        param
        for layer in layers
        if not is_first_last_bf16_layer(config, layer.layer_number - 1)
        for name, inner in _quantising(layer, config)
        if (len(forms) == 1 or not (_keeps(inner, config) or _is_recomputed(name, config)))
        # Attention that absorbs this weight multiplies with it itself, in bf16.
        and not (getattr(config, "experimental_attention_variant", None) and "kv_up_proj" in name)
        for param in inner.parameters(recurse=False)
        if param.dim() == 2
    }
    for unit in units:
        named = zip(unit.param_names, unit.params, strict=True)
        names = [name for name, param in named if param in weights]
        unit.gather_in_codes(names, forms, is_computing)


def _is_recomputed(name: str, config: Any) -> bool:
    """Return whether the backward of a layer calls its linear layer `name` again."""
    if config.recompute_granularity != "selective":
        return False  # the layer is called again as a whole, which its unit notices
    parts = [part for key in config.recompute_modules for part in _RECOMPUTED.get(key, ("",))]
    return any(part in name for part in parts)


def _forms_of(recipe: Any) -> list[BlockFormat]:
    """Return the formats in which layers read weights: one, or one for each direction, or none."""
    is_blocked = recipe.float8_block_scaling() and recipe.w_block_scaling_dim == 2
    if is_blocked or recipe.float8_current_scaling():
        weight, side = recipe.fp8_quant_fwd_weight, 128 if is_blocked else None
        return [ScaledFp8(side, side, weight.power_2_scale, weight.amax_epsilon)]
    if recipe.mxfp8() and not getattr(recipe, "enable_2d_quantization", False):
        return [Mxfp8(1, 32), Mxfp8(32, 1)]
    if recipe.nvfp4() and getattr(recipe, "nvfp4_4over6", "none") == "none":
        is_square = recipe.fp4_quant_fwd_weight.fp4_2d_quantization
        return [Nvfp4(16, 16)] if is_square else [Nvfp4(1, 16), Nvfp4(16, 1)]
    return []
