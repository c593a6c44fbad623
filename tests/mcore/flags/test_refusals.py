# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every flag that is refused, against Megatron's real parser."""

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.refusals import REFUSALS, refuse_unsupported


def test_a_plain_run_is_not_refused(parse):
    refuse_unsupported(parse())


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_unsupported_flag_is_refused_in_one_line_with_reason_and_remedy(parse, refusal):
    with pytest.raises(ConfigurationError) as refused:
        refuse_unsupported(parse(refusal.example))
    line = str(refused.value)
    assert line.startswith(f"{refusal.flag} is not supported with --use-asynchzp: ")
    assert refusal.reason in line and refusal.remedy in line and "\n" not in line


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_refused_flag_is_one_that_megatron_has(parser, refusal):
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert refusal.flag in flags


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_a_flag_is_refused_by_its_own_row_and_no_other(parse, refusal):
    args = parse(refusal.example)
    assert [row.flag for row in REFUSALS if row.is_asked(args)] == [refusal.flag]
