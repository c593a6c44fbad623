#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a trained GPT: sets up the environment, then runs scripts/quickstart.py,
# whose --help lists what can be changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec "$PYTHON" -m scripts.quickstart "$@"
