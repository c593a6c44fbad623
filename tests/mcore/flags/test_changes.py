# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What --use-asynchzp switches off in Megatron, and the lines it logs."""

import pytest
from packaging.version import Version

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import changes, megatron_settings
from megatron_asynchzp.mcore.flags.arguments import schedule_of
from megatron_asynchzp.mcore.flags.changes import CHANGES
from megatron_asynchzp.mcore.flags.checks import confirm_args, prepare_args
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.rule_table import change_settings, refuse_changes
from tests.mcore.flags.conftest import action_of

# Of rules that ask more of a run than a value other than theirs, a command line that has it.
_ASKING = {
    "use_transformer_engine_op_fuser": "--fp8-format hybrid",
    "exp_avg_dtype": "--use-precision-aware-optimizer",
    "exp_avg_sq_dtype": "--use-precision-aware-optimizer",
    "use_torch_optimizer_for_cpu_offload": "--optimizer-cpu-offload",
    "overlap_cpu_optimizer_d2h_h2d": "--optimizer-cpu-offload",
    "asynchzp_early_update": "--calculate-per-token-loss",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm --fp16",
    "delay_wgrad_compute": "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "optimizer": "--optimizer dist_muon",
    "exit_signal_handler": "--save runs --save-interval 2",
    "replication": "--replication --replication-jump 3",
    "tensor_parallel_num_weight_shards": "--tensor-parallel-num-weight-shards 2",
    "expert_tensor_parallel_num_weight_shards": "--expert-tensor-parallel-num-weight-shards 2",
}
# Their values are those of the command line.
_READ = {"optimizer", "replication", "overlap_moe_expert_parallel_comm", "eval_interval"}
_READ |= {name for name in _ASKING if name.endswith("num_weight_shards")}


@pytest.mark.parametrize("rule", CHANGES, ids=lambda rule: rule.setting)
def test_what_asynchzp_replaces_gets_its_value_with_one_line_in_the_log(parser, parse, rule):
    action = action_of(parser, rule.flag)
    assert rule.setting == action.dest or rule.setting in ("replication", "asynchzp_early_update")
    args = parse(_ASKING.get(rule.setting, ""))
    if rule.setting not in _READ:
        setattr(args, rule.setting, "given")
    own = [one for one in CHANGES if one.setting == rule.setting]
    deciding = next(one for one in own if one.applies(MegatronSettings(args)))
    lines = change_settings(args)
    assert getattr(args, rule.setting) == rule.value
    told = [line for line in lines if line.startswith(f"{rule.setting} = {rule.value}: ")]
    assert len(told) == (not deciding.is_silent)
    assert change_settings(args) == []


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("--optimizer dist_muon", "optimizer", "muon"),
        ("--fp16", "accumulate_allreduce_grads_in_fp32", True),
        ("--save dir --save-interval 10", "exit_signal_handler", True),
    ],
)
def test_what_a_run_needs_is_set_with_one_line_in_the_log(parse, line, name, value):
    args, plain = parse(line), parse()
    args.bf16 = not args.fp16
    assert sum(one.startswith(f"{name} = {value}: ") for one in change_settings(args)) == 1
    assert getattr(args, name) == value
    assert f"{name} = " not in " ".join(change_settings(plain))


KEEPS_BIASES = "--delay-wgrad-compute of layers with biases, which keeps gathered ones"


@pytest.mark.parametrize(
    "line, beside",
    [
        ("", None),
        ("--fp8-format hybrid --recompute-granularity selective", None),
        ("--recompute-granularity full", "--recompute-granularity full"),
        ("--fp16", "--fp16"),
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router", None),
        (
            "--cuda-graph-impl transformer_engine --mtp-num-layers 1",
            "captured layers and --mtp-num-layers",
        ),
        ("--add-qkv-bias", KEEPS_BIASES),
        ("--cuda-graph-impl local", "--cuda-graph-impl local"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex"),
        ("--optimizer muon", "--optimizer muon"),
    ],
)
def test_the_overlapped_schedule_is_left_by_name_beside_what_it_was_not_tested_with(
    parse, line, beside
):
    names = ["overlap_moe_expert_parallel_comm", "delay_wgrad_compute"]
    args = parse(
        f"--overlap-moe-expert-parallel-comm --delay-wgrad-compute --disable-bias-linear {line}"
    )
    found = [one for one in change_settings(args) if one.split()[0] in names]
    assert [getattr(args, name) for name in names] == [beside is None] * 2
    assert len(found) == (0 if beside is None else 2)
    assert all(f"has not been tested beside {beside} (--" in one for one in found)


@pytest.mark.parametrize(
    "line, is_kept",
    [
        ("", True),
        ("--pipeline-model-parallel-size 2", True),
        ("--fp8-format e4m3 --num-experts 4", True),
        ("--fp4-format e2m1", False),
        ("--fp8-format e4m3 --num-experts 4 --moe-layer-freq [0,1]", False),
        ("--fp8-format e4m3 --num-experts 4 --moe-layer-freq 2", False),
        ("--fp8-format e4m3 --num-experts 4 --pipeline-model-parallel-size 2", False),
    ],
)
def test_fused_operations_are_left_where_their_copies_of_weights_are_not_counted(
    parse, monkeypatch, line, is_kept
):
    monkeypatch.setattr(changes, "can_fuse_grads", lambda: True)
    args = parse(f"--use-transformer-engine-op-fuser {line}")
    lines = change_settings(args)
    assert args.use_transformer_engine_op_fuser == is_kept
    assert any("keep a quantised copy of each weight" in one for one in lines) != is_kept
    assert not args.gradient_accumulation_fusion


# fmt: off
_MXFP8 = "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather"
_FUSED_EXPERTS = ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
                  "--num-experts 4 --use-transformer-engine-op-fuser")
