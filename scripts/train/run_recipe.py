# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs recipes of a Megatron-LM checkout for a few steps with `--use-asynchzp`, by its unmodified
pretrain_gpt.py or pretrain_hybrid.py:

    python -m scripts.train.run_recipe CHECKOUT RECIPE [RECIPE...] [--ranks 4] [-- FLAGS]

RECIPE: a folder below the checkout's tests/functional_tests/test_cases (gpt/gpt3_mcore_te_tp2_pp2),
or any model_config.yaml or shell script. All of its flags are given, but for files: data is mocked,
the tokenizer is a null one, checkpoints go to a temporary folder, and nothing is reported to
Weights & Biases. The run is cut short: --train-iters 2, one sample per data-parallel rank and
micro-batch. FLAGS come last, so they overrule: sizes of a model that does not fit this machine.

Without an accelerator it runs on the CPU platform, whose changes are printed. Ends with the number
of recipes that failed.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from scripts.gpu_check.process import run_command
from scripts.train.census import Case, find_cases

_CASES = Path("tests", "functional_tests", "test_cases")
_STEPS = 2
_LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+|nan|inf)", re.IGNORECASE)
# Flags whose value is a place, and those of a service on the network.
_PLACES = ("--save", "--load", "--tensorboard-dir", "--data-cache-path")
_SERVICES = ("--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir")


class Outcome(NamedTuple):
    """losses: by step; output: of all ranks; status: of the launcher."""

    losses: dict[int, float]
    output: str
    status: int

    @property
    def is_trained(self) -> bool:
        is_whole = self.status == 0 and len(self.losses) == _STEPS
        return is_whole and all(map(isfinite, self.losses.values()))


def main(argv: Sequence[str]) -> int:
    middle = list(argv).index("--") if "--" in argv else len(argv)
    args, overrules = _parse(argv[:middle]), list(argv[middle + 1 :])
    failed = 0
    for recipe in args.recipe:
        cases = list(find_cases([_folder_of(args.checkout, recipe)]))
        if not cases:
            print(f"\n{recipe}\n  FAILED: it does not train")
        failed += not cases
        for case in cases:
            outcome = run(args.checkout, case, args.ranks, overrules, args.time_limit)
            _print(recipe, outcome)
            failed += not outcome.is_trained
    return failed


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout of core_v0.19.0")
    parser.add_argument("recipe", nargs="+")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for each recipe")
    args = parser.parse_args(argv)
    if not (args.checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{args.checkout}: no pretrain_gpt.py there, so no Megatron-LM checkout")
    for recipe in args.recipe:
        if not _folder_of(args.checkout, recipe).is_dir():
            parser.error(f"{recipe}: no such recipe")
    return args


def _folder_of(checkout: Path, recipe: str) -> Path:
    return next((f for f in (checkout / _CASES / recipe, Path(recipe)) if f.is_dir()), Path(recipe))


# ---- one run


def command_line(case: Case, folder: str, ranks: int, overrules: Sequence[str]) -> list[str]:
    """The recipe's flags, cut short; places are below `folder`."""
    flags, words = [], list(case.flags)
    while words:
        flag = words.pop(0)
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        if flag in _SERVICES:
            continue
        flags += [flag, *([folder] if flag in _PLACES else values)]
    length = ["--train-iters", str(_STEPS)]
    if "--train-samples" in flags:
        length = ["--train-samples", str(_STEPS * ranks)]
    if "--save" in flags and "--save-interval" not in flags:
        length += ["--save-interval", str(_STEPS)]
    batch = ["--micro-batch-size", "1", "--global-batch-size", str(ranks)]
    return [*flags, *length, *batch, "--eval-iters", "0", "--log-interval", "1", *overrules]


def run(
    checkout: Path, case: Case, ranks: int, overrules: Sequence[str], time_limit_s: float
) -> Outcome:
    """Train; the output is kept whole."""
    name = "pretrain_hybrid.py" if "--hybrid-layer-pattern" in case.flags else "pretrain_gpt.py"
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"} | os.environ
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks), "-m", "megatron_asynchzp.launch"]
        command = [*launcher, str(checkout / name), *command_line(case, folder, ranks, overrules)]
        log = Path(folder, "log")
        ended = run_command([*command, "--use-asynchzp"], log, time_limit_s, environment)
        output = log.read_text(errors="replace")
    losses = {int(step): float(loss) for step, loss in _LOSS.findall(output)}
    return Outcome(losses, output, 124 if ended.status is None else ended.status)


def _print(recipe: str, outcome: Outcome) -> None:
    print(f"\n{recipe}")
    for line in outcome.output.splitlines():
        if line.startswith("megatron_asynchzp: "):
            print(f"  {line}")
    losses = ", ".join(f"{loss:.4f}" for loss in outcome.losses.values())
    if outcome.is_trained:
        print("  trained:", losses)
        return
    losses = f": losses {losses}" if losses else ""
    print(f"  FAILED with status {outcome.status} after {len(outcome.losses)} steps{losses}")
    wrong = [line for line in outcome.output.splitlines() if re.search(r"Error|error:", line)]
    for line in list(dict.fromkeys(wrong))[:5]:
        print(f"  {line[:300]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
