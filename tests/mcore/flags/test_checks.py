# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is checked before Megatron builds anything."""

import pytest
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import checks
from megatron_asynchzp.mcore.flags.asynchzp import resolve_schedule
from megatron_asynchzp.mcore.flags.command_line import check_command_line


def test_arguments_are_left_alone_when_the_run_is_refused(parse):
    args = parse("--use-distributed-optimizer --qk-clip")
    before = dict(vars(args))
    with pytest.raises(ConfigurationError):
        checks.prepare_args(args)
    assert vars(args) == before


def test_the_sizes_of_a_valid_run_are_written_into_the_arguments(parse, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = parse("--asynchzp-grad-shard-size 2")
    checks.prepare_args(args)
    assert args.asynchzp_param_shard_size == 4
    assert args.asynchzp_grad_shard_size == 2
    assert args.asynchzp_optim_shard_size == 8


@pytest.mark.parametrize(
    "line, world_size, words",
    [
        ("--tensor-model-parallel-size 4", 2, "2 ranks .* start 4 ranks"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, "= 4; start 4"),
        ("--global-batch-size 9", 8, "--global-batch-size 9 .* use a multiple of 8"),
        ("--eval-global-batch-size 9", 8, "--eval-global-batch-size 9 .* use a multiple of 8"),
        ("--eval-micro-batch-size 3", 8, "8 is not .* --eval-micro-batch-size 3 .* multiple of 24"),
    ],
)
def test_a_world_or_batch_that_does_not_divide_is_refused(parse, line, world_size, words):
    with pytest.raises(ConfigurationError, match=words):
        checks.prepare_args(parse(line, world_size))


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
        if is_legal:
            checks.refuse_sizes(args)
        else:
            with pytest.raises(ConfigurationError, match=f"--global-batch-size {batch} is not a"):
                checks.refuse_sizes(args)
    assert refused[False] and (refused[True] or micro * ranks == 1)


def test_a_growing_batch_is_let_through_where_megatron_grows_it_and_refused_where_not(parser):
    def check(line: str) -> None:
        words = f"--use-asynchzp --micro-batch-size 1 {line}".split()
        check_command_line(words, world_size=2)
        args = parser.parse_args(words)
        args.world_size = 2
        checks.refuse_sizes(args)

    check("--step-batch-size-schedule 0:2,128:8")
    with pytest.raises(ConfigurationError, match="ignores it .*use --step-batch-size-schedule"):
        check("--global-batch-size 8 --rampup-batch-size 2 2 100")


def _touch_dataset(folder, name: str) -> str:
    (folder / f"{name}.idx").write_bytes(b"MMIDIDX\x00\x00" + bytes(25))
    (folder / f"{name}.bin").write_bytes(b"some tokens")
    return str(folder / name)


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path", "--valid-data-path"])
def test_a_dataset_that_is_not_there_is_named_before_training(parse, tmp_path, flag):
    there, missing = _touch_dataset(tmp_path, "there"), str(tmp_path / "missing")
    checks.refuse_missing_data(parse(f"{flag} {there}"))
    checks.refuse_missing_data(parse(f"{flag} 0.5 {there} 0.5 {there}"))
    with pytest.raises(ConfigurationError, match=f"{flag} {missing}: no dataset there") as refused:
        checks.refuse_missing_data(parse(f"{flag} 0.5 {there} 0.5 {missing}"))
    assert "\n" not in str(refused.value)


def test_half_a_dataset_is_named_by_the_missing_half(parse, tmp_path):
    (tmp_path / "half.idx").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"\(.*half.bin missing\)"):
        checks.refuse_missing_data(parse(f"--data-path {tmp_path}/half"))


def test_datasets_listed_in_a_file_are_checked_too(parse, tmp_path):
    listing = tmp_path / "data.txt"
    with pytest.raises(ConfigurationError, match="no such file"):
        checks.refuse_missing_data(parse(f"--data-args-path {listing}"))
    listing.write_text(f"1.0 {tmp_path}/missing")
    with pytest.raises(ConfigurationError, match="--data-args-path .*missing: no dataset there"):
        checks.refuse_missing_data(parse(f"--data-args-path {listing}"))


def test_object_storage_is_left_to_megatron(parse):
    checks.refuse_missing_data(parse("--data-path s3://bucket/prefix"))


