# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Rules read settings by name, from Megatron's arguments and from its dataclasses alike."""

from argparse import Namespace
from dataclasses import fields
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.refusals import REFUSALS

# Fields by Megatron's argument, where training's own functions copy one to the other.
_COPIED = {
    "num_moe_experts": "num_experts",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
_KINDS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
_FIELDS = {_COPIED.get(one.name, one.name) for kind in _KINDS for one in fields(kind)}


def _filled(kind: type, args: Namespace) -> Any:
    """A dataclass of Megatron with the values of `args`; its own checks are not made."""
    made = object.__new__(kind)
    for one in fields(kind):
        name = _COPIED.get(one.name, one.name)
        if hasattr(args, name):
            object.__setattr__(made, one.name, getattr(args, name))
    return made


# Megatron's training alone has these: batches, and an older name of the parts; or ours.
_OF_TRAINING = (
    *("--step-batch-size-schedule", "--micro-batch-size"),
    *("--cuda-graph-scope", "--asynchzp-"),
)
_SHARED = [
    rule
    for rule in REFUSALS
    if rule.setting in _FIELDS and not any(flag in rule.example for flag in _OF_TRAINING)
]


def test_most_refusals_of_a_model_or_an_optimizer_are_about_fields_of_dataclasses():
    assert len(_SHARED) >= 35


@pytest.mark.parametrize("rule", _SHARED, ids=lambda rule: rule.example)
def test_a_rule_says_of_megatrons_dataclasses_what_it_says_of_its_flags(parse, rule):
    plain, asking = (
        [_filled(kind, args) for kind in _KINDS] for args in (parse(), parse(rule.example))
    )
    assert rule.applies(MegatronSettings(*asking))
    assert not rule.applies(MegatronSettings(*plain))


def test_a_setting_that_a_framework_does_not_have_is_not_asked_for():
    settings = MegatronSettings(Namespace(bf16=True), Namespace(bf16=False, fp8=None))
    assert settings.bf16 is True and settings.skip_train is None
    assert settings.has("fp8") and not settings.has("skip_train")
