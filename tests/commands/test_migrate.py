# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`asynchzp migrate`: it says of a training command what a start of it says."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_asynchzp.commands import deepspeed, migrate, validation
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.planner import explain
from tests.commands.test_shell_script import words_of_bash
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
    "optim --use-nccl-ub --fsdp-manual-registration --fsdp-double-buffer": "yes",
    "--use-torch-fsdp2 --ckpt-format torch_dcp --untie-embeddings-and-output-weights": "yes",
    "--tensor-parallel-num-weight-shards 2 --use-distributed-optimizer": "yes",
    EXPERTS + "--overlap-moe-expert-parallel-comm --bf16 --transformer-impl local": "yes",
    EXPERTS + "--overlap-moe-expert-parallel-comm --bf16 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1": "yes!",
    "--freeze-all-layers --use-distributed-optimizer": "no",
    "--optimizer-cpu-offload --use-distributed-optimizer --use-precision-aware-optimizer": "yes",
    "--optimizer-cpu-offload --no-pin-cpu-params": "no",
    "--freeze-all-layers --main-grads-dtype bf16 --skip-train": "no",
    "--pipeline-model-parallel-size 3": "no",
    "--global-batch-size 9": "no",
    "--num-layrs 2": "no",
}


# Written after what users post in public issues, for the same model.
TP = "--tensor-model-parallel-size 2 "
POSTED = {
    "--use-mcore-models --use-flash-attn --recompute-activations --lr-decay-iters 320000 --min-lr "
    "1e-5 --lr-warmup-fraction .01 --clip-grad 1.0 --weight-decay 1e-2 --split 949,50,1": "yes",
    EXPERTS + TP + "--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
    "--pipeline-model-parallel-size 2 --sequence-parallel": "no",
    TP + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --sequence-parallel "
    "--ckpt-format fsdp_dtensor --overlap-grad-reduce --use-distributed-optimizer": "yes",
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--use-distributed-optimizer --overlap-grad-reduce "
    "--accumulate-allreduce-grads-in-fp32": "yes",
    EXPERTS + "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "yes",
    "--lr-warmup-iters 2000 --use-distributed-optimizer": "no",
}


@pytest.fixture(scope="module")
def run() -> Iterator[RunCommand]:
    with serving(migrate.main) as migrated:
        yield migrated


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str], Ended]]:
    """What `asynchzp launch` checks before it starts 4 ranks, of flags beside MODEL."""
    with serving(validation.main) as checked:
        yield lambda more: checked("1", "4", SCRIPT, *MODEL.split(), *shlex.split(more))


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


@pytest.mark.parametrize("flags", [*COMMANDS, *POSTED])
def test_its_verdict_is_what_the_check_before_a_start_says(run, start, flags):
    status, out, err = run("--", *launch_words(flags))
    expected = (COMMANDS | POSTED)[flags]
    starts = expected.startswith("yes")
    assert (status, err) == (0 if starts else migrate.EXIT_REFUSED, ""), out
    checked = start(f"{flags} --use-asynchzp")
    assert (checked.status == 0) == starts
    if not starts:
        assert checked.err.strip().removeprefix("megatron_asynchzp: ") in refused(out)
    first = out.splitlines()[0]
    assert first.startswith(f"{SCRIPT} on 4 ranks, 4 a node: ")
    assert ("weakened" in first) == ("Switched off" in out) == expected.endswith("!")


STARTED = [flags for flags in COMMANDS if COMMANDS[flags] == "no" or "weight-shards" in flags]
STARTED += POSTED


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
    flags = (
        "--freeze-all-layers --skip-train --use-distributed-optimizer --keep-fp8-transpose-cache"
    )
    status, out, _ = run("--", *launch_words(flags))
    assert status == migrate.EXIT_REFUSED
    assert {line.split()[0] for line in refused(out)} == {"--freeze-all-layers", "--skip-train"}
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
    assert (
        "no flag or value of Megatron, and left out: entity" in run(f"{tmp_path}/settings.yaml").out
    )
    out = run(f"{tmp_path}/train.sh").out
    assert "$SAVES" in out and "on 8 ranks" in out


