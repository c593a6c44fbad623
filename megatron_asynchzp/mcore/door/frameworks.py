# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where frameworks build models within building(), and use parameters within whole(), or asleep."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec, PathFinder
from inspect import signature
from types import ModuleType
from typing import Any

from megatron_asynchzp.mcore.door.building import building
from megatron_asynchzp.mcore.door.whole import runtimes_of, whole
from megatron_asynchzp.mcore.door.wrapper import DoorDataParallel
from megatron_asynchzp.mcore.patches.patch import Patch, apply_patches, replaces
from megatron_asynchzp.mcore.step.optimizer import AsyncHZPOptimizer
from megatron_asynchzp.mcore.step.whole_tensors import norm_of_params

_TRAINER = "swift.megatron.trainers.base.BaseMegatronTrainer"
_BRIDGE = "megatron.bridge.models.conversion"


def _read_whole(models: Any, read: Callable, *args: Any, **options: Any) -> Iterator[Any]:
    with whole(models):
        yield from read(*args, **options)


def _exporting(method: str, parameters: str) -> Patch:
    def export(original: Callable, self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        models = args[0] if args else options[parameters.split()[1]]
        return _read_whole(models, original, self, *args, **options)

    why = "a bridge writes and sends weights in the form of Hugging Face from here"
    drop_when = "the bridge asks the wrapper for whole parameters"
    return replaces(method, parameters, why=why, drop_when=drop_when)(export)


@replaces(
    "verl.workers.engine.megatron.transformer_impl.MegatronEngine.get_per_tensor_param_shard",
    "self kwargs",
    why="verl reads weights here, and sends a generator their changes",
    drop_when="verl asks the wrapper for whole parameters",
)
def export_shards(original: Callable, self: Any, **options: Any) -> tuple[Iterator[Any], Any]:
    values, adapters = original(self, **options)
    return _read_whole(self.module, lambda: values), adapters


def _within(
    context: Callable[..., AbstractContextManager], method: str, parameters: str, why: str
) -> Patch:
    def call(original: Callable, *args: Any, **options: Any) -> Any:
        with context(*args, **options):
            return original(*args, **options)

    return replaces(method, parameters, why=why, drop_when="the framework calls AsyncHZP")(call)


@replaces(
    f"{_TRAINER}._initialize_embedding",
    "model",
    why="ms-swift looks here for rows of new tokens, which are 0, and draws them",
    drop_when="ms-swift asks the wrapper for whole parameters",
)
def initialize_embedding(original: Callable, *args: Any) -> None:
    model = args[-1]  # behind the trainer: it is a static method, and this is none
    held = [vars(param) for param in model.parameters() if hasattr(param, "main_param")]
    mains = [attributes.pop("main_param") for attributes in held]  # which it would write whole
    try:
        with whole(model, writes=True):
            original(model)
    finally:
        for attributes, main in zip(held, mains, strict=True):
            attributes["main_param"] = main


@replaces(
    "verl.utils.checkpoint.megatron_checkpoint_manager.MegatronCheckpointManager."
    "_build_sharded_state_dict_metadata",
    "self",
    why="verl states the optimizer's form for the state, and again for the file it writes",
    drop_when="verl writes the metadata with which the state was made",
)
def metadata_of_state(original: Callable, self: Any) -> dict[str, Any]:
    # As OptimizerCheckpoint.sharded_state_dict writes it into what it is given.
    form = {"distrib_optim_sharding_type": "fully_reshardable"}
    return original(self) | (form if isinstance(self.optimizer, AsyncHZPOptimizer) else {})


@replaces(
    "megatron.bridge.training.utils.train_utils.calc_params_l2_norm",
    "model model_config use_megatron_fsdp force_create_fp32_copy",
    why="Megatron Bridge logs the norm of all parameters (log_params_norm)",
    drop_when="the norm of parameters is a method of the wrapper",
)
def calc_params_l2_norm(original: Callable, *args: Any, **options: Any) -> float:
    given = signature(original).bind(*args, **options).arguments
    if not (runtimes := runtimes_of(given["model"])):
        return original(*args, **options)
    in_model_dtype = given.get("force_create_fp32_copy") or not given["model_config"].bf16
    return norm_of_params(runtimes, in_model_dtype)


def _offloading(module: str) -> list[Patch]:
    """The patches of four functions that verl and ms-swift have in common."""

    def move(original: Callable, models: Sequence[Any], *args: Any, **options: Any) -> None:
        # Stock moves a wrapper's buffers, which ours lacks: one without optimizer is a module.
        sharded = [model for model in models if isinstance(model, DoorDataParallel)]
        optimizer = sharded[0].optimizer() if sharded else None
        if optimizer is None:
            plain = [m.module if isinstance(m, DoorDataParallel) else m for m in models]
            original(plain, *args, **options)
        elif (leaves := "offload" in original.__name__) != _is_asleep(optimizer):
            optimizer.sleep(2) if leaves else optimizer.wake()

    def move_states(original: Callable, optimizers: Any) -> None:
        if not (isinstance(optimizers, AsyncHZPOptimizer) and _is_asleep(optimizers)):
            original(optimizers)

    why = "a model that leaves the device takes its shards and the optimizer's states with it"
    calls = {
        "offload_megatron_model_to_cpu": ("models", move),
        "load_megatron_model_to_gpu": ("models load_grad load_frozen_params", move),
        "offload_megatron_optimizer": ("optimizers", move_states),
        "load_megatron_optimizer": ("optimizers", move_states),
    }
    return [
        replaces(f"{module}.{name}", parameters, why=why, drop_when="it asks the wrapper")(call)
        for name, (parameters, call) in calls.items()
    ]


def _is_asleep(optimizer: AsyncHZPOptimizer) -> bool:
    return optimizer.model_chunks[0].runtime.is_asleep


def _whole_models(trainer: Any, *_: Any, **__: Any) -> AbstractContextManager:
    return whole(trainer.unwrapped_models, writes=True)


_MERGES = "ms-swift adds adapters to the weights, or takes them off, around an export"
_PATCHES = [
    _exporting(
        "mcore_bridge.bridge.gpt_bridge.GPTBridge.export_weights",
        "self mg_models target_device only_master_rank peft_format adapter_name converter "
        "tqdm_desc disable_tqdm _is_saving skip_unsupported_export",
    ),
    _within(
        lambda cfg, pg_collection: building(pg_collection),
        "megatron.bridge.training.setup._build_distributed_model",
        "cfg pg_collection",
        "Megatron Bridge builds the trained model here, reads its weights and wraps it",
    ),
    _within(
        lambda self, hf_pretrained, megatron_model, *_, **__: whole(megatron_model, writes=True),
        f"{_BRIDGE}.model_bridge.MegatronModelBridge.load_weights_hf_to_megatron",
        "self hf_pretrained megatron_model allowed_mismatched_params",
        "Megatron Bridge reads weights of Hugging Face here, also after the optimizer is made",
    ),
    _exporting(
        f"{_BRIDGE}.model_bridge.MegatronModelBridge.stream_weights_megatron_to_hf",
        "self megatron_model hf_pretrained cpu show_progress conversion_tasks "
        "merge_adapter_weights weight_dtype",
    ),
    _exporting(
        f"{_BRIDGE}.quant_bridge.MegatronQuantizationBridge.stream_weights_megatron_to_hf_quant",
        "self megatron_model hf_pretrained quantization_checker quant_fn quant_block_size cpu "
        "show_progress conversion_tasks merge_adapter_weights",
    ),
    _exporting(
        f"{_BRIDGE}.peft_bridge.MegatronPeftBridge.stream_adapter_weights_megatron_to_hf",
        "self megatron_model cpu show_progress exclude_adapter_base_prefixes",
    ),
    _within(
        lambda self: building(),
        f"{_TRAINER}.prepare_model",
        "self",
        "ms-swift builds the trained model here, reads its weights and wraps it",
    ),
    _within(_whole_models, f"{_TRAINER}.merge_lora_adapters", "self adapter_name", _MERGES),
    _within(_whole_models, f"{_TRAINER}.unmerge_lora_adapters", "self", _MERGES),
    *(initialize_embedding, calc_params_l2_norm, export_shards, metadata_of_state),
    *_offloading("swift.megatron.trainers.utils"),
    *_offloading("verl.utils.megatron_utils"),
]


def _patches_by_module() -> dict[str, list[Patch]]:
    patches: dict[str, list[Patch]] = {}
    for patch in _PATCHES:
        above, _, name = patch.module.rpartition(".")
        patches.setdefault(above if name[:1].isupper() else patch.module, []).append(patch)
    return patches


class _PatchesOnImport:
    """Finds modules of frameworks as Python does, and replaces their functions once imported."""

    patches = _patches_by_module()

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, _: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in cls.patches else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            apply_patches(cls.patches[name])

        spec.loader.exec_module = exec_module
        return spec


def patch_frameworks() -> None:
    """Replace the functions of frameworks, also of those that this process imports later."""
    for module, patches in _PatchesOnImport.patches.items():
        if module in sys.modules:
            apply_patches(patches)
    sys.meta_path.insert(0, _PatchesOnImport)