_REUSED = f"{_MXFP8} --reuse-grad-buf-for-mxfp8-param-ag"
# fmt: on


@pytest.mark.parametrize(
    "line, said, is_lost",
    [
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", "codes", False),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather", "codes", False),
        ("--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather", "1", True),
        (_REUSED.replace("mxfp8 ", "blockwise ", 1), "codes", False),
        (_REUSED.replace("mxfp8 ", "tensorwise ", 1), "codes", False),
        (_FUSED_EXPERTS, "2 bytes each instead of 1", True),
        (_REUSED, "codes", False),
        (_MXFP8, "codes", False),
        (f"{_REUSED} --use-megatron-fsdp", "codes", False),
        (f"{_MXFP8} --overlap-moe-expert-parallel-comm", "codes", False),
        (
            f"{_REUSED} --use-transformer-engine-op-fuser --num-experts 4",
            "as in stock Megatron 2 bytes a parameter travel",
            False,
        ),
        (
            f"{_REUSED} --use-transformer-engine-op-fuser --num-experts 4 --use-megatron-fsdp",
            "2 bytes each instead of 1",
            True,
        ),
        (_REUSED.replace("mxfp8 ", "delayed ", 1), "2 bytes each instead of 1", True),
    ],
)
def test_what_becomes_of_gathers_in_fp8_depends_on_what_stock_gathers(parse, line, said, is_lost):
    args = parse(line)
    lines = change_settings(args)
    told = [one for one in lines if one.startswith("fp8_param_gather = False: ")]
    assert len(told) == 1 and said in told[0]
    reused = [one for one in lines if one.startswith("reuse_grad_buf_for_mxfp8_param_ag = ")]
    assert all(said in one for one in reused) and len(reused) == ("--reuse" in line)
    rules = [rule for rule in CHANGES if rule.is_in(lines) and "param_" in rule.setting]
    assert {rule.is_lost for rule in rules if "overlap" not in rule.setting} == {is_lost}
    assert getattr(args, "asynchzp_sends_codes", False) == (said == "codes")
    assert not args.fp8_param_gather and not args.reuse_grad_buf_for_mxfp8_param_ag
    again = change_settings(args)
    assert again == [] and getattr(args, "asynchzp_sends_codes", False) == (said == "codes")


@pytest.mark.parametrize(
    ("name", "value", "sends_codes"),
    [
        ("NVTE_NVFP4_4OVER6", "none", True),
        ("NVTE_NVFP4_4OVER6", "weights", False),
        ("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "1", True),
        ("NVTE_BACKWARD_OVERRIDE", "dequantized", False),
    ],
)
def test_four_bit_codes_travel_where_blocks_are_as_by_default(
    parse, monkeypatch, name, value, sends_codes
):
    monkeypatch.setenv(name, value)
    args = parse("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --fp4-param-gather")
    (told,) = [one for one in change_settings(args) if one.startswith("fp4_param_gather = False: ")]
    assert ("as codes" in told) == sends_codes == getattr(args, "asynchzp_sends_codes", False)


INSTALLATIONS = [
    (["transformer_engine", "fused_weight_gradient_mlp_cuda"], "2.15.0", True),
    (["transformer_engine", "fused_weight_gradient_mlp_cuda"], "2.14.1", False),
    (["transformer_engine"], "2.15.0", False),
    (["fused_weight_gradient_mlp_cuda"], None, False),
]


@pytest.mark.parametrize("modules, version, is_kept", INSTALLATIONS)
def test_layers_keep_fused_gradients_where_what_they_need_is_installed(
    parse, monkeypatch, modules, version, is_kept
):
    monkeypatch.setattr(megatron_settings, "find_spec", lambda name: name in modules)
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version(version))
    args = parse()
    change_settings(args)
    assert args.gradient_accumulation_fusion == is_kept
    refuse_changes(args)


@pytest.mark.parametrize("line", ["", "--eval-interval 0"])
def test_a_run_without_an_interval_of_evaluations_never_reaches_one(parse, line):
    """Megatron takes such a command line, and fails while it builds the datasets."""
    from megatron.training import training

    args = parse(f"{line} --train-iters 10 --eval-iters 2")
    lines = change_settings(args)
    assert sum(line.startswith("eval_interval = ") for line in lines) == 1
    assert args.eval_interval > args.train_iters
    args.eval_global_batch_size = args.global_batch_size  # as Megatron's validation does
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "get_args", lambda: args)
        samples = training.get_train_valid_test_num_samples()
    assert samples == (10 * 8, 2 * 8, 2 * 8)


def test_an_interval_of_evaluations_that_is_given_is_kept(parse):
    args = parse("--eval-interval 5")
    assert "eval_interval" not in " ".join(change_settings(args))
    assert args.eval_interval == 5


def test_what_megatron_switches_on_again_is_noticed(parse):
    args = parse()
    prepare_args(args)
    args.use_distributed_optimizer = True
    with pytest.raises(ConfigurationError, match="use_distributed_optimizer"):
        confirm_args(args)


@pytest.mark.parametrize(
    "line, cluster, expected",
    [
        ("", None, (0, True)),
        ("--use-nccl-ub", None, (4, True)),
        ("--use-nccl-ub", "gb200", (72, True)),
        ("--use-nccl-ub --disable-symmetric-registration", None, (4, False)),
    ],
)
def test_memory_is_registered_within_a_node_or_the_clusters_domain(
    parse, monkeypatch, line, cluster, expected
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = parse(line)
    args.asynchzp_cluster = cluster
    args.asynchzp_param_shard_size = cluster and "auto"
    change_settings(args)
    schedule = schedule_of(args)
    assert (schedule.registers_memory, schedule.registers_windows) == expected
    assert not args.nccl_ub