_MODEL = ("config.json", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    "files, is_refused",
    [
        (_MODEL, True),
        (("config.json", "model.safetensors.index.json"), True),
        (("config.json", "pytorch_model-00001-of-00002.bin"), True),
        (("config.json",), False),
        (("model.safetensors",), False),
        # Where training has saved, there is something to load.
        ((*_MODEL, "latest_checkpointed_iteration.txt"), False),
        ((*_MODEL, "iter_0000010/metadata.json"), False),
        ((*_MODEL, "release/metadata.json"), False),
    ],
)
@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_a_model_of_hugging_face_is_not_a_run_from_random_weights(
    parse, tmp_path, flag, files, is_refused
):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    args = parse(f"{flag} {tmp_path}")
    if not is_refused:
        checks.refuse_useless_load(args)
        return
    with pytest.raises(ConfigurationError) as refused:
        checks.refuse_useless_load(args)
    line = str(refused.value)
    assert line.startswith(f"{flag} {tmp_path} is a model of Hugging Face") and "\n" not in line
    assert f"asynchzp hf import --load {tmp_path} --save" in line


@pytest.mark.parametrize("flag", ["--yaml-cfg run.yaml", "--yaml-cfg=run.yaml"])
def test_a_yaml_configuration_cannot_drop_use_asynchzp_silently(flag):
    with pytest.raises(ConfigurationError, match="--yaml-cfg"):
        checks.refuse_yaml(["--use-asynchzp", *flag.split()], "--use-asynchzp")
    checks.refuse_yaml(flag.split(), "--use-asynchzp")


def test_saving_beside_training_needs_its_writer(parse, monkeypatch):
    flags = "--save runs --save-interval 5 --async-save --use-persistent-ckpt-worker"
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="^--async-save: .* add --async-strategy mcore$"):
        checks.refuse_useless_saves(parse(flags))
    checks.refuse_useless_saves(parse(f"{flags} --async-strategy mcore"))
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    checks.refuse_useless_saves(parse(flags))


@pytest.mark.parametrize("flag", ["--asynchzp-memory-in-flight-gb", "--asynchzp-grad-slot-mb"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_size_that_is_none_is_refused_in_one_line(parse, flag, value):
    with pytest.raises(ConfigurationError, match=f"^{flag} .*: give a size larger than 0$"):
        checks.prepare_args(parse(f"{flag}={value}"))


def test_what_is_not_a_number_is_refused_in_one_line(parse, capsys):
    with pytest.raises(SystemExit):
        parse("--asynchzp-grad-slot-mb many")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--asynchzp-grad-slot-mb: invalid float value: 'many'" in last


def test_a_budget_for_kept_parameters_is_a_number_or_what_the_device_has_left(parse, capsys):
    schedule = resolve_schedule(parse("--asynchzp-keep-params-gb auto"))
    assert schedule.keeps_params_in_rest and not schedule.keep_params_nbytes
    schedule = resolve_schedule(parse("--asynchzp-keep-params-gb 0.5"))
    assert schedule.keep_params_nbytes == 2**29 and not schedule.keeps_params_in_rest
    with pytest.raises(SystemExit):
        parse("--asynchzp-keep-params-gb some")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("--asynchzp-keep-params-gb: some is neither a number of GiB nor auto")


def test_the_chunks_of_a_rank_share_its_memory_in_flight(parse):
    args = parse("--asynchzp-memory-in-flight-gb 3 --asynchzp-grad-slot-mb 0.5")
    args.virtual_pipeline_model_parallel_size = 2
    schedule = resolve_schedule(args)
    assert schedule.in_flight_nbytes == 3 * 2**29 and schedule.grad_slot_nbytes == 2**19


def test_muon_needs_the_package_with_its_arithmetic_and_coefficients_it_knows(parse, monkeypatch):
    checks.refuse_missing_muon(parse("--optimizer muon"))
    with pytest.raises(ConfigurationError, match="^--muon-coefficient-type cubic .*quintic"):
        checks.refuse_missing_muon(parse("--optimizer muon --muon-coefficient-type cubic"))
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    checks.refuse_missing_muon(parse())
    for name in ("muon", "dist_muon"):
        with pytest.raises(ConfigurationError, match="pip install emerging-optimizers$"):
            checks.refuse_missing_muon(parse(f"--optimizer {name}"))
