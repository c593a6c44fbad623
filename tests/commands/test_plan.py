# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`asynchzp plan`: what is printed, and one line for what cannot be planned."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_asynchzp.commands import plan_table
from megatron_asynchzp.commands.plan import main
from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.planner import explain
from megatron_asynchzp.planner.activations import Recompute
from megatron_asynchzp.planner.cluster_files import FOLDER, load_cluster
from megatron_asynchzp.planner.model import Attention, Batch, Experts, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.plan import Plan
from megatron_asynchzp.planner.search import FLAT, search
from megatron_asynchzp.planner.space import Space
from tests.support.command_server import Ended, serving

LAYER = Layer(Attention(16, 16, 64), Mlp(4096, False))
MODEL = Model(1024, 32000, (LAYER,) * 4, is_tied=False)
ONE_NODE = "--cluster h100 --ranks 8 --rows 2"
# Without a flag of ours, with those of Megatron's wrapper, and with data that is not here.
# fmt: off
STOCK = ["--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4",
         "--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "1",
         "--global-batch-size", "16", "--train-iters", "3", "--lr", "1e-3", "--bf16",
         "--tokenizer-type", "NullTokenizer", "--vocab-size", "511",
         "--data-path", "/cluster/corpus",
         "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
# fmt: on


@pytest.fixture(scope="module")
def plan() -> Iterator[Callable[..., Ended]]:
    """Call with words of the plan command, the script, and flags beside STOCK."""
    with serving(main) as run:
        yield lambda words, script, *more: run(*words.split(), "--", script, *STOCK, *more)


@pytest.fixture
def small_cluster(tmp_path) -> Path:
    text = (FOLDER / "h100.toml").read_text()
    path = tmp_path / "small.toml"
    path.write_text(text.replace("memory_gib = 80", "memory_gib = 6.0001"))
    return path


def test_a_plan_is_printed_with_its_flags_its_reasons_and_its_limit(plan, tmp_path):
    files = tmp_path / "plan.png", tmp_path / "step.json"
    cluster = tmp_path / "measured.toml"  # with the host's own time, which no named file states
    text = (FOLDER / "h100.toml").read_text()
    text = text.replace("efficiency = 0.5 ", "efficiency = 0.02 ")  # which gets one line
    cluster.write_text(text.replace("memory_gib = 80", "memory_gib = 80\nstep_us = 2000"))
    more = f"--picture {files[0]} --trace {files[1]}"
    status, out, err = plan(f"--cluster {cluster} --ranks 16 {more}", "pretrain_gpt.py")
    assert status == 0, err
    assert err.startswith(f"megatron_asynchzp: {cluster}: device.efficiency 0.02 of")
    assert "Add: --use-asynchzp --asynchzp-param-shard-size" in out
    assert all(name in out for name in ("ZeRO-3", "HSDP", "distributed optimizer", "limited by"))
    rows = [line for line in out.splitlines() if line.startswith("*")]
    assert len(rows) == 2 and "%" in rows[0] and rows[1].startswith("* the ")
    assert all(file.stat().st_size > 1000 for file in files)


# The first imports the adaptor, which checks the words of its command line as a run does.
@pytest.mark.parametrize("script", ["scripts/train/pretrain_gpt.py", "pretrain_gpt.py"])
def test_a_stock_command_line_is_planned_as_it_is(plan, script):
    status, out, err = plan(ONE_NODE, script)
    assert status == 0, err
    assert "Add: --use-asynchzp --asynchzp-param-shard-size" in out
    assert plan(ONE_NODE, script, "--use-asynchzp") == (status, out, err)
    counted = f"{script}: 478,720 parameters, 2 layers of width 128, a vocabulary of 512 with"
    assert out.startswith(counted)


LLAMA_3_8B = Model(4096, 128256, (Layer(Attention(32, 8, 128), Mlp(14336, True)),) * 32, (), False)
MIXTRAL_8X7B = Model(
    4096, 32000, (Layer(Attention(32, 8, 128), Experts(8, 2, 14336, True)),) * 32, (), False
)
GPT_2 = Model(
    768, 50257, (Layer(Attention(12, 12, 64), Mlp(3072, False)),) * 12, (), True, True, 2, 1024
)


@pytest.mark.parametrize("model, published", [
    (LLAMA_3_8B, 8_030_261_248), (MIXTRAL_8X7B, 46_702_792_704), (GPT_2, 124_439_808),
])  # fmt: skip
def test_published_models_have_the_parameters_that_their_authors_count(model, published):
    assert model.num_params == published
    assert f"{published:,} parameters" in plan_table.model(model)


@pytest.mark.parametrize("words, training, line", [
    ("--cluster h1000", "pretrain_gpt.py", "h1000: no cluster of that name; the nearest is"),
    ("--cluster h100 --ranks 12", "pretrain_gpt.py", "h100: 12 ranks do not fill nodes of 8"),
    ("--cluster h100 --ranks 128", "pretrain_gpt.py", "--global-batch-size 16 is not a multiple"),
    (ONE_NODE, "pretrain_gpt.py --freeze-all-layers",
     "--freeze-all-layers is not supported with --use-asynchzp"),
    (ONE_NODE, "mine.py", "mine.py: no such script"),
])  # fmt: skip
def test_what_cannot_be_planned_is_one_line(plan, words, training, line):
    status, out, err = plan(words, *training.split())
    assert status == 2 and out == ""
    assert err.startswith("megatron_asynchzp: ") and line in err and err.count("\n") == 1


def test_a_model_that_fits_nowhere_names_the_field_and_what_is_needed(plan, small_cluster):
    status, _, err = plan(f"--cluster {small_cluster} --ranks 8", "pretrain_gpt.py")
    assert status == 1
    assert f"{small_cluster}: device.memory_gib: none of" in err and err.count("\n") == 1


@pytest.mark.parametrize("words, line", [
    ("--cluster h100 --pictures x -- x.py", "--pictures: no such flag; the nearest is --picture"),
    ("--cluster h100 --rnaks=8 -- x.py", "--rnaks: no such flag; the nearest is --ranks"),
    ("--cluster h100 pretrain_gpt.py --bf16", "give the training command after --, as in"),
    ("--cluster h100 --picture plan.jpg -- x.py", "plan.jpg: name a .png file"),
    ("--cluster h100 --trace plan -- x.py", "plan: name a .json file"),
    ("--cluster h100 --rows 0 -- x.py", "--rows 0: give a number of at least 1"),
    ("--cluster H100 -- mine.py --bf16", "mine.py: no such script"),
])  # fmt: skip
def test_a_mistake_is_one_line_without_megatron(monkeypatch, capsys, words, line):
    monkeypatch.setattr("megatron_asynchzp.commands.plan.setting_of", lambda *_: pytest.fail("no"))
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


@pytest.mark.parametrize("argv", [
    ["--cluster", "h100"], ["--", "pretrain_gpt.py"],
    ["--cluster", "h100", "--ranks", "0", "--", "x"],
    ["--cluster", "h100", "--picture", "plan.pdf", "--", "x"],
])  # fmt: skip
def test_a_wrong_command_line_is_refused_as_argparse_does(argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_the_star_says_how_far_the_chosen_plan_is_behind_the_fastest_and_for_what():
    plan = Plan(ShardSizes(1, 1, 1), Parallel(), Batch(1, 1024))
    outcome = search(Space(MODEL, load_cluster("h100").with_ranks(16), 64, plan))
    light = min(outcome.ranked, key=lambda one: one.costing.node_nbytes)
    heavy = max(outcome.ranked, key=lambda one: one.costing.node_nbytes)
    sent, more = (one.costing.node_nbytes / 1e9 for one in (light, heavy))
    assert light.scheme not in FLAT and more > 2 * sent
    fast = replace(heavy, step=replace(heavy.step, step_s=1.0))
    slow = replace(light, step=replace(light.step, step_s=1.002))
    line = explain.choice(replace(outcome, ranked=(fast, slow)))
    assert line == (
        "* the plan whose flags follow: 0.20% slower than the fastest, with "
        f"{sent:,.1f} GB off a node in place of {more:,.1f}"
    )
    assert explain.choice(replace(outcome, ranked=(slow,))) == (
        "* the fastest plan, whose flags follow"
    )


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
