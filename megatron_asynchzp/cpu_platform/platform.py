# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Installs and removes the replacements, whose bodies are in inert_cuda.py and devices.py."""

import functools
import importlib
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

from megatron_asynchzp.cpu_platform import devices, inert_cuda, norms, state_space
from megatron_asynchzp.replacements import Replacements

logger = logging.getLogger(__name__)

_MEGATRON_PARTS = (
    "core.transformer.moe.moe_utils",
    "core.parallel_state",
    "core.optimizer.distrib_optimizer",
    "core.dist_checkpointing.strategies.async_utils",
    "core.transformer.torch_norm",
    "core.ssm.mamba_mixer",
    "core.transformer.dot_product_attention",
    "core.tensor_parallel.inference_layers",
)

# The interpreter has one torch, so its replaced attributes are state of the process.
_installed = Replacements(package="megatron")


def is_installed() -> bool:
    return bool(_installed.entries)


def install() -> list[str]:
    """Make the CPU answer as the CUDA device of torch and Megatron. Idempotent.

    It works before and after Megatron was imported. Returns one line per replaced attribute, none
    when the platform is installed; rank 0 logs them at level DEBUG.
    """
    if is_installed():
        return []
    # Before anything is replaced: importing Megatron imports dynamo, which builds a table of
    # torch's functions that stand-ins would upset.
    import torch._dynamo  # noqa: F401

    # Likewise torch's table of functions that `with torch.device(...)` moves, made once: with
    # stand-ins in it, models on the meta device would be real, now and after `uninstall`.
    from torch.utils._device import _device_constructors

    _device_constructors()

    parts = [_import(name) for name in _MEGATRON_PARTS]
    try:
        _replace_cuda(_installed)
        _replace_tensor_moves(_installed)
        _replace_collectives(_installed)
        _replace_megatron(_installed, parts)
        _replace_compiler(_installed)
    except BaseException:
        _installed.restore()
        raise
    copies = _installed.follow_copies()
    lines = [str(entry) for entry in _installed.entries[: len(_installed.entries) - copies]]
    lines.append(f"{copies} by-name copies of these in modules of megatron")
    if os.environ.get("RANK", "0") == "0":
        logger.info("CPU platform: Megatron runs on the CPU, %d attributes replaced", len(lines))
        logger.debug("CPU platform: replaced\n  %s", "\n  ".join(lines))
    return lines


def uninstall():
    if is_installed():
        _installed.restore()
        torch.compiler.set_stance("default")


