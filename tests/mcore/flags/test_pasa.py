# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The flags that PASA attention refuses, against Megatron's real parser."""

from argparse import ArgumentParser

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.checks import refuse_yaml
from megatron_asynchzp.mcore.flags.pasa import (
    PASA_REFUSALS,
    add_pasa_arguments,
    refuse_unsupported_attention,
)


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    made = ArgumentParser(allow_abbrev=False)
    # The name as it is in Megatron, whether or not another test patched it.
    getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(made)
    return add_pasa_arguments(made)


@pytest.mark.parametrize("refusal", PASA_REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_unsupported_flag_is_refused_by_its_own_row_in_one_line(parser, refusal):
    refuse_unsupported_attention(parser.parse_args(["--use-pasa-attention"]))
    args = parser.parse_args(["--use-pasa-attention", *refusal.example.split()])
    assert [row.flag for row in PASA_REFUSALS if row.is_asked(args)] == [refusal.flag]
    with pytest.raises(ConfigurationError) as refused:
        refuse_unsupported_attention(args)
    line = str(refused.value)
    assert line.startswith(f"{refusal.flag} is not supported with --use-pasa-attention: ")
    assert refusal.reason in line and refusal.remedy in line and "\n" not in line


@pytest.mark.parametrize("flag", ["--yaml-cfg run.yaml", "--yaml-cfg=run.yaml"])
def test_a_yaml_configuration_cannot_drop_the_flag_silently(flag):
    with pytest.raises(ConfigurationError, match="--yaml-cfg"):
        refuse_yaml(["--use-pasa-attention", *flag.split()], "--use-pasa-attention")
    refuse_yaml(flag.split(), "--use-pasa-attention")
