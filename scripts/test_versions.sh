#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Runs a fast set of tests beside other versions, in an environment that is made once and kept in
# .versions: ./scripts/test_versions.sh [--torch 2.15.0] [--megatron 0.18.2] [--python 3.13]
# [--transformers 4]. Which ones are tested: .github/workflows/nightly.yml. Before the tests, that an
# install of this package would replace nothing there. Ends with pytest's status, 1 where the
# environment cannot be made or an install replaces something, 2 for a wrong command line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"

torch=2.13.0 megatron=0.19.2 python=3.12 transformers=""
while (($#)); do
    if [[ ! "$1" =~ ^--(torch|megatron|python|transformers)$ || ! "${2:-}" =~ ^[0-9]+(\.[0-9]+)*[a-z0-9]*$ ]]; then
        echo "test_versions.sh: $1 ${2:-}: give --torch, --megatron, --python or --transformers and a version" >&2
        exit 2
    fi
    printf -v "${1#--}" %s "$2"
    shift 2
done
source scripts/environment.sh

name="torch-${torch}_megatron-${megatron}_python-$python${transformers:+_transformers-$transformers}"
folder=".versions/$name"
uv() { "$PYTHON" -m uv --no-python-downloads "$@"; }

# This interpreter, one of pyenv, or what uv finds on this machine.
interpreter="$PYTHON"
if [[ "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$python" ]]; then
    interpreter="$(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$python*/bin/python" | head -1)" ||
        interpreter="$python"
fi
if [[ ! -e "$folder/complete" ]]; then
    uv venv --quiet --clear --python "$interpreter" "$folder" || exit 1
    # The package itself is found by PYTHONPATH: an editable install would leave files here.
    uv pip install --quiet --python "$folder" "torch==$torch" "megatron-core[training]==$megatron" \
        "transformers${transformers:+==$transformers.*}" \
        pytest pytest-xdist hypothesis packaging rich safetensors einops || exit 1
    touch "$folder/complete"
fi

# Engine, patch points, parity with stock, checkpoints, PASA, the emulated device. The first has a
# test that cannot be skipped: that the environment's versions are among the supported ones.
tests=(tests/test_versions.py tests/library/step/test_sharded_model.py tests/zero/test_engine_parity.py
    tests/mcore/patches tests/mcore/test_differences.py tests/mcore/test_parity.py
    tests/mcore/checkpoint/test_resuming.py tests/mcore/attention
    tests/attention/test_equivalence.py tests/device/test_engine.py tests/device/test_torch.py)
extras=(--extra megatron)
if [[ "$transformers" != 4 ]]; then # with which `asynchzp hf` is refused
    tests+=(tests/hf)
    extras+=(--extra hf)
fi
said="$(uv pip install --dry-run --python "$folder" -r pyproject.toml "${extras[@]}" 2>&1)" ||
    { echo "$said" >&2; exit 1; }
if replaced="$(grep '^ - ' <<<"$said")"; then
    printf 'test_versions.sh: %s: an install of this package replaces\n%s\n' "$name" "$replaced" >&2
    exit 1
fi
# Bytecode of its own: two environments have other files of one name and date.
PYTHONPATH="$root" PYTHONPYCACHEPREFIX="$root/.versions/bytecode/$name" exec "$folder/bin/python" \
    -m pytest -q -m "not slow" -n 2 --dist worksteal -p no:cacheprovider "${tests[@]}"
