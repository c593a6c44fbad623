# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Host time of the engine per unit and micro-batch, without a device: its streams and collectives
do nothing, so what is left is what Python costs.

    python -m scripts.bench.host_cost --out host_cost.jsonl [--beside CHECKOUT]

Each row: a schedule and a number of parameters per unit; microseconds that the engine adds to
forward and to backward, in all threads together (CPU time of the process, less that of the plain
model in the same process), and calls of the device per unit and micro-batch. Medians and spread
over the repetitions, each in a process of its own. --beside measures the engine of another checkout
in turn with this one.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from megatron_asynchzp.comm.groups import ShardGroups
from megatron_asynchzp.comm.schedules import start_driver
from megatron_asynchzp.device import StreamDevice
from megatron_asynchzp.schedule import ScheduleConfig
from megatron_asynchzp.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.zero.autograd import HZPRuntime
from megatron_asynchzp.zero.plan import plan_units
from scripts.testbed.machine import machine_record

_ROOT = Path(__file__).parents[2]
_NUM_UNITS, _STEPS = 16, 40
_WORLD, _RANK, _SIZES = 8, 3, ShardSizes(2, 4, 8)


class _Done:
    """The handle of a collective that has completed."""

    def __init__(self, calls: Counter[str]):
        self._calls = calls

    def wait(self) -> None:
        self._calls["wait for collective"] += 1


class _Event:
    """Has happened; its calls are counted."""

    def __init__(self, calls: Counter[str], **_options: object):
        self._calls = calls
        calls["new event"] += 1

    def record(self, _stream: object = None) -> None:
        self._calls["record"] += 1

    def query(self) -> bool:
        self._calls["query"] += 1
        return True

    def synchronize(self) -> None:
        self._calls["synchronize"] += 1

    def elapsed_time(self, _end: object) -> float:
        return 0.0


class _Stream:
    """Does nothing; its calls are counted."""

    def __init__(self, calls: Counter[str]):
        self._calls = calls

    def wait_event(self, _event: object) -> None:
        self._calls["wait for event"] += 1


class _Module:
    """In the place of torch.cuda: what the engine calls of it, counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._stream = _Stream(self.calls)

    def Event(self, **options: object) -> _Event:
        return _Event(self.calls, **options)

    def Stream(self, **_options: object) -> _Stream:
        return self._stream

    def current_stream(self, _device: object = None) -> _Stream:
        self.calls["current stream"] += 1
        return self._stream

    def stream(self, _stream: object) -> AbstractContextManager[None]:
        self.calls["switch stream"] += 1
        return nullcontext()

    def set_device(self, _device: object) -> None:
        return


class _Linear(torch.autograd.Function):
    """Saves its weight itself, as the layers of Megatron and Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ hidden


class _Layer(nn.Module):
    """As many parameters, and saved tensors, as asked for; hardly any arithmetic."""

    def __init__(self, num_params: int):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16)) for _ in range(num_params)
        )

    def forward(self, hidden: torch.Tensor, **_unused: object) -> torch.Tensor:
        for weight in self.weights:
            hidden = _Linear.apply(hidden, weight)
        return hidden


