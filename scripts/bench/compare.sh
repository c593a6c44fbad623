#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Sets up the environment, then runs scripts/bench/compare.py, whose --help lists what can be
# changed; --quick is one network, all contenders once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
exec "$PYTHON" -m scripts.bench.compare "$@"
