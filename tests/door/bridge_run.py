# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Calls Megatron Bridge's own functions, with its recipes shrunk, and notes each step.

torchrun ... -m tests.door.bridge_run OUT.json CALLS. CALLS is a JSON list of [function of this
module, its keyword arguments]; trainings with stock DDP come before those with AsyncHZP. What the
calls return is written to OUT.json.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.door.te_cpu import counted_peak, memory_of, prepare

# Norms of the two systems differ in their last bits, which clipped gradients would pass on.
_UNCLIPPED = {"clip_grad": 100.0}
# The function of a recipe in megatron.bridge.recipes, and what it needs to run on two small ranks.
RECIPES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "gpt": (
        "gpt.h100.vanilla_gpt.vanilla_gpt_pretrain_1gpu_h100_bf16_config",
        {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 4,
                "ffn_hidden_size": 64,
                "vocab_size": 128,
            }
        },
    ),
    "llama": (
        "llama.h100.llama3.llama32_1b_pretrain_1gpu_h100_bf16_config",
        {"optimizer": _UNCLIPPED},
    ),
    "qwen": (
        "qwen.h100.qwen3_moe.qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
        {
            "model": {
                "expert_model_parallel_size": 2,
                "sequence_parallel": False,
                "moe_token_dispatcher_type": "alltoall",  # deepep needs a GPU
                "moe_flex_dispatcher_backend": None,
                "moe_permute_fusion": False,
            },
            "optimizer": _UNCLIPPED,
        },
    ),
}
# Fused kernels that need a GPU.
_OFF = (
    "gradient_accumulation_fusion masked_softmax_fusion bias_activation_fusion bias_dropout_fusion "
    "apply_rope_fusion cross_entropy_loss_fusion persist_layer_norm"
)
_SMALL: dict[str, dict[str, Any]] = {
    "model": {
        "seq_length": 64,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **dict.fromkeys(_OFF.split(), False),
    },
    "dataset": {"seq_length": 64, "num_workers": 0, "persistent_workers": False, "split": "1,0,0"},
    "tokenizer": {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": 127},
    "train": {"train_iters": 6, "global_batch_size": 8, "micro_batch_size": 2},
    "validation": {"eval_iters": 0, "eval_interval": None},
    "scheduler": {"lr_warmup_iters": 1},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "use_distributed_optimizer": True},
    "ddp": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "dist": {"distributed_backend": "gloo"},
    "logger": {"log_interval": 1, "tensorboard_dir": None},
    "checkpoint": {
        "save": None,
        "load": None,
        "save_interval": 4,
        "dist_ckpt_optim_fully_reshardable": True,
    },
}


