#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs linter, formatter and tests in an environment of their own:
# ./scripts/test.sh [--all] [arguments for pytest]. --all adds the tests marked slow. Ends with pytest's status, so a failed test fails the script.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
if [[ "${1:-}" == --all ]]; then
    selection=()
    shift
fi
source scripts/environment.sh
# The tests start many interpreters. Where no bytecode may be written beside the sources, each would
# compile torch, Megatron and transformers again, which takes 10 s: it goes to a folder of its own.
if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="$PWD/.pytest_cache/bytecode"
fi
if "$PYTHON" -m ruff --version >/dev/null 2>&1; then
    "$PYTHON" -m ruff check --quiet
    "$PYTHON" -m ruff format --check --quiet
else
    echo "test.sh: $PYTHON has no ruff: linter and formatter are skipped" >&2
fi
exec "$PYTHON" -m pytest "${selection[@]}" --durations=10 "$@"
