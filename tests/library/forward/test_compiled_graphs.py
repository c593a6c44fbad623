# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Modules that torch.compile runs as CUDA graphs are refused where the library takes the model."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from megatron_asynchzp.library.arguments import faults_of_sharded


def compiled_in_place(layer: nn.Module, **how: Any) -> nn.Module:
    layer.compile(**how)
    return layer


def compiled_method(layer: nn.Module, **how: Any) -> nn.Module:
    layer.forward = torch.compile(layer.forward, **how)
    return layer


pytestmark = pytest.mark.slow  # torch's compiler is imported


@pytest.mark.parametrize("compiled", [torch.compile, compiled_in_place, compiled_method])
@pytest.mark.parametrize(
    ("how", "is_graphed"),
    [
        ({}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"backend": "eager"}, False),
    ],
)
def test_a_unit_that_is_compiled_with_graphs_is_refused_by_name(compiled, how, is_graphed):
    model = nn.Sequential(nn.Linear(4, 4), compiled(nn.Linear(4, 4), **how))
    faults = [*faults_of_sharded(model)]
    assert bool(faults) is is_graphed
    if is_graphed:
        assert re.match(r"1.* is compiled with CUDA graphs .*without", faults[0])
