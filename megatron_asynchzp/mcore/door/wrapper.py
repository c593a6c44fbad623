# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The wrapper of a framework's model chunk.

[Note: why a model is sharded when its optimizer is made]
Frameworks wrap chunks one by one, and some of them read weights into the wrapped model. Each of
them then calls get_megatron_optimizer with all chunks of the rank. So a chunk stays whole until
then: what was loaded, initialised or frozen in between is sharded, and a model without an optimizer
(a reference, a judge) stays whole and is only called.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, override

from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch.nn.modules.module import _IncompatibleKeys

from megatron_asynchzp.engine.zero.step import StepState
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.shards import FROZEN_KEY, SHARDS_KEY
from megatron_asynchzp.mcore.door.building import is_built_in_shards
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel, reduce_last_micro_batch
from megatron_asynchzp.mcore.step.optimizer import AsyncHZPOptimizer

_SHARD = re.compile(rf".*\.({SHARDS_KEY}|{FROZEN_KEY})\.(\d+)")
NO_OPTIMIZER = (
    "a model is trained whose optimizer AsyncHZP did not make: call megatron_asynchzp.install() "
    "before anything keeps get_megatron_optimizer under a name of its own, and make the optimizer "
    "with it"
)


class DoorDataParallel(AsyncHZPDataParallel):
    """A model chunk that a framework wraps with megatron.core's DistributedDataParallel."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.siblings: Sequence[DoorDataParallel] = ()  # all chunks of the rank, once sharded
        self.optimizer: Callable[[], AsyncHZPOptimizer | None] = lambda: None  # once it is made

    @property
    def is_sharded(self) -> bool:
        """Whether the optimizer of the chunk was made."""
        return bool(self.siblings)

    def note_sharded(self, siblings: Sequence["DoorDataParallel"]) -> None:
        """Take part in a model of `siblings`, all sharded, whose checkpoints are shards."""
        self.siblings = siblings
        model: Any = unwrap_model(self.module)
        describe, load, read = model.sharded_state_dict, model.load_state_dict, model.state_dict

        def sharded_state_dict(*args: Any, **options: Any) -> dict[str, Any]:
            """Give each shard a key that begins with its parameter's, by which it is filtered."""
            state = describe(*args, **options)
            for kind, names in self.checkpoint.names.items():
                shards = state.pop(kind, {})
                state |= {f"{names[i]}.{kind}.{i}": shard for i, shard in shards.items()}
            return state

        def load_state_dict(state_dict: Mapping[str, Any], strict: bool = True, **rest: Any) -> Any:
            if any(map(_SHARD.fullmatch, state_dict)):
                return self.load_state_dict(state_dict, strict)
            self._check_whole("whole values are loaded into", "load them", "(model, writes=True)")
            return load(state_dict, strict=strict, **rest)

        def state_dict(*args: Any, **options: Any) -> dict[str, Any]:
            self._check_whole("state_dict() has no values of", "call it", "(model)")
            return read(*args, **options)

        model.sharded_state_dict, model.load_state_dict = sharded_state_dict, load_state_dict
        model.state_dict = state_dict

    def _check_whole(self, fault: str, remedy: str, whole: str) -> None:
        if self.runtime.state is not StepState.STREAMING:  # as within whole()
            raise ConfigurationError(
                f"{fault} a model that is in shards; {remedy} before its optimizer is made, or "
                f"within megatron_asynchzp.whole{whole}"
            )

    # ---- before its optimizer is made

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_sharded and is_built_in_shards([*self.parameters()]):
            raise ConfigurationError(
                "a model that was built within building() is called without an optimizer; make "
                "its optimizer first, or build it outside"
            )
        return super().forward(*args, **kwargs)

    # Megatron Bridge saves functions of its configuration by name, and reads those that stock has.
    @override
    @wraps(DistributedDataParallel.no_sync)
    def no_sync(self) -> AbstractContextManager:
        return super().no_sync() if self.is_sharded else nullcontext()

    @override
    def zero_grad_buffer(self) -> None:
        if not self.is_sharded:
            return
        # A framework sets it by itself where it overlaps, and asserts before that it is None.
        if self.config.no_sync_func is None:
            reduce_last_micro_batch(self.siblings)
        super().zero_grad_buffer()

    @override
    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if not self.is_sharded:
            raise ConfigurationError(NO_OPTIMIZER)
        super().finish_grad_sync(force_all_reduce)

    # ---- checkpoints

    @override
    def state_dict(self, *args: Any, **kwargs: Any):
        return self.module.state_dict(*args, **kwargs)

    state_dict_for_save_checkpoint = state_dict

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict of the chunk; returns missing and unexpected keys, as torch does."""
        if not self.is_sharded:
            return self.module.load_state_dict(state_dict, strict=strict)
        state: dict[str, Any] = {}
        for key, value in state_dict.items():
            if shard := _SHARD.fullmatch(key):
                state.setdefault(shard[1], {})[shard[2]] = value
            else:
                state[key] = value
        return _IncompatibleKeys(*self.checkpoint.load_state_dict(state, strict))
