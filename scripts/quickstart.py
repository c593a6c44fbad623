# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains one small GPT twice over the same batches: stock Megatron DDP, and AsyncHZP."""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_asynchzp.errors import ConfigurationError
from scripts.report import loss_picture
from scripts.report.megatron_log import Iteration, parse_iteration
from scripts.report.records import replace
from scripts.testbed.differences import worst_difference
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import flags_of, shape_flags
from scripts.train import prepare_data

ROOT = Path(__file__).resolve().parent.parent
TRAIN_SCRIPT = ROOT / "scripts" / "train" / "pretrain_gpt.py"
SEQ_LENGTH, LAYERS, HIDDEN = 128, 4, 160
GLOBAL_BATCH, WARMUP = 32, 20
# Rounding makes fp32 runs drift apart by far less in some hundred steps; a fault by more.
LOSS_TOLERANCE = 1e-2


class QuickstartError(Exception):
    """The quickstart cannot go on; the message is for the user."""


class Platform(NamedTuple):
    """What the ranks run on."""

    name: str
    ranks: int
    backend: str
    env: dict[str, str]


class Result(NamedTuple):
    """What one training run left: its steps and its report."""

    steps: list[Iteration]
    report: dict

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def fullest_rank(self) -> dict[str, int]:
        """The states of the rank that holds most."""
        held = [{s: rank[s] for s in loss_picture.STATES} for rank in self._per_rank]
        return max(held, key=lambda rank: sum(rank.values()))

    @property
    def _per_rank(self) -> list[dict[str, int]]:
        return self.report["state_bytes_per_rank"]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description=__doc__)
    parser.add_argument("--steps", type=int, default=120, help="training steps of each run")
    parser.add_argument("--ranks", type=int, help="default: 4 on CPU, else the number of GPUs")
    parser.add_argument("--text", nargs="+", type=Path, help="train on these files or folders")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "quickstart")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2")
    if args.ranks is not None and GLOBAL_BATCH % max(args.ranks, 1):
        parser.error(f"--ranks must divide the batch of {GLOBAL_BATCH} sequences")
    args.output = args.output.resolve()
    return args


