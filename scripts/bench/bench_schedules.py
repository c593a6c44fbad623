# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Times one training step of the engine's three schedules, of torch's systems and of a baseline.

DDP, FSDP2, HSDP and a small hierarchical baseline take turns with them on the modelled network. It
prints a table; --out writes JSON lines.

    python -m scripts.bench.bench_schedules --nodes 2 4 --repetitions 5 --out runs/schedules.jsonl
"""

import argparse
import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from megatron_asynchzp.engine.comm.timeline import captured_trace
from scripts.report.records import append
from scripts.report.records import replace as replace_records
from scripts.testbed.contenders.delayed_model import ModelSize
from scripts.testbed.contenders.systems import SYSTEMS, Engine, System
from scripts.testbed.counters import total
from scripts.testbed.cpu_usage import FOREIGN_LIMIT, CpuUsage
from scripts.testbed.differences import worst_difference
from scripts.testbed.fabric.network import Network
from scripts.testbed.fabric.streams import host_waits, install_streams
from scripts.testbed.machine import machine_record
from scripts.testbed.profile import PROFILES, NetworkProfile, ProfileError, named_profile
from scripts.testbed.ranks import Cluster

LOSS_STEPS = 3  # compared between contenders; they also warm up


@dataclass(frozen=True)
class Settings:
    """One cluster and its measurements."""

    nodes: int
    profile: NetworkProfile
    size: ModelSize
    contenders: tuple[str, ...]
    repetitions: int
    steps: int
    traces: Path | None


@dataclass
class Result:
    """A contender's result on a rank, which `_over_ranks` gathers to the whole.

    step_ms: one value per repetition; node_nbytes: left the fullest node, per step; busy_ms: of
    all lanes of this rank, per step; losses: of the first steps, mean over ranks.
    """

    step_ms: list[float]
    losses: list[float]
    node_nbytes: float = 0.0
    busy_ms: float = 0.0
    host_waits: int = 0


def main() -> None:
    args = parse_args(sys.argv[1:])
    console = Console(stderr=True)
    for nodes in args.nodes:
        settings = Settings(
            nodes,
            replace(args.profile, ranks_per_node=args.ranks),
            ModelSize(args.hidden, args.blocks, args.rows, args.block_ms),
            tuple(args.contenders),
            args.repetitions,
            args.steps,
            args.traces,
        )
        console.print(f"{nodes} nodes x {args.ranks} ranks")
        cluster = Cluster(nodes, args.ranks, settings.profile)
        env = {"OMP_NUM_THREADS": "1"}
        results, foreign = cluster.run(
            measure, settings, timeout_s=args.time_limit, log=None, env=env
        )[0]
        records = [_record(settings, name, result) for name, result in results.items()]
        _check(records)  # before anything is written
        if args.out:
            first = [machine_record()] if nodes == args.nodes[0] else []
            lines = (record | {"foreign_cpu": round(foreign, 3)} for record in records)
            append(args.out, *first, *lines)
        if args.traces:
            file = args.traces / "timeline.jsonl"  # of the last of the clusters
            replace_records(file, [machine_record(), *_trace_records(settings)])
        # Not cut to 80 columns where the output is a file.
        Console(width=100).print(_table(settings, records, foreign))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2], help="sizes to measure")
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--profile", default="ethernet-1g", help=", ".join(PROFILES))
    parser.add_argument("--inter-gbit", type=float, help="between nodes, in place of the profile's")
    parser.add_argument("--contenders", nargs="+", default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="per repetition and contender")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16, help="batch of a rank")
    parser.add_argument("--block-ms", type=float, default=20.0, help="emulated forward time")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds per cluster")
    parser.add_argument(
        "--traces",
        type=Path,
        help="folder for a trace of each of our schedules, and for timeline.jsonl, a record of all",
    )
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args(argv)
    for name in ("ranks", "repetitions", "steps", "hidden", "blocks", "rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if min(args.nodes) < 1 or args.block_ms < 0:
        parser.error("--nodes must be at least 1 and --block-ms at least 0")
    if unknown := [name for name in args.contenders if name not in SYSTEMS]:
        parser.error(f"--contenders {unknown[0]}: not one of {', '.join(SYSTEMS)}")
    try:
        args.profile = named_profile(args.profile)
    except ProfileError as error:
        parser.error(f"--profile: {error}")
    if args.inter_gbit is not None:
        if args.inter_gbit <= 0:
            parser.error("--inter-gbit must be above 0")
        name = f"{args.inter_gbit:g} Gbit/s between nodes"
        args.profile = replace(args.profile, name=name, inter_gbit=args.inter_gbit)
    return args


# ---- on the ranks


def measure(network: Network, settings: Settings) -> tuple[dict[str, Result], float]:
    """Results by contender, complete on rank 0, and the share of the machine others used."""
    install_streams()
    shape = (settings.nodes, settings.profile.ranks_per_node)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("inter", "intra"))
    is_silent = dist.get_rank() > 0
    with Progress(console=Console(stderr=True), disable=is_silent) as progress:
        num_rounds = settings.repetitions + 1
        task = progress.add_task("warm-up", total=num_rounds * len(settings.contenders))
        systems, results = {}, {}
        for name in settings.contenders:
            system = systems[name] = SYSTEMS[name](settings.size, mesh)
            results[name] = Result([], [system.step() for _ in range(LOSS_STEPS)])
            system.drain()
            progress.advance(task)
        gc.collect()
        gc.freeze()  # a collection in one contender's step would be the garbage of all
        usage = CpuUsage()
        for repetition in range(settings.repetitions):
            progress.update(task, description=f"repetition {repetition + 1}")
            for name, system in systems.items():
                _measure_steps(system, settings.steps, network, results[name])
                progress.advance(task)
        foreign = usage.foreign_share()
    for name, system in systems.items():
        if settings.traces is not None and isinstance(system, Engine):
            _trace(system, _trace_file(settings.traces, name))
        system.close()
    return {name: _over_ranks(settings, result) for name, result in results.items()}, foreign


def _trace_file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.json"


def _trace_records(settings: Settings) -> list[dict]:
    """A line for each trace that was written: what `timeline.png` is drawn from."""
    assert settings.traces is not None
    files = {name: _trace_file(settings.traces, name) for name in settings.contenders}
    return [
        {"kind": "trace", "name": name, "events": _events(json.loads(files[name].read_text()))}
        for name in settings.contenders
        if issubclass(SYSTEMS[name], Engine)
    ]


def _events(trace: dict) -> list[list]:
    """Category, name, begin from the first one on and length of every event, in microseconds."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    first = min(event["ts"] for event in events)
    return [
        [event["cat"], event["name"], round(event["ts"] - first), round(event["dur"])]
        for event in events
    ]


