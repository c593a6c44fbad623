# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a user can choose, without flags and with them."""

import subprocess
import sys

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.arguments import config_of
from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig


def test_a_command_line_without_our_flags_has_the_defaults_of_the_config(parse):
    assert config_of(parse()) == AsyncHZPConfig()


def test_each_choice_is_the_flag_of_its_name(parse):
    line = (
        "--asynchzp-param-shard-size 2 --asynchzp-schedule inline --no-asynchzp-check-order "
        "--asynchzp-keep-params-gb auto --asynchzp-adapter-rank 8 --asynchzp-save-trained-only "
        "--asynchzp-adapter-layers linear_fc1 linear_fc2"
    )
    assert config_of(parse(line)) == AsyncHZPConfig(
        param_shard_size=2,
        schedule="inline",
        check_order=False,
        keep_params_gb="auto",
        adapter_rank=8,
        save_trained_only=True,
        adapter_layers=("linear_fc1", "linear_fc2"),
    )


@pytest.mark.parametrize(
    "choice, line",
    [
        ({"schedule": "fast"}, "--asynchzp-schedule fast: give one of auto, inline"),
        ({"early_update": True}, "--asynchzp-early-update True: give one of auto, on, off"),
        ({"prefetch_depth": -1}, "--asynchzp-prefetch-depth: -1 is not a whole number from 0"),
        ({"prefetch_depth": 1.5}, "--asynchzp-prefetch-depth: 1.5 is not a whole number from 0"),
        ({"save_ranks": 0}, "--asynchzp-save-ranks: 0 is not a whole number from 1"),
        ({"adapter_layers": ("qkv",)}, "--asynchzp-adapter-layers qkv: give one of linear_qkv"),
        ({"param_shard_size": "all"}, "--asynchzp-param-shard-size: all is neither a number"),
        ({"optim_shard_size": "auto"}, "auto: give --asynchzp-cluster NAME_OR_FILE"),
        ({"memory_in_flight_gb": 0.0}, "--asynchzp-memory-in-flight-gb 0: give a size larger"),
        ({"keep_grads_gb": float("nan")}, "--asynchzp-keep-grads-gb nan: give the GiB"),
    ],
)
def test_a_choice_that_no_run_can_have_is_refused_when_it_is_made_and_names_its_flag(choice, line):
    with pytest.raises(ConfigurationError) as refused:
        AsyncHZPConfig(**choice)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_config_is_checked_without_torch():
    code = (
        "import sys; from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig\n"
        "AsyncHZPConfig(param_shard_size='node')\n"
        "print([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
