# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Every flag that is refused beside one of ours, against Megatron's real parser."""

import pytest

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.pasa import PASA_REFUSALS
from megatron_asynchzp.mcore.flags.refusals import REFUSALS
from megatron_asynchzp.mcore.flags.rules import refuse
from tests.mcore.flags.conftest import action_of

TABLES = {"--use-asynchzp": REFUSALS, "--use-pasa-attention": PASA_REFUSALS}


@pytest.mark.parametrize("beside", TABLES)
def test_a_plain_run_is_not_refused(parse, beside):
    refuse(TABLES[beside], MegatronSettings(parse(beside)))


@pytest.mark.parametrize("row", [*REFUSALS, *PASA_REFUSALS], ids=lambda row: row.flag)
def test_each_unsupported_flag_is_refused_by_its_own_row_in_one_line(parser, parse, row):
    action = action_of(parser, row.flag)
    assert action.dest == row.setting
    parsed, table = parse(f"{row.of} {row.example}"), TABLES[row.of]
    parsed.use_asynchzp = row.of == "--use-asynchzp"
    args = MegatronSettings(parsed)
    assert [other.flag for other in table if other.applies(args)] == [row.flag]
    with pytest.raises(ConfigurationError) as refused:
        refuse(table, args)
    line = str(refused.value)
    flag, value, *_ = *row.example.split(), "--"
    given = flag if value.startswith("--") or action.nargs == 0 else f"{flag} {value}"
    assert line.startswith(given)
    assert f" is not supported with {row.beside or row.of}: " in line
    assert row.reason in line and row.remedy in line and "\n" not in line


_CAPTURING = "--use-asynchzp --bf16 --cuda-graph-impl transformer_engine"
_EXPERTS = f"{_CAPTURING} --num-experts 4 --moe-token-dispatcher-type alltoall"
_OWN = "--use-asynchzp --bf16 --cuda-graph-impl local"
_PADDED = "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        (_EXPERTS, True),
        (f"{_EXPERTS} --cuda-graph-modules attn moe", True),
        (f"{_EXPERTS} --cuda-graph-scope moe", True),
        (f"{_EXPERTS} --moe-expert-capacity-factor 1.0", True),
        (f"{_EXPERTS} {_PADDED} --moe-token-dispatcher-type flex", True),
        (f"{_EXPERTS} {_PADDED}", False),
        (f"{_EXPERTS} {_PADDED} --cuda-graph-modules moe", False),
        (f"{_EXPERTS} --cuda-graph-modules attn moe_router moe_preprocess", False),
        (f"{_EXPERTS} --cuda-graph-scope attn", False),
        (f"{_CAPTURING} --hybrid-layer-pattern M*", False),
        (f"{_CAPTURING} --fp8-format hybrid --fp8-recipe delayed", False),
    ],
)
def test_experts_are_captured_only_where_the_host_knows_their_tokens(parse, line, is_refused):
    rows = [row for row in REFUSALS if row.applies(MegatronSettings(parse(line)))]
    assert len(rows) == is_refused
    assert all("--moe-pad-expert-input-to-capacity" in row.remedy for row in rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (_OWN, ""),
        (f"{_OWN} --cuda-graph-modules attn mlp", ""),
        (f"{_OWN} --transformer-impl local", "layers of Transformer Engine alone"),
        (f"{_OWN} --num-experts 4 {_PADDED} --moe-token-dispatcher-type alltoall", ""),
        (f"{_OWN} --num-experts 4 --moe-token-dispatcher-type alltoall", "around experts"),
        (f"{_OWN} --num-experts 4 --cuda-graph-modules moe_router", "around experts"),
        (f"{_OWN} --fp8-format hybrid --fp8-recipe delayed", "change scales"),
        (f"{_OWN} --fp8-format hybrid --fp8-recipe tensorwise", ""),
        (f"{_OWN} --cuda-graph-scope full_iteration", "it is an old name"),
        (
            "--use-asynchzp --fp16 --cuda-graph-impl local",
            "has not been tested in a captured layer",
        ),
    ],
)
def test_megatrons_own_graphs_are_taken_where_their_numbers_are_those_without(parse, line, reason):
    rows = [row for row in REFUSALS if row.applies(MegatronSettings(parse(line)))]
    assert len(rows) == bool(reason) and all(reason in row.reason for row in rows)


_SUB_SAMPLES = "--hybrid-context-parallel"
_ROUTED = f"{_SUB_SAMPLES} --num-experts 4 --moe-router-load-balancing-type"
_ALL_TO_ALL = f"{_ROUTED} none --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (_SUB_SAMPLES, ""),
        (f"{_SUB_SAMPLES} --hybrid-layer-pattern *-E", ""),
        (f"{_SUB_SAMPLES} --hybrid-layer-pattern M*-", "do not follow the ranks"),
        (f"{_SUB_SAMPLES} --micro-batch-size 1", ""),
        (f"{_SUB_SAMPLES} --micro-batch-size 3", "a batch of one"),
        (f"{_SUB_SAMPLES} --eval-micro-batch-size 2", "a batch of one"),
        (f"{_SUB_SAMPLES} --bf16 --cuda-graph-impl full_iteration", "fillers have one token"),
        (f"{_ROUTED} none --moe-aux-loss-coeff 0.01", ""),
        (f"{_ROUTED} aux_loss", ""),
        (f"{_ROUTED} none --moe-z-loss-coeff 0.01", "tokens of an expert"),
        (f"{_ROUTED} none --moe-router-enable-expert-bias", "tokens of an expert"),
        (f"{_ROUTED} seq_aux_loss --moe-aux-loss-coeff 0.01", "tokens of an expert"),
        (f"{_ROUTED} aux_loss sinkhorn --moe-aux-loss-coeff 0 0.01", "tokens of an expert"),
        (_ALL_TO_ALL, ""),
        (f"{_ALL_TO_ALL} --moe-token-dispatcher-type allgather", "expect equal ones"),
        (f"{_ALL_TO_ALL} --moe-token-dispatcher-type flex", "expect equal ones"),
        (f"{_ALL_TO_ALL} {_PADDED}", "expect equal ones"),
        (f"{_ROUTED} none --expert-tensor-parallel-size 2", "expect equal ones"),
        (f"{_ROUTED} none --tensor-model-parallel-size 2 --disable-bias-linear", ""),
    ],
)
def test_sub_samples_are_taken_where_ranks_may_have_unequal_ones(parse, line, reason):
    rows = [row for row in REFUSALS if row.applies(MegatronSettings(parse(line)))]
    assert len(rows) == bool(reason), rows
    assert all(reason in row.reason for row in rows)


def test_quantiles_of_routers_count_a_filler_as_a_sub_sample(parse):
    args = parse(f"{_ROUTED} none")
    args.moe_router_load_balancing_type = ["quantile_balancing"]  # 0.19 and later
    rows = [row for row in REFUSALS if row.applies(MegatronSettings(args))]
    assert [row.reason.split()[-1] for row in rows] == ["expert"]


def test_pasa_follows_sub_samples_where_our_patches_do(parse):
    args = parse(f"--use-pasa-attention {_SUB_SAMPLES}")
    for args.use_asynchzp in (True, False):
        refused = [row for row in PASA_REFUSALS if row.applies(MegatronSettings(args))]
        assert bool(refused) != args.use_asynchzp
