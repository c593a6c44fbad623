# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How many existing training recipes start with `--use-asynchzp`, and which flag keeps the rest:

    python -m scripts.train.census FOLDER [FOLDER...] [--out FILE]

Reads every model_config.yaml (the form of Megatron-LM's functional tests) and every shell script
below the folders. Each command line goes through Megatron's own parser and validation in a
pretended world, once as it is and once with `--use-asynchzp`. What only names files (data,
tokenizers) is replaced by mock data and a null tokenizer. Needs no device. --out: JSON lines for
`python -m scripts.report.add_record census FILE`.
"""

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron_asynchzp.commands.pretended_world import fewest_ranks, parse, patch_megatron
from megatron_asynchzp.errors import ConfigurationError
from scripts.testbed.machine import machine_record

_RANKS_PER_NODE = 8
# Megatron wants 1 with tensor parallelism on Hopper, anything else with its own FSDP.
_CONNECTIONS = ("1", "8")

# Arguments that name files which are not here.
# fmt: off
_FILES = frozenset((
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
    "per_split_data_args_path", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_type",
    "tokenizer_hf_no_use_fast", "tiktoken_pattern", "data_cache_path", "mock_data",
))
# fmt: on
_IN_PLACE_OF_FILES = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
_VOCABULARY = ["--vocab-size", "131072"]
# The other writer is a package that need not be installed here.
_WRITER = ["--async-strategy", "mcore"]


@dataclass(frozen=True)
class Case:
    """One command line. flags: a shell variable that the recipe does not set stands for 1."""

    path: Path
    flags: list[str]


@dataclass(frozen=True)
class Verdict:
    """What became of a case. stock, ours: None where Megatron alone, or with `--use-asynchzp`,
    accepted it."""

    case: Case
    stock: ConfigurationError | None
    ours: ConfigurationError | None

    @property
    def is_ours_alone(self) -> bool:
        """Whether the plugin refuses what Megatron would start."""
        return self.stock is None and self.ours is not None and _is_ours(self.ours)


# ---- reading recipes


class Flags:
    """Megatron's flags, and how many values each takes."""

    def __init__(self) -> None:
        from megatron.training.arguments import add_megatron_arguments

        parser = argparse.ArgumentParser(allow_abbrev=False)
        getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(parser)
        self._actions = {
            option: action for action in parser._actions for option in action.option_strings
        }

    def among(self, words: list[str]) -> list[str]:
        """The flags of Megatron among `words`, with their values; those of files left out."""
        kept: list[str] = []
        position = 0
        while position < len(words):
            word = words[position].partition("=")[0]
            position += 1
            action = self._actions.get(word)
            if action is None:
                continue
            values = self._values(action, words, position)
            position += len(values)
            if action.dest not in _FILES:
                kept += [words[position - len(values) - 1], *values]
        return kept

    def _values(self, action: argparse.Action, words: list[str], start: int) -> list[str]:
        if action.nargs == 0 or "=" in words[start - 1]:
            return []
        stop = next((i for i in range(start, len(words)) if words[i].startswith("--")), len(words))
        most = stop if action.nargs in ("+", "*", "?") else start + (action.nargs or 1)
        return words[start : min(most, len(words))]


def _words_of_yaml(path: Path) -> list[str] | None:
    """The command line of a functional test; None where it does not train."""
    import yaml

    recipe = yaml.safe_load(path.read_text())
    arguments = recipe.get("MODEL_ARGS") if isinstance(recipe, dict) else None
    if not isinstance(arguments, dict) or recipe.get("MODE", "pretraining") != "pretraining":
        return None
    words: list[str] = []
    for flag, value in arguments.items():
        if value is True:
            words.append(flag)
        elif value is not False:
            values = value if isinstance(value, list) else _split(str(value))
            words += [flag, *map(str, values)]
    return words


def _split(value: str) -> list[str]:
    """The words of a value, as the runner of these tests makes them: [a b] is two, (a b) one."""
    if value.startswith("("):
        return [value]
    try:
        return shlex.split(value.strip("[]")) or [""]
    except ValueError:  # quotes that do not match
        return [value]


_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s(]\S*)\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)(?::-([^}]*))?\}?")


def _words_of_script(path: Path) -> list[str]:
    """Every word of a shell script, with the variables that it sets to plain values."""
    text = path.read_text(errors="replace").replace("\\\n", " ")
    known = {name: value.strip("\"'") for name, value in _ASSIGNMENT.findall(text)}

    def value_of(found: re.Match[str]) -> str:
        return known.get(found[1], found[2] or found[0])

    for _ in range(3):  # variables of variables
        text = _VARIABLE.sub(value_of, text)
    words: list[str] = []
    for line in text.splitlines():
        with suppress(ValueError):  # a text over several lines is no command line
            words += shlex.split(line, comments=True)
    return [word.strip("()") for word in words if word.strip("()")]


