# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Applies the one list of rules on Megatron's settings to argparse's Namespace. Loads no torch."""

from argparse import Namespace

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.changes import CHANGES, OWN_SETTINGS
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.pasa import PASA, PASA_REFUSALS
from megatron_asynchzp.mcore.flags.refusals import REFUSALS
from megatron_asynchzp.mcore.flags.rules import OURS, Rule, changes, refuse, values_after

RULES: dict[str, tuple[Rule, ...]] = {OURS: (*REFUSALS, *CHANGES), PASA: PASA_REFUSALS}
"""By the flag of ours with which a rule counts."""


def refuse_unsupported(args: Namespace, of: str = OURS) -> None:
    refuse(RULES[of], MegatronSettings(args))


def change_settings(args: Namespace) -> list[str]:
    """Set and translate settings, all by their values before the call; return a line for each."""
    settings = MegatronSettings(args)
    rules = changes(RULES[OURS], settings)
    lines = [rule.line(settings) for rule in rules if not rule.is_silent]
    own = {name: getattr(args, name, default) for name, default in OWN_SETTINGS.items()}
    vars(args).update(own | values_after(rules, settings))
    return lines


def refuse_changes(args: Namespace) -> None:
    """Raise ConfigurationError for a setting that Megatron's validation switched on again."""
    held = (rule for rule in RULES[OURS] if not rule.may_change_again)
    for rule in changes(held, MegatronSettings(args)):
        raise ConfigurationError(
            f"Megatron set {rule.setting} to {getattr(args, rule.setting)}, which {OURS} needs to "
            f"be {rule.value}: {rule.reason}"
        )
