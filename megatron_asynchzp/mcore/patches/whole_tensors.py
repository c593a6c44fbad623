# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Where Megatron reads whole parameters and gradients, or changes them."""

from collections.abc import Callable
from typing import Any

from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.settings import run_args
from megatron_asynchzp.mcore.step.communication import Communication


@replaces(
    "megatron.training.utils.common_utils.calc_params_l2_norm",
    "model force_create_fp32_copy",
    why="the norm of all parameters (--log-params-norm) is summed over shards",
    drop_when="the norm of parameters is a method of the wrapper",
)
def calc_params_l2_norm(
    original: Callable, model: Any, force_create_fp32_copy: bool = False
) -> float:
    if (communication := Communication.current()) is None:
        return original(model, force_create_fp32_copy)
    from megatron_asynchzp.mcore.step.whole_tensors import norm_of_params

    # As stock: of the main parameters in bf16, of the model's in fp16.
    in_model_dtype = force_create_fp32_copy or not run_args().bf16
    return norm_of_params(communication.runtimes, in_model_dtype)


@replaces(
    "megatron.core.utils.check_param_hashes_across_dp_replicas",
    "model cross_check",
    why="what is compared between replicas (--check-weight-hash-across-dp-replicas-interval) are "
    "the shards that several ranks hold, moments included",
    drop_when="the comparison of replicas is a method of the wrapper",
)
def check_param_hashes(original: Callable, model: Any, cross_check: bool = False) -> bool:
    if (communication := Communication.current()) is None:
        return original(model, cross_check)
    from megatron_asynchzp.mcore.step.replicas import compare_replicas

    compare_replicas(communication.runtimes, communication.moments_of, communication.driver.step)
    return True


@replaces(
    "megatron.core.optimizer.qk_clip.clip_qk",
    "model log_max_only",
    why="the rows that --qk-clip scales are scaled in shards",
    drop_when="the wrapper gives each shard's place in its parameter",
)
def clip_qk(original: Callable, model: Any, log_max_only: bool = False) -> float:
    if (communication := Communication.current()) is None:
        return original(model, log_max_only)
    from megatron_asynchzp.mcore.step.qk_clip import clip_scores

    return clip_scores(model, communication.runtimes, log_max_only)


@replaces(
    "megatron.training.checkpointing.save_grads",
    "save_dir state_dict iteration grad_label",
    why="dumps of parameters and gradients (--save-params-interval, --save-wgrads-interval) hold "
    "whole tensors",
    drop_when="train_step asks the wrapper for whole tensors",
)
def save_grads(
    original: Callable, save_dir: Any, state_dict: Any, iteration: int, grad_label: str
) -> None:
    communication = Communication.current()
    if communication is not None and grad_label in ("params", "wgrads"):
        from megatron.core import mpu

        from megatron_asynchzp.mcore.step.whole_tensors import whole_grads, whole_params

        gather = whole_params if grad_label == "params" else whole_grads
        is_writer = mpu.get_expert_data_parallel_rank() == 0
        state_dict = {}
        for index, runtime in enumerate(communication.runtimes):
            # Named as Megatron does, without the wrapper of 16-bit models.
            state_dict[f"model_chunk{index}"] = {
                name.removeprefix("module."): tensor.to("cpu", copy=True)
                for name, tensor in gather(runtime)
                if is_writer
            }
    original(save_dir, state_dict, iteration, grad_label)
