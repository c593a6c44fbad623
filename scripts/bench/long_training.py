# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level GPT for thousands of steps, undisturbed and with failures.

By stock Megatron and by AsyncHZP, in bf16 and with PASA attention in fp16, on the sources of
Python's own library.

    python -m scripts.bench.long_training --out FILE                        # all runs
    python -m scripts.bench.long_training --runs stock-1 ours failures      # these

What a run has done stays in --folder: the same command goes on from there. It ends in a line and
status 1 if ranks end otherwise than their failure explains, or a repeated step has other bits.
"""

import argparse
import filecmp
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from scripts.report.records import append, read
from scripts.testbed import ranks
from scripts.testbed.device.worlds import DeviceWorlds
from scripts.testbed.launches import Ended, Launch, processes_with
from scripts.testbed.machine import machine_record
from scripts.testbed.megatron_flags import BF16, FP16, flags_of, shape_flags, size_flags
from scripts.train import prepare_data
from scripts.train.noted_pretrain import train_on_device

RANK_SCRIPT = Path(prepare_data.__file__).with_name("noted_pretrain.py")
ROOT = Path(__file__).parents[2]
RUNS = ("stock-1", "ours", "failures", "pasa", "stock-2", "stock-3", "fp8")
BATCH, WARMUP, SAVE_EVERY, VALIDATE_EVERY = 16, 100, 50, 250
SEED, OTHER_SEEDS = 1234, {"stock-2": 1235, "stock-3": 1236}
NOTED_EVERY = 10  # steps, in the record
_SWITCHES = (
    *("disable-bias-linear", "swiglu", "untie-embeddings-and-output-weights", "no-rope-fusion"),
    *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-persist-layer-norm"),
    *("no-bias-swiglu-fusion", "no-bias-dropout-fusion", "exit-signal-handler"),
)
_START_LIMIT_S = 7200.0
_FP8_STARTS_S = 1200.0  # until the first step, and for the last save
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-param-gather"]
FP8 += ["--attention-backend", "unfused", "--no-create-attention-mask-in-dataloader"]
OURS = ["--use-asynchzp", "--asynchzp-early-update", "on"]


@dataclass(frozen=True)
class Start:
    """The ranks of one start, until the fault strikes `victims` in `step`; none: until the end.

    `label`: the system and its sizes. A start with a label seen before repeats its steps' bits.
    """

    ranks: int
    label: str
    flags: tuple[str, ...]
    fault: str = ""
    step: int = 0
    ms: int = 0
    victims: tuple[int, ...] = ()


_DEFAULT = (2, "ours, default sizes", (*OURS, *BF16))


def _sized(number: int, *sizes: int) -> tuple[int, str, tuple[str, ...]]:
    return number, f"ours, P, G, O = {sizes}", (*OURS, *BF16, *size_flags(sizes))


# Which ranks train, and what ends them. The last repeats the first, and so on.
COURSE = [
    (_DEFAULT, "kill"),
    (_DEFAULT, "damage"),
    (_sized(4, 2, 2, 4), "kill"),
    (_sized(4, 2, 2, 4), "node lost"),
    (_sized(2, 1, 2, 2), "signal"),  # as when the node is back
    (_sized(4, 2, 2, 4), "full disk"),
    (_sized(8, 2, 4, 8), "kill"),
    ((2, "stock", tuple(BF16)), "kill"),
    (_DEFAULT, "hugging face"),
    (_DEFAULT, "signal"),
]


def course(steps: int, every: int, seed: int) -> list[Start]:
    """The starts of the run with failures: one in each `every` steps, at a random moment."""
    numbers, starts = random.Random(seed), []
    for first, ((number, label, flags), fault) in zip(
        range(0, steps - every, every), cycle(COURSE)
    ):
        victims: Sequence[int] = [numbers.randrange(number)]
        if fault == "node lost":
            victims = range(number // 2, number)
        elif fault == "full disk":
            victims = range(number)
        step = first + numbers.randint(every // 2, every)
        ms = 0 if fault == "full disk" else numbers.randrange(400)
        starts.append(Start(number, label, flags, fault, step, ms, tuple(victims)))
    return [*starts, Start(*_DEFAULT)]


def flags_of_run(args: argparse.Namespace, number: int) -> list[str]:
    """Megatron's flags that all runs share."""
    data = args.folder / "data"
    # fmt: off
    values = {
        "position-embedding-type": "rope", "normalization": "RMSNorm",
        "micro-batch-size": BATCH // number, "global-batch-size": BATCH,
        "train-iters": args.steps, "lr": 1e-3, "min-lr": 1e-4, "lr-decay-style": "cosine",
        "lr-warmup-iters": min(WARMUP, args.steps // 4), "weight-decay": 0.1, "clip-grad": 1.0,
        "adam-beta2": 0.99, "attention-dropout": 0.0, "hidden-dropout": 0.0,
        "data-path": data / "text", "data-cache-path": data / "cache",
        "split": "969,31,0", "make-vocab-size-divisible-by": 32, "num-workers": 0,
        "log-interval": 100,
        "eval-interval": min(VALIDATE_EVERY, args.steps), "eval-iters": 8,
        "save-interval": args.save_every, "distributed-timeout-minutes": 5,
    }
    # fmt: on
    return [
        *shape_flags(4, 256, 128),
        *flags_of(values),
        *(f"--{switch}" for switch in _SWITCHES),
        *prepare_data.ByteEncoder().training_flags(),
    ]


class Run:
    """One of the runs, in a folder of its own.

    notes.jsonl: what the ranks noted; starts.jsonl: a line of each start that has ended.
    """

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self._args = name, args
        self.folder = args.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._checkpoints = self.folder / "checkpoints"

    def starts(self) -> list[Start]:
        if self.name.startswith("stock"):
            return [Start(2, "stock", tuple(BF16))]
        if self.name == "failures":
            return course(self._args.steps, self._args.every, SEED)
        if self.name == "fp8":
            return [Start(2, self.name, (*OURS, *BF16, *FP8))]
        more = ["--use-pasa-attention", *FP16] if self.name == "pasa" else BF16
        return [Start(2, self.name, (*OURS, *more))]

    def lines(self, file: str) -> list[dict]:
        path = self.folder / f"{file}.jsonl"
        return read([path] if path.exists() else [])

    def train(self) -> None:
        """Go on to the end. Raises TrainingError."""
        starts = self.starts()
        for number in range(len(self.lines("starts")), len(starts)):
            begin_s = time.time()
            ended = self._run(starts[number], number)
            line = asdict(starts[number]) | {"kind": "start", "start": number, "began_at": begin_s}
            line |= {"ended_at": time.time(), "statuses": [one.status for one in ended]}
            check_statuses(starts[number], ended)
            self._prepare_next(starts[number].fault)
            append(self.folder / "starts.jsonl", line)
            last = max(one["step"] for one in self.lines("notes") if one["kind"] == "step")
            print(f"{self.name}: {starts[number].label}: to step {last}", flush=True)
        check_repeats(self.lines("notes"), starts)

    def _run(self, start: Start, number: int) -> list[Ended]:
        line = [*flags_of_run(self._args, start.ranks), *start.flags]
        places = {"save": self._checkpoints, "load": self._checkpoints}
        line += flags_of(places | {"seed": OTHER_SEEDS.get(self.name, SEED)})
        line += self._args.flags.split()
        asked = {"notes": str(self.folder / "notes.jsonl"), "start": number} | asdict(start)
        if self.name == "fp8":
            minutes = ["--exit-duration-in-mins", str(self._args.fp8_minutes)]
            with DeviceWorlds(["scripts.testbed.te.preload"]) as worlds:
                limit_s = 60.0 * self._args.fp8_minutes + _FP8_STARTS_S
                given = [*line, *minutes], asked
                worlds.run(train_on_device, start.ranks, *given, timeout_s=limit_s, watches=False)
            return []
        line += flags_of({"asynchzp-device": "cpu", "transformer-impl": "local"})
        env = {"LONG_TRAINING": json.dumps(asked)}
        launch = Launch(self.folder, RANK_SCRIPT, " ".join(line), start.ranks, env)
        ended = launch.end(_START_LIMIT_S)
        for left in processes_with(str(self.folder / "notes.jsonl")):  # stock Megatron's queue
            os.kill(left, signal.SIGKILL)
        return ended

    def _prepare_next(self, fault: str) -> None:
        """Do what happens to checkpoints between two starts; old ones go."""
        folders = sorted(self._checkpoints.glob("iter_*"))
        for old in folders[:-3]:
            shutil.rmtree(old)
        if fault == "damage":
            file = max(folders[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif fault == "hugging face":
            self._go_through_hugging_face()

    def _go_through_hugging_face(self) -> None:
        """Export the newest checkpoint's weights, and import them.

        Raises TrainingError unless they come back bit for bit.
        """
        first, back, again = (self.folder / name for name in ("hf", "from_hf", "hf_again"))
        for path in (first, back, again):
            shutil.rmtree(path, ignore_errors=True)
        for words in (
            ["export", "--load", self._checkpoints, "--output", first],
            ["import", "--load", first, "--save", back],
            ["export", "--load", back, "--output", again],
        ):
            command = [sys.executable, "-m", "megatron_asynchzp", "hf", *map(str, words)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if ended.returncode:
                raise TrainingError(f"{self.name}: hf {words[0]}: {ended.stderr.strip()[-300:]}")
        names = [path.name for path in first.glob("*.safetensors")]
        if not names or any(filecmp.cmpfiles(first, again, names, shallow=False)[1:]):
            raise TrainingError(f"{self.name}: weights differ after Hugging Face: {again}")

    def record(self) -> list[dict]:
        """Losses of every NOTED_EVERY-th step, validation, and what became of each start."""
        found: dict[int, dict] = {}
        for line in self.lines("notes"):
            if line["kind"] == "step" and line["step"] % NOTED_EVERY == 0:
                found[line["step"]] = {"kind": "step", "step": line["step"], "loss": line["loss"]}
        notes = self.lines("notes")[::-1]  # of two at one step the first: Megatron's last is extra
        validated = {line["step"]: line for line in notes if line["kind"] == "validation"}
        kept = [
            {"kind": "validation", "step": step, "loss": one["loss"]}
            for step, one in sorted(validated.items())
        ]
        starts = starts_of(self.lines("notes"), self.lines("starts"), self._args.save_every)
        return [{"run": self.name} | line for line in (*found.values(), *kept, *starts)]


class TrainingError(RuntimeError):
    """A run that went otherwise than it should; the message is one line for the user."""


def check_statuses(start: Start, ended: Sequence[Ended]) -> None:
    """Raises TrainingError unless every rank ended as the fault explains."""
    killed = start.fault in ("kill", "damage", "node lost", "hugging face")
    for rank, one in enumerate(ended):
        if killed and rank in start.victims:
            good = one.status == -9
        elif killed:
            good = one.status == 1 and (start.label == "stock" or bool(one.own_lines))
        elif start.fault == "full disk":
            good = one.status == 1 and "earlier checkpoints are as they were" in "".join(
                "\n".join(each.own_lines) for each in ended
            )
        else:
            good = one.status == 0
        if not good:
            last = (one.text.strip().splitlines() or ["nothing"])[-1]
            raise TrainingError(
                f"after {start.fault or 'the end'} rank {rank}: {one.status}, {last}"
            )


def check_repeats(notes: Iterable[dict], starts: Sequence[Start]) -> int:
    """Return how many steps were made again on the same ranks and sizes, all bit for bit.

    Raises TrainingError.
    """
    seen: dict[tuple[str, int], tuple] = {}
    repeated = 0
    for line in notes:
        if line["kind"] == "step":
            key = starts[line["start"]].label, line["step"]
            values = line["loss"], line["norm"]
            repeated += key in seen
            if seen.setdefault(key, values) != values:
                raise TrainingError(f"step {line['step']} again: {values} and before {seen[key]}")
    return repeated


def starts_of(notes: Sequence[dict], ended: Sequence[dict], save_every: int) -> list[dict]:
    """For each start its fault, and the seconds and steps that it cost.

    `step_s`: the mean of steps that follow no save and no evaluation; `save_s`: the mean of those
    that follow a save, over that; `repeated`: its steps that the start before had made. Evaluation
    is left out of `wall_s`.
    """
    lines, reached = [], 0
    for start in ended:
        own = [line for line in notes if line["start"] == start["start"]]
        began = next((line for line in own[::-1] if line["kind"] == "began"), None)
        if began is None:
            continue  # there was no step left
        own = own[own.index(began) :]  # this program may have been interrupted in this start
        steps = {line["step"]: line["at"] for line in own if line["kind"] == "step"}
        validated = {line["step"] for line in own if line["kind"] == "validation"}
        struck = [line["at"] for line in own if line["kind"] == "struck"]
        line = {key: start[key] for key in ("start", "ranks", "label", "fault")}
        line |= {
            "kind": "start",
            "save_every": save_every,
            "from": began["step"],
            "to": max(steps, default=began["step"]),
        }
        line["repeated"] = max(0, reached - began["step"])
        line["start_s"] = round(began["at"] - start["began_at"], 3)
        line["to_the_end_s"] = round(start["ended_at"] - max(struck), 3) if struck else None
        line["first_step_s"] = round(min(steps.values(), default=began["at"]) - began["at"], 3)
        evaluated_s = 0.0
        gaps = {step: at - steps[step - 1] for step, at in steps.items() if step - 1 in steps}
        plain = [
            s for step, s in gaps.items() if (step - 1) % save_every and step - 1 not in validated
        ]
        if plain:
            mean_s = statistics.mean(plain)
            extra = {step - 1: gap - mean_s for step, gap in gaps.items()}
            saves = [s for step, s in extra.items() if not step % save_every]
            line["step_s"] = round(mean_s, 4)
            line["save_s"] = round(statistics.mean(saves), 3) if saves else None
            evaluated_s = sum(s for step, s in extra.items() if step in validated)
        line["wall_s"] = round(start["ended_at"] - start["began_at"] - evaluated_s, 2)
        lines.append(line)
        reached = max(reached, line["to"])
    return lines


def refuse_other_settings(args: argparse.Namespace) -> None:
    """Keep the settings of a folder with its runs. Raises TrainingError if they were others."""
    file, names = args.folder / "settings.json", ("steps", "every", "save_every", "flags")
    asked = {name: getattr(args, name) for name in names}
    if not file.exists():
        file.write_text(json.dumps(asked))
    for name, value in json.loads(file.read_text()).items():
        if asked[name] != value:
            flag = f"--{name.replace('_', '-')}"
            raise TrainingError(
                f"{flag} {asked[name]}: {args.folder} was begun with {value}; use another --folder"
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="long_training", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=150, help="steps between failures, on average")
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "long_training")
    parser.add_argument("--fp8-minutes", type=int, default=20, help="of the emulated device")
    parser.add_argument("--flags", default="", help="further flags of Megatron, in one word")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="other files to train on")
    parser.add_argument("--out", type=Path, help="file to append JSON lines to")
    args = parser.parse_args(argv)
    if not 4 <= args.every < args.steps or args.save_every < 1:
        parser.error("--every must be at least 4 and below --steps, --save-every at least 1")
    args.folder = args.folder.resolve()
    ranks.preload(["scripts.testbed.preload_megatron"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (args.folder / "data" / "text.idx").exists():
        words = ["--output-prefix", str(args.folder / "data" / "text"), *map(str, args.text)]
        print(prepare_data.prepare(prepare_data.parse_arguments(words)).splitlines()[0], flush=True)
    try:
        refuse_other_settings(args)
        runs = [Run(name, args) for name in args.runs]
        for run in runs:
            run.train()
    except TrainingError as error:
        print(f"long_training: {error}", file=sys.stderr)
        return 1
    if args.out:
        starts = [line for run in runs for line in run.lines("starts")]
        took_s = round(sum(line["ended_at"] - line["began_at"] for line in starts), 1)
        lines = (line for run in runs for line in run.record())
        append(args.out, machine_record() | {"seconds": took_s}, *lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
