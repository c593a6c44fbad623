# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by launch.sh and launch.slurm for NVIDIA GPUs, with the row's flags as arguments:
#     source scripts/train/env_cuda.sh "${flags[@]}"
# What is set already stays. docs/schedule.md has the reason for each; none has been measured by us yet.

RANKS_PER_NODE="${RANKS_PER_NODE:-8}" DEVICE_GIB=80

# Below Blackwell Megatron refuses tensor or context parallelism without one hardware queue. It
# makes a gather that waits hold up computation that does not need it, so nobody else gets it.
case " $* " in
    *" --tensor-model-parallel-size "* | *" --context-parallel-size "*)
        export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" ;;
    *) export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" ;;
esac

# The engine's communicators and Megatron's meet on the device only: launch them in the order of the
# host (NCCL 2.26 or later; older ones ignore it).
export NCCL_LAUNCH_ORDER_IMPLICIT="${NCCL_LAUNCH_ORDER_IMPLICIT:-1}"
# Fewer channels leave more of the device to computation. Try 8 or 16; unset is NCCL's own choice:
#     export NCCL_MAX_CTAS=16