class _Model(nn.Module):
    def __init__(self, num_params: int):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(num_params) for _ in range(_NUM_UNITS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1
        for layer in self.layers:
            hidden = layer(hidden, mask=None, context=None, rotary=None, bias=None)
        return hidden


def _train_step(model: nn.Module) -> tuple[float, float]:
    """CPU microseconds per unit of forward and of backward; what is left of the gradients is freed
    within it, as the engine frees them."""
    hidden = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    start = time.process_time()
    loss = model(hidden).sum()
    middle = time.process_time()
    loss.backward()
    model.zero_grad()
    end = time.process_time()
    return 1e6 * (middle - start) / _NUM_UNITS, 1e6 * (end - middle) / _NUM_UNITS


def _medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*times, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _measure_added(kind: str, num_params: int) -> tuple[tuple[float, float], Counter[str]]:
    """Microseconds that forward and backward take more than those of the plain model, whose steps
    are between the engine's, and all calls of the device."""
    plain, model, module = _Model(num_params), _Model(num_params), _Module()
    device = StreamDevice(cast("ModuleType", module), torch.device("cuda"))
    topology = ShardTopology(_WORLD, _RANK, _SIZES)
    groups = ShardGroups.of_topology(
        topology, range(_WORLD), lambda _purpose, _ranks: cast("dist.ProcessGroup", object())
    )
    config = ScheduleConfig(kind, checks_order=False)
    driver = start_driver(config, device)
    plans = plan_units(model, list(model.layers))
    runtime = HZPRuntime(model, plans, {"dense": groups}, config, driver)
    done = _Done(module.calls)
    times: list[tuple[float, float]] = []
    collectives = "megatron_asynchzp.comm.collectives."
    with (
        mock.patch(f"{collectives}all_gather_flat", lambda *_, **__: done),
        mock.patch(f"{collectives}reduce_scatter_flat", lambda *_, **__: done),
        mock.patch("torch.distributed.all_reduce", lambda *_, **__: done),
    ):
        for step in range(2 + _STEPS):
            runtime.zero_grads()
            runtime.is_last_micro_batch = False
            if step == 2:
                module.calls.clear()
            forward, backward = _train_step(model)
            plain_forward, plain_backward = _train_step(plain)
            times.append((forward - plain_forward, backward - plain_backward))
        calls = module.calls.copy()
        runtime.close()
        driver.close()
    return _medians(times[2:]), calls


def measure(kind: str, num_params: int) -> dict[str, Any]:
    """Once, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    (forward, backward), calls = _measure_added(kind, num_params)
    per_unit = _NUM_UNITS * _STEPS
    return {
        "forward_us": forward,
        "backward_us": backward,
        "total_us": forward + backward,
        "device_calls": sum(calls.values()) / per_unit,
        "calls": {name: round(count / per_unit, 2) for name, count in sorted(calls.items())},
    }


def _measure_in_child(kind: str, num_params: int, checkout: Path) -> dict[str, Any]:
    """The same with the engine of `checkout`, in a process of its own."""
    paths = os.pathsep.join((str(checkout), str(_ROOT)))
    command = [sys.executable, "-P", "-m", "scripts.bench.host_cost", "--once", kind]
    ended = subprocess.run(
        [*command, "--params", str(num_params)],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the repetitions, and the spread of their totals."""
    totals = [row["total_us"] for row in rows]
    medians = {
        key: round(statistics.median(row[key] for row in rows), 1)
        for key in ("forward_us", "backward_us", "total_us", "device_calls")
    }
    return {
        **medians,
        "fastest_us": round(min(totals), 1),
        "slowest_us": round(max(totals), 1),
        "repetitions": len(rows),
        "calls": rows[-1]["calls"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--schedules", nargs="+", default=["main-thread"])
    parser.add_argument("--params", nargs="+", type=int, default=[12, 256])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--out", type=Path, help="append records to this file")
    parser.add_argument("--once", metavar="SCHEDULE", help="one measurement, as JSON")
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measure(options.once, options.params[0])))
        return
    checkouts = {"this": _ROOT}
    if options.beside is not None:
        checkouts = {"before": options.beside.resolve(), **checkouts}
    records: list[dict[str, Any]] = [machine_record()]
    for kind, num_params in itertools.product(options.schedules, options.params):
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
        for _ in range(options.repetitions):
            for name, checkout in checkouts.items():
                rows[name].append(_measure_in_child(kind, num_params, checkout))
        for name, measured in rows.items():
            what = {"engine": name, "schedule": kind, "params": num_params}
            records.append({"kind": "host_cost", **what, **summary(measured)})
            print(json.dumps(records[-1]), flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
