# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is refused in a framework, each in one line, and what becomes of its dataclasses."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.config import AsyncHZPConfig
from tests.door.core_loop import Loop
from tests.door.test_core_loop import install
from tests.support.world import on_ranks


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def frozen_loop() -> Loop:
    loop = Loop()
    loop.build_model()
    for chunk in loop.model:
        chunk.requires_grad_(False)
    return loop


def misuses() -> dict[str, str]:
    from megatron.core import optimizer, package_info

    from megatron_asynchzp import cpu_platform

    cpu_platform.install()

    def kept_in_a_function(make: Callable = optimizer.get_megatron_optimizer) -> Callable:
        return make

    with mock.patch.object(package_info, "__version__", "0.15.2"):
        lines = {"an old core": refusal(install)}
    for name, value in USELESS.items():
        lines[name] = refusal(lambda: install(**{name: value}))  # noqa: B023
    lines["no folder"] = refusal(lambda: install(trace="/no/such/folder/trace.json"))
    with mock.patch.dict("os.environ", WORLD_SIZE="3"):
        lines["another world"] = refusal(install)
    install()
    lines["other sizes"] = refusal(lambda: install((1, 1, 2)))
    install()  # with the same choices it changes nothing
    loop = Loop(has_optimizer=False).build()
    make = kept_in_a_function()
    config = optimizer.OptimizerConfig(lr=1e-3, params_dtype=torch.float32)
    lines["a kept name"] = refusal(lambda: make(config, loop.model))
    lines["another optimizer"] = refusal(loop.model[0].finish_grad_sync)
    lines["all frozen"] = refusal(frozen_loop().make_optimizer)
    for name, options in REFUSED.items():
        loop = Loop(**options)
        loop.build_model()
        lines[name] = refusal(loop.make_optimizer)
    for name, values in LATE.items():
        loop = Loop(dtype=torch.bfloat16)
        loop.build_model()
        vars(loop.config).update(values)
        lines[name] = refusal(loop.make_optimizer)
    loop = Loop(optimizer_options={"lr": 1e-3 * (1 + torch.distributed.get_rank())})
    loop.build_model()
    lines["other ranks"] = refusal(loop.make_optimizer)
    lines["unwrapped"] = refusal(lambda: optimizer.get_megatron_optimizer(config, loop.modules))
    loop = Loop().build()
    values = {name: torch.zeros(()) for name in ("decoder.final_layernorm.weight",)}
    lines["whole values"] = refusal(lambda: loop.model[0].module.load_state_dict(values))
    other = Loop(optimizer_options={"optimizer": "sgd"})
    other.build_model()
    lines["a second model"] = refusal(other.make_optimizer)
    return lines


MIXED: dict[str, Any] = {"dtype": torch.bfloat16, "is_distributed": True}
REFUSED: dict[str, dict] = {
    "moments": MIXED | {"set_later": {"exp_avg_dtype": torch.bfloat16}},
    "main parameters": MIXED | {"set_later": {"main_params_dtype": torch.float16}},
    "lion": {"optimizer_options": {"optimizer": "lion"}},
    "muon": {"optimizer_options": {"optimizer": "muon", "muon_coefficient_type": "cubic"}},
    "dtypes": {"dtype": torch.bfloat16, "optimizer_options": {"bf16": False}},
}
# Of a TransformerConfig whose layers were built.
LATE: dict[str, dict] = {
    "built otherwise": {"gradient_accumulation_fusion": True},
    "own graphs": {"cuda_graph_impl": "local"},
    "fp8 without Transformer Engine": {"fp8": "hybrid"},
    "precisions of layers": {"quant_recipe": "recipe"},
    "sub-samples": {"hybrid_context_parallel": True},
}
USELESS = {"save_ranks": 2, "verify": "structure", "save_trained_only": True, "adapter_rank": 8}
EXPECTED = {
    "an old core": "megatron-core 0.15.2 was found",
    "no folder": "--asynchzp-trace /no/such/folder/trace.json: no such folder",
    "another world": "--asynchzp-param-shard-size 2 does not divide the 3 ranks of the run",
    "other sizes": "install() with --asynchzp-param-shard-size 1 after one with 2",
    "a kept name": "call megatron_asynchzp.install() before anything keeps get_megatron_optimizer",
    "another optimizer": "a model is trained whose optimizer AsyncHZP did not make",
    "all frozen": "no parameter of the model needs a gradient",
    "moments": "it has no effect without --use-precision-aware-optimizer",
    "save_ranks": "--asynchzp-save-ranks 2 has no effect in a framework",
    "verify": "--asynchzp-verify structure has no effect",
    "save_trained_only": "--asynchzp-save-trained-only True has no effect",
    "adapter_rank": "--asynchzp-adapter-rank 8 has no effect",
    "lion": "--optimizer",
    "muon": "--muon-coefficient-type cubic is not known",
    "dtypes": "OptimizerConfig: bf16 is False, and TransformerConfig's is True; give both the same",
    "own graphs": "TransformerConfig: cuda_graph_impl is local",
    "fp8 without Transformer Engine": "--fp8-recipe delayed needs Transformer Engine 2.15.0",
    "precisions of layers": "--te-precision-config-file recipe is not supported",
    "sub-samples": "TransformerConfig: hybrid_context_parallel works in Megatron-LM's own scripts",
    "other ranks": "OptimizerConfig.lr",
    "unwrapped": "a model is wrapped with GPTModel, which AsyncHZP does not shard",
    "main parameters": "--main-params-dtype",
    "built otherwise": "TransformerConfig: gradient_accumulation_fusion is True",
    "whole values": "within megatron_asynchzp.whole(model, writes=True)",
    "a second model": "a second model of this process needs moment",
}


