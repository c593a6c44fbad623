#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs a fast set of tests beside other versions of torch, Megatron and Python, each in an environment
# of its own: ./scripts/test_versions.sh [--torch 2.15.0] [--megatron 0.18.2] [--python 3.13]. Without
# an option: all combinations that docs/megatron.md lists. Exit status: 0, or 1 where a test failed
# or an environment could not be made, 2 for a wrong command line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec "$PYTHON" -m scripts.versions "$@"
