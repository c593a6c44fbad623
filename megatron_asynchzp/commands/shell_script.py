# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns which words the commands of a shell script get, by bash's grammar; nothing is run."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from megatron_asynchzp.errors import ConfigurationError

# What nothing in the text sets stands in a word between two of these.
_OPEN = re.compile("\0([^\0]*)\0")

_NESTED = (
    r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|"
    r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)
_EXPANSION = rf"{_NESTED}|\$(?:[A-Za-z_]\w*|[\d@*#?$!-])"
_DOUBLE = rf'\$?"(?:\\.|\0[^\0]*\0|{_NESTED}|[^"\\\0])*+"'
_QUOTED = rf"\\.|\0[^\0]*\0|\$?'[^']*'|{_DOUBLE}"
# A "#" within a word is no comment.
_WORD = rf"(?:{_QUOTED}|{_EXPANSION}|(?<![\s(])#|[^\s\\\0'\"`;&|<>()#])"
_ARRAY = rf"[A-Za-z_]\w*\+?=\((?:(?<=[\s(])#[^\n]*|\s|{_WORD})*+\)"
_TOKENS = re.compile(
    rf"(?:\\\n|[ \t])+|#[^\n]*|(?:\d+|&)?[<>]{{1,3}}[&|]?[ \t]*{_WORD}*+|"
    rf"(?P<word>{_ARRAY}|{_WORD}++)|(?P<end>.)",
    re.DOTALL,
)
_PIECES = re.compile(rf"{_QUOTED}|{_EXPANSION}|.", re.DOTALL)
_PIECES_IN_QUOTES = re.compile(rf"\\.|\0[^\0]*\0|{_EXPANSION}|.", re.DOTALL)
_HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*[\\'\"]?(\w+)['\"]?([^\n]*\n)((?:[^\n]*\n)*?)[ \t]*\1[ \t]*(?=\n|\Z)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
# Words that a command may stand behind, with their options.
_BEFORE = re.compile(
    r"if|then|elif|else|do|while|until|\{|!|time|exec|eval|command|builtin|export|local|declare|"
    r"readonly|typeset|-\w+"
)
_PARAMETER = re.compile(r"(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_ARITHMETIC = re.compile(r"[\d\s()+*/%-]+")
_SPACE = re.compile("(\0[^\0]*\0)|\\s+")
_COMMAND_IN_QUOTES = re.compile(r"[^-\s].*\.py\b.*\s--\w", re.DOTALL)


def open_variables(words: list[str]) -> list[str]:
    return sorted({name for word in words for name in _OPEN.findall(word)})


def with_numbers(words: list[str]) -> list[str]:
    return [_OPEN.sub("1", word) for word in words]


def _job_of(text: str) -> dict[str, int]:
    lines = " ".join(re.findall(r"^#SBATCH[ \t]+([^#\n]*)", text, re.MULTILINE))
    options = {"nodes": "-N|--nodes", "tasks": "-n|--ntasks", "tasks_per_node": "--ntasks-per-node"}
    values = {
        name: re.findall(rf"(?:^|\s)(?:{flags})(?:=|\s+|(?<=-\w))(\d+)", lines)
        for name, flags in options.items()
    }
    return {name: int(numbers[-1]) for name, numbers in values.items() if numbers}


def _shell_variables(job: Mapping[str, int]) -> dict[str, str]:
    user = os.environ.get("USER") or "user"
    names = {"PWD": os.getcwd(), "HOME": f"/home/{user}", "USER": user, "LOGNAME": user}
    names |= {"HOSTNAME": os.uname().nodename, "SHELL": "/bin/bash", "UID": str(os.getuid())}
    names |= {
        "PATH": "/bin",
        "RANDOM": "1",
        "SECONDS": "1",
        "TMPDIR": "/tmp",
        "$": "1",
        "0": "x.sh",
    }
    names |= {name: os.environ[name] for name in names.keys() & os.environ.keys()}
    nodes, per_node = job.get("nodes"), job.get("tasks_per_node")
    tasks = job.get("tasks") or (nodes and per_node and nodes * per_node)
    slurm = {"NNODES": nodes, "JOB_NUM_NODES": nodes, "NTASKS": tasks, "NPROCS": tasks}
    slurm["NTASKS_PER_NODE"] = per_node
    return names | {f"SLURM_{name}": str(number) for name, number in slurm.items() if number}


class ShellScript:
    """The commands of a script: each command of each branch once, in the order of the text.

    commands: Their words.
    set_twice: Variables with several values; the last is read.
    job: Numbers of the lines for Slurm: nodes, tasks, tasks_per_node.
    """

    def __init__(self, text: str, name: str) -> None:
        self.commands: list[list[str]] = []
        self.set_twice: dict[str, None] = {}
        self.text, self._name = text, name
        self.job = _job_of(text)
        self._shell = _shell_variables(self.job)
        self._known: dict[str, str | list[str]] = {}
        self._read(_HEREDOC.sub(r"\2", text))
        if not self.has_flags:
            # It writes the script that trains.
            self._read(_HEREDOC.sub(lambda match: match[2] + match[3].replace("\\$", "$"), text))

    @property
    def has_flags(self) -> bool:
        return any(word.startswith("--") for words in self.commands for word in words)

    def number(self, name: str) -> int | None:
        value = self._known.get(name)
        return int(value) if isinstance(value, str) and value.isdecimal() else None

    def _read(self, text: str) -> None:
        words, depth, start = list[str](), 0, len(self.commands)
        for token in _TOKENS.finditer(text + "\n"):
            if token["word"]:
                words.append(token["word"])
            elif token["end"] in ("'", '"', "`"):
                line = text[text.rfind("\n", 0, token.start()) + 1 :].partition("\n")[0]
                raise ConfigurationError(
                    f"{self._name}: a quote that has no end: {line.strip()[:60]}"
                )
            elif token["end"]:
                if token["end"] == ")" and not depth:  # a pattern of a case
                    del self.commands[start:]
                else:
                    self._take(words)
                depth = max(0, depth + {"(": 1, ")": -1}.get(token["end"], 0))
                start = len(self.commands) if token["end"] in "\n;" else start
                words = []

    def _take(self, raw: list[str]) -> None:
        place = 0
        while place < len(raw):
            if match := _ASSIGNMENT.fullmatch(raw[place]):
                self._assign(*match.groups())
            elif not _BEFORE.fullmatch(raw[place]):
                break
            place += 1
        words = [word for part in raw[place:] for word in self._words(part)]
        if not words or words[0] in ("echo", "printf"):
            return
        kept = [word for word in words if not _COMMAND_IN_QUOTES.match(word.strip())]
        self.commands += [kept] if kept else []
        for word in words if len(kept) < len(words) else ():  # bash -c "...", ssh HOST "..."
            if word not in kept:
                self._read(word)

    def _assign(self, name: str, more: str, raw: str) -> None:
        if raw.startswith("("):
            tokens = [token["word"] for token in _TOKENS.finditer(raw[1:-1])]
            value = [word for text in tokens if text for word in self._words(text)]
        else:
            value = self._text(raw).replace("\1", " ").replace("\2", "")
        before = self._known.get(name)
        if more and isinstance(before, type(value)):
            value = before + value  # pyright: ignore[reportOperatorIssue]
        elif before and before != value and not re.search(rf"\$\{{?{name}\b", raw):
            self.set_twice[name] = None
        self._known[name] = value

    def _words(self, raw: str) -> list[str]:
        r"""Expand and split into words. Within, \1 separates words and \2 marks quotes."""
        return [word.replace("\2", "") for word in self._text(raw).split("\1") if word]

    def _text(self, raw: str) -> str:
        return "".join(map(self._piece, _PIECES.findall(raw)))

    def _piece(self, piece: str) -> str:
        if piece[0] == "\\":
            return piece[1:].replace("\n", "")
        if piece.endswith("'") and len(piece) > 1:
            return "\2" + piece.lstrip("$")[1:-1]
        if piece.endswith('"') and len(piece) > 1:
            return "\2" + self._in_quotes(piece.lstrip("$")[1:-1])
        value = self._value(piece, self._text) if piece[0] in "$`" else piece
        return _SPACE.sub(lambda match: match[1] or "\1", value)

    def _in_quotes(self, raw: str) -> str:
        text = ""
        for piece in _PIECES_IN_QUOTES.findall(raw):
            if piece[0] == "\\" and len(piece) > 1:
                text += piece[1:].replace("\n", "") if piece[1] in '$`"\\\n' else piece
            elif piece != '"':  # which only a default has there
                text += self._value(piece, self._in_quotes) if piece[0] in "$`" else piece
        return text

    def _value(self, piece: str, text_of: Callable[[str], str]) -> str:
        is_open = "\0{}\0".format(re.sub(r"\s+", " ", piece))
        if re.match(r"(`|\$\()\s*#", piece):  # a comment within a command
            return ""
        if piece in ("$(pwd)", "`pwd`"):
            return self._shell["PWD"]
        if piece.startswith("$(("):
            return self._number(piece[3:-2]) or is_open
        parameter = _PARAMETER.fullmatch(piece[2:-1] if piece[1:2] == "{" else piece[1:])
        if parameter is None:
            return is_open if len(piece) > 1 else piece
        name, index, _, operator, default = parameter.groups()
        value = self._known.get(name, self._shell.get(name))
        if isinstance(value, list):
            if index in ("@", "*"):
                between = " " if index == "*" and text_of == self._in_quotes else "\1"
                value = between.join(f"\2{part}" for part in value)
            else:
                value = dict(enumerate(value)).get(int(index or 0))
        if operator == "+":
            return text_of(default) if value else ""
        if operator in ("-", "=") and (value is None or (parameter[3] and not value)):
            value = text_of(default)
            if operator == "=":
                self._known[name] = value.replace("\1", " ").replace("\2", "")
        return is_open if value is None else value

    def _number(self, raw: str) -> str:
        """Return the value of $((...)), "" if a part is open."""

        def known(match: re.Match[str]) -> str:
            value = self._known.get(match[0], self._shell.get(match[0]))
            return value if isinstance(value, str) else match[0]

        text = re.sub(r"\b[A-Za-z_]\w*", known, self._in_quotes(raw))
        with suppress(ArithmeticError, SyntaxError, TypeError):
            if _ARITHMETIC.fullmatch(text) and "**" not in text:
                return str(eval(text.replace("/", "//")))
        return ""
