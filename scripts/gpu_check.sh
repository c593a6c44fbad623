#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs on this machine's GPUs what a CPU cannot show: scripts/gpu_check.sh [--only NAMES]
# [--json PATH] [--markdown PATH] [--time-limit SECONDS]. --help lists the checks. Exit status: 0,
# or 1 where a check failed, 2 for a wrong command line, 130 after Ctrl-C.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ASYNCHZP_MODULES=torch # a check that trains Megatron says so itself where it is missing
source scripts/environment.sh
exec "$PYTHON" -m scripts.gpu_check "$@"
