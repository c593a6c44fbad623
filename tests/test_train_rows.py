# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What scripts/train can launch: every row through Megatron's own parser and on the meta device,
and the shell scripts as far as they go without a cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.train import dry_run
from scripts.train.rows import RowError, load_row, row_names
from tests.support.command_server import RunCommand, serving
from tests.support.selection import slow_unless

_ROOT = Path(__file__).parents[1]
_TRAIN = _ROOT / "scripts" / "train"

# A model's name is rounded: 36 stands for 36.15, and the padded vocabulary adds to it.
_NAMED_WITHIN = 0.02


@pytest.fixture(scope="module")
def run_dry() -> Iterator[RunCommand]:
    with serving(dry_run.main) as run:
        yield run


# Both systems, dense and with experts, and a pipeline; other tests run two more.
FAST_ROWS = ["table2-9b-hzp", "table2-9b-nd", "table2-moe-hzp", "table2-moe-nd"]
FAST_ROWS += ["table3-pp8-async"]


@pytest.fixture(
    scope="module",
    params=[slow_unless(True, FAST_ROWS, id="some"), slow_unless(False, row_names(), id="all")],
)
def reports(
    request, run_dry: RunCommand, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict]:
    """The numbers of every row, by its name."""
    path, found = tmp_path_factory.mktemp("rows") / "rows.json", {}
    for words in [["--all"]] if request.param == row_names() else [[row] for row in request.param]:
        assert run_dry(*words, "--json", str(path)).status == 0
        found |= {report["row"]: report for report in json.loads(path.read_text())}
    assert list(found) == request.param
    return found


def test_every_row_of_tables_2_to_5_is_there():
    expected = {
        2: {"9b-hzp", "9b-nd", "36b-hzp", "36b-nd", "moe-hzp", "moe-nd"},
        3: {"pp8-async", "pp8-vanilla", "cp8-async", "cp8-vanilla"},
        4: {f"{length}-{system}" for length in ("8k", "32k", "128k") for system in ("hzp", "nd")},
        5: {"256-hzp", "512-hzp", "1024-hzp", "1024-nd"},
    }
    for table, names in expected.items():
        assert {f"table{table}-{name}" for name in names} <= set(row_names())


def test_the_models_are_as_large_as_in_the_paper(reports):
    for report in reports.values():
        assert report["parameters"] == pytest.approx(
            report["expected_parameters"], rel=_NAMED_WITHIN
        )


def test_optimizer_bytes_of_all_ranks_are_the_replicas_times_12_n(reports):
    for report in reports.values():
        row = load_row(report["row"])
        held = sum(
            stage["formula"][state] * stage["ranks"]
            for stage in report["stages"]
            for state in ("main_param", "optimizer_moments")
        )
        stage_ranks = row.ranks // row.pp // row.tp
        replicas = stage_ranks / (row.optim or stage_ranks)
        assert held == pytest.approx(replicas * 12 * report["parameters"], rel=1e-3)


def test_padding_adds_less_than_a_thousandth(reports):
    for report in reports.values():
        for stage in report["stages"]:
            allocated, formula = (sum(stage[kind].values()) for kind in ("allocated", "formula"))
            assert formula <= allocated * (1 + 1e-9) and allocated <= 1.001 * formula


def test_groups_of_each_kind_hold_all_ranks_once(reports):
    for report in reports.values():
        assert {size * count for size, count in report["groups"].values()} == {report["ranks"]}
        row = load_row(report["row"])
        for state in ("param", "grad", "optim"):
            if row.is_asynchzp:
                assert report["groups"][f"{state} shards"][0] == getattr(row, state)


