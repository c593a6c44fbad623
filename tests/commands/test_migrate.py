# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`asynchzp migrate`: it says of a training command what a start of it says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_asynchzp.commands import deepspeed, migrate, validation
from megatron_asynchzp.errors import ConfigurationError
from tests.support.command_server import Ended, RunCommand, serving

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/train/pretrain_gpt.py"
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 2 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --vocab-size 63 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --transformer-impl local "
    "--no-persist-layer-norm --eval-iters 0 --log-interval 1 --bf16 "
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --disable-bias-linear "
)
# Each with whether it starts; "!" for weakened. As Megatron's examples and what users report have
# them, for a small model.
COMMANDS = {
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": "yes",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format "
    "fsdp_dtensor --no-gradient-accumulation-fusion --calculate-per-token-loss "
    "--init-model-with-meta-device": "yes",
    "--use-megatron-fsdp --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy "
    "optim --use-nccl-ub --fsdp-manual-registration --fsdp-double-buffer": "yes!",
    "--use-torch-fsdp2 --ckpt-format torch_dcp --untie-embeddings-and-output-weights": "yes",
    "--tensor-parallel-num-weight-shards 2 --use-distributed-optimizer": "yes",
    EXPERTS + "--overlap-moe-expert-parallel-comm --bf16 --transformer-impl local": "yes",
    EXPERTS + "--overlap-moe-expert-parallel-comm --bf16 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1": "yes!",
    "--freeze-all-layers --use-distributed-optimizer": "no",
    "--optimizer-cpu-offload --use-distributed-optimizer --use-precision-aware-optimizer": "no",
    "--optimizer-cpu-offload --main-grads-dtype bf16 --qk-clip": "no",
    "--pipeline-model-parallel-size 3": "no",
    "--global-batch-size 9": "no",
    "--num-layrs 2": "no",
}


@pytest.fixture(scope="module")
def run() -> Iterator[RunCommand]:
    with serving(migrate.main) as migrated:
        yield migrated


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str], Ended]]:
    """What `asynchzp launch` checks before it starts 4 ranks, of flags beside MODEL."""
    with serving(validation.main) as checked:
        yield lambda more: checked("4", "4", SCRIPT, *MODEL.split(), *more.split())


def launch_words(flags: str, ranks: int = 4) -> list[str]:
    options = ["torchrun", "--nproc-per-node", str(ranks), SCRIPT]
    return [*options, *MODEL.split(), *flags.split()]


def refused(out: str) -> list[str]:
    lines = out.splitlines()
    if "Refused:" not in lines:
        return []
    rest = lines[lines.index("Refused:") + 1 :]
    ends = (place for place, line in enumerate(rest) if not line.startswith("  "))
    return [line.strip() for line in rest[: next(ends, None)]]


@pytest.mark.parametrize("flags", COMMANDS)
def test_its_verdict_is_what_the_check_before_a_start_says(run, start, flags):
    status, out, err = run("--", *launch_words(flags))
    starts = COMMANDS[flags].startswith("yes")
    assert (status, err) == (0 if starts else migrate.EXIT_REFUSED, ""), out
    checked = start(f"{flags} --use-asynchzp")
    assert (checked.status == 0) == starts
    if not starts:
        assert checked.err.strip().removeprefix("megatron_asynchzp: ") in refused(out)
    first = out.splitlines()[0]
    assert first.startswith(f"{SCRIPT} on 4 ranks, 4 a node: ")
    assert ("weakened" in first) == ("Switched off" in out) == COMMANDS[flags].endswith("!")


