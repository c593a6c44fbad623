# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The dry run of the launcher as a user meets it: tables, exit statuses, and one line for what
cannot run."""

import re
from collections.abc import Callable, Iterator

import pytest

from megatron_asynchzp import launch
from tests.support.command_server import Ended, serving

_SCRIPT = "scripts/train/pretrain_gpt.py"
# fmt: off
_MODEL = ["--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4",
          "--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2",
          "--global-batch-size", "16", "--train-iters", "3", "--lr", "1e-3", "--mock-data",
          "--tokenizer-type", "NullTokenizer", "--vocab-size", "511", "--bf16", "--use-asynchzp"]
_HYBRID = ["--hybrid-layer-pattern", "M-M*ME", "--num-experts", "4", "--moe-router-topk", "2",
           "--mamba-head-dim", "32", "--mamba-state-dim", "16", "--mamba-num-groups", "1",
           "--disable-bias-linear"]
# fmt: on


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Ended]]:
    """Call with the words after the model's flags."""
    with serving(launch.main) as run_line:
        yield lambda *words, ranks="8", **env: run_line(
            _SCRIPT, *_MODEL, *words, "--asynchzp-dry-run", *ranks.split(), **env
        )


@pytest.mark.parametrize(
    "words", [["--tensor-model-parallel-size", "2", "--sequence-parallel"], _HYBRID]
)
def test_a_command_line_runs_dry_with_all_its_tables_that_of_a_hybrid_model_too(run, words):
    status, out, err = run(*words)
    assert status == 0 and "megatron_asynchzp: " not in err
    for title in ("8 ranks, 8 per node", "Mesh", "States per rank", "Memory per rank"):
        assert title in out


def test_it_shows_what_budgets_would_save_and_counts_the_one_that_is_asked_for(run):
    budget = ("--asynchzp-keep-params-gb", "0.5", "--asynchzp-keep-grads-gb", "0.25")
    found = {}
    for flags in ((), budget):
        status, out, _ = run("--pipeline-model-parallel-size", "2", *flags)
        assert status == 0
        table = out.split("by memory budgets")[1].splitlines()
        cells = [re.findall(r"[\d.]+(?= )", line) for line in table if "iB" in line]
        found[flags] = [[float(cell) for cell in row] for row in cells]
        memory = out.split("Memory per rank")[1].splitlines()
        first = next(line for line in memory if re.match(r"[│|] 0 +[│|]", line))
        found[flags, "in flight"] = re.split(r"[│|]", first)[4]
    plain, asked = found[()], found[budget]
    # As much as there is room for all.
    assert [row for row in asked if row not in plain] == [[0.5, plain[-1][1], 0.25, plain[-1][3]]]
    for row, more in zip(plain, plain[1:]):
        assert more[1] <= row[1] and more[3] <= row[3]
    # Of two micro-batches; the turn from forward to backward is free.
    assert plain[-1][1] < plain[0][1] and plain[-1][3] == plain[0][3] / 2
    assert found[(), "in flight"] != found[budget, "in flight"]


def test_it_names_the_budgets_for_which_a_device_has_room(run):
    flags = ("--pipeline-model-parallel-size", "2", "--asynchzp-device-gb")
    advised = [run(*flags, gib)[1] for gib in ("40", "1e-4")]
    assert "has room to keep more" in advised[0] and "has room" not in advised[1]
    line = advised[0].splitlines()[-1]
    budgets = re.findall(r"(--asynchzp-keep-\w+-gb) (\S+)", line)
    assert [flag for flag, _ in budgets] == [
        "--asynchzp-keep-params-gb",
        "--asynchzp-keep-grads-gb",
    ]
    saved = [int(number) for number in re.findall(r"(\d+) (?:gathers|reductions)", line)]
    status, out, _ = run(*flags, "40", *(word for pair in budgets for word in pair))
    assert status == 0 and "has room" not in out  # nothing more is to be saved
    table = out.split("by memory budgets")[1].splitlines()
    rows = [re.findall(r"[\d.]+", line) for line in table if "iB" in line]
    for count, place in zip(saved, (1, 3), strict=True):
        assert str(count) in [row[place] for row in rows]


def test_it_says_what_is_registered_with_nccl(run):
    line = "registered with NCCL, for groups within 8 ranks: segments of "
    assert line in run("--use-nccl-ub")[1] and line not in run()[1]


@pytest.mark.parametrize("ranks, expected", [("", "8 ranks"), ("4", "4 ranks"), ("2", "2 ranks")])
def test_it_pretends_the_ranks_that_are_asked_for_or_the_fewest_that_can_run(run, ranks, expected):
    status, out, _ = run(ranks=ranks)
    assert status == 0 and out.startswith(expected)


def test_moments_in_bf16_are_half_of_those_in_fp32(run):
    rounded = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16")
    held = []
    for flags in ((), rounded, (*rounded, "--exp-avg-sq-dtype", "bf16")):
        _, out, _ = run(*flags)
        table = out.split("States per rank")[1].splitlines()
        row = next(line for line in table if re.match(r"[│|] 0 +[│|]", line))
        held.append(float(re.findall(r"([\d.]+) MiB", row)[-1]))
    assert held[1:] == pytest.approx([0.75 * held[0], 0.5 * held[0]], rel=2e-3)


def test_a_device_that_is_too_small_ends_in_one_line_with_status_1(run):
    assert run("--asynchzp-device-gb", "1")[0] == 0
    status, out, err = run("--asynchzp-device-gb", "0.001")
    assert status == 1 and "Memory per rank" in out
    assert "does not fit" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, ranks, line",
    [
        (["--no-such-flag"], "8", "unrecognized arguments: --no-such-flag"),
        (["--freeze-all-layers"], "8", "--freeze-all-layers is not supported"),
        (["--data-path", "nowhere"], "8", "nowhere: no dataset there"),
        (["--exp-avg-dtype", "fp8"], "8", "--exp-avg-dtype fp8 is not supported"),
        (["--asynchzp-device-gb", "-3"], "8", "--asynchzp-device-gb -3: give the GiB"),
        (["--asynchzp-param-shard-size", "3"], "8", "valid values: 1, 2, 4, 8"),
        ([], "-2", "--asynchzp-dry-run -2: give a number of ranks"),
        ([], "many", "--asynchzp-dry-run: invalid int value"),
        (["--tensor-model-parallel-size", "3"], "8", "8 ranks are not a multiple"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_with_status_2(run, words, ranks, line):
    status, out, err = run(*words, ranks=ranks)
    assert status == 2 and out == ""
    assert err.startswith("megatron_asynchzp: ") and err.count("\n") == 1
    assert line in err and err.count("megatron_asynchzp: ") == 1


def test_megatron_itself_asks_for_one_hardware_queue(run):
    ended = run("--context-parallel-size", "2", CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert ended.status == 2 and "CUDA_DEVICE_MAX_CONNECTIONS to 1" in ended.err
