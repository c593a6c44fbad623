# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Code that reads or writes `param.data` finds whole parameters within whole()."""

import sys
from collections.abc import Iterable, Iterator
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from megatron_asynchzp.errors import ConfigurationError
from tests.door.core_loop import Loop
from tests.door.test_core_loop import install
from tests.support.world import on_ranks

Values = dict[str, torch.Tensor]


def values_of(loop: Loop) -> Values:
    """Read them as a bridge to Hugging Face does."""
    return {name: p.data.clone() for chunk in loop.model for name, p in chunk.named_parameters()}


def new_values(loop: Loop) -> Values:
    numbers = torch.Generator().manual_seed(11)
    return {
        name: (0.1 * torch.randn(param.shape, generator=numbers)).to(param.dtype)
        for chunk in loop.model
        for name, param in chunk.named_parameters()
    }


def write(loop: Loop, values: Values) -> None:
    for chunk in loop.model:
        for name, param in chunk.named_parameters():
            param.data.copy_(values[name])


def units_held(loop: Loop) -> list[int]:
    """How many units are whole, at each parameter that is read."""
    counts = []
    for param in loop.model[0].parameters():
        param.data.sum()
        counts.append(sum(unit.is_unsharded for unit in loop.model[0].units))
    return counts


def weights_of(megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in megatron_model:
        yield from ((name, param.data.clone()) for name, param in chunk.named_parameters())


# fmt: off
class MegatronPeftBridge:
    def stream_adapter_weights_megatron_to_hf(
        self, megatron_model, cpu=True, show_progress=True, exclude_adapter_base_prefixes=None
    ):
        yield from weights_of(megatron_model)


class MegatronQuantizationBridge:
    def stream_weights_megatron_to_hf_quant(
        self, megatron_model, hf_pretrained, quantization_checker, quant_fn, quant_block_size=None,
        cpu=True, show_progress=True, conversion_tasks=None, merge_adapter_weights=False,
    ):
        yield from weights_of(megatron_model)


class MegatronModelBridge(MegatronPeftBridge, MegatronQuantizationBridge):
    """What Megatron Bridge has under these names, without its conversions."""

    def stream_weights_megatron_to_hf(
        self, megatron_model, hf_pretrained, cpu=True, show_progress=True, conversion_tasks=None,
        merge_adapter_weights=True, weight_dtype=None,
    ):
        yield from weights_of(megatron_model)

    def load_weights_hf_to_megatron(
        self, hf_pretrained, megatron_model, allowed_mismatched_params=None
    ):
        with torch.no_grad():
            for chunk in megatron_model:
                for name, param in chunk.named_parameters():
                    param.copy_(hf_pretrained[name])
        return megatron_model
# fmt: on


class MegatronEngine:
    """What verl has under this name, for the changes of weights."""

    def __init__(self, module: list[Any]):
        self.module = module

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator, None]:
        return weights_of(self.module), None


def calc_params_l2_norm(
    model, model_config, use_megatron_fsdp=False, force_create_fp32_copy=False
) -> float:
    """What Megatron Bridge has under this name, which reads a rank's own parameters."""
    return norm_of(param.data for chunk in model for param in chunk.parameters())


def norm_of(values: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([value.float().norm() for value in values]).norm())


def import_frameworks() -> None:
    bridge = "megatron.bridge.models.conversion"
    kinds: dict[str, Any] = {
        "megatron.bridge.training.utils.train_utils": calc_params_l2_norm,
        f"{bridge}.model_bridge": MegatronModelBridge,
        f"{bridge}.peft_bridge": MegatronPeftBridge,
        f"{bridge}.quant_bridge": MegatronQuantizationBridge,
        "verl.workers.engine.megatron.transformer_impl": MegatronEngine,
    }
    for name, kind in kinds.items():
        module = ModuleType(name)
        setattr(module, kind.__name__, kind)
        sys.modules[module.__name__] = module


def use_frameworks(options: dict) -> dict[str, Any]:
    from megatron_asynchzp import cpu_platform, whole

    cpu_platform.install()
    import_frameworks()
    install()
    bridge, loop = MegatronModelBridge(), Loop(**options).build()
    loop.train(0, 2)
    modules = [chunk.module for chunk in loop.model]
    exports = {
        "all": bridge.stream_weights_megatron_to_hf(loop.model, None),
        "all by keyword": bridge.stream_weights_megatron_to_hf(
            megatron_model=modules, hf_pretrained=None
        ),
        "codes": bridge.stream_weights_megatron_to_hf_quant(modules, None, None, None),
        "parts": MegatronEngine(loop.model).get_per_tensor_param_shard()[0],
        "adapters": bridge.stream_adapter_weights_megatron_to_hf(modules),
    }
    exported = {name: [value for _, value in export] for name, export in exports.items()}
    norms_module: Any = sys.modules["megatron.bridge.training.utils.train_utils"]
    norms = [
        norms_module.calc_params_l2_norm(loop.model, loop.config, force_create_fp32_copy=is_of)
        for is_of in (False, True)
    ]
    with whole(loop.model):
        norms.append(norm_of(values_of(loop).values()))
    values = new_values(loop)
    loop = Loop(**options).build()
    bridge.load_weights_hf_to_megatron(values, loop.model)
    loaded = loop.train(0, 2)
    loop = Loop(**options)
    loop.build_model()
    bridge.load_weights_hf_to_megatron(values, loop.model)
    loop.make_optimizer()
    return {"exported": exported, "norms": norms, "loaded": [loaded, loop.train(0, 2)]}