RUN = f"torchrun --nproc_per_node 4 {SCRIPT}"
# As launchers of Megatron-LM and Megatron Bridge, and what users report, have theirs: "no" for what
# does not start.
SCRIPTS = {
    "arrays": f"A=({MODEL}\n --skip-train # no\n)\nA+=(--use-distributed-optimizer)\n"
    f'{RUN} "${{A[@]}}"',
    "text of one line": f'A="{MODEL} --freeze-all-layers"\n{RUN} $A  # no',
    "text of many lines": f'A="\n  {MODEL} \\\n --use-distributed-optimizer \\\n"\n{RUN} ${{A}}',
    "command in a text": f'A="{MODEL} --skip-train"\nB="{RUN} $A"  # no\nsrun -l bash -c "$B"',
    "eval": f'A="{MODEL}"\neval "{RUN} $A --freeze-all-layers"  # no',
    "exec": f"export TP=${{TP:-4}} PP=3\nexec {RUN} {MODEL} --tensor-model-parallel-size=$TP",
    "function": f'train() {{\n  local A="{MODEL}"\n  {RUN} $A --global-batch-size=$((3 * 3))\n}}'
    "\ntrain  # no",
    "default": f"{RUN} {MODEL} ${{MORE:---skip-train}}  # no",
    "heredoc": f"cat >x.sh <<EOF\n{RUN} {MODEL} --skip-train\nEOF\n{RUN} {MODEL}",
    "one word of two": f'A="--seed 2"\n{RUN} {MODEL} "$A"  # no',
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_verdict_on_a_script_is_what_a_start_of_its_words_says(run, start, name, tmp_path):
    words = words_of_bash(SCRIPTS[name], tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPTS[name])
    status, out, err = run(str(tmp_path / "train.sh"))
    checked = start(shlex.join([*words[words.index(SCRIPT) + 1 :], "--use-asynchzp"]))
    assert (status == 0) == (checked.status == 0) == ("# no" not in SCRIPTS[name]), out
    assert err == "" and f"{SCRIPT} on 4 ranks, 4 a node: " in out
    if checked.status:
        assert checked.err.strip().removeprefix("megatron_asynchzp: ") in refused(out)


def assumed(out: str) -> str:
    return "\n".join(line for line in out.splitlines() if line.startswith("- "))


def test_what_a_script_has_and_its_command_does_not_get_is_named(run, tmp_path):
    text = f"""
    TP=1; [ x ] && TP=2
    EXTRA=(--swiglu)
    [ -f {SCRIPT} ] || exit; case $1 in --bf16|--fp16) shift ;; --skip-train) shift ;; esac
    python tools/preprocess_data.py --vocab-file x
    {RUN} {MODEL} --seed $SEED --lr-decay-iters=$((N * 2)) \\
      # --log-params-norm \\
      --untie-embeddings-and-output-weights
    """
    (tmp_path / "train.sh").write_text(text)
    status, out, _ = run(str(tmp_path / "train.sh"))
    assert status == 0 and "Refused" not in out
    told = assumed(out)
    assert "nothing sets $((N * 2)), $SEED: 1 stands for a value" in told
    assert (
        "not given to the script, and left out: --fp16, --skip-train, --swiglu, --vocab-file"
        in told
    )
    assert "for bash, which ends it before, and read all the same: --untie-emb" in told
    assert "read as set last: TP" in told and "params-norm" not in told


def test_settings_in_yaml_are_switches_in_any_spelling_and_the_rest_is_named(run, tmp_path):
    lines = ["lr: 1e-3", "micro_batch_size: 1", "max_position_embeddings: 32", "num_layers: 2"]
    lines += ["hidden-size: 64", "num_attention_heads: 4", "seq_length: 32", "swiglu: 'False'"]
    path = tmp_path / "settings.yaml"
    for switch in ("freeze_all_layers: 1", "freeze_all_layers: 'True'", "skip-train: on"):
        path.write_text("\n".join([*lines, switch, "bf16: 'true'", "add_bias_linear: 0"]))
        status, out, _ = run(str(path))
        flag = "--" + switch.partition(":")[0].replace("_", "-")
        assert status == 1 and refused(out)[0].startswith(flag) and "left out" not in out
    odd = ["bf16: maybe", "recompute_granularity: false", "disable_bias_linear: yes", "mine: 3"]
    path.write_text("\n".join([*lines, *odd, "--tensor-model-parallel-size: $TP"]))
    status, out, _ = run(str(path))
    told = assumed(out)
    assert "left out: bf16: maybe, recompute_granularity: False, mine" in told
    assert "nothing sets $TP" in told


def test_the_number_of_ranks_is_the_same_for_flags_in_one_word_and_in_two(run):
    heads = []
    for between in (" ", "="):
        flags = f"--tensor-model-parallel-size{between}4 --pipeline-model-parallel-size{between}4"
        heads.append(run("--", SCRIPT, *MODEL.split(), *flags.split()).out.splitlines()[0])
    assert "on 16 ranks" in heads[0] and heads == heads[:1] * 2


@pytest.mark.parametrize(
    "words, line",
    [
        ("no_such.sh", "no_such.sh: no such file"),
        ("scripts/train/lunch.sh", "lunch.sh: no such file; the nearest is launch.sh"),
        ("scripts/train", "scripts/train: that is a folder; name a file in it"),
        ("pretrain_gpt.py --bf16", "asynchzp migrate: give the training command after --, as in"),
        ("--rnaks 8 train.sh", "asynchzp migrate: --rnaks: no such flag; the nearest is --ranks"),
        ("-- torchrun pretrain_gpt.py", "torchrun: no flags of Megatron there"),
        ("no_such_thing", "no_such_thing: no such file, and no training command"),
        ("README.md", "README.md: give a .sh, .yaml or .json file, or a command line"),
        (".pre-commit-config.yaml", "no flags of Megatron there"),
        ("docs/results/records/census.jsonl", "give a .sh, .yaml or .json file"),
        ("no_such.json", "no_such.json: No such file"),
        ("--cluster no_such train.sh", "no_such: no cluster of that name; give one of a100"),
        ("--cluster h100 --ranks 12 -- pretrain_gpt.py", "12 ranks do not fill nodes of 8"),
    ],
)
def test_what_is_no_training_command_is_one_line_and_status_2(run, words, line):
    status, out, err = run(*words.split())
    assert (status, out) == (2, "")
    (printed,) = err.splitlines()
    assert line in printed


UNREADABLE = {
    "empty.sh": b"", "none.sh": b"echo hello\nls -l\n", "binary.sh": b"PK\0\3 --bf16",
    "empty.yaml": b"", "open.sh": b"torchrun pretrain_gpt.py --bf16 'x\n",
    "torn.yaml": b"a: [1, 2\n", "list.yaml": b"- 1",
}  # fmt: skip


def test_what_can_be_known_of_a_file_is_said_without_torch_and_megatron(tmp_path):
    for name, content in UNREADABLE.items():
        (tmp_path / name).write_bytes(content)
    code = f"""
import sys
from megatron_asynchzp.commands import migrate
for name in {[*UNREADABLE, "absent.sh", "."]}:
    try:
        migrate.main(["--cluster", "H100", name])
    except SystemExit as end:
        assert end.code == 2
assert not {{"torch", "megatron"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert len(lines) == len(UNREADABLE) + 2 and done.stdout == ""
    faults = ["no flags", "no flags", "not a text", "no flags", "a quote that", "not a YAML"]
    for line, fault in zip(lines, [*faults, "no flags", "no such file", "a folder"]):
        assert line.startswith("megatron_asynchzp: ") and fault in line, line


RANKS = {
    "torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py": "32 ranks, 8 a node",
    "torchrun --nproc_per_node=$((4 * 2)) --nnodes=${NNODES:-2} pretrain_gpt.py": "16 ranks, 8",
    "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=4\nsrun pretrain_gpt.py": "16 ranks, 4 a node",
    "#SBATCH -N 2\n#SBATCH -n16\nsrun -l bash -c 'pretrain_gpt.py": "16 ranks, 8 a node",
    "#SBATCH --nodes 2-4\ntorchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py":
        "16 ranks, 8 a node",
    "srun -N 2 --ntasks-per-node 4 python pretrain_gpt.py": "8 ranks, 4 a node",
    "mpirun -np 16 -x A python pretrain_gpt.py": "16 ranks, 8 a node",
    "G=8\nWORLD_SIZE=$(($G*$N))\nWORLD_SIZE=$((G * 3))\npython pretrain_gpt.py": "24 ranks, 8 a",
}  # fmt: skip


@pytest.mark.parametrize("launcher", RANKS)
def test_a_script_starts_the_ranks_of_its_launcher_or_of_its_job(run, tmp_path, launcher):
    flags = MODEL.replace("size 8", "size 96")
    quote = "'" * (launcher.count("'") % 2)
    (tmp_path / "train.sh").write_text(f"#!/bin/bash\n{launcher} {flags}{quote}\n")
    status, out, err = run(str(tmp_path / "train.sh"))
    assert (status, err) == (0, ""), out
    assert out.startswith(f"pretrain_gpt.py on {RANKS[launcher]}")
    assert "nothing says how many ranks" not in out


def test_ranks_that_nothing_says_are_assumed_in_a_line_or_asked_for(run):
    head = run("--", SCRIPT, *MODEL.split()).out.splitlines()
    assert head[0].startswith(f"{SCRIPT} on 8 ranks, 8 a node: ")
    assert (
        head[1] == "- nothing says how many ranks it starts: 8 assumed; give yours with --ranks N"
    )
    flags = ["--pipeline-model-parallel-size", "3", "--micro-batch-size", "16"]
    status, out, err = run("--", SCRIPT, *MODEL.split(), *flags)
    assert (status, out) == (2, "")
    assert "does not say how many ranks it starts, and 3, the fewest, cannot: --global-batch" in err
    assert err.endswith("; add --ranks N, the ranks of your run\n")


def test_what_a_shell_sets_by_itself_is_not_missing(run, tmp_path):
    words = (
        '--save ${PWD}/a --save-interval 5 --data-cache-path "$HOME/$USER-$(pwd)" --seed $(date)'
    )
    (tmp_path / "train.sh").write_text(f"{RUN} {MODEL} {words}")
    told = assumed(run(str(tmp_path / "train.sh")).out)
    assert "nothing runs $(date): 1 stands for a value" in told and "nothing sets" not in told


@pytest.mark.parametrize("gain, judged", [
    (-0.1, "Stay"), (0.005, "Stay"), (0.0167, "Measure both"), (0.056, "Measure"), (0.057, "Worth"),
])  # fmt: skip
def test_a_gain_below_the_planners_own_error_is_not_worth_a_change(gain, judged):
    assert explain.worth(gain).startswith(judged)
    page = (ROOT / "docs" / "planner.md").read_text()
    assert f"{explain.MEAN_ERROR:.1%} of all" in page  # of published runs


def test_the_peak_of_yours_is_at_least_its_states_and_activations(run):
    large = "--use-distributed-optimizer --hidden-size 2048 --num-layers 8"
    out = run("--", *launch_words(large)).out
    columns = next(line for line in out.splitlines() if line.startswith("yours")).split()
    assert columns[-2] == ">=" and float(columns[-1]) > float(columns[-3])
    assert ">= leaves out what yours holds beside its states, activations and logits" in out


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
    config = {"zero_optimization": zero, "bf16": {"enabled": True}}
    flags, _ = deepspeed.translate(config, "ds.json")
    assert " ".join(flags[2:7:2]) == sizes and flags[7:] == ["--bf16", "--clip-grad", "0.0"]


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
    assert (
        "zero_quantized_weights: weights are gathered in 16 bits" in out
        and "--clip-grad 1.0" in out
    )
    for stage in (4, "3", True, None):
        with pytest.raises(ConfigurationError, match=r"^ds.json: zero_optimization\.stage: "):
            deepspeed.translate({"zero_optimization": {"stage": stage}}, "ds.json")
    with pytest.raises(ConfigurationError, match="mics_shard_size: not a number of ranks"):
        deepspeed.translate({"zero_optimization": {"stage": 3, "mics_shard_size": "8"}}, "ds.json")


MICRO = {"train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    "config, ranks, expected",
    [
        ({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}, None,
         "--micro-batch-size 1 --clip-grad 0"),
        (MICRO | {"train_batch_size": 64}, None, "-size 4 --global-batch-size 64 "),
        (MICRO | {"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8,
         "-size 4 --global-batch-size 64 "),
        (MICRO | {"gradient_accumulation_steps": 8}, 16, "-size 4 --global-batch-size 512 "),
        (MICRO | {"gradient_accumulation_steps": 8}, None, "it is 4 x 8 x the data-parallel ranks"),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, "--micro-batch-size 4 "),
        ({"train_batch_size": 64}, None, "64 = micro-batch x 1 x the data-parallel ranks"),
        (MICRO | {"train_batch_size": 33}, 8, "Refused: train_batch_size: 33 is not 4 x 1 x"),
        (MICRO, None, "--micro-batch-size 4 --clip-grad 0.0"),
        (MICRO | {"gradient_clipping": "auto"}, None, 'Not translated: gradient_clipping "auto"'),
        (MICRO | {"bf16": {"enabled": "auto"}}, None, 'Not translated: bf16.enabled "auto"'),
        (MICRO | {"optimizer": {"type": "OneBitAdam"}}, None, 'optimizer.type "OneBitAdam"'),
        (MICRO | {"amp": {"enabled": True, "opt": 1}}, None, "amp.enabled true, amp.opt 1"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, 1, "Refused: bf16 and fp16"),
        ({"zero_optimization": {"offload_param": {"device": "none", "pin": True}}}, 1, "no line"),
        ({"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}, 1, "no line"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, 1, "no line"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, 1, "no line"),
        ({"zero_optimization": {"cpu_offload": False}, "fp16": {"enabled": False}}, 1, "no line"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 1, "Refused: offload_param"),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 8}}, 1, "mics_shard_size 8"),
    ],
)  # fmt: skip
def test_every_key_of_deepspeeds_json_becomes_a_flag_or_a_line(config, ranks, expected):
    flags, lines = deepspeed.translate(config, "ds.json", ranks)
    refused = [line for line in lines if line.startswith("Refused: ")]
    assert len(refused) == expected.startswith("Refused: ")
    assert expected in "\n".join([*lines, " ".join(flags), "" if lines else "no line"])


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping", *MICRO])
@pytest.mark.parametrize("value", [True, -1, "8"])
def test_a_number_of_deepspeeds_json_that_is_none_is_refused(key, value):
    with pytest.raises(ConfigurationError, match=f"^ds.json: {key}: not a number of at least "):
        deepspeed.translate({key: value}, "ds.json")


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
