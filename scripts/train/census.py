# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts the training recipes that start with `--use-asynchzp`, and the flags that refuse the rest.

    python -m scripts.train.census PLACE [PLACE...] [--out FILE]

Reads every model_config.yaml (the form of Megatron-LM's functional tests) and every shell script
below a folder, and the recipes of a JSON file: a list of {name, hardware, gpus, flags, vpp}, whose
flags say nothing of the model's shape, so that they get a small one. Each command line goes through
Megatron's own parser and validation in a pretended world, once as it is and once with
`--use-asynchzp`: it runs as it is, runs weakened (something is switched off that nothing else
gives), or is refused. What only names files (data, tokenizers) is replaced by mock data and a null
tokenizer. Needs no device. --out: a record.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_asynchzp.commands import verdict as of_start
from megatron_asynchzp.commands.launch_words import DEFAULT_SCRIPT
from megatron_asynchzp.commands.pretended_world import fewest_ranks, megatron_flags, patch_megatron
from megatron_asynchzp.commands.recipes import Flags, read_command, read_source, without_flag
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.machine import machine_record

_RANKS_PER_NODE = 8
# Megatron can capture no whole layer whose experts take any number of tokens. NVIDIA's recipes name
# parts in an assignment of its own, which a list of flags may have lost.
_CAPTURED_BESIDE_EXPERTS = ["--cuda-graph-modules", "attn", "moe_router", "moe_preprocess"]
# On a command line this switches offloading on. NVIDIA's configurations do that by an assignment of
# its own, which their recipes with graphs don't have: Megatron takes no graphs with offloading.
_LAYERS_OFFLOADED = "--cpu-offloading-num-layers"
# Megatron demands it of graphs of a whole iteration, and NVIDIA's recipes assign it.
_UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
# The other writer is a package that need not be installed here.
_WRITER = ["--async-strategy", "mcore"]


@dataclass(frozen=True)
class Case:
    """One command line.

    `flags`: a shell variable that the recipe does not set stands for 1; `name`, `hardware`,
    `ranks`: if the recipe says so.
    """

    path: Path
    flags: list[str]
    name: str = ""
    hardware: str = ""
    ranks: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    `stock`, `ours`: None if Megatron alone, or with `--use-asynchzp`, accepted it; `lost`: the
    arguments that are then switched off without a replacement; `needed`: what has to be in the
    environment.
    """

    case: Case
    stock: of_start.Line | None
    ours: of_start.Line | None
    lost: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()

    @property
    def is_ours_alone(self) -> bool:
        """Whether the plugin refuses what Megatron would start."""
        return self.stock is None and self.ours is not None and bool(self.ours.by)


# ---- reading recipes


def _shape_for(flags: list[str], stages: int) -> list[str]:
    """Return a small model that the parallel sizes divide, with the parts that `flags` name."""

    def size(name: str) -> int:
        flag = f"--{name}-parallel-size"
        return int(flags[flags.index(flag) + 1]) if flag in flags else 1

    tensor, pipeline = size("tensor-model"), size("pipeline-model")
    is_offloading, parts = _LAYERS_OFFLOADED in flags, 2 * pipeline * stages
    # Megatron wants more layers than are offloaded.
    fewest = int(flags[flags.index(_LAYERS_OFFLOADED) + 1]) + 1 if is_offloading else 1
    layers, length = -(-fewest // parts) * parts, 64 * tensor * size("context")
    values = {"num-layers": layers, "hidden-size": 512 * tensor, "num-attention-heads": 8 * tensor}
    values |= {"seq-length": length, "max-position-embeddings": length, "train-iters": 10}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    words += ["--lr", "1e-3", "--micro-batch-size", "1", "--position-embedding-type", "rope"]
    words += ["--attention-dropout", "0", "--hidden-dropout", "0"]  # as large models have it
    if stages > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(stages)]
    if "--overlap-moe-expert-parallel-comm" in flags and size("expert-model") == 1:
        words += ["--expert-model-parallel-size", "8"]  # which it needs, and a list may have lost
    if size("expert-model") > 1 or any("moe" in word for word in flags):
        words += ["--num-experts", str(8 * size("expert-model")), "--moe-router-topk", "2"]
        words += ["--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"]
        words += ["--disable-bias-linear"]
        if tensor > 1:
            words += ["--sequence-parallel"]  # which Megatron wants with experts
        if "--expert-tensor-parallel-size" not in flags:
            words += ["--expert-tensor-parallel-size", "1"]  # as NVIDIA's recipes have it
    if any("mla" in word for word in flags):
        words += ["--multi-latent-attention"]
    return words


def _captures_all_of_layers(flags: list[str]) -> bool:
    names_parts = {"--cuda-graph-modules", "--cuda-graph-scope"} & {*flags}
    return "transformer_engine" in flags and not names_parts


def _of_list(path: Path) -> Iterator[Case]:
    """The recipes of a JSON file."""
    megatron = Flags(megatron_flags())
    for recipe in json.loads(path.read_text()):
        # As the configuration has it, and not the parser.
        flags = ["--use-nccl-ub" if flag == "--nccl-ub" else flag for flag in recipe["flags"]]
        if "full_iteration" in flags:
            flags += [_UNCHECKED]
        if "--cuda-graph-impl" in flags:
            flags = without_flag(flags, _LAYERS_OFFLOADED)
        ranks = recipe["gpus"]
        flags += _shape_for(flags, recipe["vpp"] or 1)
        if "--num-experts" in flags and _captures_all_of_layers(flags):
            # A router is not captured where the experts are computed again.
            flags += _CAPTURED_BESIDE_EXPERTS[: 2 if "moe" in flags else None]
        # NVIDIA's recipes have it throughout, and some of their flags need it.
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
        flags += ["--global-batch-size", str(16 * ranks)]
        kept, others, _ = megatron.read(flags)
        yield Case(path, [*kept, *others], recipe["name"], recipe["hardware"], ranks)


def find_cases(places: list[Path]) -> Iterator[Case]:
    """The recipes that train of files, and below folders in the order of their paths."""
    for place in places:
        yield from _of_list(place) if place.suffix == ".json" else _below(place)


def _below(folder: Path) -> Iterator[Case]:
    flags = Flags(megatron_flags())
    for path in sorted((*folder.rglob("model_config.yaml"), *folder.rglob("*.sh"))):
        found = list[str]()
        with suppress(ConfigurationError):  # nothing there trains
            found, _, _ = flags.read(read_command(read_source([str(path)]), str(path), flags).flags)
        if {"--train-iters", "--train-samples"} & set(found):
            yield Case(path, [*found, *(_WRITER if "--async-save" in found else [])])


def judge(case: Case) -> Verdict:
    """Ask Megatron alone, and with `--use-asynchzp`."""
    size = case.ranks or fewest_ranks(case.flags)
    command, per_node = [DEFAULT_SCRIPT, *case.flags], min(_RANKS_PER_NODE, size)
    stock = of_start.validate_command(command, size, per_node)
    refused = of_start.lines_of(stock) if isinstance(stock, ConfigurationError) else []
    found = of_start.judge_command(command, size, per_node)
    lost = () if found.refused else tuple(rule.setting for rule in found.lost)
    needed = tuple(line.partition(":")[0] for line in found.environment)
    return Verdict(case, next(iter(refused), None), next(iter(found.refused), None), lost, needed)


# ---- the report


def _topic(refusal: of_start.Line) -> str:
    """What cases are counted by: the flag of a refusal of ours, or Megatron's message."""
    return refusal.by or refusal.text[:100]


def report(verdicts: list[Verdict], names_cases: bool = False) -> str:
    """The counts as text. names_cases: also the path of every case that was refused."""
    accepted = [verdict for verdict in verdicts if verdict.ours is None]
    by_stock = [verdict for verdict in verdicts if verdict.stock is None]
    lines = [
        f"{len(verdicts)} training recipes",
        f"{len(by_stock)} start with stock Megatron in this pretended world",
        f"{len(accepted)} start with --use-asynchzp",
    ]
    if weakened := [verdict for verdict in accepted if verdict.lost]:
        counts = Counter(name for verdict in weakened for name in verdict.lost)
        lines.append(f"{len(weakened)} of them weakened: something is switched off")
        lines += [f"{count:5}  {name}" for name, count in counts.most_common()]
    counts = Counter(words for verdict in accepted for words in verdict.needed)
    lines += [f"{count:5}  with {words} in the environment" for words, count in counts.items()]
    for is_ours, title in ((True, "refused by --use-asynchzp"), (False, "refused by Megatron")):
        refusals = [v.ours for v in verdicts if v.ours is not None and v.is_ours_alone == is_ours]
        counts = Counter(map(_topic, refusals))
        lines += ["", f"{title}: {len(refusals)}"]
        lines += [f"{count:5}  {topic}" for topic, count in counts.most_common()]
    if names_cases:
        named = ((v.case.name or v.case.path, v) for v in verdicts)
        lines += ["", *(f"{name}: {_verdict(v)}" for name, v in named if v.ours or v.lost)]
    return "\n".join(lines)


def _verdict(verdict: Verdict) -> str:
    return verdict.ours.text if verdict.ours else f"weakened, without {', '.join(verdict.lost)}"


def as_record(verdict: Verdict) -> dict:
    """Return the record's line. stock, ours: None if it starts, else the refusing flag and why."""
    path = verdict.case.path
    words = path.parts[-3:-1] if path.suffix == ".yaml" else path.parts[-2:]
    line: dict = {"kind": "case", "case": verdict.case.name or "/".join(words)}
    if verdict.case.hardware:
        line["hardware"] = verdict.case.hardware
    for name, refusal in (("stock", verdict.stock), ("ours", verdict.ours)):
        line[name] = refusal and {"by": refusal.by or "Megatron", "why": refusal.text}
    return line | {"lost": [*verdict.lost]}


def main(argv: list[str]) -> int:
    """Print the census; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.census", description=__doc__)
    parser.add_argument("place", nargs="+", type=Path, help="a folder, or a .json file of recipes")
    parser.add_argument(
        "--cases", action="store_true", help="name every recipe that is refused or weakened"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a line for each recipe")
    asked = parser.parse_args(argv)
    for place in asked.place:
        if not (place.is_file() if place.suffix == ".json" else place.is_dir()):
            parser.error(f"{place}: no such folder, and no .json file")
    patch_megatron()
    verdicts = [judge(case) for case in find_cases(asked.place)]
    if not verdicts:
        print("census: no training recipe found there", file=sys.stderr)
        return 1
    print(report(verdicts, asked.cases))
    if asked.out:
        lines = [machine_record(), *map(as_record, verdicts)]
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