def find_cases(folders: list[Path]) -> Iterator[Case]:
    """The recipes below `folders` that train, in the order of their paths."""
    flags = Flags()
    for folder in folders:
        for path in sorted((*folder.rglob("model_config.yaml"), *folder.rglob("*.sh"))):
            words = _words_of_yaml(path) if path.suffix == ".yaml" else _words_of_script(path)
            found = flags.among(words or [])
            if {"--train-iters", "--train-samples"} & set(found):
                found = ["1" if _VARIABLE.fullmatch(word) else word for word in found]
                missing = [*_IN_PLACE_OF_FILES]
                if "--vocab-size" not in found:
                    missing += _VOCABULARY
                if "--async-save" in found:
                    missing += _WRITER
                yield Case(path, [*found, *missing])


# ---- asking Megatron


def _refusal(flags: list[str], world_size: int) -> ConfigurationError | None:
    """How Megatron or the plugin refuses `flags`; None where they are accepted."""
    refusal = None
    for connections in _CONNECTIONS:
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        with mock.patch.dict("os.environ", environment):
            try:
                parse(flags, world_size, min(_RANKS_PER_NODE, world_size))
            except ConfigurationError as error:
                refusal = refusal or error
            else:
                return None
    return refusal


def judge(case: Case) -> Verdict:
    """Ask Megatron alone, and with `--use-asynchzp`."""
    size = fewest_ranks(case.flags)
    return Verdict(
        case, _refusal(case.flags, size), _refusal([*case.flags, "--use-asynchzp"], size)
    )


# ---- the report


def _is_ours(refusal: ConfigurationError) -> bool:
    return isinstance(refusal.__cause__, ConfigurationError)


def _topic(refusal: ConfigurationError) -> str:
    """What cases are counted by: the flag of a refusal of ours, or Megatron's message."""
    return str(refusal).split()[0] if _is_ours(refusal) else str(refusal)[:100]


def report(verdicts: list[Verdict], names_cases: bool = False) -> str:
    """The counts as text. names_cases: also the path of every case that was refused."""
    accepted = [verdict for verdict in verdicts if verdict.ours is None]
    by_stock = [verdict for verdict in verdicts if verdict.stock is None]
    lines = [
        f"{len(verdicts)} training recipes",
        f"{len(by_stock)} start with stock Megatron in this pretended world",
        f"{len(accepted)} start with --use-asynchzp",
    ]
    for is_ours, title in ((True, "refused by --use-asynchzp"), (False, "refused by Megatron")):
        refusals = [v.ours for v in verdicts if v.ours is not None and v.is_ours_alone == is_ours]
        counts = Counter(map(_topic, refusals))
        lines += ["", f"{title}: {len(refusals)}"]
        lines += [f"{count:5}  {topic}" for topic, count in counts.most_common()]
    if names_cases:
        lines += ["", *(f"{v.case.path}: {v.ours}" for v in verdicts if v.ours is not None)]
    return "\n".join(lines)


def as_record(verdict: Verdict) -> dict:
    """One line of the record. stock, ours: who refuses the case, and why; None where it starts."""
    path = verdict.case.path
    words = path.parts[-3:-1] if path.suffix == ".yaml" else path.parts[-2:]
    line: dict = {"kind": "case", "case": "/".join(words)}
    for name, refusal in (("stock", verdict.stock), ("ours", verdict.ours)):
        by = None if refusal is None else _topic(refusal) if _is_ours(refusal) else "Megatron"
        line[name] = by and {"by": by, "why": str(refusal)}
    return line


def main(argv: list[str]) -> int:
    """Print the census; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train.census", description=__doc__)
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--cases", action="store_true", help="name every recipe that is refused")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a line for each recipe")
    asked = parser.parse_args(argv)
    if missing := [folder for folder in asked.folder if not folder.is_dir()]:
        parser.error(f"{missing[0]}: no such folder")
    patch_megatron()
    verdicts = [judge(case) for case in find_cases(asked.folder)]
    if not verdicts:
        print("census: no training recipe found below these folders", file=sys.stderr)
        return 1
    print(report(verdicts, asked.cases))
    if asked.out:
        lines = [machine_record(), *map(as_record, verdicts)]
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
