# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where a training command stands: in words, in a shell script, or in a recipe in YAML.
Nothing of it is run."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_asynchzp.errors import ConfigurationError, require

# Arguments that name files which are not here.
# fmt: off
_TOKENIZER = frozenset((
    "vocab_file", "merge_file", "tokenizer_model", "tokenizer_type", "tokenizer_hf_no_use_fast",
    "tiktoken_pattern",
))
_DATA = frozenset((
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path",
    "per_split_data_args_path", "data_cache_path", "mock_data",
))
# fmt: on
_VOCABULARY = "131072"


@dataclass(frozen=True)
class Command:
    """launcher: words that torchrun's options are among; script: "" where none is named; flags: of
    the script, without files. assumed: lines on what the text leaves open."""

    launcher: Sequence[str]
    script: str
    flags: list[str]
    assumed: list[str]

    @property
    def world(self) -> tuple[int | None, int | None]:
        """Ranks that torchrun would start and those of a node, None where it does not say."""
        words = " ".join(self.launcher)

        def number(name: str) -> int | None:
            found = re.findall(rf"--{name}[= ](\d+)(?= |$)", words)
            return int(found[-1]) if found else None

        per_node = number("nproc[-_]per[-_]node")
        nodes = number("nnodes") if "--nnodes" in words else 1
        return (per_node * nodes if per_node and nodes else None), per_node


class Flags:
    """Megatron's flags, and how many values each takes."""

    def __init__(self) -> None:
        from megatron.training.arguments import add_megatron_arguments

        parser = argparse.ArgumentParser(allow_abbrev=False)
        getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(parser)
        self._actions = {flag: one for one in parser._actions for flag in one.option_strings}

    def _split(self, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Each flag of Megatron with its values, after the name of its argument; other words one by
        one, after ""."""
        position = 0
        while position < len(words):
            start = position
            action = self._actions.get(words[start].partition("=")[0])
            position += 1
            if action is not None and action.nargs != 0 and "=" not in words[start]:
                rest = enumerate(words[position:], position)
                stop = next((i for i, word in rest if word.startswith("--")), len(words))
                is_list = action.nargs in ("+", "*", "?")
                position = stop if is_list else position + int(action.nargs or 1)
            yield action.dest if action else "", list(words[start:position])

    def read(self, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Megatron's flags, with mock data in place of a dataset and a null tokenizer in place of
        one whose files are not here; all other words; lines on what that assumes."""
        parts = list(self._split(words))
        files = [part[-1] for name, part in parts if name in ("vocab_file", "tokenizer_model")]
        is_here = bool(files) and all(Path(file).exists() for file in files)
        dropped = {"", *_DATA} if is_here else {"", *_DATA, *_TOKENIZER}
        kept = [word for name, part in parts if name not in dropped for word in part]
        kept.append("--mock-data")
        others = [word for name, part in parts if not name for word in part]
        if is_here:
            return kept, others, []
        kept += ["--tokenizer-type", "NullTokenizer"]
        if any(name == "vocab_size" for name, _ in parts):
            return kept, others, []
        line = f"no tokenizer's file is here: a vocabulary of {_VOCABULARY} is assumed"
        return [*kept, "--vocab-size", _VOCABULARY], others, [line]

    def of_settings(self, settings: Mapping) -> tuple[list[str], list[str]]:
        """The flags of a mapping whose leaves are flags, or names of Megatron's arguments, and the
        names that are neither."""
        words: list[str] = []
        unknown: list[str] = []
        for key, value in settings.items():
            name = str(key)
            actions = [one for one in self._actions.values() if one.dest == name]
            if isinstance(value, Mapping):
                inner, others = self.of_settings(value)
                words, unknown = words + inner, unknown + others
            elif name.startswith("--"):
                words += _flag_with(name, value)
            elif not actions:
                unknown.append(name)
            else:  # a switch has the value that it stores
                is_switch = isinstance(value, bool)
                fitting = [one for one in actions if (one.nargs == 0) == is_switch]
                found = [one for one in fitting if not is_switch or one.const is value]
                for action in found[:1]:
                    words += _flag_with(action.option_strings[0], is_switch or value)
        return words, unknown


def _flag_with(flag: str, value: object) -> list[str]:
    if value is False or value is None:
        return []
    if value is True:
        return [flag]
    return [flag, *map(str, value if isinstance(value, list) else _values(str(value)))]


def _values(text: str) -> list[str]:
    """As the runner of Megatron's functional tests makes them: [a b] is two, (a b) one."""
    if not text.startswith("("):
        with suppress(ValueError):  # quotes that do not match
            return shlex.split(text.strip("[]")) or [""]
    return [text]


def words_of_yaml(path: Path, flags: Flags) -> tuple[list[str], list[str]]:
    """The flags of a recipe that trains, and its settings that are none: MODEL_ARGS of Megatron's
    functional tests, or settings by the names of Megatron's arguments."""
    require("yaml", path.name)
    import yaml

    try:
        recipe = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not a YAML file: {error}") from error
    if not isinstance(recipe, dict) or recipe.get("MODE", "pretraining") != "pretraining":
        return [], []
    arguments = recipe.get("MODEL_ARGS", recipe)
    return flags.of_settings(arguments) if isinstance(arguments, dict) else ([], [])


_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^\s(]\S*)\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def words_of_script(path: Path) -> list[str]:
    """Every word of a shell script, of each branch, with the variables that it sets to plain
    values."""
    text = path.read_text(errors="replace").replace("\\\n", " ")
    known: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        default = _VARIABLE.fullmatch(value.strip("\"'"))
        if default and default[1] == name:  # what it has unless someone else sets it
            value = default[2] or ""
        known[name] = value.strip("\"'")

    def value_of(found: re.Match[str]) -> str:
        return known.get(found[1], (found[2] or "").strip("\"'") or found[0])

    for _ in range(3):  # variables of variables
        text = _VARIABLE.sub(value_of, text)
    words: list[str] = []
    for line in text.splitlines():
        with suppress(ValueError):  # a text over several lines is no command line
            words += shlex.split(line, comments=True)
    parts = (word.split() if word.startswith("--") else [word] for word in words)
    return [word.strip("()") for part in parts for word in part if word.strip("()")]