def find_platform(ranks: int | None) -> Platform:
    """CUDA with NCCL where there are GPUs, else CPU with gloo."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        if ranks is not None and ranks > gpus:
            raise QuickstartError(f"--ranks {ranks}, but there are {gpus} GPUs")
        ranks = ranks or 1 << (gpus.bit_length() - 1)  # a power of two divides the batch
        return Platform(f"{ranks} x {torch.cuda.get_device_name()}", ranks, "nccl", {})
    env = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return Platform(f"{ranks or 4} CPU ranks", ranks or 4, "gloo", env)


def shard_sizes(ranks: int) -> dict[str, int]:
    """Parameters and gradients over pairs of ranks, optimizer states over all of them."""
    pair = 2 if ranks % 2 == 0 else 1
    return {"param": pair, "grad": pair, "optim": ranks}


def training_flags(args: argparse.Namespace, platform: Platform, data: Path) -> list[str]:
    """Megatron's flags of both runs: same model, same seed, same batches, fp32.

    All of the text is for training: Megatron never ends building a validation set that got no
    document, and a text may be one document.
    """
    # fmt: off
    flags = {
        "position-embedding-type": "rope", "normalization": "RMSNorm",
        "micro-batch-size": GLOBAL_BATCH // platform.ranks, "global-batch-size": GLOBAL_BATCH,
        "train-iters": args.steps, "lr": 1e-3, "min-lr": 1e-4, "lr-decay-style": "cosine",
        "lr-warmup-iters": min(WARMUP, args.steps - 1), "weight-decay": 0.1, "clip-grad": 1.0,
        "adam-beta2": 0.99,
        "attention-dropout": 0.0, "hidden-dropout": 0.0, "seed": args.seed,
        "data-path": data, "split": "100,0,0", "data-cache-path": data.parent / "cache",
        "make-vocab-size-divisible-by": 32, "num-workers": 0,
        "log-interval": 1, "eval-interval": 10 * args.steps, "eval-iters": 0,
        "distributed-backend": platform.backend, "transformer-impl": "local",
        "asynchzp-device": "auto" if platform.backend == "nccl" else "cpu",
    }
    # fmt: on
    switches = [
        "disable-bias-linear",
        "swiglu",
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
        "no-persist-layer-norm",
        "no-bias-swiglu-fusion",
        "no-rope-fusion",
        "no-bias-dropout-fusion",
    ]
    return [
        *shape_flags(LAYERS, HIDDEN, SEQ_LENGTH),
        *flags_of(flags),
        *(f"--{switch}" for switch in switches),
        *prepare_data.ByteEncoder().training_flags(),
    ]


def prepare_text(args: argparse.Namespace, console: Console) -> Path:
    """The indexed dataset to train on: made once, unless the user names a text."""
    prefix = args.output / "data" / ("text" if args.text else "standard_library")
    if args.text or not Path(f"{prefix}.idx").exists():
        request = ["--output-prefix", str(prefix), *map(str, args.text or [])]
        try:
            shown = prepare_data.prepare(prepare_data.parse_arguments(request))
        except ConfigurationError as error:
            raise QuickstartError(str(error)) from error
        console.print(shown.splitlines()[0], highlight=False, soft_wrap=True)
    return prefix


@contextmanager
def training_process(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """Run torchrun in a process group of its own, which does not outlive this context."""
    process = subprocess.Popen(
        command,
        env=os.environ | env,
        cwd=ROOT,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def curve(losses: Sequence[float], top: float, width: int = 24) -> str:
    """A loss curve as blocks of text, of one height per point; `top` fills a block."""
    points = losses[:: max(1, -(-len(losses) // width))]
    heights = (max(0, min(7, int(8 * loss / top))) for loss in points)
    return "".join("▁▂▃▄▅▆▇█"[height] for height in heights)


def follow(
    lines: Iterable[str], name: str, steps: int, console: Console, other: Sequence[float] = ()
) -> Iterator[Iteration]:
    """Yield the steps that a run prints, and show the growing loss curve meanwhile.

    It is a bar on a terminal, else a line for every tenth of the way. `other`: the losses of the
    run before.
    """
    losses: list[float] = []
    columns = (
        TextColumn(f"{name:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps, shown="starting")
        for step in filter(None, map(parse_iteration, lines)):
            losses.append(step.loss)
            beside = f" (before {other[len(losses) - 1]:.3f})" if len(other) >= len(losses) else ""
            shown = f"loss {step.loss:.3f}{beside}  {step.step_ms:.0f} ms/step"
            shown += f"  {curve(losses, losses[0])}"
            progress.update(task, completed=step.number, shown=shown)
            if not console.is_terminal and step.number % max(1, steps // 10) == 0:
                console.print(f"{name:<12} step {step.number}/{steps}  {shown}", highlight=False)
            yield step


def train(
    name: str,
    flags: list[str],
    platform: Platform,
    output: Path,
    steps: int,
    console: Console,
    other: Sequence[float] = (),
) -> Result:
    """Run one training; its output goes to OUTPUT/NAME.log, its report to NAME.json."""
    log, report = output / f"{name}.log", output / f"{name}.json"
    report.unlink(missing_ok=True)
    # fmt: off
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(platform.ranks), "-m", "megatron_asynchzp.launch",
        str(TRAIN_SCRIPT), *flags, "--report-json", str(report),
    ]
    # fmt: on
    tail: deque[str] = deque(maxlen=25)
    with log.open("w", buffering=1) as file, training_process(command, platform.env) as process:
        printed = process.stdout
        assert printed is not None

        def lines() -> Iterator[str]:
            for line in printed:
                file.write(line)
                tail.append(line)
                yield line

        found = list(follow(lines(), name, steps, console, other))
        status = process.wait()
    if status or not report.exists():
        console.print(escape("".join(tail)), style="dim", highlight=False)
        raise QuickstartError(f"the run {name} ended with status {status}; its log: {log}")
    if [step.number for step in found] != list(range(1, steps + 1)):
        raise QuickstartError(f"the run {name} printed {len(found)} of {steps} losses; see {log}")
    return Result(found, json.loads(report.read_text()))


def result_table(stock: Result, asynchzp: Result) -> Table:
    def row(label: str, cells: Iterable[str], end_section: bool = False) -> None:
        table.add_row(label, *cells, end_section=end_section)

    def mib(nbytes: int) -> str:
        return f"{nbytes / 2**20:.2f} MiB"

    both = (stock, asynchzp)
    table = Table("", "Megatron DDP", "AsyncHZP", title="Same model, same batches")
    for column in table.columns[1:]:
        column.justify = "right"
    row("loss at the first step", (f"{run.losses[0]:.6f}" for run in both))
    row("loss at the last step", (f"{run.losses[-1]:.6f}" for run in both), end_section=True)
    held = [dict(run.fullest_rank) for run in both]
    totals = [sum(of_run.values()) for of_run in held]
    rings = [of_run.pop(loss_picture.RINGS) for of_run in held]
    for state in held[0]:
        if any(of_run[state] for of_run in held):  # fp32 has no separate main parameters
            label, _ = loss_picture.STATES[state]
            row(f"{label} on a rank", (mib(of_run[state]) for of_run in held))
    row("state at rest, fullest rank", (mib(sum(of_run.values())) for of_run in held))
    row("in flight, the same rank", map(mib, rings))
    row("both together", map(mib, totals), end_section=True)
    row("median time per step", (_median_ms(step.step_ms for step in run.steps) for run in both))
    exposed = [[step.exposed_comm_ms for step in run.steps] for run in both]
    row("of it, waiting for communication", map(_median_ms, exposed))
    return table


def _median_ms(times: Iterable[float | None]) -> str:
    """Stock Megatron does not measure how long it waits."""
    shown = [ms for ms in times if ms is not None]
    return f"{statistics.median(shown):.0f} ms" if shown else "-"


def show_results(
    stock: Result,
    asynchzp: Result,
    sizes: dict[str, int],
    title: str,
    output: Path,
    console: Console,
) -> None:
    """The table and the picture; raises when the losses do not agree."""
    shown = f"P={sizes['param']} G={sizes['grad']} O={sizes['optim']}"
    picture = output / "loss.png"
    runs = (
        loss_picture.Run("Megatron DDP", stock.losses, stock.fullest_rank),
        loss_picture.Run(f"AsyncHZP, {shown}", asynchzp.losses, asynchzp.fullest_rank),
    )
    write_record(runs, title, output / "record.jsonl")
    loss_picture.draw(*runs, title, picture)
    console.print(result_table(stock, asynchzp))
    apart = worst_difference(asynchzp.losses, stock.losses)
    equal = sum(a == b for a, b in zip(stock.losses, asynchzp.losses, strict=True))
    console.print(
        f"{equal} of {len(stock.losses)} losses equal in every printed digit, "
        f"largest relative difference {apart:.1e}\nPicture: {picture}\nLogs:    {output}/*.log",
        highlight=False,
        soft_wrap=True,
    )
    if not apart <= LOSS_TOLERANCE:
        raise QuickstartError(f"the losses differ by {apart:.1e}, more than {LOSS_TOLERANCE:g}")


def write_record(runs: Iterable[loss_picture.Run], title: str, file: Path) -> None:
    """The numbers behind the picture as JSON lines, for `python -m scripts.report.rebuild`."""
    machine = machine_record(shlex.join(["./scripts/quickstart.sh", *sys.argv[1:]]))
    shown = ({"kind": "run", "title": title} | run._asdict() for run in runs)
    replace(file, [machine, *shown])


def run(args: argparse.Namespace, console: Console) -> None:
    platform = find_platform(args.ranks)
    sizes = shard_sizes(platform.ranks)
    args.output.mkdir(parents=True, exist_ok=True)
    data = prepare_text(args, console)
    console.print(
        f"Training on {platform.name} with {platform.backend}: {LAYERS} layers of {HIDDEN}, "
        f"{args.steps} steps of {GLOBAL_BATCH} x {SEQ_LENGTH} bytes, once with stock Megatron DDP,"
        f" once with AsyncHZP (states sharded over {sizes['param']} | {sizes['grad']} | "
        f"{sizes['optim']} ranks)",
        highlight=False,
    )
    flags = training_flags(args, platform, data)
    stock = train("ddp", flags, platform, args.output, args.steps, console)
    own = ["--use-asynchzp"]
    for state, size in sizes.items():
        own += [f"--asynchzp-{state}-shard-size", str(size)]
    asynchzp = train(
        "asynchzp", flags + own, platform, args.output, args.steps, console, stock.losses
    )
    text = "the given text" if args.text else "the Python standard library"
    title = f"A byte-level GPT on {text}, {platform.name}, {platform.backend}, fp32"
    show_results(stock, asynchzp, sizes, title, args.output, console)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the ranks as after Ctrl-C
    try:
        run(args, console)
    except QuickstartError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
