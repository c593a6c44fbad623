# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The times of a run with --use-asynchzp: the trace of a step and the log line."""

import shutil
import tempfile
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_asynchzp.engine.comm.timeline import CAPTURE, COMPUTE, LANES, WAIT, Span
from megatron_asynchzp.engine.schedule import SCHEDULES
from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig
from megatron_asynchzp.mcore.run.settings import trace_of
from scripts.report.megatron_log import parse_log
from scripts.report.step_trace import read_trace
from scripts.testbed.megatron_flags import UNTIED
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.support.world import on_ranks

STEPS, MICRO_BATCHES = 3, 3


@dataclass
class TracedRun:
    """A traced run. spans: of one step on rank 0; logs: of each rank."""

    units: list[str]
    spans: list[Span]
    logs: list[str]

    def lane(self, name: str) -> list[Span]:
        return sorted((s for s in self.spans if s.lane == name), key=lambda span: span.start)

    def counts(self, lane: str) -> Counter[str]:
        return Counter(span.name for span in self.lane(lane))


def traced_run(path: Path, kind: str) -> dict[str, Any]:
    batch = MICRO_BATCHES * dist.get_world_size()
    record = run_pretrain(
        gpt_args(
            *("--use-asynchzp", "--asynchzp-param-shard-size", "2"),
            *("--asynchzp-grad-shard-size", "2", "--asynchzp-optim-shard-size", "4"),
            *("--asynchzp-schedule", kind, "--asynchzp-trace", str(path)),
            *("--log-interval", "1", "--train-iters", str(STEPS)),
            *("--global-batch-size", str(batch), *UNTIED),
        ),
        inspect=lambda chunks, _: [unit.name for unit in chunks[0].runtime.units],
    )
    trace = path.read_text() if path.is_file() else None
    dist.barrier()
    return {"log": record.log, "units": record.inspected, "trace": trace}


def all_runs() -> dict[str, Any]:
    """Starting Megatron takes longer than the steps, so the ranks are started once."""
    folder = [tempfile.mkdtemp(prefix="asynchzp-trace-")]
    dist.broadcast_object_list(folder, src=0)
    records = {kind: traced_run(Path(folder[0], f"{kind}.json"), kind) for kind in SCHEDULES}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return records


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, TracedRun]:
    path, runs = tmp_path_factory.mktemp("trace") / "trace.json", {}
    by_rank = on_ranks(all_runs, 4)
    for kind in SCHEDULES:
        path.write_text(by_rank[0][kind]["trace"])
        logs = [rank[kind]["log"] for rank in by_rank]
        runs[kind] = TracedRun(by_rank[0][kind]["units"], list(read_trace(path).spans), logs)
    return runs


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_trace_has_all_computation_every_reduction_and_one_sync_of_each_unit(runs, kind):
    one = runs[kind]
    assert len(one.units) == 5  # two layers, the embedding, the output layer, the rest
    assert one.counts(COMPUTE) == {
        f"{way} {unit}": MICRO_BATCHES for way in ("forward", "backward") for unit in one.units
    }
    assert one.counts("gather").keys() == set(one.units)
    assert one.counts("reduce") == dict.fromkeys(one.units, MICRO_BATCHES)
    assert one.counts("grad-sync") == dict.fromkeys(one.units, 1)
    # It belongs to the next forward: one may end before, or after, the step that is traced.
    syncs = one.counts("param-sync")
    assert syncs.keys() <= set(one.units) and syncs.total() > 0
    assert kind != "inline" or syncs == dict.fromkeys(one.units, 1)
    compared = ["all units"] + ["what was sent"] * (kind != "inline")
    assert one.counts("order") == dict.fromkeys(compared, 1)
    jobs = {f"{span.lane} {span.name}" for span in one.spans if span.lane in LANES}
    assert one.counts(WAIT).keys() <= jobs


@pytest.mark.parametrize("kind", SCHEDULES)
def test_everything_but_what_began_in_the_step_before_lies_within_the_step(runs, kind):
    (step,) = runs[kind].lane(CAPTURE)
    for span in runs[kind].spans:
        assert 0 <= span.end <= step.end
        assert span.start >= 0 or span.lane in ("gather", "param-sync"), span


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_log_of_the_last_rank_has_exposed_communication_and_overlap(runs, kind):
    *others, log = (parse_log(log.splitlines()) for log in runs[kind].logs)
    assert not any(others)
    assert [step.number for step in log] == list(range(1, STEPS + 1))
    # Each line is about its own step: the first, which gathers on demand, has waited.
    assert log[0].exposed_comm_ms > 0.0 and log[0].overlap_percent < 100.0
    for step in log:
        assert 0.0 <= step.exposed_comm_ms < step.step_ms
        assert 0.0 <= step.overlap_percent <= 100.0
    assert kind != "inline" or all(step.overlap_percent < 5.0 for step in log[1:])


def arguments(
    rank: int = 0, train_iters: int | None = 100, stages: int = 1, stages_inside: bool = False
) -> Namespace:
    return Namespace(
        rank=rank,
        train_iters=train_iters,
        world_size=8,
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=2,
        context_parallel_size=1,
        use_tp_pp_dp_mapping=stages_inside,
    )


def test_rank_0_traces_the_tenth_step_or_the_last_but_one_also_of_a_run_that_goes_on(tmp_path):
    traced = AsyncHZPConfig(trace=str(tmp_path / "trace.json"))
    for num_steps, tenth in ((None, 10), (100, 10), (11, 10), (10, 9), (2, 1), (1, 1)):
        for done in (0, 7):
            train_iters = None if num_steps is None else done + num_steps
            request = trace_of(traced, arguments(train_iters=train_iters))
            assert request.step_after(done + 1) == done + tenth
    assert trace_of(traced, arguments(rank=1)) is None
    assert trace_of(AsyncHZPConfig(), arguments(train_iters=5)) is None


@pytest.mark.parametrize("stages_inside, leaders", [(False, (0, 4)), (True, (0, 2))])
def test_the_first_rank_of_each_pipeline_stage_traces_into_a_file_of_its_own(
    stages_inside, leaders, tmp_path
):
    traced = AsyncHZPConfig(trace=str(tmp_path / "t.json"))
    requests = [
        trace_of(traced, arguments(rank, stages=2, stages_inside=stages_inside))
        for rank in range(8)
    ]
    names = {rank: request.path.name for rank, request in enumerate(requests) if request}
    assert names == dict(zip(leaders, ("t.json", "t.stage1.json"), strict=True))