def assert_each_has(expected: dict[str, str], lines: dict[str, str]) -> None:
    assert lines.keys() == expected.keys()
    for name, part in expected.items():
        assert part in lines[name], name


def test_each_misuse_is_one_line():
    for lines in on_ranks(misuses, 2):
        assert_each_has(EXPECTED, lines)


def test_variables_of_the_environment_are_a_config():
    variables = {
        "ASYNCHZP_PARAM_SHARD_SIZE": "2",
        "ASYNCHZP_OPTIM_SHARD_SIZE": "world",
        "ASYNCHZP_KEEP_GRADS_GB": "0.5",
        "ASYNCHZP_CHECK_ORDER": "0",
        "ASYNCHZP_SCHEDULE": "inline",
    }
    with mock.patch.dict("os.environ", variables):
        config = AsyncHZPConfig.of_environment()
    assert config == AsyncHZPConfig(
        param_shard_size=2,
        optim_shard_size="world",
        keep_grads_gb=0.5,
        check_order=False,
        schedule="inline",
    )


@pytest.mark.parametrize(
    ("variable", "word", "part"),
    [
        ("PARAM_SHARD_SIZES", "2", "did you mean ASYNCHZP_PARAM_SHARD_SIZE?"),
        ("PREFETCH_DEPTH", "-1", "ASYNCHZP_PREFETCH_DEPTH=-1: -1 is not a whole number from 0"),
        ("CHECK_ORDER", "no", "ASYNCHZP_CHECK_ORDER=no: give 1 or 0"),
        ("SCHEDULE", "later", "--asynchzp-schedule later: give one of"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_refused(variable: str, word: str, part: str):
    with mock.patch.dict("os.environ", {f"ASYNCHZP_{variable}": word}):
        assert part in refusal(AsyncHZPConfig.of_environment)


def translated(in_shards: bool) -> dict[str, Any]:
    from megatron.core import optimizer

    from megatron_asynchzp import building, cpu_platform

    cpu_platform.install()
    install()
    loop = Loop(
        **MIXED,
        ddp_options={"grad_reduce_in_fp32": False},
        set_later={"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16},
    )
    loop.initialize()
    with building() if in_shards else nullcontext():
        loop.build_modules()
        loop.wrap()
    grouped = optimizer._get_param_groups

    def with_decay(*args: Any) -> list[dict]:
        return [{**group, "wd_mult": 0.25} for group in grouped(*args)]

    with mock.patch.object(optimizer, "_get_param_groups", with_decay):  # as ms-swift does
        loop.make_optimizer()
    loop.train(0, 1)
    (state, *_) = loop.optimizer.optimizer.state.values()
    return {
        "exp_avg": state["exp_avg"].dtype,
        "exp_avg_sq": state["exp_avg_sq"].dtype,
        "gradients on the wire": loop.model[0].units[0].groups.grad_dtype,
        "their sums": loop.model[0].units[0].main_grad.storage.dtype,
        "asked": loop.ddp.grad_reduce_in_fp32,
        "groups": {group["wd_mult"] for group in loop.optimizer.param_groups},
    }


@pytest.mark.parametrize("in_shards", [False, True], ids=["whole", "built in shards"])
def test_moments_and_gradients_have_the_dtypes_that_the_dataclasses_ask_for(in_shards: bool):
    for found in on_ranks(translated, 2, in_shards):
        assert found == {
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.float32,
            "gradients on the wire": torch.bfloat16,
            "their sums": torch.float32,
            "asked": False,  # the caller's own dataclass is as it was
            "groups": {0.25},
        }


@pytest.mark.parametrize("name", ["no_sync", "start_grad_sync", "start_param_sync"])
def test_a_saved_configuration_names_the_functions_of_stock(name: str):
    from megatron.core.distributed import DistributedDataParallel

    from megatron_asynchzp.mcore.door.wrapper import DoorDataParallel

    ours, stock = getattr(DoorDataParallel, name), getattr(DistributedDataParallel, name)
    assert ours is not stock
    assert (ours.__module__, ours.__qualname__) == (stock.__module__, stock.__qualname__)
