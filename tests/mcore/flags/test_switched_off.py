# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What --use-asynchzp switches off in Megatron, and the lines it logs."""

import pytest
from packaging.version import Version

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import switched_off
from megatron_asynchzp.mcore.flags.checks import confirm_args, prepare_args
from megatron_asynchzp.mcore.flags.switched_off import (
    NORMALISATIONS,
    normalize_args,
    refuse_changes,
)


@pytest.mark.parametrize("rule", NORMALISATIONS, ids=lambda rule: rule.name)
def test_each_argument_that_is_switched_off_is_one_that_megatron_has(parser, rule):
    action = next(action for action in parser._actions if rule.flag in action.option_strings)
    assert action.dest == rule.name


@pytest.mark.parametrize(
    "line, name",
    [
        ("--use-distributed-optimizer", "use_distributed_optimizer"),
        ("--overlap-grad-reduce", "overlap_grad_reduce"),
        ("--overlap-param-gather", "overlap_param_gather"),
        ("--ddp-average-in-collective", "ddp_average_in_collective"),
        ("--create-all-gather-group", "create_all_gather_group"),
        ("--ddp-bucket-size 100", "ddp_bucket_size"),
        ("--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step"),
        ("--use-nccl-ub", "nccl_ub"),
        ("--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute"),
        ("--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm"),
        ("--delay-wgrad-compute", "delay_wgrad_compute"),
        ("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser"),
        ("--use-megatron-fsdp", "use_megatron_fsdp"),
        ("", "gradient_accumulation_fusion"),
    ],
)
def test_what_asynchzp_replaces_is_switched_off_with_a_line_in_the_log(parse, line, name):
    args = parse(line)
    lines = normalize_args(args)
    assert not getattr(args, name)
    assert sum(line.startswith(f"{name} = ") for line in lines) == 1


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
    monkeypatch.setattr(switched_off, "find_spec", lambda name: name in modules)
    monkeypatch.setattr("megatron.core.utils.get_te_version", lambda: Version(version))
    args = parse()
    normalize_args(args)
    assert args.gradient_accumulation_fusion == is_kept
    refuse_changes(args)


def test_a_second_normalisation_changes_nothing_and_logs_nothing(parse):
    args = parse("--use-distributed-optimizer --overlap-grad-reduce")
    assert normalize_args(args)
    assert normalize_args(args) == []


def test_gradients_of_fp16_runs_are_reduced_in_fp32(parse):
    args = parse("--fp16")
    args.bf16 = False
    lines = normalize_args(args)
    assert any(line.startswith("accumulate_allreduce_grads_in_fp32 = True") for line in lines)
    assert args.accumulate_allreduce_grads_in_fp32


def test_a_run_that_saves_has_megatrons_handler_of_sigterm(parse):
    args = parse("--save dir --save-interval 10")
    line = normalize_args(args)
    assert args.exit_signal_handler
    assert sum(line.startswith("exit_signal_handler = True: SIGTERM ") for line in line) == 1
    args = parse()
    assert "exit_signal_handler" not in " ".join(normalize_args(args))
    assert not args.exit_signal_handler


@pytest.mark.parametrize("line", ["", "--eval-interval 0"])
def test_a_run_without_an_interval_of_evaluations_never_reaches_one(parse, line):
    """Megatron takes such a command line, and fails while it builds the datasets."""
    from megatron.training import training

    args = parse(f"{line} --train-iters 10 --eval-iters 2")
    lines = normalize_args(args)
    assert sum(line.startswith("eval_interval = ") for line in lines) == 1
    assert args.eval_interval > args.train_iters
    args.eval_global_batch_size = args.global_batch_size  # as Megatron's validation does
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "get_args", lambda: args)
        samples = training.get_train_valid_test_num_samples()
    assert samples == (10 * 8, 2 * 8, 2 * 8)


def test_an_interval_of_evaluations_that_is_given_is_kept(parse):
    args = parse("--eval-interval 5")
    assert "eval_interval" not in " ".join(normalize_args(args))
    assert args.eval_interval == 5


def test_checkpoints_are_written_in_the_one_format_that_holds_any_sizes(parse):
    args = parse("--ckpt-format fsdp_dtensor --save dir --save-interval 10")
    lines = normalize_args(args)
    assert args.ckpt_format == "torch_dist"
    assert sum(line.startswith("ckpt_format = torch_dist: ") for line in lines) == 1


def test_what_megatron_switches_on_again_is_noticed(parse):
    args = parse()
    prepare_args(args)
    args.use_distributed_optimizer = True
    with pytest.raises(ConfigurationError, match="use_distributed_optimizer"):
        confirm_args(args)


def test_layer_wise_muon_becomes_muon_on_shards(parse):
    args = parse("--optimizer dist_muon")
    lines = normalize_args(args)
    assert args.optimizer == "muon"
    assert sum(line.startswith("optimizer = muon: ") for line in lines) == 1
