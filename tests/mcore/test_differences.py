# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What stands for names that not every version of megatron-core has."""

from typing import override

import pytest
import torch
from megatron.core.optimizer import optimizer as stock
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.step.differences import (
    called_by_megatron,
    copy_optimizer_param_metadata,
)
from megatron_asynchzp.mcore.step.optimizer import AsyncHZPOptimizer


class _Base:
    def step(self): ...

    def norm_in_018(self): ...


def test_a_method_that_megatron_renamed_is_refused_by_name():
    line = r"^_Base\.count_zeros does not exist; megatron-core \S+ was found .* made for 0.18"
    with pytest.raises(ConfigurationError, match=line):

        @called_by_megatron()
        class _Ours(_Base):
            @override
            def step(self): ...

            @override
            def count_zeros(self): ...


def test_of_a_method_with_two_names_one_must_be_megatrons():
    assert called_by_megatron("norm_in_018", "norm")(type("_Ours", (_Base,), {}))
    with pytest.raises(ConfigurationError, match=r"^_Base\.norm_in_017 or norm does not exist"):
        called_by_megatron("norm_in_017", "norm")(type("_Ours", (_Base,), {}))


@pytest.mark.parametrize("kind", [AsyncHZPOptimizer, AsyncHZPDataParallel])
def test_every_method_that_replaces_one_of_megatrons_is_marked_so(kind):
    own = [name for name, one in vars(kind).items() if callable(one) and not name.endswith("__")]
    names_in_versions = {"_filter_grads_for_norm", "get_main_grads_for_grad_norm"}
    for name in set(own) - names_in_versions:
        replaces = any(
            name in vars(base) and base.__module__.startswith("megatron.")
            for base in kind.__mro__[1:]
        )
        assert replaces <= getattr(vars(kind)[name], "__override__", False), name


def test_without_megatrons_function_the_same_is_copied_of_a_parameter(monkeypatch):
    source = torch.zeros(2)
    source.allreduce, source.shared, source.else_where = False, True, 1
    monkeypatch.delattr(stock, "copy_optimizer_param_metadata", raising=False)
    copy_optimizer_param_metadata(copy := torch.zeros(2), source)
    assert vars(copy) == {"allreduce": False, "shared": True}
    assert issubclass(AsyncHZPOptimizer, MixedPrecisionOptimizer)
