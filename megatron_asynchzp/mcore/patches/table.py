# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every function that is replaced, in the order of the documentation."""

from megatron_asynchzp.mcore.patches import (
    arguments,
    datasets,
    model,
    offloading,
    process,
    whole_tensors,
)
from megatron_asynchzp.mcore.patches.checkpoint import CHECKPOINT_PATCHES
from megatron_asynchzp.mcore.patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    arguments.add_arguments,
    arguments.validate_args,
    datasets.compile_helpers,
    model.build_models,
    model.get_model,
    model.ddp_wrap,
    model.wrap_chunks,
    model.get_optimizer,
    process.initialize_model_parallel,
    process.print_rank_last,
    process.report_theoretical_memory,
    process.get_signal_handler,
    process.destroy_process_group,
    model.build_module,
    model.capture_layers,
    model.capture_recorded,
    offloading.offload_chunk,
    whole_tensors.calc_params_l2_norm,
    whole_tensors.check_param_hashes,
    whole_tensors.clip_qk,
    whole_tensors.save_grads,
    *CHECKPOINT_PATCHES,
)
