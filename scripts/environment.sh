# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: makes or reuses the isolated environment in .venv and sets $PYTHON.
# ASYNCHZP_PYTHON=/path/to/python uses that environment as it is and installs nothing; it has to have
# the modules in ASYNCHZP_MODULES (default: torch megatron.training). Where
# PYTHONDONTWRITEBYTECODE is set, bytecode goes to .bytecode/ (or to PYTHONPYCACHEPREFIX).

ASYNCHZP_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_environment_fail() {
    printf 'environment: %s\n' "$@" >&2
    exit 2
}

# Succeeds when $1 really runs and is Python 3.12 or later: a name on PATH may be a shim for nothing.
_is_python_312() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the first interpreter that works, the best supported versions first.
_find_python() {
    local candidate pyenv_root="${PYENV_ROOT:-$HOME/.pyenv}"
    local candidates=(python3.12 python3.13 python3)
    candidates+=("$pyenv_root"/versions/3.12*/bin/python "$pyenv_root"/versions/3.13*/bin/python)
    candidates+=(/usr/bin/python3.12 /usr/bin/python3.13 /usr/local/bin/python3.12)
    candidates+=(/usr/local/bin/python3.13 python3.14 python)
    for candidate in "${candidates[@]}"; do
        if _is_python_312 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    candidate="$(uv python find --no-python-downloads '>=3.12' 2>/dev/null || true)"
    if [[ -n "$candidate" ]] && _is_python_312 "$candidate"; then
        printf '%s\n' "$candidate"
    fi
}

# Prints a uv that runs: the one on PATH, or one installed once into .uv with interpreter $1.
_find_uv() {
    local uv
    for uv in uv "$ASYNCHZP_ROOT/.uv/bin/uv"; do
        if "$uv" --version >/dev/null 2>&1; then
            printf '%s\n' "$uv"
            return
        fi
    done
    echo "environment: installing uv into .uv" >&2
    rm -rf "$ASYNCHZP_ROOT/.uv"
    "$1" -m venv "$ASYNCHZP_ROOT/.uv" >&2 || _environment_fail \
        "$1 cannot make a virtual environment; install its venv module (Debian: apt-get install python3-venv)"
    "$ASYNCHZP_ROOT/.uv/bin/python" -m pip install --quiet --disable-pip-version-check uv >&2 ||
        _environment_fail "pip could not install uv; install uv yourself and put it on PATH"
    printf '%s\n' "$ASYNCHZP_ROOT/.uv/bin/uv"
}

# What .venv was made from: equal text means nothing to do. The path is there because the install
# is editable: a moved checkout needs a new one.
_environment_wanted() {
    printf '%s\n' "$ASYNCHZP_ROOT"
    cat "$ASYNCHZP_ROOT"/{pyproject.toml,setup.py,requirements/lock.txt}
}

_make_environment() {
    local venv="$ASYNCHZP_ROOT/.venv" python uv repair=()
    python="$(_find_python)"
    [[ -n "$python" ]] || _environment_fail \
        "no Python 3.12 or later found (a name on PATH may be a pyenv shim that runs nothing)." \
        "Install one, for example: apt-get install python3.12 python3.12-venv | pyenv install 3.12 | uv python install 3.12" \
        "or set ASYNCHZP_PYTHON to the interpreter of an environment that has torch and megatron-core[training]."
    uv="$(_find_uv "$python")" || exit 2
    echo "environment: making .venv with $python (the first time takes a minute or more)" >&2
    if ! _is_python_312 "$venv/bin/python"; then
        "$uv" venv --quiet --clear --python "$python" "$venv" || _environment_fail "uv venv failed"
    fi
    [[ ! -e "$venv/.asynchzp-unfinished" ]] || repair=(--reinstall) # the last install was cut off
    touch "$venv/.asynchzp-unfinished"
    # The versions that the figures in docs/ were measured with. `uv pip compile`, as the head of the
    # file has it, makes it anew.
    "$uv" pip install --quiet "${repair[@]}" --python "$venv/bin/python" \
        --constraints "$ASYNCHZP_ROOT/requirements/lock.txt" --editable "$ASYNCHZP_ROOT[dev]" ||
        _environment_fail "installing the dependencies failed (uv's message is above)"
    _environment_wanted >"$venv/.asynchzp-stamp"
    rm "$venv/.asynchzp-unfinished"
}

_use_environment() {
    if [[ -n "${ASYNCHZP_PYTHON:-}" ]]; then
        _is_python_312 "$ASYNCHZP_PYTHON" ||
            _environment_fail "ASYNCHZP_PYTHON=$ASYNCHZP_PYTHON is not a working Python 3.12 or later"
        local modules="${ASYNCHZP_MODULES:-torch megatron.training}"
        "$ASYNCHZP_PYTHON" -c 'import sys
from importlib.util import find_spec as find
assert all(map(find, sys.argv[1:]))' $modules >/dev/null 2>&1 || _environment_fail \
            "ASYNCHZP_PYTHON=$ASYNCHZP_PYTHON does not have ${modules// / and } (install megatron_asynchzp[megatron])"
        PYTHON="$ASYNCHZP_PYTHON"
        export PYTHONPATH="$ASYNCHZP_ROOT${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    PYTHON="$ASYNCHZP_ROOT/.venv/bin/python"
    _is_environment_ready && return
    # Two first runs at the same time: one installs, the other waits and finds it done.
    exec 9>"$ASYNCHZP_ROOT/.venv.lock"
    ! command -v flock >/dev/null || flock 9
    _is_environment_ready || _make_environment
    exec 9>&-
}

_is_environment_ready() {
    [[ -f "$ASYNCHZP_ROOT/.venv/.asynchzp-stamp" ]] &&
        [[ "$(_environment_wanted)" == "$(cat "$ASYNCHZP_ROOT/.venv/.asynchzp-stamp")" ]] &&
        _is_python_312 "$PYTHON"
}

_use_environment
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # several ranks share the cores
# Without bytecode every rank would compile torch and Megatron again, which takes 10 s of a core.
if [[ -n "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
    unset PYTHONDONTWRITEBYTECODE
    export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$ASYNCHZP_ROOT/.bytecode}"
fi
