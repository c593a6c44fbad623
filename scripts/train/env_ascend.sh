# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by launch.sh and launch.slurm for Ascend NPUs:
#     source scripts/train/env_ascend.sh "${flags[@]}"
# Needs CANN and torch_npu. What is set already stays. Nothing of it has been run by us.

# The paper, section 6: 16 cards per node, full mesh within 8.
RANKS_PER_NODE="${RANKS_PER_NODE:-16}" DEVICE_GIB=64
for cann in "${ASCEND_HOME_PATH:-}/set_env.sh" /usr/local/Ascend/ascend-toolkit/set_env.sh; do
    if [[ -z "${ASCEND_OPP_PATH:-}" && -f "$cann" ]]; then
        set +u # CANN's script reads variables that may not be there
        source "$cann"
        set -u
    fi
done

# Megatron calls torch.cuda: this script maps it to torch.npu, then runs the one behind it.
RUN_WITH=("$ASYNCHZP_ROOT/scripts/train/on_ascend.py")

# Megatron asks for it with tensor or context parallelism, whatever the device; no NPU reads it.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Collectives on the vector cores: no scheduling through the host's queue (docs/schedule.md).
export HCCL_OP_EXPANSION_MODE="${HCCL_OP_EXPANSION_MODE:-AIV}"
# As long as Megatron's own --distributed-timeout-minutes (10): compilation comes before it.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-600}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-600}"
# Two levels of asynchronous submission: the host runs ahead of the device.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-2}"
