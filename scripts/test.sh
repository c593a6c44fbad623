#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs linter, formatter, type checker and tests in an environment of their own:
# ./scripts/test.sh [--all] [arguments for pytest]. --all adds the tests marked slow, a fast set
# beside the newest torch that is supported, and those of local checkpoints. With arguments only the
# tests that they name run. Ends with pytest's status, so a failed test fails the script; so does
# what the linter, the formatter or the type checker finds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
if [[ "${1:-}" == --all ]]; then
    selection=()
    shift
fi
source scripts/environment.sh
# Linter and formatter; each tool is skipped with a line where an environment lacks it.
check_format() {
    if "$PYTHON" -m ruff --version >/dev/null 2>&1; then
        "$PYTHON" -m ruff check --quiet
        "$PYTHON" -m ruff format --check --quiet
    else
        echo "test.sh: $PYTHON has no ruff: linter and formatter are skipped" >&2
    fi
}

# Prints what it finds, and ends with status 1 where that is something.
check_types() {
    if "$PYTHON" -c "import basedpyright" 2>/dev/null; then
        "$PYTHON" -m basedpyright --pythonpath "$PYTHON" --level error --threads 1 2>&1
    else
        echo "test.sh: $PYTHON has no basedpyright: the type checker is skipped"
    fi
}

# They need nvidia-resiliency-ext, whose wheels ask for a later glibc than many machines have, and
# run with an older one. In a folder of its own it changes nothing for the other tests.
test_local_checkpoints() {
    local folder=.venv/resiliency
    "$PYTHON" -m uv pip install --quiet --python "$PYTHON" --target "$folder" --no-deps \
        --python-platform x86_64-manylinux_2_39 "nvidia-resiliency-ext>=0.6" || return
    PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m pytest -m slow tests/mcore/checkpoint/test_local.py
}

if (($# > 0)); then # only the tests that the arguments name
    exec "$PYTHON" -m pytest "${selection[@]}" --durations=10 "$@"
fi

check_format
# Two processes share the fast tests, where pytest-xdist is there: a test waits about half of its
# time for its ranks. The slow tests run alone: they start 8 ranks at once.
workers=()
if ((${#selection[@]} > 0)) && "$PYTHON" -c "import xdist" 2>/dev/null; then
    workers=(-n 2 --dist worksteal)
fi
types_log="$(mktemp)"
check_types >"$types_log" & # beside the tests; what it finds is shown after them
types=$!
status=0
"$PYTHON" -m pytest "${selection[@]}" "${workers[@]}" --durations=10 || status=$?
wait "$types" || status=$((status ? status : 1))
if ((${#selection[@]} == 0)); then
    "$PYTHON" -m scripts.versions --newest-torch || status=$((status ? status : 1))
    test_local_checkpoints || status=$((status ? status : 1))
fi
cat "$types_log" >&2
rm "$types_log"
exit "$status"
