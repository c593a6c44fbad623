# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the training command in words, in a shell script or in a YAML recipe, and runs nothing."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from megatron_asynchzp.commands.launch_words import DEFAULT_SCRIPT
from megatron_asynchzp.commands.shell_script import ShellScript, open_variables, with_numbers
from megatron_asynchzp.errors import ConfigurationError, raise_first, require

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
_SUFFIXES = (".sh", ".yaml", ".yml")
_MANY = 8  # names of variables that a line has


@dataclass(frozen=True)
class TrainingCommand:
    """A training command."""

    script: str  # "" if the command names none.
    flags: list[str]  # Without files.
    assumed: list[str]  # Lines on what the text leaves open.
    world: "World"


class World(NamedTuple):
    """Ranks that a command starts and those of a node, None if it does not say."""

    ranks: int | None = None
    per_node: int | None = None


def _last_number(pattern: str, text: str) -> int | None:
    numbers = re.findall(rf"(?:^| )(?:{pattern})[= ]?(\d+)(?= |$)", text)
    return int(numbers[-1]) if numbers else None


def world_of(launcher: Sequence[str], shell: ShellScript | None = None) -> World:
    """Read the world of a launcher."""
    # It stands in options of torchrun, mpirun or srun, in the script's lines for Slurm, or in the
    # WORLD_SIZE that the script sets.
    job = shell.job if shell else {}
    steps = [step for step in shell.commands if step[0] == "srun"] if shell else []
    words = " ".join(word for command in (launcher, *steps) for word in command)
    per_node = _last_number("--nproc[-_]per[-_]node", words)
    if re.search("--nproc[-_]per[-_]node", words):
        nodes = _last_number("--nnodes", words)
        nodes = nodes or (job.get("nodes", 1) if "--nnodes" in words else 1)
        ranks = per_node and per_node * nodes
    elif re.search(r"(^| )mpi(run|exec) ", words):
        ranks, per_node = _last_number("-np|-n|--np", words), _last_number("-ppn|--npernode", words)
    else:
        nodes = _last_number("-N|--nodes", words) or job.get("nodes", 1)
        per_node = _last_number("--ntasks-per-node", words) or job.get("tasks_per_node")
        ranks = _last_number("-n|--ntasks", words) or job.get("tasks")
        ranks = ranks or (per_node and per_node * nodes)
        ranks = ranks if re.search("(^| )srun ", f"{words} ") else None
    known = shell.number("WORLD_SIZE") if shell else None
    return World(ranks or known, per_node)