def test_megatron_bridge_and_verl_read_and_write_whole_parameters():
    for results in on_ranks(use_frameworks, 2, {"dtype": torch.bfloat16}):
        expected, *exports = results["exported"].values()
        assert not any(value.isnan().any() for value in expected)
        for values in exports:
            assert all(map(torch.equal, values, expected)) and len(values) == len(expected)
        of_main, of_model, expected = results["norms"]
        assert of_main == pytest.approx(expected, rel=1e-3) and of_main != of_model
        assert of_model == pytest.approx(expected, rel=1e-6)
        after, before = results["loaded"]
        assert after == before


def read_and_write(options: dict) -> dict[str, Any]:
    from megatron_asynchzp import cpu_platform, mark_weights, whole
    from megatron_asynchzp.engine.at_rest.unit_stream import stream_units

    cpu_platform.install()
    stock = Loop(**options).build()
    stock.train(0, 2)
    results: dict[str, Any] = {"stock": values_of(stock), "stock goes on": stock.train(2, 4)}
    stock = Loop(**options)
    stock.build_model()
    values = new_values(stock)
    write(stock, values)
    stock.make_optimizer()
    results["stock from values"] = stock.train(0, 3)

    install()
    loop = Loop(**options).build()
    loop.train(0, 2)
    inner = [chunk.module for chunk in loop.model]
    with whole(inner), whole(loop.model):  # as an exporter within the caller's own
        results["ours"] = values_of(loop)
    with whole(inner):
        results["units held"] = units_held(loop)
        first, *_, last = loop.model[0].parameters()
        kept = first.data  # whole, also when another unit is used
        results["kept"] = torch.equal(last.data + 0 * kept.sum(), last.data)
        copied = deepcopy(first)
        is_own = type(copied) is torch.nn.Parameter and copied.data_ptr() != first.data.data_ptr()
        results["copied"] = is_own and torch.equal(copied.data, kept)
        results["of two units"] = bool(torch.outer(first[0], last[0]).isfinite().all())
        states = [chunk.state_dict() for chunk in (*loop.model, *unwrap_model(loop.model))]
        results["states"] = [torch.equal(state[next(iter(state))], first) for state in states]
    for chunk in (*loop.model, *unwrap_model(loop.model)):
        with pytest.raises(
            ConfigurationError, match="state_dict.. has no values of a model that is in shards"
        ):
            chunk.state_dict()
    with pytest.raises(ConfigurationError) as caught, whole(loop.model):
        first.data.mul_(2)
    results["refused"] = str(caught.value)
    with whole(loop.model, writes=True):  # main parameters keep their bits
        write(loop, results["ours"])
    results["goes on"] = loop.train(2, 4)

    loop = Loop(**options).build()
    mark_weights(loop.model, "served")
    with whole(loop.model, writes=True):
        write(loop, values)
    changes = stream_units(loop.model[0].runtime, since="served")
    results["changed"] = sum(v.numel() for u in changes if u.changed is None for _, v in u.params)
    results["written"] = sum(value.numel() for value in values.values())
    results["ours from values"] = loop.train(0, 3)
    loop = Loop(**options).build()
    prefix = "module.module." if options else "module."
    bare = {name.removeprefix(prefix): value for name, value in values.items()}
    with whole(loop.model, writes=True):
        loop.model[0].module.load_state_dict(bare, strict=False)
    results["ours from a state dict"] = loop.train(0, 3)
    return results


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"dtype": torch.bfloat16}]
)
def test_whole_parameters_are_read_one_unit_at_a_time_and_written(options: dict):
    for results in on_ranks(read_and_write, 2, options):
        for name, value in results["ours"].items():
            torch.testing.assert_close(value, results["stock"][name], rtol=1e-5, atol=1e-6)
        assert set(results["units held"]) == {1}
        expected = [pytest.approx(step, rel=1e-6) for step in results["stock goes on"]]
        assert results["goes on"] == expected
        assert results["states"] == [True, True] and results["copied"]
        assert results["kept"] and results["of two units"]
        assert "were written within whole(), which only reads" in results["refused"]
        expected = [pytest.approx(step, rel=1e-6) for step in results["stock from values"]]
        assert results["ours from values"] == expected
        assert results["changed"] == results["written"]
        assert results["ours from a state dict"] == expected