def _trace(system: Engine, path: Path) -> None:
    """One step between two others, as rank 0 saw it."""
    system.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    capture = captured_trace(system.runtime.driver.timeline, path)
    with capture if dist.get_rank() == 0 else nullcontext():
        system.step()
    system.step()
    system.drain()


def _measure_steps(system: System, steps: int, network: Network, result: Result) -> None:
    """Time steps between two others.

    A step pays for the work that the step before left in flight, and not for the work that the last
    one leaves.
    """
    dist.barrier()
    before, waits = network.counters.snapshot(), host_waits()
    system.step()
    begin_s = time.perf_counter()
    for _ in range(steps):
        system.step()
    result.step_ms.append(1e3 * (time.perf_counter() - begin_s) / steps)
    system.drain()
    gained = total(network.counters.since(before).values())
    dist.barrier()
    result.node_nbytes = gained.node_nbytes / (steps + 1)
    result.busy_ms = 1e3 * gained.busy_s / (steps + 1)
    result.host_waits += host_waits() - waits


def _over_ranks(settings: Settings, result: Result) -> Result:
    """Losses averaged over ranks, bytes summed over each node, times of the slowest rank."""
    step_ms = torch.tensor(result.step_ms, dtype=torch.float64)
    dist.all_reduce(step_ms, dist.ReduceOp.MAX)
    losses = torch.tensor(result.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    by_node = torch.zeros(settings.nodes, dtype=torch.float64)
    by_node[settings.profile.node_of(dist.get_rank())] = result.node_nbytes
    dist.all_reduce(by_node)
    mean = (losses / dist.get_world_size()).tolist()
    return replace(result, step_ms=step_ms.tolist(), losses=mean, node_nbytes=by_node.max().item())


# ---- records and tables


def _record(settings: Settings, name: str, result: Result) -> dict:
    size, profile = settings.size, settings.profile
    params_nbytes = size.blocks * size.block_nbytes
    ideal = SYSTEMS[name].volume(settings.nodes, profile.ranks_per_node, size.blocks)  # pyright: ignore[reportAttributeAccessIssue]
    # fmt: off
    return {
        "bench": "schedules", "contender": name, "nodes": settings.nodes,
        "ranks_per_node": profile.ranks_per_node, "profile": asdict(profile),
        "model": asdict(size), "params_nbytes": params_nbytes,
        "repetitions": settings.repetitions, "steps": settings.steps,
        "median_ms": statistics.median(result.step_ms),
        "min_ms": min(result.step_ms), "max_ms": max(result.step_ms), "step_ms": result.step_ms,
        "node_nbytes": result.node_nbytes, "volume": result.node_nbytes / params_nbytes,
        "ideal_volume": ideal, "busy_ms": result.busy_ms, "host_waits": result.host_waits,
        "losses": result.losses, "trains": SYSTEMS[name].trains,
    }
    # fmt: on


def _table(settings: Settings, records: list[dict], foreign: float) -> Table:
    ranks = settings.profile.ranks_per_node
    title = (
        f"One step, {settings.nodes} nodes x {ranks} ranks, {settings.profile.name}, "
        f"{settings.size.block_ms:g} ms a block; others used {foreign:.0%} of the machine"
    )
    table = Table(title=title)
    for column in ("contender", "median ms", "min", "max", "sent / P", "ideal", "busy ms", "loss"):
        table.add_column(column, no_wrap=True, justify="left" if column == "contender" else "right")
    for record in records:
        times = [f"{record[key]:.0f}" for key in ("median_ms", "min_ms", "max_ms")]
        volumes = [f"{record[key]:.3f}" for key in ("volume", "ideal_volume")]
        loss = f"{record['losses'][-1]:.6f}" if record["trains"] else "-"
        table.add_row(record["contender"], *times, *volumes, f"{record['busy_ms']:.0f}", loss)
    if foreign > FOREIGN_LIMIT:
        table.caption = "a busy machine: not to be quoted"
    return table


def _check(records: list[dict]) -> None:
    """No speed without correctness: end with a status where losses or volumes are wrong."""
    trained = [record for record in records if record["trains"]]
    for record in trained:
        if not worst_difference(record["losses"], trained[0]["losses"]) <= 1e-5:
            sys.exit(
                f"{record['contender']}: losses {record['losses']} are not those of "
                f"{trained[0]['contender']}, {trained[0]['losses']}"
            )
    for record in records:
        # Shards are padded, which shows in small models: a little more than ideal, never less.
        if not 0.999 * record["ideal_volume"] <= record["volume"] <= 1.01 * record["ideal_volume"]:
            sys.exit(
                f"{record['contender']}: {record['volume']:.3f} P left a node, not "
                f"{record['ideal_volume']:.3f} P"
            )


if __name__ == "__main__":
    main()
