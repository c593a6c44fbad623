# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What scripts/train can launch: every row through Megatron's own parser and on the meta device,
and the shell scripts as far as they go without a cluster."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.train import rows
from scripts.train.rows import RowError, load_row, row_names
from tests.support.command_server import serving
from tests.support.selection import slow_unless

_ROOT = Path(__file__).parents[1]
_TRAIN = _ROOT / "scripts" / "train"
# Without the last each of these processes would compile what it imports.
_KEPT = ("PATH", "PYTHONPYCACHEPREFIX")

# A model's name is rounded: 36 stands for 36.15, and the padded vocabulary adds to it.
_NAMED_WITHIN = 0.02


def report(names: list[str]) -> None:
    """Prints the numbers of these rows as JSON."""
    from megatron_asynchzp.commands.stages import dry_run_of_flags

    once = functools.cache(dry_run_of_flags)  # rows of different tables are often the same run
    for row in map(load_row, names):
        found = once(tuple(row.flags()), row.ranks, 8)
        numbers = {
            "row": row.name,
            "ranks": found.args.world_size,
            "parameters": found.parameters,
            "groups": {kind.name: [kind.size, kind.count] for kind in found.kinds},
            "stages": [
                {"ranks": one.num_ranks, "formula": one.formula, "held": dict(one.memory.at_rest)}
                for one in found.stages
            ],
        }
        print(json.dumps(numbers))


# Both systems, dense and with experts, and a pipeline; other tests run two more.
FAST_ROWS = ["table2-9b-hzp", "table2-9b-nd", "table2-moe-hzp", "table2-moe-nd"]
FAST_ROWS += ["table3-pp8-async"]


@pytest.fixture(
    scope="module",
    params=[slow_unless(True, FAST_ROWS, id="some"), slow_unless(False, row_names(), id="all")],
)
def reports(request) -> dict[str, dict]:
    """The numbers of every row, by its name."""
    with serving(report) as run:
        ended = run(*request.param)
    assert ended.status == 0, ended.err
    found = {numbers["row"]: numbers for numbers in map(json.loads, ended.out.splitlines())}
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
            load_row(report["row"]).parameters, rel=_NAMED_WITHIN
        )


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


def test_a_row_that_is_not_there_or_that_ascend_refuses_ends_in_one_line(capsys):
    for words, output in (
        (["no-such-row"], "no-such-row: no such row"),
        (["table2-9b-nd", "--platform", "ascend"], "table2-9b-nd on ascend: --sequence-parallel"),
    ):
        assert rows.main(words) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert printed.err.startswith("scripts/train: ") and output in printed.err


# --- the shell scripts -------------------------------------------------------------------------


def _shell(
    script: str, *words: str, limit_s: float = 120, **env: str
) -> subprocess.CompletedProcess:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["ASYNCHZP_PYTHON"] = sys.executable
    return subprocess.run(
        ["bash", str(_TRAIN / script), *words],
        env=kept | env,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def test_a_row_runs_dry_with_where_it_is_from_and_the_last_of_two_devices_counts():
    ended = _shell("launch.sh", "table3-cp8-async", "--dry-run", "--", "--asynchzp-device-gb", "16")
    assert ended.returncode == 1 and "a device has 16" in ended.stderr
    for words in ("table3-cp8-async: ", "from: ", "assumed: ", "256 ranks, 8 per node", "Mesh"):
        assert words in ended.stdout


@pytest.mark.slow
def test_a_line_says_of_each_row_whether_a_device_is_large_enough():
    ended = _shell("launch.sh", "--all", "--platform", "ascend", limit_s=900)
    lines = dict(line.split(maxsplit=1) for line in ended.stdout.splitlines())
    assert list(lines) == row_names() and ended.returncode == 2
    assert lines["table2-9b-hzp"].startswith("fits: a rank of stage 0 needs ")
    assert "--sequence-parallel cannot be" in lines["table2-9b-nd"]


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
