#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs linter, formatter and type checker, or with --no-types the first two and with --types the last
# alone. Ends with status 1 where one of them finds something. A tool that the environment lacks is skipped with a line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

status=0
check() { # a module, and its arguments
    if "$PYTHON" -c "import $1" 2>/dev/null; then
        "$PYTHON" -m "$@" || status=1
    else
        echo "lint.sh: $PYTHON has no $1: it is skipped" >&2
    fi
}

if [[ "${1:-}" != --types ]]; then
    check ruff check --quiet
    check ruff format --check --quiet
    formatter="$(dirname "$PYTHON")/clang-format"
    if [[ -x "$formatter" ]]; then
        git ls-files '*.cpp' '*.hpp' | xargs "$formatter" --dry-run --Werror --style=file || status=1
    else
        echo "lint.sh: there is no clang-format: it is skipped" >&2
    fi
fi
if [[ "${1:-}" != --no-types ]]; then
    check basedpyright --pythonpath "$PYTHON" --level error
fi
exit "$status"