def open_variables(words: Sequence[str]) -> list[str]:
    """Of a script that does not set them."""
    return sorted({word for word in words if _VARIABLE.fullmatch(word)})


def with_numbers(words: Sequence[str]) -> list[str]:
    """1 in place of open variables."""
    return ["1" if _VARIABLE.fullmatch(word) else word for word in words]


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Without its values too."""
    kept: list[str] = []
    is_dropped = False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] == flag
        kept += [] if is_dropped else [word]
    return kept


def read_command(words: Sequence[str], flags: Flags) -> Command:
    """A command line in one word or in several, or the file that it stands in. Raises
    ConfigurationError, one line, where no training command is there."""
    path = Path(words[0])
    if len(words) == 1 and (path.suffix in (".sh", ".yaml", ".yml") or path.is_file()):
        return _of_file(path, flags)
    try:
        parts = shlex.split(words[0].replace("\\\n", " ")) if len(words) == 1 else list(words)
    except ValueError as error:
        raise ConfigurationError(f"{words[0]}: {error}") from error
    at = next((index for index, word in enumerate(parts) if word.endswith(".py")), -1)
    if at < 0 and not (parts and parts[0].startswith("--")):
        raise ConfigurationError(
            f"{words[0]}: no such file, and no training command: it names no script (.py)"
        )
    kept, others, assumed = flags.read(parts[at + 1 :])
    return Command(parts[: max(at, 0)], parts[at] if at >= 0 else "", [*kept, *others], assumed)


def _of_file(path: Path, flags: Flags) -> Command:
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    if path.suffix in (".yaml", ".yml"):
        words, strange = words_of_yaml(path, flags)
    elif path.suffix == ".sh":
        words, strange = words_of_script(path), []
    else:
        raise ConfigurationError(f"{path}: give a .sh, .yaml or .json file, or a command line")
    kept, others, assumed = flags.read(with_numbers(words))
    if not any(word.startswith("--") and word not in others for word in words):
        raise ConfigurationError(f"{path}: no flags of Megatron there")
    if is_open := open_variables(words):
        assumed.append(f"1 stands for what the script does not set: {', '.join(is_open)}")
    of_torchrun = re.compile("--(n?nodes|nproc|node|rdzv|master|max.restarts|standalone)")
    strange += [word for word in others if word[:2] == "--" and not of_torchrun.match(word)]
    if strange:
        assumed.append(f"not of Megatron, and left out: {', '.join(dict.fromkeys(strange))}")
    scripts = (word for word in words if word.endswith(".py") and "=" not in word)
    return Command(with_numbers(words), next(scripts, ""), kept, assumed)