def train(
    recipe: str,
    system: str,
    source: str | None,
    *,
    model: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    is_fp32: bool = False,
    has_pasa: bool = False,
    is_initialized_from_source: bool = False,
    exports: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Call pretrain().

    Args:
        recipe: A key of RECIPES.
        system: "stock" or "ours".
        source: The folder of the tiny model for which the recipe's name on the hub stands.
        model: More settings of the model.
        checkpoint: More settings of checkpoints.
        is_fp32: Train in fp32, not in bf16.
        has_pasa: Take PASA as attention, which knows context parallelism on CPUs.
        is_initialized_from_source: Load the weights of `source` before the model is wrapped.
        exports: The folders into which weights are exported after a step, by its number.
    """
    if system == "ours":
        from megatron_asynchzp import install

        install()  # the line that a user adds
    _initialize()
    function, small = RECIPES[recipe]
    config, bridge = _config(function, source)
    for settings in (_SMALL, small, {"model": model or {}, "checkpoint": checkpoint or {}}):
        for part, values in settings.items():
            _change(getattr(config, part), values)
    from megatron.core.transformer.enums import AttnBackend

    config.model.attention_backend = AttnBackend.unfused
    if is_fp32:
        _make_fp32(config)
    if has_pasa:
        config.model.transformer_layer_spec = pasa_layer_spec
    if is_initialized_from_source:
        config.model.register_pre_wrap_hook(bridge.load_hf_weights)
    notes: dict[str, Any] = {"steps": []}

    def note(context: Any) -> None:
        import torch

        loss = (context.loss_dict or {"lm loss": 0.0})["lm loss"]  # on the last stage
        notes["steps"].append((float(torch.as_tensor(loss).flatten()[0]), context.grad_norm))
        notes["wrapper"] = type(context.model[0]).__name__
        if system == "ours":
            notes["memory"] = memory_of(context.model)
        if folder := (exports or {}).get(str(len(notes["steps"]))):
            bridge.save_hf_pretrained(context.model, folder)

    callbacks = _bridge("training.callbacks").CallbackManager()
    callbacks.register("on_train_step_end", note)
    step = _bridge("training.gpt_step").forward_step
    with counted_peak(_bridge("training.setup"), "_build_distributed_model") as peaks:
        _bridge("training.pretrain").pretrain(config, step, callbacks)
    return notes | {"peaks": peaks}


def import_weights(source: str, checkpoint: str) -> None:
    """Make a checkpoint of the tiny model in `source`."""
    from megatron.core.tensor_parallel import layers

    _initialize()
    # The model is only built: its attention and its fused gradients need a GPU to compute.
    has_fusion = mock.patch.object(layers, "_grad_accum_fusion_available", True)
    with mock.patch.dict(os.environ), has_fusion:
        for kind in ("FLASH", "FUSED", "UNFUSED"):
            os.environ.pop(f"NVTE_{kind}_ATTN", None)
        _bridge("").AutoBridge.import_ckpt(source, checkpoint)
    _bridge("training.initialize").destroy_global_state()


def export_weights(source: str, checkpoint: str, folder: str) -> None:
    """Write the weights of `checkpoint` to `folder` in the form of Hugging Face."""
    _bridge("").AutoBridge.from_hf_pretrained(source).export_ckpt(checkpoint, folder)


def pasa_layer_spec(config: Any) -> Any:
    """Bridge's specification of a layer, with PASA in the place of its attention."""
    from megatron_asynchzp.mcore.attention.core_attention import use_pasa_in
    from megatron_asynchzp.mcore.flags.pasa import PasaOptions

    spec = _bridge("models.gpt_provider").default_layer_spec(config)
    attention = spec.submodules.self_attention
    spec.submodules.self_attention = use_pasa_in(attention, PasaOptions())
    return spec


def _bridge(name: str) -> Any:
    return import_module(f"megatron.bridge.{name}".rstrip("."))


def _config(function: str, source: str | None) -> tuple[Any, Any]:
    """The recipe's config, and the bridge of `source`, which stands for a name on the hub."""
    module_name, name = function.rsplit(".", 1)
    module = _bridge(f"recipes.{module_name}")
    bridge = None
    if source is not None:
        bridge = _bridge("").AutoBridge.from_hf_pretrained(source)
        module.AutoBridge = SimpleNamespace(from_hf_pretrained=lambda *_, **__: bridge)
    return getattr(module, name)(), bridge


def _change(part: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert hasattr(part, name), name
        setattr(part, name, value)


def _make_fp32(config: Any) -> None:
    import torch

    config.mixed_precision = None
    for part in (config.model, config.optimizer):
        part.bf16, part.params_dtype = False, torch.float32
    config.model.autocast_dtype = config.model.pipeline_dtype = torch.float32


def _initialize() -> None:
    """Prepare a call: calls share process groups, which Bridge leaves to their owner."""
    import torch.distributed as dist

    # It keeps the state of a checkpoint that was read, and changes it while it trains.
    _bridge("training.utils.checkpoint_utils").read_train_state.cache_clear()
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def prepare_bridge() -> None:
    """Let Bridge run with megatron-core of a wheel, and of version 0.19."""
    import megatron.core.datasets.utils as datasets
    import megatron.core.models.hybrid.hybrid_layer_allocation as allocation
    import megatron.core.ssm.mamba_hybrid_layer_allocation as old_allocation

    datasets.compile_helpers = lambda: None  # the wheel has no Makefile
    for name in ("Symbols", "get_hybrid_total_layer_count", "parse_hybrid_pattern"):
        if not hasattr(old_allocation, name):  # megatron-core 0.19 has them elsewhere
            setattr(old_allocation, name, getattr(allocation, name))


def main(out: Path, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Make the calls one after another."""
    prepare()
    prepare_bridge()
    functions = {made.__name__: made for made in (train, import_weights, export_weights)}
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1  # of the last stage
    results: list[Any] = []
    for name, arguments in calls:
        results.append(functions[name](**arguments))
        if is_last:
            out.write_text(json.dumps({"results": results}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
