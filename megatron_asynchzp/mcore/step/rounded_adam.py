# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adam with moments or gradients in bf16: Transformer Engine's fused one, or torch's.

A step computes in fp32, and rounds the new moments once, to nearest, when it stores them.
"""

import inspect
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch.optim.adam import adam

from megatron_asynchzp.engine.zero.taken_grads import given_grad
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.run.settings import MomentDtypes

# Elements that are computed in fp32 at once: a step takes 8 further bytes for each.
_CHUNK = 1 << 20


class RoundedAdam(torch.optim.AdamW):
    """torch's fused Adam(W): fp32 parameters, any gradients (given_grad), moments in `moments`."""

    is_elementwise = True

    def __init__(self, params: Any, moments: MomentDtypes, is_decoupled: bool, **rest: Any):
        super().__init__(params, **rest)
        self._moments, self._is_decoupled = moments, is_decoupled

    def initialize_state(self, param: torch.Tensor) -> None:
        """Zero the moments of a parameter, as Transformer Engine's Adam does."""
        self.state[param] = {
            "step": torch.tensor(0.0, device=param.device),
            "exp_avg": torch.zeros_like(param, dtype=self._moments.exp_avg),
            "exp_avg_sq": torch.zeros_like(param, dtype=self._moments.exp_avg_sq),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if closure is not None:
            raise NotImplementedError("RoundedAdam takes no closure")
        for group in self.param_groups:
            for param in group["params"]:
                if (grad := given_grad(param)) is None:
                    continue
                if not self.state[param]:
                    self.initialize_state(param)
                self._update(param, grad, self.state[param], group)

    def _update(
        self, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        tensors = (param, grad, state["exp_avg"], state["exp_avg_sq"])
        for chunk in zip(*(tensor.view(-1).split(_CHUNK) for tensor in tensors), strict=True):
            values, gradient, *stored = chunk
            moments = [moment.float() for moment in stored]  # the same tensor if it is fp32
            adam(
                [values],
                [gradient.float()],
                *([moment] for moment in moments),
                max_exp_avg_sqs=[],
                state_steps=[state["step"].clone()],
                fused=True,
                decoupled_weight_decay=self._is_decoupled,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, place in zip(moments, stored, strict=True):
                if moment is not place:
                    place.copy_(moment)
        state["step"] += 1


def build_rounded_adam(
    config: OptimizerConfig,
    param_groups: list[dict],
    moments: MomentDtypes,
    reads_bf16: bool = False,
) -> tuple[torch.optim.Optimizer, Any]:
    """Build Adam over `param_groups`, and the function that creates its states for a load.

    reads_bf16: gradients are in bf16. Raises ConfigurationError for a fused Adam that has fp32
    moments only.
    """
    common: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        built = RoundedAdam(param_groups, moments, config.decoupled_weight_decay, **common)
    else:
        fused: Any = megatron_optimizer.Adam
        if "exp_avg_dtype" not in inspect.signature(fused).parameters:
            raise ConfigurationError(
                f"--use-precision-aware-optimizer: {fused.__module__} knows fp32 states only; "
                "install Transformer Engine 2.1 or newer, or drop the flag"
            )
        built = fused(
            param_groups,
            **common,
            adam_w_mode=config.decoupled_weight_decay,
            exp_avg_dtype=moments.exp_avg,
            exp_avg_sq_dtype=moments.exp_avg_sq,
            **({"use_decoupled_grad": True} if reads_bf16 else {}),
        )
    return built, _make_states


def _make_states(optimizer: Any, config: Any = None) -> None:
    known = inspect.signature(optimizer.initialize_state).parameters
    # Transformer Engine's, from 2.1 on, may keep 16 bits of main parameters: ours are whole.
    more = (False,) if "store_param_remainders" in known else ()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.initialize_state(param, *more)
