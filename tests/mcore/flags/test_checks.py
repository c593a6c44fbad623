# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is checked before Megatron builds anything."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

from megatron_asynchzp.checkpoint_files.choice import TRACKER
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import checks
from megatron_asynchzp.mcore.flags.arguments import schedule_of
from megatron_asynchzp.mcore.flags.command_line import check_command_line


def test_arguments_are_left_alone_when_the_run_is_refused(parse):
    args = parse("--use-distributed-optimizer --skip-train")
    before = dict(vars(args))
    with pytest.raises(ConfigurationError):
        checks.prepare_args(args)
    assert vars(args) == before


@pytest.mark.parametrize("fraction", ["-0.5", "1.01", "nan"])
def test_a_part_of_the_optimizer_states_that_is_none_is_refused(parse, fraction):
    args = parse(f"--optimizer-cpu-offload --optimizer-offload-fraction {fraction}")
    with pytest.raises(
        ConfigurationError, match="--optimizer-offload-fraction .*; give a number from 0 to 1$"
    ):
        checks.prepare_args(args)


@pytest.mark.parametrize("more", ["", "--decrease-batch-size-if-needed"])
@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_batch_is_refused_where_megatron_refuses_it_and_nowhere_else(parse, more, micro, ranks):
    refused = {True: 0, False: 0}
    for batch in range(1, 26):
        line = f"{more} --micro-batch-size {micro} --global-batch-size {batch} "
        args = parse(f"{line} --eval-global-batch-size {4 * micro * ranks}", ranks)
        is_rounded = args.decrease_batch_size_if_needed
        try:
            ConstantNumMicroBatchesCalculator(batch, micro, ranks, is_rounded, rank=1)
            is_legal = True
        except AssertionError:
            is_legal = False
        refused[not is_legal] += 1
        faults = [*checks.faults_of_sizes(args)]
        assert is_legal == (not faults)
        assert is_legal or f"--global-batch-size {batch} is not a" in faults[0]
    assert refused[False] and (refused[True] or micro * ranks == 1)


def test_a_growing_batch_is_let_through_where_megatron_grows_it_and_refused_where_not(parser):
    def check(line: str) -> None:
        words = f"--use-asynchzp --micro-batch-size 1 {line}".split()
        check_command_line(words, world_size=2)
        args = parser.parse_args(words)
        args.world_size = 2
        assert not [*checks.faults_of_sizes(args)]

    check("--step-batch-size-schedule 0:2,128:8")
    with pytest.raises(ConfigurationError, match="ignores it .*use --step-batch-size-schedule"):
        check("--global-batch-size 8 --rampup-batch-size 2 2 100")


