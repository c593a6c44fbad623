# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the form of a rule about a setting of Megatron, and the evaluation over settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from megatron_asynchzp.errors import ConfigurationError

OURS = "--use-asynchzp"


class Verdict(Enum):
    """What becomes of a setting."""

    REFUSE = "refuse"  # the run does not start
    SET = "set"  # it gets one fixed value, because the engine does its job or a run needs it
    TRANSLATE = "translate"  # it gets that value, and what it asked for becomes a setting of ours


@dataclass(frozen=True)
class Rule:
    """What becomes of a setting of Megatron with a flag of ours."""

    setting: str  # the name of the argument, see MegatronSettings
    when: Callable[[Any], Any]  # whether the settings, before and after Megatron's validation, ask
    verdict: Verdict = Verdict.REFUSE
    reason: str = ""
    remedy: str = ""  # of a refusal
    flag: str = ""
    of: str = OURS  # the flag of ours with which the rule counts
    # For a refusal:
    example: str = ""  # a command line that is refused; its first word is the flag
    condition: str = ""  # which values are refused, for the documentation; "" means all of them
    beside: str = ""  # the flag that the line names in place of `of`
    is_decided_by_flag: bool = False  # `when` reads this setting alone
    # For a change:
    value: object = None
    becomes: Callable[[Any], Mapping[str, object]] = lambda settings: {}
    is_lost: bool = False  # a run goes without what the flag gives it
    told: Callable[[Any], str] | None = None  # what the log says in place of the reason
    is_silent: bool = False  # the log says nothing of it
    may_change_again: bool = False  # Megatron's validation may: a run does not depend on it

    def applies(self, settings: Any) -> bool:
        is_asked = self.verdict is Verdict.REFUSE or (
            settings.has(self.setting) and getattr(settings, self.setting) != self.value
        )
        return is_asked and bool(self.when(settings))

    def line(self, settings: Any) -> str:
        """Return the line of a refusal, or the line of the log on a changed setting."""
        if self.verdict is Verdict.REFUSE:
            given = f"{self.flag}{_written(getattr(settings, self.setting))}"
            beside = self.beside or self.of
            return f"{given} is not supported with {beside}: {self.reason}; {self.remedy}"
        why = self.reason if self.told is None else self.told(settings)
        return f"{self.setting} = {self.value}: {why} ({self.flag})"

    def is_in(self, log: Sequence[str]) -> bool:
        """Whether one line of a log is of this rule."""
        if self.verdict is Verdict.REFUSE:
            return False
        own = (line for line in log if line.startswith(f"{self.setting} = {self.value}: "))
        return any(self.told is not None or self.reason in line for line in own)


class Refused(ConfigurationError):
    """Raised for settings that `rows` refuse. The message is the line of the first row."""

    def __init__(self, rows: Sequence[Rule], settings: Any):
        self.rows = rows
        self.lines = [row.line(settings) for row in rows]
        super().__init__(self.lines[0])


def _written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return ""
    words = value if isinstance(value, list | tuple) else [value]
    return "".join(f" {getattr(word, 'name', word)}" for word in words)


def refuse(rules: Iterable[Rule], settings: Any) -> None:
    refusing = (rule for rule in rules if rule.verdict is Verdict.REFUSE)
    if rows := [rule for rule in refusing if rule.applies(settings)]:
        raise Refused(rows, settings)


def changes(rules: Iterable[Rule], settings: Any) -> list[Rule]:
    """The rules that change a setting: of those for one setting the first that applies."""
    first: dict[str, Rule] = {}
    for rule in rules:
        if rule.verdict is not Verdict.REFUSE and rule.applies(settings):
            first.setdefault(rule.setting, rule)
    return list(first.values())


def values_after(rules: Sequence[Rule], settings: Any) -> dict[str, object]:
    """Return the new values of changed settings, and of ours that they are translated into."""
    values: dict[str, object] = {}
    for rule in rules:
        values |= rule.becomes(settings)
    return values | {rule.setting: rule.value for rule in rules}


# ---- how refusals are written


def argument_of(example: str) -> str:
    return example.split()[0].removeprefix("--").replace("-", "_")


def refusal(
    example: str,
    when: Callable[[Any], Any],
    condition: str = "",
    reason: str = "",
    remedy: str = "",
    **more: Any,
) -> Rule:
    setting, flag = more.pop("setting", argument_of(example)), example.split()[0]
    own = partial(Rule, setting, when, flag=flag, example=example, condition=condition, **more)
    return own(reason=reason, remedy=remedy)


def given(example: str) -> Rule:
    """Refuse any value but None, False, 0 and the empty list."""
    name = argument_of(example)
    return refusal(example, lambda settings: bool(getattr(settings, name)), is_decided_by_flag=True)


def other_than(example: str, *allowed: object) -> Rule:
    """Refuse all values but `allowed`, and None of a framework without the setting."""
    name = argument_of(example)
    *others, last = map(str, allowed)
    condition = f"other than {', '.join(others)} and {last}" if others else f"other than {last}"
    return refusal(
        example,
        lambda settings: getattr(settings, name) not in (None, *allowed),
        condition,
        is_decided_by_flag=True,
    )


def equal_to(example: str) -> Rule:
    name, value = argument_of(example), example.split()[1]
    return refusal(
        example, lambda settings: getattr(settings, name) == value, value, is_decided_by_flag=True
    )


def because(reason: str, remedy: str, *rows: str | Rule, of: str = OURS) -> tuple[Rule, ...]:
    """Give rows one reason and one remedy. A string stands for `given` with that example."""
    made = (given(row) if isinstance(row, str) else row for row in rows)
    return tuple(replace(row, reason=reason, remedy=remedy, of=of) for row in made)
