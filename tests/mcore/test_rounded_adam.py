# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adam with moments in bf16 computes in fp32 and rounds what it stores, once a step."""

from argparse import Namespace
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megatron_asynchzp.engine.zero.taken_grads import give_grad, given_grad
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.refusals import REFUSALS
from megatron_asynchzp.mcore.flags.rule_table import change_settings
from megatron_asynchzp.mcore.flags.rules import refuse
from megatron_asynchzp.mcore.run.settings import MomentDtypes, moments_of
from megatron_asynchzp.mcore.step import rounded_adam
from megatron_asynchzp.mcore.step.rounded_adam import RoundedAdam, build_rounded_adam

_HOW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_BF16 = MomentDtypes(torch.bfloat16, torch.bfloat16)
_STEPS = 5


def _trained(make, num_elements: int = 1000) -> tuple[torch.Tensor, dict]:
    """A parameter after some steps, and its state. make: the optimizer of a list of parameters."""
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(num_elements, generator=generator))
    optimizer = make([param])
    for _ in range(_STEPS):
        param.grad = torch.randn(num_elements, generator=generator)
        optimizer.step()
    return param.data, optimizer.state[param]


def test_chunks_change_no_bit():
    with mock.patch.object(rounded_adam, "_CHUNK", 64):
        cut = _trained(lambda p: RoundedAdam(p, _BF16, True, **_HOW))
    whole = _trained(lambda p: RoundedAdam(p, _BF16, True, **_HOW))
    assert torch.equal(cut[0], whole[0])
    assert all(torch.equal(cut[1][name], whole[1][name]) for name in whole[1])


@pytest.mark.parametrize(
    "moments",
    [_BF16, MomentDtypes(exp_avg=torch.bfloat16), MomentDtypes(exp_avg_sq=torch.bfloat16)],
)
def test_the_parameter_moves_by_moments_that_are_rounded_only_when_they_are_stored(moments):
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = RoundedAdam([param], moments, True, **_HOW)
    values, m, v = param.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    (beta, beta_sq), lr = _HOW["betas"], _HOW["lr"]
    for step in range(1, _STEPS + 1):
        grad = torch.randn(1000, generator=generator)
        param.grad = grad.clone()
        optimizer.step()
        m, v = beta * m + (1 - beta) * grad, beta_sq * v + (1 - beta_sq) * grad**2
        size = (v / (1 - beta_sq**step)).sqrt() + _HOW["eps"]
        values = values * (1 - lr * _HOW["weight_decay"]) - lr / (1 - beta**step) * m / size
        m, v = m.to(moments.exp_avg).float(), v.to(moments.exp_avg_sq).float()
        torch.testing.assert_close(param.data, values, rtol=1e-5, atol=1e-6)
    state = optimizer.state[param]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == tuple(moments)


@pytest.mark.parametrize("moments", [MomentDtypes(), _BF16])
def test_a_gradient_in_bf16_is_what_it_is_in_fp32(moments):
    start, grad = torch.randn(1000), torch.randn(1000).bfloat16()
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    give_grad(params[0], grad)
    give_grad(params[1], grad.float())
    assert params[0].grad is None and given_grad(params[0]) is grad
    for param in params:
        RoundedAdam([param], moments, True, **_HOW).step()
    assert torch.equal(params[0], params[1]) and not torch.equal(params[0], start)


class _Fused(torch.optim.SGD):
    """Stands for Transformer Engine's Adam, which is CUDA only: notes how it was made."""

    def __init__(self, params, lr, betas, eps, weight_decay, adam_w_mode, exp_avg_dtype,
                 exp_avg_sq_dtype, use_decoupled_grad=False):  # fmt: skip
        super().__init__(params, lr=lr)
        self.use_decoupled_grad = use_decoupled_grad
        self.made = (betas, eps, weight_decay, adam_w_mode, exp_avg_dtype, exp_avg_sq_dtype)
        self.initialized = []

    def initialize_state(self, param, store_param_remainders):
        self.initialized.append(param)
        assert not store_param_remainders