class Flags:
    """Megatron's flags, and how many values each takes."""

    def __init__(self, actions: Mapping[str, argparse.Action]) -> None:
        self._actions = actions

    def _split(self, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Yield flags of Megatron with values after their argument's name, other words after ""."""
        position = 0
        while position < len(words):
            start = position
            flag, equals, value = words[start].partition("=")
            action = self._actions.get(flag)
            position += 1
            if action is not None and action.nargs is None and equals and value[:1] != "-":
                yield action.dest, [flag, value]
                continue
            if action is not None and action.nargs != 0 and not equals:
                rest = enumerate(words[position:], position)
                stop = next((i for i, word in rest if word.startswith("--")), len(words))
                is_list = action.nargs in ("+", "*", "?")
                position = stop if is_list else min(stop, position + int(action.nargs or 1))
            yield action.dest if action else "", list(words[start:position])

    def known(self, words: Sequence[str]) -> list[str]:
        return [word for name, part in self._split(words) if name for word in part]

    def read(self, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """Return Megatron's flags with stand-ins for files, other words, and lines on stand-ins."""
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
        """Return the flags of a mapping of flags or arguments, and the names that are none."""
        words: list[str] = []
        unknown: list[str] = []
        for key, value in settings.items():
            name = str(key)
            if isinstance(value, Mapping):
                inner, others = self.of_settings(value)
            elif name.startswith("--") and name not in self._actions:
                inner, others = [name, *_values(value)], []
            else:
                inner = self._of_setting(name, value)
                others = [f"{name}: {value}" if self._named(name) else name] * (inner is None)
            words += inner or []
            unknown += others
        return words, unknown

    def _named(self, name: str) -> list[argparse.Action]:
        own = [action for action in self._actions.values() if action.dest == name.replace("-", "_")]
        flag = self._actions.get("--" + name.removeprefix("--").replace("_", "-"))
        return own or ([flag] if flag else [])

    def _of_setting(self, name: str, value: object) -> list[str] | None:
        """Return the words of a setting, none for a default, None if no flag takes the value."""
        actions = self._named(name)
        if value is None and actions:
            return []
        valued = [action.option_strings[0] for action in actions if action.nargs != 0]
        if valued:
            is_value = not isinstance(value, bool) and value != []
            return [valued[0], *_values(value)] if is_value else None
        is_on = _SWITCHES.get(str(value).lower())
        if is_on is None or not actions:
            return None
        for action in actions:
            if isinstance(action, argparse.BooleanOptionalAction):
                return [action.option_strings[0 if is_on else -1]]
            # By its name an argument has a value, by its name a flag is there or not.
            if action.const is is_on if action.dest == name.replace("-", "_") else is_on:
                return [action.option_strings[0]]
        return []


_SWITCHES = {"true": True, "1": True, "yes": True, "on": True}
_SWITCHES |= {"false": False, "0": False, "no": False, "off": False}


def _values(value: object) -> list[str]:
    """Return words as Megatron's runner of functional tests does: [a b] is two, (a b) one."""
    if isinstance(value, list):
        return [*map(str, value)]
    text = str(value)
    if not text.startswith("("):
        with suppress(ValueError):  # quotes that do not match
            return shlex.split(text.strip("[]")) or [""]
    return [text]


def _settings_of(path: Path) -> Mapping:
    """Return the settings of a recipe that trains: MODEL_ARGS of Megatron's tests, or all."""
    require("yaml", path.name)
    import yaml

    try:
        recipe = yaml.safe_load(path.read_text(errors="replace"))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not a YAML file: {error}") from error
    if not isinstance(recipe, dict) or recipe.get("MODE", "pretraining") != "pretraining":
        return {}
    settings = recipe.get("MODEL_ARGS", recipe)
    return settings if isinstance(settings, dict) else {}


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    kept: list[str] = []
    is_dropped = False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.partition("=")[0] == flag
        kept += [] if is_dropped else [word]
    return kept


type Source = ShellScript | Mapping | Sequence[str]


def read_source(words: Sequence[str]) -> Source:
    """Read a command line, or the file with it, without Megatron; refuse one without flags."""
    source: Source = words
    path = Path(words[0])
    if len(words) == 1 and path.suffix != ".py":
        is_file = path.suffix in _SUFFIXES or path.exists() or " " not in words[0]
        source = _read_file(path) if is_file else ShellScript(words[0], words[0])
    has_flags = bool(source)
    if not isinstance(source, Mapping):
        commands = source.commands if isinstance(source, ShellScript) else [source]
        has_flags = any(word.startswith("--") for command in commands for word in command)
    if not has_flags:
        raise ConfigurationError(f"{words[0]}: no flags of Megatron there")
    return source


def _read_file(path: Path) -> ShellScript | Mapping:
    raise_first(f"{path}: {fault}" for fault in _faults_of(path))
    if path.suffix != ".sh":
        return _settings_of(path)
    return ShellScript(path.read_text(errors="replace"), str(path))


def _faults_of(path: Path) -> Iterator[str]:
    if not path.is_file():
        fault = "that is a folder; name a file in it" if path.is_dir() else "no such file"
        if path.suffix not in _SUFFIXES and not path.exists():
            fault += ", and no training command: it names no script (.py)"
        near = get_close_matches(path.name, _names_beside(path), 1)
        yield fault + (f"; the nearest is {near[0]}" if near else "")
    if path.suffix not in _SUFFIXES:
        yield "give a .sh, .yaml or .json file, or a command line"
    try:
        if "\0" in path.read_text(errors="replace") and path.suffix == ".sh":
            yield "not a text; give a .sh, .yaml or .json file"
    except OSError as error:
        yield f"it cannot be read ({error.strerror})"


def _names_beside(path: Path) -> list[str]:
    with suppress(OSError):
        kinds = (*_SUFFIXES, ".json")
        return [sibling.name for sibling in path.parent.iterdir() if sibling.suffix in kinds]
    return []


def read_command(source: Source, name: str, flags: Flags) -> TrainingCommand:
    """Find the command in `read_source`'s result, or refuse a text without Megatron's flags."""
    if isinstance(source, ShellScript):
        command = _of_shell(source, flags)
    elif isinstance(source, Mapping):
        words, unknown = flags.of_settings(source)
        words = [re.sub(r"(\$\{\w+\}|\$\w+)", "\0\\1\0", word) for word in words]
        command = _without_files([], "", words, unknown, flags)
    else:
        launcher, script, rest = _at_script(source)
        if not script and not source[0].startswith("--"):
            raise ConfigurationError(f"{name}: no training command: it names no script (.py)")
        kept, others, assumed = flags.read(rest)
        return TrainingCommand(script, [*kept, *others], assumed, world_of(launcher))
    if not command.flags:
        raise ConfigurationError(f"{name}: no flags of Megatron there")
    return command


def _at_script(words: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """Split `words` at a script into those before, its name, the rest; (all, "", all) without."""
    for place, word in enumerate(words):
        if word.endswith(".py") and "=" not in word:
            return words[:place], word, words[place + 1 :]
    return words, "", words


def _of_shell(shell: ShellScript, flags: Flags) -> TrainingCommand:
    """Join all commands with most of Megatron's flags, and those without a script."""
    splits = [_at_script(words) for words in shell.commands]
    known = [flags.known(rest) for _, _, rest in splits]
    numbers = [(bool(script), len(own)) for (_, script, _), own in zip(splits, known)]
    script = splits[numbers.index(max(numbers))][1] if splits else ""
    launcher, args, is_split, num_runs = list[str](), list[str](), list[str](), 0
    for (before, own_script, rest), own in zip(splits, known):
        if own_script == script and (own or not max(numbers)[1]):
            launcher, num_runs = [*launcher, *before], num_runs + bool(own)
            args += rest
        elif not own_script:
            args += own
            is_split += own[:1] if rest[0].startswith("--") else []
    given = {word.partition("=")[0] for word in args}
    in_text = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"(^|\s)#.*", "", shell.text))}
    unread = [flag for flag in in_text - given if flags.known([flag])]
    lines = {
        "not of the command for bash, which ends it before, and read all the same": is_split,
        "set more than once, and read as set last": shell.set_twice,
        "commands of the script, read as one": [str(num_runs)] if script and num_runs > 1 else [],
        "in the text but not given to the script, and left out": unread,
    }
    told = [f"{title}: {', '.join(sorted(names))}" for title, names in lines.items() if names]
    command = _without_files(launcher, script, args, [], flags)
    world = world_of(launcher, shell)
    return replace(command, assumed=[*command.assumed, *told], world=world)


