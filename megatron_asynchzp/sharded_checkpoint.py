# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns a sharded model's checkpoint: which parts of which tensors a rank saves, and how it takes
them back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.sharded_fragments import HeldFragment, TrainedFragment
from megatron_asynchzp.sharded_state import ShardedState
from megatron_asynchzp.sharding.topology import Range
from megatron_asynchzp.whole_values import saved_buffers
from megatron_asynchzp.zero.autograd import HZPRuntime


@dataclass(frozen=True)
class ModelCheckpoint:
    """Keys and contents as in ShardedModel.state_dict. parts: all that this rank holds; is_first:
    whether it saves what all ranks have."""

    model: nn.Module
    runtime: HZPRuntime
    optimizer: torch.optim.Optimizer
    parts: Sequence[HeldFragment]
    is_first: bool

    @property
    def _trained(self) -> list[TrainedFragment]:
        return [part for part in self.parts if isinstance(part, TrainedFragment)]

    def state_dict(self, only_trained: bool) -> dict[str, Any]:
        """Of an optimizer that has a state. Nothing is in flight, or the model is asleep."""
        state: dict[str, Any] = {
            f"model.{part.name}": part.state_of(self.runtime.at_rest(part.values))
            for part in (self._trained if only_trained else self.parts)
            if part.held.numel
        }
        for part in self._trained:
            for key, value in self.optimizer.state[part.param].items():
                if part.held.numel:
                    is_whole = not isinstance(value, torch.Tensor) or value.dim() == 0
                    state[f"optim.{part.name}.{key}"] = value if is_whole else part.state_of(value)
        for name, buffer in saved_buffers(self.model):
            values = buffer.detach().reshape(-1)
            whole = ShardedState(buffer.shape, Range(0, buffer.numel()), values)
            whole.is_written = self.is_first
            state[f"model.{name}"] = whole
        state["grad_record"] = self.runtime.budgets.grad_record()
        state["param_groups"] = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.optimizer.param_groups
        ]
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state`. Raises ConfigurationError for one that is not of this object."""
        if missing := {"param_groups", "grad_record"} - state.keys():
            raise ConfigurationError(
                f"the state has no {sorted(missing)[0]}: it is to be a state_dict() of this object "
                "into which torch.distributed.checkpoint.load has read; a whole state dict of the "
                "model goes into sharded.model.load_state_dict()"
            )
        frozen = (one for one in self.parts if not isinstance(one, TrainedFragment))
        has_frozen = any(f"model.{part.name}" in state for part in frozen)
        asked = self.parts if has_frozen else self._trained
        if not all(_is_place_of(part, state) for part in asked if part.held.numel):
            raise ConfigurationError(
                "the state is not one of this object as it is now: call state_dict() again, after "
                "wake(), and load into that"
            )
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        for part in self._trained:
            own = self.optimizer.state[part.param]
            for key, value in own.items():
                if not isinstance(value, torch.Tensor) and part.held.numel:
                    own[key] = state[f"optim.{part.name}.{key}"]
        for name, buffer in saved_buffers(self.model):
            buffer.copy_(state[f"model.{name}"].values.view(buffer.shape))
        self.runtime.budgets.expect_grads(state["grad_record"], self.runtime.units)
        for unit in self.runtime.units:
            if not unit.is_trained:
                unit.marks.note_rewritten()  # the others are cast now
        self.runtime.sync_params()
        self.runtime.settle()


def _is_place_of(part: HeldFragment, state: Mapping[str, Any]) -> bool:
    """Whether loading into `state` has written the values of `part`."""
    found = state.get(f"model.{part.name}")
    return isinstance(found, ShardedState) and found.values.data_ptr() == part.values.data_ptr()