@pytest.mark.parametrize("saved", [TRACKER, "iter_0000010/metadata.json", "release/metadata.json"])
@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_a_model_of_hugging_face_is_refused_but_where_training_has_saved(
    parse, tmp_path, flag, saved
):
    args = parse(f"{flag} {tmp_path}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert not [*checks.faults_of_files(args)]  # something else: its config is missing
    (tmp_path / "config.json").touch()
    (fault,) = checks.faults_of_files(args)
    assert fault.startswith(f"{flag} {tmp_path} is a model of Hugging Face")
    (tmp_path / saved).parent.mkdir(exist_ok=True)
    (tmp_path / saved).touch()
    assert not [*checks.faults_of_files(args)]


@pytest.mark.parametrize("flag", ["--asynchzp-memory-in-flight-gb", "--asynchzp-grad-slot-mb"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_size_that_is_none_is_refused_in_one_line(parse, flag, value):
    with pytest.raises(ConfigurationError, match=f"^{flag} .*: give a size larger than 0$"):
        checks.prepare_args(parse(f"{flag}={value}"))


def test_a_budget_for_kept_parameters_is_a_number_or_what_the_device_has_left(parse):
    schedule = schedule_of(parse("--asynchzp-keep-params-gb auto"))
    assert schedule.keeps_params_in_free_memory and not schedule.keep_params_nbytes
    schedule = schedule_of(parse("--asynchzp-keep-params-gb 0.5"))
    assert schedule.keep_params_nbytes == 2**29 and not schedule.keeps_params_in_free_memory


@pytest.mark.parametrize(
    "line, reason",
    [
        ("--calculate-per-token-loss", "--calculate-per-token-loss"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-parallel"),
        ("--tensor-model-parallel-size 2 --qk-layernorm", "--qk-layernorm"),
        ("--optimizer muon", "--optimizer"),
        ("--optimizer dist_muon", "--optimizer"),
    ],
)
def test_early_updates_are_off_where_gradients_change_after_backward_and_on_is_refused(
    parse, line, reason
):
    args = parse(line)
    checks.prepare_args(args)
    assert schedule_of(args).early_update == "off"
    with pytest.raises(
        ConfigurationError, match=f"^--asynchzp-early-update on is .* with {reason}: "
    ):
        checks.prepare_args(parse(f"{line} --asynchzp-early-update on"))


def test_early_updates_are_as_asked_for_elsewhere(parse):
    for way in ("auto", "on", "off"):
        for line in ("", "--sequence-parallel", "--bf16 --tensor-model-parallel-size 2"):
            args = parse(f"{line} --asynchzp-early-update {way}")
            checks.prepare_args(args)
            assert schedule_of(args).early_update == way


def test_the_chunks_of_a_rank_share_its_memory_in_flight(parse):
    args = parse("--asynchzp-memory-in-flight-gb 3 --asynchzp-grad-slot-mb 0.5")
    args.virtual_pipeline_model_parallel_size = 2
    schedule = schedule_of(args)
    assert schedule.in_flight_nbytes == 3 * 2**29 and schedule.grad_slot_nbytes == 2**19


def test_muon_needs_the_package_with_its_arithmetic_and_coefficients_it_knows(parse, monkeypatch):
    checks.prepare_args(parse("--optimizer muon"))
    with pytest.raises(ConfigurationError, match="^--muon-coefficient-type cubic .*quintic"):
        checks.prepare_args(parse("--optimizer muon --muon-coefficient-type cubic"))
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    checks.prepare_args(parse())
    for name in ("muon", "dist_muon"):
        with pytest.raises(ConfigurationError, match=r"pip install .megatron_asynchzp\[muon\].$"):
            checks.prepare_args(parse(f"--optimizer {name}"))


def _write_dataset(prefix: Path, tokens: np.ndarray) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=tokens.dtype.type)
    builder.add_document(tokens, [tokens.size])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("place", [0, 1234, -1])
def test_a_token_of_which_the_model_has_no_row_is_refused_before_a_start(
    parse, tmp_path, dtype, place
):
    tokens = (np.arange(2000) % 128).astype(dtype)
    _write_dataset(tmp_path / "good", tokens)
    tokens[place] = 128
    _write_dataset(tmp_path / "other", tokens)
    args = parse(f"--train-data-path 0.5 {tmp_path}/good 0.5 {tmp_path}/other")
    args.mock_data, args.padded_vocab_size = False, 129
    assert not [*checks.faults_of_tokens(args)]
    args.padded_vocab_size = 128
    (fault,) = checks.faults_of_tokens(args)
    assert f"{tmp_path}/other: it holds the token 128, and" in fault


def test_of_large_data_a_part_is_looked_at_from_its_beginning_to_its_end(tmp_path, monkeypatch):
    tokens = np.zeros(10_000, np.uint16)
    tokens[7300:] = 9
    _write_dataset(tmp_path / "large", tokens)
    monkeypatch.setattr(checks, "_TOKENS_SEEN", 10)
    assert checks._ids_seen(tmp_path / "large.idx", tmp_path / "large.bin") == [0, 9]


@pytest.mark.parametrize("name", ["MASTER_ADDR", "RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("scheduler", [{}, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}])
def test_a_process_that_nothing_made_a_rank_is_refused_naming_what_it_lacks(
    monkeypatch, name, scheduler
):
    for one in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(one, "1")
    for key, value in scheduler.items():
        monkeypatch.setenv(key, value)
    checks.check_is_rank()
    monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=f"^{name} not set: .* asynchzp launch"):
        checks.check_is_rank()


@pytest.mark.parametrize(
    ("ranks", "more", "fault"),
    [
        (8, "", ""),
        (16, "--tensor-model-parallel-size 2 --context-parallel-size 2", ""),
        (6, "", "with 6 data x context parallel ranks: .* start as many ranks$"),
        (2, "--tensor-model-parallel-size 2", "with 1 data x context parallel ranks"),
        (2, "", "-rank 16: 2 ranks hold no sub-sample of --seq-length 64; give 32 or more$"),
        (8, "--max-seqlen-per-dp-cp-rank 0", "add --max-seqlen-per-dp-cp-rank TOKENS$"),
    ],
)
def test_sub_samples_need_as_many_ranks_as_megatron_has_groups_for(parse, ranks, more, fault):
    line = "--hybrid-context-parallel --seq-length 64 --max-seqlen-per-dp-cp-rank 16 "
    faults = [*checks.faults_of_sizes(parse(f"{line} --global-batch-size 48 {more}", ranks))]
    assert bool(fault) == bool(faults)
    assert not fault or re.search(f"^--hybrid-context-parallel.*{fault}", faults[0])
