# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of the engine per unit and micro-batch without a device.

Streams and collectives do nothing, so the rest is the cost of Python and of torch's dispatcher.

    python -m scripts.bench.host_cost [--beside CHECKOUT]

It prints the microseconds that the engine adds to forward and to backward, in all threads together
(CPU time of the process, less that of the plain model in the same process), and the engine's calls
of the device. The engine shards over ranks of torch's fake process group. Each repetition is a
process of its own. --beside measures the engine of another checkout in turn with this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_asynchzp.engine.comm.drivers import start_driver
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.device import StreamDevice
from megatron_asynchzp.engine.schedule import ScheduleConfig
from megatron_asynchzp.engine.sharding.topology import ShardSizes, ShardTopology
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.plan import plan_units

_ROOT = Path(__file__).parents[2]
_NUM_UNITS, _WARM_UP, _STEPS = 16, 2, 40
_WORLD, _RANK, _SIZES = 8, 3, ShardSizes(2, 4, 8)


class Added(NamedTuple):
    """CPU microseconds per unit and micro-batch."""

    forward_us: float
    backward_us: float


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
    """Return the CPU microseconds per unit of forward and of backward."""
    hidden = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    start = time.process_time()
    loss = model(hidden).sum()
    middle = time.process_time()
    loss.backward()
    model.zero_grad()
    end = time.process_time()
    return 1e6 * (middle - start) / _NUM_UNITS, 1e6 * (end - middle) / _NUM_UNITS


def _train_beside(model: nn.Module, plain: nn.Module, begin_step: Callable[[], object]) -> Added:
    """Return the time that `model` takes more than `plain`, whose steps alternate with its own."""
    times: list[tuple[float, float]] = []
    for _ in range(_STEPS):
        begin_step()
        forward, backward = _train_step(model)
        plain_forward, plain_backward = _train_step(plain)
        times.append((forward - plain_forward, backward - plain_backward))
    forward, backward = zip(*times, strict=True)
    return Added(statistics.median(forward), statistics.median(backward))


def _of_engine(kind: str, num_params: int) -> tuple[Added, Counter[str]]:
    """And all calls of the device. kind: the schedule."""
    plain, model, module = _Model(num_params), _Model(num_params), _Module()
    device = StreamDevice(cast("ModuleType", module), torch.device("cuda"))
    groups = ShardGroups.of_topology(
        ShardTopology(_WORLD, _RANK, _SIZES),
        range(_WORLD),
        lambda _, ranks: dist.new_group(ranks),  # pyright: ignore[reportArgumentType]
    )
    config = ScheduleConfig(kind, checks_order=False)
    driver = start_driver(config, device)
    plans = plan_units(model, list(model.layers))
    runtime = HZPRuntime(model, plans, {"dense": groups}, config, driver)

    def begin_step() -> None:
        runtime.zero_grads()
        runtime.is_last_micro_batch = False

    for _ in range(_WARM_UP):
        begin_step()
        _train_step(model)
    module.calls.clear()
    added = _train_beside(model, plain, begin_step)
    calls = module.calls.copy()
    runtime.close()
    driver.close()
    return added, calls


def measure(schedule: str, num_params: int) -> dict[str, Any]:
    """Measure once, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=_RANK, world_size=_WORLD)
    added, calls = _of_engine(schedule, num_params)
    dist.destroy_process_group()
    device_calls = sum(calls.values()) / (_NUM_UNITS * _STEPS)
    return {**added._asdict(), "total_us": sum(added), "device_calls": device_calls}


def _measure_in_child(schedule: str, num_params: int, checkout: Path) -> dict[str, Any]:
    """Measure the engine of `checkout` in a process of its own."""
    command = [sys.executable, "-P", "-m", "scripts.bench.host_cost", "--once", schedule]
    ended = subprocess.run(
        [*command, "--params", str(num_params)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(checkout), str(_ROOT)))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """Give the medians of the repetitions, and the spread of their totals."""
    totals = [row["total_us"] for row in rows]
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return (
        "{total_us:.0f} us ({0:.0f} to {1:.0f}), forward {forward_us:.0f}, backward "
        "{backward_us:.0f}, {device_calls:.1f} calls of the device"
    ).format(min(totals), max(totals), **medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--schedule", default="main-thread")
    parser.add_argument("--params", nargs="+", type=int, default=[12, 256], help="of a unit")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--once", metavar="SCHEDULE", help="one measurement, as JSON")
    options = parser.parse_args()
    if options.once is not None:
        print(json.dumps(measure(options.once, options.params[0])))
        return
    checkouts = [_ROOT, *([options.beside.resolve()] if options.beside else [])]
    for num_params in options.params:
        rows = [
            [_measure_in_child(options.schedule, num_params, checkout) for checkout in checkouts]
            for _ in range(options.repetitions)
        ]
        for checkout, of_checkout in zip(checkouts, zip(*rows, strict=True), strict=True):
            print(f"{checkout.name}, {num_params} parameters: {_summary(of_checkout)}", flush=True)


if __name__ == "__main__":
    main()