STARTED = [flags for flags in COMMANDS if COMMANDS[flags] == "no" or "weight-shards" in flags]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [*STARTED, EXPERTS + "--overlap-moe-expert-parallel-comm"])
def test_its_verdict_is_what_a_real_start_says(run, flags):
    words = launch_words(flags)[1:]
    command = [sys.executable, "-m", "megatron_asynchzp", "launch", *words, "--use-asynchzp"]
    done = subprocess.run(
        [*command, "--asynchzp-device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    status, out, _ = run("--", "torchrun", *words)
    assert (done.returncode == 0) == (status == 0), done.stderr[-2000:]
    if status:
        line = done.stderr.strip().splitlines()[-1]
        assert line.removeprefix("megatron_asynchzp: ") in refused(out)
    else:
        assert " iteration        2/" in done.stdout


def test_what_megatron_asks_of_the_environment_is_named_and_judged_as_if_it_were_there(run):
    flags = "--bf16 --transformer-impl transformer_engine --fine-grained-activation-offloading"
    status, out, _ = run("--", *launch_words(f"{flags} --offload-modules core_attn"))
    assert status == 0, out
    assert "Needed in the environment" in out and "  NVTE_CPU_OFFLOAD_V1 = 1: " in out


def test_every_refusal_is_named_and_the_rest_is_judged_without_them(run):
    flags = "--optimizer-cpu-offload --qk-clip --use-distributed-optimizer --use-nccl-ub"
    status, out, _ = run("--", *launch_words(flags))
    assert status == migrate.EXIT_REFUSED
    assert {line.split()[0] for line in refused(out)} == {"--optimizer-cpu-offload", "--qk-clip"}
    assert "Switched off" in out and "Without what is refused: " in out
    assert "yours (distributed optimizer)  1, 1, 4" in out


@pytest.mark.parametrize(
    "flags, yours, becomes",
    [
        ("", "1, 1, 1", "node"),
        ("--use-distributed-optimizer", "1, 1, 4", "node"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "1, 4, 4", "1, 4, 4"),
        ("--use-megatron-fsdp --num-distributed-optimizer-instances 2", "2, 2, 2", "2, 2, 2"),
        ("--use-torch-fsdp2", "4, 4, 4", "4, 4, 4"),
        ("--tensor-parallel-num-weight-shards 2", "2, 2, 2", "2, 2, 4"),
        ("--tensor-parallel-num-weight-shards 4 --use-distributed-optimizer", "4, 4, 4", "4, 4, 4"),
        ("--tensor-parallel-num-weight-shards 4 --tensor-model-parallel-size 2 "
         "--use-distributed-optimizer", "2, 2, 2", "2, 2, 2"),
        ("--expert-tensor-parallel-num-weight-shards 2 " + EXPERTS, "1, 1, 1", "2, 2, 4"),
    ],
)  # fmt: skip
def test_other_sharding_flags_become_sizes_and_stand_beside_ours(run, flags, yours, becomes):
    words = launch_words(flags)
    words[2:3] = ["2", "--nnodes", "2"]
    # The 4 ranks are two nodes, or one of the cluster's.
    for own, node in (("", 2), ("--cluster h100", 4)):
        status, out, _ = run(*own.split(), "--", *words)
        assert status == 0 and f"on 4 ranks, {node} a node" in out
        assert ("step s on h100" in out) == bool(own)
        rows = [line for line in out.splitlines() if line.startswith(("yours", "--use-asynchzp  "))]
        assert yours in rows[0]
        assert (f"{node}, {node}, 4" if becomes == "node" else becomes) in rows[1]


def test_a_recipe_a_script_and_a_command_in_one_word_are_read_alike(run, tmp_path):
    pairs = [("--lr", "1e-3"), ("--global-batch-size", "8"), ("--micro-batch-size", "1")]
    pairs += [("--max-position-embeddings", "32")]
    shape = ["num-layers", "hidden-size", "num-attention-heads", "seq-length"]
    pairs += [(f"--{name}", str(size)) for name, size in zip(shape, (2, 64, 4, 32), strict=True)]
    line = " ".join(word for pair in pairs for word in pair) + " --bf16 --train-iters 2"
    recipe = {"MODEL_ARGS": dict(pairs) | {"--bf16": True, "--train-iters": 2, "--swiglu": False}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    named = {flag[2:].replace("-", "_"): value for flag, value in pairs}
    nested = {"model": named, "train": {"train_iters": 2, "bf16": True, "add_bias_linear": True}}
    (tmp_path / "settings.yaml").write_text(json.dumps(nested | {"logger": {"entity": "me"}}))
    script = f"""
    GPUS=${{GPUS:-8}}
    ARGS=({line} "--exit-interval 10" --eval-iters ${{EVALS:-1}} --save-interval $SAVES)
    torchrun --nproc_per_node $GPUS pretrain_gpt.py ${{ARGS[@]}} --tokenizer-model $TOKENIZER
    """
    (tmp_path / "train.sh").write_text(script)
    told = []
    for words in (
        [f"{tmp_path}/recipe.yaml"], [f"{tmp_path}/settings.yaml"], [f"{tmp_path}/train.sh"],
        [f"torchrun --nproc_per_node 8 pretrain_gpt.py {line}"], ["--", *line.split()],
    ):  # fmt: skip
        status, out, err = run("--ranks", "8", *words)
        assert (status, err) == (0, ""), out
        told.append([line for line in out.splitlines() if line.startswith(("Model", "yours"))])
    assert told == told[:1] * 5
    assert "not of Megatron, and left out: entity" in run(f"{tmp_path}/settings.yaml").out
    out = run(f"{tmp_path}/train.sh").out
    assert "$SAVES" in out and "on 8 ranks" in out


@pytest.mark.parametrize(
    "words, line",
    [
        ("no_such.sh", "no_such.sh: no such file"),
        ("no_such_thing", "no_such_thing: no such file, and no training command"),
        ("README.md", "README.md: give a .sh, .yaml or .json file, or a command line"),
        (".pre-commit-config.yaml", "no flags of Megatron there"),
        ("docs/results/records/census.jsonl", "give a .sh, .yaml or .json file"),
        ("no_such.json", "no_such.json: No such file"),
        ("--cluster no_such train.sh", "no_such: No such file"),
        ("--cluster h100 --ranks 12 -- pretrain_gpt.py", "12 ranks do not fill nodes of 8"),
    ],
)
def test_what_is_no_training_command_is_one_line_and_status_2(run, words, line):
    status, out, err = run(*words.split())
    assert (status, out) == (2, "")
    (printed,) = err.splitlines()
    assert line in printed


@pytest.mark.parametrize(
    "zero, sizes",
    [
        ({"stage": 1}, "1 1 world"), ({"stage": 2}, "1 world world"), ({}, "1 1 1"),
        ({"stage": 3}, "world world world"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "8 world world"),
        ({"stage": 3, "mics_shard_size": 8}, "8 8 8"), ({"stage": 3, "mics_shard_size": -1},
         "world world world"), ({"stage": 2, "zero_hpz_partition_size": 8}, "1 world world"),
    ],
)  # fmt: skip
def test_deepspeeds_json_becomes_sizes(zero, sizes):
    flags = deepspeed.flags_of({"zero_optimization": zero, "bf16": {"enabled": True}}, "ds.json")
    assert " ".join(flags[2:7:2]) == sizes and flags[7:] == ["--bf16"]


def test_deepspeeds_json_names_what_is_refused_switched_off_and_wrong(run, tmp_path):
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "overlap_comm": True, "offload_param": {"device": "none"}}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    status, out, _ = run(str(path))
    assert status == 0 and "Refused" not in out
    zero |= {"offload_optimizer": {"device": "cpu"}, "zero_quantized_weights": True}
    path.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 1.0}))
    status, out, _ = run(str(path))
    assert status == migrate.EXIT_REFUSED and "offload_optimizer: not supported" in out
    assert "zero_quantized_weights: nothing below 16 bits" in out and "--clip-grad 1.0" in out
    for stage in (4, "3", True, None):
        with pytest.raises(ConfigurationError, match=r"^ds.json: zero_optimization\.stage: "):
            deepspeed.flags_of({"zero_optimization": {"stage": stage}}, "ds.json")
    with pytest.raises(ConfigurationError, match="mics_shard_size: not a number of ranks"):
        deepspeed.flags_of({"zero_optimization": {"stage": 3, "mics_shard_size": "8"}}, "ds.json")


@pytest.mark.slow
def test_sixteen_thousand_ranks_take_less_than_ten_seconds_of_a_core():
    shape = "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192"
    flags = f"{shape} --max-position-embeddings 8192 --micro-batch-size 1 --bf16 --lr 1e-4"
    flags += " --global-batch-size 16384 --train-iters 10 --tensor-model-parallel-size 8"
    flags += " --pipeline-model-parallel-size 8 --use-distributed-optimizer --vocab-size 128256"
    code = (
        "import sys, time; from megatron_asynchzp.command import main; "
        "status = main(sys.argv[1:]); print(time.process_time()); sys.exit(status)"
    )
    words = ["migrate", "--cluster", "h100", "--ranks", "16384", "--", *flags.split()]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *table, seconds = done.stdout.splitlines()
    assert any("--use-asynchzp   " in line for line in table)
    # In a quarter of the time on a machine of its own: import of torch and Megatron is nearly all.
    assert float(seconds) < 20