class _OldFused(torch.optim.SGD):
    """One without a choice of dtypes."""


def _config(**given) -> Namespace:
    usual = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
    return Namespace(**(usual | {"adam_eps": 1e-8, "decoupled_weight_decay": True} | given))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.booleans(),
    st.sampled_from([1e-8, 1e-3, 1.0]),
    *[st.floats(0.0, 0.99)] * 2,
    *[st.floats(1e-3, 1.0)] * 2,
)
def test_every_setting_of_the_run_reaches_adam(is_decoupled, eps, beta, beta_sq, lr, decay):
    """Whatever they are it is torch's Adam, bit by bit."""
    config = _config(
        decoupled_weight_decay=is_decoupled,
        adam_eps=eps,
        adam_beta1=beta,
        adam_beta2=beta_sq,
        lr=lr,
        weight_decay=decay,
    )
    how = {"lr": lr, "betas": (beta, beta_sq), "eps": eps, "weight_decay": decay}
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    expected, _ = _trained(lambda p: kind(p, **how, fused=True), 50)
    with mock.patch.object(rounded_adam.megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True):
        got, _ = _trained(
            lambda p: build_rounded_adam(config, [{"params": p}], MomentDtypes())[0], 50
        )
    assert torch.equal(got, expected)


def _build(fused, **more):
    params = [torch.nn.Parameter(torch.ones(3))]
    with (
        mock.patch.object(rounded_adam.megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(rounded_adam.megatron_optimizer, "Adam", fused),
    ):
        return params, *build_rounded_adam(_config(), [{"params": params}], _BF16, **more)


def test_the_fused_adam_of_a_device_gets_the_dtypes_and_makes_its_states_itself():
    params, built, make_states = _build(_Fused)
    assert built.made == ((0.9, 0.95), 1e-8, 0.1, True, torch.bfloat16, torch.bfloat16)
    make_states(built)
    assert built.initialized == params and not built.use_decoupled_grad
    assert _build(_Fused, reads_bf16=True)[1].use_decoupled_grad


def test_a_fused_adam_without_such_dtypes_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match="install Transformer Engine 2.1 or newer"):
        _build(_OldFused)


def _flags(**given) -> Namespace:
    usual = {"optimizer": "adam", "use_precision_aware_optimizer": True}
    dtypes = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")
    return Namespace(**(usual | dict.fromkeys(dtypes, "fp32") | given))


def test_the_flags_become_dtypes_and_megatrons_own_optimizer_is_switched_off():
    args = _flags(exp_avg_dtype="bf16")
    (line,) = change_settings(args)
    assert "bf16 and fp32" in line and not args.use_precision_aware_optimizer
    assert args.exp_avg_dtype == "fp32"
    assert moments_of(args) == MomentDtypes(exp_avg=torch.bfloat16)


def test_main_gradients_in_bf16_are_the_engines_own():
    args = _flags(main_grads_dtype="bf16", use_precision_aware_optimizer=False)
    (line,) = change_settings(args)
    assert "keeps main gradients in bf16" in line and args.main_grads_dtype == "fp32"
    assert args.asynchzp_main_grads_dtype == "bf16"


@pytest.mark.parametrize(
    "given, words",
    [
        ({"exp_avg_dtype": "fp8"}, "--exp-avg-dtype .*use bf16"),
        ({"exp_avg_sq_dtype": "fp16"}, "--exp-avg-sq-dtype .*use bf16"),
        (
            {"exp_avg_dtype": "bf16", "use_precision_aware_optimizer": False},
            "no effect without --use-precision-aware-optimizer",
        ),
        ({"optimizer": "sgd"}, "it is for Adam alone; use --optimizer adam"),
    ],
)
def test_dtypes_that_cannot_be_are_refused_in_one_line(given, words):
    with pytest.raises(ConfigurationError, match=words) as refusal:
        refuse(REFUSALS, MegatronSettings(_flags(**given)))
    assert "\n" not in str(refusal.value)
