# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A run under `torchrun --nnodes 1:2` goes on with one node when the other is lost, and with both
when it is back: as if it had been stopped and started on other ranks by hand at the same steps.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_asynchzp.planner.cluster_files import cluster_toml, load_cluster
from scripts.testbed import links
from scripts.testbed.launches import Launch
from tests.support.journal import Attempt, read_starts
from tests.support.nodes import Nodes
from tests.test_launch import TOY

_SUPPORT = Path(__file__).parent / "support"
_STEPS, _INTERVAL = 40, 5
_LINE = (
    f"{TOY} --lr-decay-iters 100 --num-workers 0 --eval-iters 0 --hidden-dropout 0 "
    "--attention-dropout 0 --use-asynchzp --asynchzp-device cpu --save-interval 5"
)
_RULES = (
    "--asynchzp-param-shard-size auto --asynchzp-grad-shard-size node "
    "--asynchzp-optim-shard-size world"
)
_OPTIONS = "--nnodes 1:2 --max-restarts 3 --rdzv-conf"
_PATIENCE = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5"


def _chosen(text: str) -> list[str]:
    """The sizes that each start chose, in their order."""
    lines = (line for line in text.splitlines() if "chosen of" in line)
    return [line.partition(": --")[2].join(("--", "")).partition(" (")[0] for line in lines]


def _values(attempt: Attempt) -> dict[int, float]:
    return {step: float.fromhex(loss) for step, loss in attempt.losses.items()}


def _by_hand(folder: Path, starts: list[tuple[int, int, str]]) -> dict[int, float]:
    """The loss of each step of runs one after the other: their ranks, last step and sizes."""
    losses = {}
    for number, (ranks, last, sizes) in enumerate(starts):
        journal = folder / f"by_hand{number}"
        journal.mkdir()
        place = f"--load {folder / 'by_hand'} --save {folder / 'by_hand'}"
        line = f"{_LINE} {sizes} {place} --train-iters {last} --override-opt-param-scheduler"
        env = {"JOURNAL": str(journal)}
        ended = Launch(folder, _SUPPORT / "struck_pretrain.py", line, ranks, env).end()
        assert [one.status for one in ended] == [0] * ranks, ended[0].text[-3000:]
        (attempt,) = read_starts(journal)
        assert attempt.ranks == ranks
        losses |= _values(attempt)
    return losses


def _need_links() -> None:
    if (reason := links.unavailable()) is not None or os.geteuid() != 0:
        pytest.skip(reason or "the nodes' networks are entered by root alone")


@pytest.mark.slow
@pytest.mark.parametrize("inter", [None, "1gbit"], ids=["one network", "a network each"])
def test_a_lost_node_and_its_return_reshard_a_run_as_if_by_hand(tmp_path, inter):
    if inter is not None:
        _need_links()
    known = replace(load_cluster("testbed-fast"), nodes=2, ranks_per_node=2)
    (tmp_path / "mine.toml").write_text(cluster_toml(known))
    journal = tmp_path / "journal"
    journal.mkdir()
    words = ["-m", "megatron_asynchzp.launch", str(_SUPPORT / "struck_pretrain.py")]
    words += f"{_LINE} {_RULES} --asynchzp-cluster {tmp_path / 'mine.toml'}".split()
    words += f"--load {tmp_path / 'runs'} --save {tmp_path / 'runs'}".split()
    words += ["--train-iters", str(_STEPS)]

    def attempts() -> list[Attempt]:
        return read_starts(journal)

    env = {"JOURNAL": str(journal), "STEP_S": "0.3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = [*_OPTIONS.split(), _PATIENCE]
    with Nodes(tmp_path, options, words, ("a", "b"), inter, **env) as nodes:
        nodes.start("a")
        nodes.start("b")
        nodes.await_that(lambda: len(attempts()) > 0 and len(attempts()[0].losses) > 7)
        nodes.lose("b")
        nodes.await_that(lambda: len(attempts()) > 1 and len(attempts()[1].losses) > 2)
        nodes.start("b")
        assert nodes.end(150) == [0, 0]
        if inter is not None:  # more than a rendezvous takes
            assert min(map(nodes.sent_nbytes, "ab")) > 1e6
        text = nodes.log("a").read_text()
    whole, fewer, again = attempts()
    assert (whole.ranks, fewer.ranks, again.ranks) == (4, 2, 4)
    assert (whole.began, again.losses.keys()) == (0, set(range(again.began + 1, _STEPS + 1)))
    # What was saved last; a node that comes lets the others finish a step and save.
    assert fewer.began == max(whole.losses) // _INTERVAL * _INTERVAL
    assert again.began == max(fewer.losses)
    sizes = _chosen(text)
    assert [one.split()[3] for one in sizes] == ["2", "2", "2"]
    assert [one.split()[5] for one in sizes] == ["4", "2", "4"]
    lasts = [fewer.began, again.began, _STEPS]
    by_hand = _by_hand(tmp_path, list(zip([4, 2, 4], lasts, sizes, strict=True)))
    ours = {step: loss for one in (whole, fewer, again) for step, loss in _values(one).items()}
    assert ours == pytest.approx(by_hand, rel=0, abs=1e-6)
    # The batch and the order of the data are those of a run that nothing happened to.
    (tmp_path / "undisturbed").mkdir()
    undisturbed = _by_hand(tmp_path / "undisturbed", [(4, _STEPS, sizes[0])])
    assert ours == pytest.approx(undisturbed, rel=0, abs=1e-5)