def _without_files(
    launcher: Sequence[str], script: str, words: Sequence[str], strange: list[str], flags: Flags
) -> TrainingCommand:
    """Make a command without the words in `strange`; empty without Megatron's flags."""
    kept, others, assumed = flags.read(words)
    is_open = open_variables([*launcher, *words])
    runs = [name for name in is_open if re.match(r"`|\$\((?!\()", name)]
    for fault, names in (("nothing sets", {*is_open} - {*runs}), ("nothing runs", {*runs})):
        if names:
            more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
            named = ", ".join(sorted(names)[:_MANY])
            assumed.append(f"{fault} {named}{more}: 1 stands for a value")
    name = re.sub(r".*\0.*/", "", script).replace("\0", "")
    others = [word for word in others if word.startswith("--") or not open_variables([word])]
    if name != DEFAULT_SCRIPT and not Path(name).is_file():
        # Its own parser is not here.
        of_torchrun = re.compile("--(n?nodes|nproc|node|rdzv|master|max.restarts|standalone)")
        strange += [word for word in others if word[:2] == "--" and not of_torchrun.match(word)]
        others = []
    if strange:
        named = ", ".join(dict.fromkeys(strange))
        assumed.append(f"no flag or value of Megatron, and left out: {named}")
    if not flags.known(words):
        kept = others = []
    return TrainingCommand(name, with_numbers([*kept, *others]), assumed, world_of(launcher))
