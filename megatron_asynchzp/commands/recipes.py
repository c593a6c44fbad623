# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns where a training command stands: in words, in a shell script, or in a recipe in YAML.
Nothing of it is run."""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_asynchzp.commands import pretended_world
from megatron_asynchzp.commands.shell_script import ShellScript, open_variables, with_numbers
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
        nodes = number("nnodes") if re.search(r"--nnodes[= ][^\0]", words) else 1
        return (per_node * nodes if per_node and nodes else None), per_node


class Flags:
    """Megatron's flags, and how many values each takes."""

    def __init__(self) -> None:
        self._actions = pretended_world.megatron_flags()

    def _split(self, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        """Each flag of Megatron with its values, after the name of its argument; other words one by
        one, after ""."""
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
        """Return the words that are Megatron's flags, and their values."""
        return [word for name, part in self._split(words) if name for word in part]

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
        """Return the parser's actions by the name of an argument, or of a flag."""
        own = [one for one in self._actions.values() if one.dest == name.replace("-", "_")]
        flag = self._actions.get("--" + name.removeprefix("--").replace("_", "-"))
        return own or ([flag] if flag else [])

    def _of_setting(self, name: str, value: object) -> list[str] | None:
        """No words for a default; None where no flag takes the value."""
        actions = self._named(name)
        if value is None and actions:
            return []
        valued = [one.option_strings[0] for one in actions if one.nargs != 0]
        if valued:
            is_value = not isinstance(value, bool) and value != []
            return [valued[0], *_values(value)] if is_value else None
        is_on = _SWITCHES.get(str(value).lower())
        if is_on is None or not actions:
            return None
        for one in actions:
            if isinstance(one, argparse.BooleanOptionalAction):
                return [one.option_strings[0 if is_on else -1]]
            # By its name an argument has a value, by its name a flag is there or not.
            if one.const is is_on if one.dest == name.replace("-", "_") else is_on:
                return [one.option_strings[0]]
        return []


_SWITCHES = {"true": True, "1": True, "yes": True, "on": True}
_SWITCHES |= {"false": False, "0": False, "no": False, "off": False}


def _values(value: object) -> list[str]:
    """Return words as the runner of Megatron's functional tests does: [a b] is two, (a b) one."""
    if isinstance(value, list):
        return [*map(str, value)]
    text = str(value)
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
    words, unknown = flags.of_settings(arguments) if isinstance(arguments, dict) else ([], [])
    return [re.sub(r"(\$\{\w+\}|\$\w+)", "\0\\1\0", word) for word in words], unknown


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without the flag and its values."""
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
    if len(words) == 1:
        command = _of_shell(words[0], words[0], flags)
    else:
        launcher, script, rest = _at_script(words)
        kept, others, assumed = flags.read(rest)
        command = Command(launcher, script, [*kept, *others], assumed)
    if not command.script and not words[0].startswith("--"):
        raise ConfigurationError(
            f"{words[0]}: no such file, and no training command: it names no script (.py)"
        )
    return command


def _of_file(path: Path, flags: Flags) -> Command:
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    if path.suffix in (".yaml", ".yml"):
        words, strange = words_of_yaml(path, flags)
        command = _without_files([], "", words, strange, flags)
    elif path.suffix == ".sh":
        command = _of_shell(path.read_text(errors="replace"), str(path), flags)
    else:
        raise ConfigurationError(f"{path}: give a .sh, .yaml or .json file, or a command line")
    if not command.flags:
        raise ConfigurationError(f"{path}: no flags of Megatron there")
    return command


def _at_script(words: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """Split `words` into those before the script, its name, and those that follow; where none is
    named, into all words, "", and all words."""
    for place, word in enumerate(words):
        if word.endswith(".py") and "=" not in word:
            return words[:place], word, words[place + 1 :]
    return words, "", words


def _of_shell(text: str, name: str, flags: Flags) -> Command:
    """Join all commands of the script that gets most of Megatron's flags, with those that name no
    script."""
    shell = ShellScript(text, name)
    found = [_at_script(words) for words in shell.commands]
    known = [flags.known(rest) for _, _, rest in found]
    numbers = [(bool(script), len(own)) for (_, script, _), own in zip(found, known)]
    script = found[numbers.index(max(numbers))][1] if found else ""
    launcher, args, is_split, num_runs = list[str](), list[str](), list[str](), 0
    for (before, own_script, rest), own in zip(found, known):
        if own_script == script and (own or not max(numbers)[1]):
            launcher, num_runs = [*launcher, *before], num_runs + bool(own)
            args += rest
        elif not own_script:
            args += own
            is_split += own[:1] if rest[0].startswith("--") else []
    given = {word.partition("=")[0] for word in args}
    in_text = {*re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"(^|\s)#.*", "", text))}
    unread = [flag for flag in in_text - given if flags.known([flag])]
    lines = {
        "not of the command for bash, which ends it before, and read all the same": is_split,
        "set more than once, and read as set last": shell.set_twice,
        "commands of the script, read as one": [str(num_runs)] if script and num_runs > 1 else [],
        "in the text but not given to the script, and left out": unread,
    }
    told = [f"{title}: {', '.join(sorted(names))}" for title, names in lines.items() if names]
    command = _without_files(launcher, script, args, [], flags)
    return replace(command, assumed=[*command.assumed, *told])


def _without_files(
    launcher: Sequence[str], script: str, words: Sequence[str], strange: list[str], flags: Flags
) -> Command:
    """strange: what is no word and is left out. No flags where none is of Megatron."""
    kept, others, assumed = flags.read(words)
    if is_open := open_variables([*launcher, *words]):
        assumed.append(f"nothing sets {', '.join(is_open)}: 1 stands for a value")
    name = re.sub(r".*\0.*/", "", script).replace("\0", "")
    others = [word for word in others if word.startswith("--") or not open_variables([word])]
    if name != pretended_world.DEFAULT_SCRIPT and not Path(name).is_file():
        # Its own parser is not here.
        of_torchrun = re.compile("--(n?nodes|nproc|node|rdzv|master|max.restarts|standalone)")
        strange += [word for word in others if word[:2] == "--" and not of_torchrun.match(word)]
        others = []
    if strange:
        named = ", ".join(dict.fromkeys(strange))
        assumed.append(f"no flag or value of Megatron, and left out: {named}")
    if not flags.known(words):
        kept = others = []
    return Command(launcher, name, with_numbers([*kept, *others]), assumed)
