#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Trains one row of the paper's tables, or one 8-GPU node, with torchrun. On every node:
#
#   one node     scripts/train/launch.sh node-9b-hzp -- --data-path PREFIX --tokenizer-type ...
#   many nodes   NODE_RANK=<0..N-1> MASTER_ADDR=<first host> scripts/train/launch.sh ROW [-- ...]
#   Slurm        sbatch --nodes=N scripts/train/launch.slurm ROW [-- ...]
#   no node      scripts/train/launch.sh ROW --dry-run       what it would be, on a laptop
#
#   --list              the rows                  --print     the command, without running it
#   --all               dry run of all rows       --platform  cuda (default) or ascend
#   -- FLAGS            more Megatron flags, which win; without data among them, mock data; for a
#                       dry run --asynchzp-dry-run RANKS and --asynchzp-device-gb G, too
#
# NNODES (default: the row's ranks / RANKS_PER_NODE), RANKS_PER_NODE (8; Ascend 16), MASTER_PORT.
# MAX_RESTARTS (0): how often torchrun starts all ranks again when one has died; give --save and
# --load the same folder.
# MEGATRON_LM=/path/to/checkout runs its pretrain_gpt.py in place of ours. ASYNCHZP_PYTHON: the
# interpreter of your environment. Exit status: torchrun's; 2 for what cannot be started.
set -euo pipefail

fail() {
    printf 'scripts/train: %s\n' "$*" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
row="" mode=run platform=cuda extra=()
while (($#)); do
    case "$1" in
        --) shift; extra=("$@"); break ;;
        --list | --all | --dry-run | --print) mode="${1#--}" ;;
        --platform) [[ $# -ge 2 ]] || fail "--platform: cuda or ascend"; platform="$2"; shift ;;
        -h | --help) sed -n '4,22s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) fail "$1: no such option (--help lists them; Megatron's flags come after --)" ;;
        *) [[ -z "$row" ]] || fail "$1: one row at a time, $row was given"; row="$1" ;;
    esac
    shift
done
[[ "$platform" == cuda || "$platform" == ascend ]] || fail "--platform $platform: cuda or ascend"
[[ -n "$row" || "$mode" == list || "$mode" == all ]] || fail "give a row (--list) or see --help"
[[ -z "$row" || "$mode" != all ]] || fail "--all is for all rows, $row was given"

source "$root/scripts/environment.sh"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[[ "$mode" != list ]] || exec "$PYTHON" -m scripts.train.rows

if [[ "$mode" == all ]]; then # of each whether a device is large enough, or why it is refused
    status=0 verdict='^(fits|does not fit): |^(megatron_asynchzp|scripts/train): '
    for row in $("$PYTHON" -m scripts.train.rows | awk 'NR > 3 {print $1}'); do
        found="$("$0" "$row" --dry-run --platform "$platform" -- "${extra[@]}" 2>&1)" || status=$?
        printf '%-20s %s\n' "$row" "$(grep -m1 -E "$verdict" <<<"$found")"
    done
    exit "$status"
fi

printed="$("$PYTHON" -m scripts.train.rows "$row" --platform "$platform" -- "${extra[@]}")" || exit 2
mapfile -t words <<<"$printed" # the number of ranks, then the flags
RUN_WITH=()
source "$root/scripts/train/env_$platform.sh" "${words[@]:1}"
script=("$root/scripts/train/pretrain_gpt.py")
if [[ -n "${MEGATRON_LM:-}" ]]; then
    [[ -f "$MEGATRON_LM/pretrain_gpt.py" ]] || fail "MEGATRON_LM=$MEGATRON_LM: no pretrain_gpt.py"
    script=("$MEGATRON_LM/pretrain_gpt.py")
    ((${#RUN_WITH[@]})) || RUN_WITH=(-m megatron_asynchzp.launch)
fi
if [[ "$mode" == dry-run ]]; then
    "$PYTHON" -m scripts.train.rows "$row" --notes
    LOCAL_WORLD_SIZE="$RANKS_PER_NODE" exec "$PYTHON" -m megatron_asynchzp.launch "${script[@]}" \
        --asynchzp-dry-run "${words[0]}" --asynchzp-device-gb "$DEVICE_GIB" "${words[@]:1}"
fi

ranks="${words[0]}" per_node="$RANKS_PER_NODE"
((per_node <= ranks)) || per_node="$ranks"
nodes="${NNODES:-$((ranks / per_node))}"
((nodes * per_node == ranks)) ||
    fail "$row has $ranks ranks, but NNODES=$nodes x RANKS_PER_NODE=$per_node are" \
        "$((nodes * per_node))"
restarts="${MAX_RESTARTS:-0}"
[[ "$restarts" =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$restarts: give a number"
rendezvous=(--standalone)
if ((nodes > 1)); then
    if [[ "$mode" == run ]]; then
        [[ -n "${MASTER_ADDR:-}" ]] || fail "$nodes nodes: set MASTER_ADDR to the host of node 0"
        [[ -n "${NODE_RANK:-}" ]] || fail "$nodes nodes: set NODE_RANK to 0 ... $((nodes - 1))"
    fi
    host="${MASTER_ADDR:-\$MASTER_ADDR}" port="${MASTER_PORT:-29500}"
    rendezvous=(--node-rank "${NODE_RANK:-\$NODE_RANK}" --master-addr "$host" --master-port "$port")
    if ((restarts)); then
        # With the static one above the other nodes never hear of a restart. Here torchrun numbers
        # the nodes by itself; NODE_RANK 0 holds the store.
        is_host="\$((NODE_RANK == 0))"
        [[ -z "${NODE_RANK:-}" ]] || is_host="$((NODE_RANK == 0))"
        rendezvous=(--rdzv-backend c10d --rdzv-endpoint "$host:$port"
            --rdzv-id "${SLURM_JOB_ID:-$row}" --rdzv-conf "is_host=$is_host")
    fi
fi
if ((restarts)); then
    rendezvous+=(--max-restarts "$restarts")
    # Otherwise the new ranks find the addresses of the old ones in torchrun's store (torch 2.13).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
fi
command=("$PYTHON" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$per_node"
    "${rendezvous[@]}" "${RUN_WITH[@]}" "${script[@]}" "${words[@]:1}")
if [[ "$mode" == print ]]; then
    printf 'CUDA_DEVICE_MAX_CONNECTIONS=%s' "$CUDA_DEVICE_MAX_CONNECTIONS"
    printf ' %q' "${command[@]}"
    printf '\n'
    exit 0
fi
exec "${command[@]}"
