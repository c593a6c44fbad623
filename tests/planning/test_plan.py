# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`asynchzp plan`: what is printed, and one line for what cannot be planned."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from megatron_asynchzp.mcore.flags.asynchzp import add_asynchzp_arguments
from megatron_asynchzp.planner.activations import FUSED, Recompute, Setting
from megatron_asynchzp.planner.cluster_files import FOLDER, load_cluster
from megatron_asynchzp.planner.costs import Plan
from megatron_asynchzp.planner.model import Attention, Batch, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.search import Space, search
from megatron_asynchzp.planning import plan as command
from megatron_asynchzp.planning import plan_picture, plan_table
from megatron_asynchzp.planning.plan import main
from megatron_asynchzp.sharding.topology import ShardSizes
from tests.support.command_server import Ended, serving

LAYER = Layer(Attention(16, 16, 64), Mlp(4096, False))
MODEL = Model(1024, 32000, (LAYER,) * 4, is_tied=False)
TRAINING = ["--", "pretrain_gpt.py", "--num-layers", "4"]
# Without a flag of ours, with those of Megatron's wrapper, and with data that is not here.
# fmt: off
STOCK = ["--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4",
         "--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "1",
         "--global-batch-size", "16", "--train-iters", "3", "--lr", "1e-3", "--bf16",
         "--tokenizer-type", "NullTokenizer", "--vocab-size", "511",
         "--data-path", "/cluster/corpus",
         "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
# fmt: on


@pytest.fixture
def megatron(monkeypatch):
    """Stands for Megatron's parser: the setting of a training command."""

    parser = ArgumentParser()
    add_asynchzp_arguments(parser)
    stock = Namespace(
        bf16=True,
        grad_reduce_in_bf16=False,
        optimizer="adam",
        asynchzp_moment_dtypes=("fp32", "fp32"),
        distributed_backend="nccl",
        global_batch_size=64,
        distributed_timeout_minutes=10,
        log_interval=10,
    )
    args = parser.parse_args([], stock)

    def setting_of(_, cluster):
        batch = Batch(1, 1024, 64 // cluster.num_ranks)
        return Setting(MODEL, Parallel(), batch, FUSED, Recompute()), args

    monkeypatch.setattr(command, "setting_of", setting_of)
    return args


def test_a_plan_is_printed_with_its_flags_its_reasons_and_its_limit(megatron, capsys, tmp_path):
    files = tmp_path / "plan.png", tmp_path / "step.json"
    more = ["--picture", str(files[0]), "--trace", str(files[1])]
    assert main(["--cluster", "h100", "--ranks", "16", *more, *TRAINING]) == 0
    text = capsys.readouterr().out
    assert "Add: --use-asynchzp --asynchzp-param-shard-size" in text
    assert all(name in text for name in ("ZeRO-3", "HSDP", "distributed optimizer", "limited by"))
    rows = [line for line in text.splitlines() if line.startswith("*")]
    assert len(rows) == 1 and "%" in rows[0]
    assert all(file.stat().st_size > 1000 for file in files)


@pytest.mark.parametrize("argv, line", [
    (["--cluster", "h1000"], "h1000: No such file or directory; give a file or one of"),
    (["--cluster", "h100", "--ranks", "12"], "h100: 12 ranks do not fill nodes of 8"),
    (["--cluster", "h100", "--ranks", "128"], "--global-batch-size 64: no micro-batch size"),
])  # fmt: skip
def test_what_cannot_be_planned_is_one_line(megatron, capsys, argv, line):
    assert main([*argv, *TRAINING]) == 2
    text = capsys.readouterr().err
    assert text.startswith("megatron_asynchzp: ") and line in text and text.count("\n") == 1


@pytest.fixture(scope="module")
def plan() -> Iterator[Callable[..., Ended]]:
    """Call with a training command: the script, and flags beside STOCK."""
    with serving(main) as run:
        yield lambda script, *more: run("--cluster", "h100", "--ranks", "8", "--rows", "2", "--",
                                        script, *STOCK, *more)  # fmt: skip


# The first imports the adaptor, which checks the words of its command line as a run does.
@pytest.mark.parametrize("script", ["scripts/train/pretrain_gpt.py", "pretrain_gpt.py"])
def test_a_stock_command_line_is_planned_as_it_is(plan, script):
    status, out, err = plan(script)
    assert status == 0, err
    assert "Add: --use-asynchzp --asynchzp-param-shard-size" in out
    assert plan(script, "--use-asynchzp") == (status, out, err)


def test_what_could_not_run_with_the_flags_of_a_plan_is_not_planned(plan):
    status, out, err = plan("pretrain_gpt.py", "--optimizer-cpu-offload")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert "--optimizer-cpu-offload is not supported with --use-asynchzp" in err


def test_a_script_that_does_not_exist_is_one_line(capsys):
    assert main(["--cluster", "h100", "--", "mine.py"]) == 2
    assert capsys.readouterr().err == "megatron_asynchzp: mine.py: no such script\n"


def test_a_model_that_fits_nowhere_names_the_field_and_what_is_needed(megatron, capsys, tmp_path):
    small = tmp_path / "small.toml"
    text = (FOLDER / "h100.toml").read_text()
    small.write_text(text.replace("memory_gib = 80", "memory_gib = 6.5"))
    assert main(["--cluster", str(small), "--ranks", "8", *TRAINING]) == 1
    error = capsys.readouterr().err
    assert f"{small}: device.memory_gib: none of" in error and error.count("\n") == 1


@pytest.mark.parametrize("argv", [
    ["--cluster", "h100"], ["--", "pretrain_gpt.py"],
    ["--cluster", "h100", "--ranks", "0", "--", "x"],
    ["--cluster", "h100", "--picture", "plan.pdf", "--", "x"],
])  # fmt: skip
def test_a_wrong_command_line_is_refused_as_argparse_does(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_flags_name_what_differs_from_the_users_own():
    cluster = load_cluster("h100").with_ranks(16)
    start = search(Space(MODEL, cluster, 64, Plan(ShardSizes(1, 1, 1), Parallel(),
                                                        Batch(1, 1024)))).ranked[0]  # fmt: skip
    space = Space(MODEL, cluster, 64, replace(start.plan, recompute=Recompute()))
    assert "--micro-batch-size" not in plan_table.flags(start, space)
    changed = replace(start.plan, batch=Batch(2, 1024, 2), recompute=Recompute("full"))
    flags = plan_table.flags(replace(start, costing=replace(start.costing, plan=changed)), space)
    assert flags[flags.index("--recompute-granularity") + 1] == "full"
    assert ("--micro-batch-size" in flags) == (start.plan.batch.size != 2)


def test_the_front_holds_what_no_plan_beats_in_both():
    cluster = load_cluster("h100").with_ranks(8)
    space = Space(MODEL, cluster, 64, Plan(ShardSizes(1, 1, 1), Parallel(),
                                                  Batch(1, 1024)))  # fmt: skip
    ranked = search(space).ranked
    front = plan_picture._front(ranked)
    for held, step in front:
        assert not any(
            one.costing.memory.total / 2**30 < held and one.step_s < step for one in ranked
        )
    assert [held for held, _ in front] == sorted(held for held, _ in front)