def _replace_cuda(names: Replacements):
    for owner, attributes in (
        (torch.cuda, inert_cuda.cuda_attributes()),
        (torch.cuda.random, inert_cuda.rng_attributes()),
        (torch.cuda.nvtx, inert_cuda.nvtx_attributes()),
    ):
        for name, replacement in attributes.items():
            if hasattr(owner, name):
                names.replace(owner, name, replacement)
    # With a CUDA build of torch these two would answer for a device that must not be used; the
    # DataLoader asks them whether to pin memory.
    names.replace(torch.accelerator, "is_available", lambda: False)
    names.replace(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    if hasattr(torch._C, "_cuda_setRNGState"):
        names.replace(torch._C, "_cuda_setRNGState", torch.default_generator.set_state)


def _replace_tensor_moves(names: Replacements):
    def wrap(owner: Any, name: str, wrapper: Callable = devices.on_cpu):
        names.replace(owner, name, wrapper(getattr(owner, name)))

    own_device = functools.partial(devices.on_cpu, place=1)  # behind self
    for name in devices.FACTORIES:
        wrap(torch, name)
    for name in devices.NEW_METHODS:
        wrap(torch.Tensor, name)
    for owner in (torch.Tensor, torch.nn.Module):
        wrap(owner, "to", own_device)
        names.replace(owner, "cuda", devices.stay)
    names.replace(torch.Tensor, "pin_memory", devices.stay)
    names.replace(torch.Tensor, "record_stream", devices.nothing)
    wrap(torch.Tensor, "type", devices.type_as_on_cuda)
    wrap(torch, "load", devices.load_on_cpu)
    wrap(torch.utils._device.DeviceContext, "__init__", own_device)


def _replace_collectives(names: Replacements):
    for owner in (dist, dist.distributed_c10d):
        for name in devices.REDUCTIONS:
            names.replace(owner, name, devices.reduction_with_factor(getattr(owner, name)))
        names.replace(owner, "all_gather", devices.gather_of_any_sizes(owner.all_gather))
        scattered = devices.scatter_of_any_sizes(owner.reduce_scatter)
        names.replace(owner, "reduce_scatter", scattered)
    names.replace(dist, "_make_nccl_premul_sum", devices.PreMultipliedSum)


def _replace_compiler(names: Replacements):
    """Switch off dynamo, which asks the CUDA driver, also for functions compiled before."""
    names.replace(torch, "compile", devices.compile_nothing)
    torch.compiler.set_stance("force_eager")


def _replace_megatron(names: Replacements, parts: list[ModuleType]):
    moe_utils, parallel_state, optimizer, async_utils, *others = parts
    torch_norm, mamba_mixer, attention, inference_layers = others
    names.replace(moe_utils, "maybe_move_tensor_to_cpu", _as_split_sizes)
    # Its check whether a context of CUDA's random numbers drew from the CPU's: here they are one.
    random_log = logging.getLogger("megatron.core.tensor_parallel.random")
    names.replace(random_log, "filters", [*random_log.filters, _is_not_about_cpu_numbers])
    # NCCL's options would be handed to a gloo group.
    names.replace(parallel_state, "get_nccl_options", lambda *_, **__: None)
    _replace_checkpoints(names, optimizer.DistributedOptimizer)
    writer = async_utils.PersistentAsyncCaller
    names.replace(writer, "async_loop", staticmethod(_write_on_cpu))
    names.replace(torch_norm.WrappedTorchNorm, "__new__", norms.torch_norm)
    replace_mamba(names, mamba_mixer)
    _replace_attention(names, attention.DotProductAttention)
    if hasattr(inference_layers, "is_inference_column_parallel_linear"):  # megatron-core 0.20
        # Without Transformer Engine it asks isinstance() of None.
        names.replace(inference_layers, "is_inference_column_parallel_linear", _is_never)


def _replace_attention(names: Replacements, attention: type):
    """Let Megatron's local attention be built with the widths of multi-latent attention."""
    build = attention.__init__

    @functools.wraps(build)
    def with_widths(
        self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any
    ) -> None:
        build(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    names.replace(attention, "__init__", with_widths)


def replace_mamba(names: Replacements, mixer: ModuleType):
    """Give Mamba layers their kernels and norm, which come from packages for CUDA."""

    class ExtendedRMSNorm(state_space.GroupNorm):
        """Megatron's norm of a Mamba layer, over plain torch."""

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
        ) -> Any:
            return mixer.make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True),
                prefix,
                {"weight": 0},
                sharded_offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )

    names.replace(mixer, "HAVE_MAMBA_SSM", True)
    names.replace(mixer, "MAMBA_HAS_STATE_DTYPE", False)
    names.replace(mixer, "RMSNormGated", state_space.GroupNorm)
    names.replace(mixer, "ExtendedRMSNorm", ExtendedRMSNorm)
    names.replace(mixer, "mamba_split_conv1d_scan_combined", state_space.split_convolve_scan)


def _replace_checkpoints(names: Replacements, optimizer: type):
    """Let Megatron's distributed optimizer load what it saved with torch's Adam."""
    # Without Transformer Engine and apex it has torch's Adam alone. It asserts that steps were
    # counted before the load, looks for the count among the checkpoint's tensors, and gives all
    # parameters one counter, which each of them then advances.
    describe, load = optimizer.sharded_state_dict, optimizer.load_state_dict
    take = optimizer._set_main_param_and_optimizer_states

    def sharded_state_dict(self: Any, state_dict: Any, is_loading: bool = False, **kwargs: Any):
        inner = self.optimizer
        if is_loading and not inner.state and isinstance(inner, torch.optim.Adam):
            self.init_state_fn(inner, self.config)
            for state in inner.state.values():
                state["step"] = torch.zeros(())
        return describe(self, state_dict, is_loading, **kwargs)

    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]):
        take(self, model_param, {"step": None} | tensors)

    def load_state_dict(self: Any, state_dict: Any):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    names.replace(optimizer, "load_state_dict", load_state_dict)
    names.replace(optimizer, "sharded_state_dict", sharded_state_dict)
    names.replace(optimizer, "_set_main_param_and_optimizer_states", set_states)


def _write_on_cpu(*args: Any) -> None:
    """Install the platform in the new interpreter that writes checkpoints, then run its loop."""
    writer = _import("core.dist_checkpointing.strategies.async_utils").PersistentAsyncCaller
    loop = writer.async_loop
    install()
    loop(*args)


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.{name}")


def _is_never(module: Any) -> bool:
    return False


def _is_not_about_cpu_numbers(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed")


def _as_split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace maybe_move_tensor_to_cpu: the token dispatcher needs an array of split sizes."""
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor
