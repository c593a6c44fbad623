#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs linter, formatter and tests in an environment of their own:
# ./scripts/test.sh [--all] [arguments for pytest]. --all adds the tests marked slow, the type
# checker, a fast set beside the newest torch that is supported, and the tests of local checkpoints.
# With arguments only the tests that they name run. Ends with pytest's status, so a failed test fails
# the script; so does what the linter, the formatter or the type checker finds.
# --local-checkpoints runs the tests of local checkpoints alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
if [[ "${1:-}" == --all ]]; then
    selection=()
    shift
fi
source scripts/environment.sh

# They need nvidia-resiliency-ext, whose wheels ask for a later glibc than many machines have, and
# run with an older one. In a folder of its own it changes nothing for the other tests.
test_local_checkpoints() {
    local folder=.venv/resiliency
    "$PYTHON" -m uv pip install --quiet --python "$PYTHON" --target "$folder" --no-deps \
        --python-platform x86_64-manylinux_2_39 "nvidia-resiliency-ext>=0.6" || return
    PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" \
        "$PYTHON" -m pytest -m slow tests/mcore/checkpoint/test_local.py
}

if [[ "${1:-}" == --local-checkpoints ]]; then
    test_local_checkpoints
    exit
fi
if (($# > 0)); then # only the tests that the arguments name
    exec "$PYTHON" -m pytest "${selection[@]}" --durations=10 "$@"
fi

# Bytecode of torch and Megatron, which each of the processes below would make for itself.
"$PYTHON" -c "import scripts.testbed.preload_megatron" >/dev/null 2>&1 &
bytecode=$!
status=0 lint=0
types=(--no-types)
((${#selection[@]} > 0)) || types=()
./scripts/lint.sh "${types[@]}" || lint=$?
# Once, and not in each of the processes below; where it cannot be built its tests are skipped.
"$PYTHON" -m scripts.testbed.device.build || true
"$PYTHON" -m scripts.testbed.device.npu.build || true  # brings torch_npu, 43 MB
wait "$bytecode" || true # a module that cannot be imported is a test's to report
# Three processes share the fast tests, where pytest-xdist is there: a test waits about half of its
# time for its ranks. The slow tests run alone: they start 8 ranks at once.
workers=()
if ((${#selection[@]} > 0)) && "$PYTHON" -c "import xdist" 2>/dev/null; then
    workers=(-n 3 --dist worksteal)
fi
"$PYTHON" -m pytest "${selection[@]}" "${workers[@]}" --durations=10 || status=$?
status=$((status ? status : lint))
if ((${#selection[@]} == 0)); then
    ./scripts/test_versions.sh --torch 2.15.0 || status=$((status ? status : 1))
    test_local_checkpoints || status=$((status ? status : 1))
fi
exit "$status"