@pytest.mark.parametrize(
    "words, output",
    [
        (["no-such-row"], "no-such-row: no such row"),
        (["table2-9b-hzp", "--ranks", "100"], "100 ranks are not a multiple"),
        (["table2-9b-hzp", "--", "--asynchzp-optim-shard-size", "48"], "--asynchzp-optim-shard"),
        (["table2-9b-hzp", "--", "--skip-train"], "--skip-train is not supported"),
        (["table2-9b-hzp", "--", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["table2-9b-hzp", "--", "--data-path", "nowhere"], "nowhere: no dataset there"),
        (["table2-36b-nd", "--", "--num-layers", "63"], "divisible"),
        (["table2-9b-nd", "--platform", "ascend"], "table2-9b-nd on ascend: --sequence-parallel"),
    ],
)
def test_a_broken_row_is_refused_in_one_line_with_status_2(run_dry, words, output):
    printed = run_dry(*words)
    assert printed.status == 2
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("scripts/train: ") and output in printed.err


def test_what_does_not_fit_into_a_device_ends_in_one_line_with_status_1(run_dry):
    ended = run_dry("table3-cp8-async", "--device-memory-gib", "16")
    assert ended.status == 1 and "does not fit" in ended.err


def test_megatron_itself_asks_for_one_hardware_queue(run_dry):
    ended = run_dry("table2-9b-hzp", CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert ended.status == 2 and "CUDA_DEVICE_MAX_CONNECTIONS to 1" in ended.err


def test_ascend_rows_use_layers_that_need_no_transformer_engine():
    flags = " ".join(load_row("table2-moe-hzp").flags("ascend"))
    assert "--transformer-impl local --use-pasa-attention" in flags
    assert "--moe-grouped-gemm" not in flags


def test_ascend_without_torch_npu_ends_in_one_line():
    command = [sys.executable, str(_TRAIN / "on_ascend.py"), str(_TRAIN / "pretrain_gpt.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("on_ascend: torch_npu cannot be imported")


def test_data_of_yours_replaces_mock_data():
    row = load_row("node-9b-hzp")
    assert "--mock-data" in row.flags()
    assert "--mock-data" not in row.flags(extra=["--data-path=mine"])
    with pytest.raises(RowError, match="no such row"):
        load_row("node-9b")


# --- the shell scripts -------------------------------------------------------------------------


def _shell(script: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    kept = {"PATH": os.environ["PATH"], "ASYNCHZP_PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(_TRAIN / script), *words],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_of_every_node_is_printed_without_running_it():
    ended = _shell("launch.sh", "table2-36b-hzp", "--print", MASTER_ADDR="node0", NODE_RANK="7")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ")
    for words in (
        "--nnodes 32 --nproc-per-node 8 --node-rank 7 --master-addr node0",
        "scripts/train/pretrain_gpt.py --num-layers 64",
        "--use-asynchzp",
    ):
        assert words in ended.stdout


@pytest.mark.parametrize("node, is_host", [("0", 1), ("7", 0)])
def test_nodes_that_may_restart_meet_by_a_rendezvous_that_can_meet_again(node, is_host):
    env = {"MASTER_ADDR": "node0", "NODE_RANK": node, "MAX_RESTARTS": "3"}
    ended = _shell("launch.sh", "table2-36b-hzp", "--print", **env)
    assert ended.returncode == 0, ended.stderr
    words = "--rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id table2-36b-hzp "
    assert f"{words}--rdzv-conf is_host={is_host} --max-restarts 3 " in ended.stdout
    assert "--master-addr" not in ended.stdout and "--node-rank" not in ended.stdout
    ended = _shell("launch.sh", "node-9b-hzp", "--print", MAX_RESTARTS="3")
    assert "--standalone --max-restarts 3 " in ended.stdout


def test_one_node_needs_no_address_and_keeps_its_hardware_queues():
    ended = _shell("launch.sh", "node-9b-hzp", "--print", "--", "--data-path", "my data")
    assert "--standalone" in ended.stdout and ended.stdout.endswith("--data-path my\\ data\n")
    assert ended.stdout.startswith("CUDA_DEVICE_MAX_CONNECTIONS=32 ")


@pytest.mark.parametrize(
    "words, env, output",
    [
        ((), {}, "give a row"),
        (("table2-9b-hzp", "table2-9b-nd"), {}, "one row at a time"),
        (("table2-9b-hzp", "--no-such"), {}, "--no-such: no such option"),
        (("no-such-row",), {}, "no-such-row: no such row"),
        (("table2-9b-hzp",), {}, "32 nodes: set MASTER_ADDR"),
        (("table2-9b-hzp", "--print"), {"NNODES": "3"}, "NNODES=3 x RANKS_PER_NODE=8 are 24"),
        (("node-9b-hzp", "--print"), {"MEGATRON_LM": "/nowhere"}, "no pretrain_gpt.py"),
        (("node-9b-hzp", "--print"), {"MAX_RESTARTS": "some"}, "MAX_RESTARTS=some: give a number"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line_with_status_2(words, env, output):
    ended = _shell("launch.sh", *words, **env)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("scripts/train: ") and ended.stderr.count("\n") == 1
    assert output in ended.stderr


def test_slurm_starts_the_launcher_once_per_node(tmp_path):
    for name, body in (("scontrol", "echo node0; echo node1"), ("srun", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    # fmt: off
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "32", "SLURM_JOB_ID": "7",
           "SLURM_SUBMIT_DIR": str(_ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # fmt: on
    ended = _shell("launch.slurm", "table2-36b-hzp", "--", "--seed", "1", **job)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("launch.sh\ntable2-36b-hzp\n--\n--seed\n1\n")
    refused = _shell("launch.slurm", "table2-36b-hzp", **(job | {"SLURM_JOB_NUM_NODES": "2"}))
    assert refused.returncode == 2 and "NNODES=2" in refused.stderr
