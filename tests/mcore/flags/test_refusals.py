# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every flag that is refused beside one of ours, against Megatron's real parser."""

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.pasa import PASA_REFUSALS
from megatron_asynchzp.mcore.flags.refusals import REFUSALS, refuse

TABLES = {"--use-asynchzp": REFUSALS, "--use-pasa-attention": PASA_REFUSALS}


@pytest.mark.parametrize("beside", TABLES)
def test_a_plain_run_is_not_refused(parse, beside):
    refuse(TABLES[beside], parse(beside))


@pytest.mark.parametrize("row", [*REFUSALS, *PASA_REFUSALS], ids=lambda row: row.flag)
def test_each_unsupported_flag_is_refused_by_its_own_row_in_one_line(parser, parse, row):
    assert row.flag in {flag for action in parser._actions for flag in action.option_strings}
    args, table = parse(f"{row.beside} {row.example}"), TABLES[row.beside]
    assert [other.flag for other in table if other.is_asked(args)] == [row.flag]
    with pytest.raises(ConfigurationError) as refused:
        refuse(table, args)
    line = str(refused.value)
    assert line.startswith(f"{row.flag} is not supported with {row.beside}: ")
    assert row.reason in line and row.remedy in line and "\n" not in line
