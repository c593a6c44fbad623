# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer over sharded main parameters: scaling, norms, clipping and the update."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import tensor_parallel
from megatron.core.optimizer import (
    _get_megatron_optimizer_based_on_param_groups,
    check_config_overrides_consistency,
    get_standard_config_overrides,
)
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_asynchzp.engine.at_rest.host_states import HostStates
from megatron_asynchzp.engine.at_rest.sleep import Sleeper
from megatron_asynchzp.engine.comm.agreement import optimizer_settings
from megatron_asynchzp.engine.comm.timeline import profiler_range
from megatron_asynchzp.engine.zero.taken_grads import give_grad, given_grad
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.optimizer_state import (
    TORCHS_ADAM,
    FragmentPlace,
    OptimizerCheckpoint,
)
from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel
from megatron_asynchzp.mcore.step.differences import (
    GRAD_NORM_GROUPS,
    called_by_megatron,
    copy_optimizer_param_metadata,
    count_zeros,
    is_counted_once,
)
from megatron_asynchzp.mcore.step.early_update import build_early_update
from megatron_asynchzp.mcore.step.rounded_adam import MomentDtypes, build_rounded_adam


@called_by_megatron("_filter_grads_for_norm", "get_main_grads_for_grad_norm")
class AsyncHZPOptimizer(MixedPrecisionOptimizer):
    """Adam, SGD or Muon on this rank's fragments of the fp32 main parameters.

    Unlike stock optimizers it serves dense and expert parameters at once: their fragments differ
    only in which replica counts in norms. init_state_fn creates the states of all `optimizers`.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: Any,
        model_chunks: Sequence[AsyncHZPDataParallel],
        parameters: "ShardedParameters",
        pg_collection: ProcessGroupCollection,
    ):
        joined: Any = optimizers[0] if len(optimizers) == 1 else JoinedOptimizers(optimizers)
        super().__init__(joined, config, grad_scaler, init_state_fn)
        self.is_stub_optimizer = False
        self.model_chunks = list(model_chunks)
        self.tp_group = pg_collection.tp
        self.expert_tp_group = getattr(pg_collection, "expt_tp", pg_collection.tp)
        # Every element counts on exactly one rank (see counted_parameters), so the sum over the
        # world is the model's.
        self.grad_stats_parallel_group = dist.group.WORLD
        # Separate norms belong to --mtp-detach-heads, which is refused. Set here because Megatron
        # would ask the world on the first clipping, but only on ranks that own elements.
        self._has_grad_norm_group_cache = dict.fromkeys(GRAD_NORM_GROUPS, False)
        self._parameters = parameters
        self._optimizers = optimizers
        self._early = build_early_update(
            self.model_chunks, optimizers, parameters.by_unit, self._inverse_scale
        )
        runtimes = [chunk.runtime for chunk in self.model_chunks]
        self._host_states: HostStates | None = None
        if any(unit.is_on_host for unit in parameters.by_unit):
            self._host_states = HostStates(runtimes, optimizers[0], parameters.by_unit)
        self._skip_unchanged = False  # whether units that were sent early need no second send
        self._sleeper = Sleeper(runtimes, self._state_for_sleep)
        for chunk in self.model_chunks:
            chunk.runtime.early_sends.early_update = self._early
            chunk.runtime.settings_of_update = lambda: optimizer_settings(self.param_groups)
            chunk.communication.moments_of = self._moments_of
        chunks = [chunk.checkpoint for chunk in self.model_chunks]
        self._checkpoint = OptimizerCheckpoint(
            optimizers, joined.state, grad_scaler, parameters.places, chunks
        )
        self._use_fused_steps()

    def _moments_of(self, unit: HZPUnit) -> list[torch.Tensor]:
        moments: list[torch.Tensor] = []
        for fragment in self._parameters.by_unit[unit]:
            for optimizer in self._optimizers:
                states = (state for _, state in sorted(optimizer.state.get(fragment, {}).items()))
                moments += [it for it in states if isinstance(it, torch.Tensor) and it.dim()]
        return moments

    # ---- gradients

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: zero_grad_buffer clears the gradients in the shards."""
        for param in self.get_parameters():
            param.grad = None

    def _copy_model_grads_to_main_grads(self) -> None:
        self._parameters.attach_grads()

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [given_grad(param) for param in self.get_parameters()]  # pyright: ignore[reportReturnType]

    @override
    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        if self.get_parameters():
            return super()._unscale_main_grads_and_check_for_nan()
        # A rank of padding only: the stock kernel refuses an empty list, the others wait for us.
        self.found_inf.fill_(0.0)
        dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.grad_stats_parallel_group)
        return self.found_inf.item() > 0

    def _filter_grads_for_norm(self, params, param_filter=None) -> list[torch.Tensor]:
        return super()._filter_grads_for_norm(
            self._parameters.counted(params), param_filter=param_filter
        )

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the counted gradients, for megatron-core 0.18 in place of the method above."""
        counted = self._parameters.counted(self.get_parameters())
        groups = self.tp_group, self.expert_tp_group
        params = [param for param in counted if is_counted_once(param, *groups)]
        grads = map(given_grad, params)
        return [grad for grad in grads if grad is not None]

    @override
    @torch.no_grad()
    def count_zeros(self) -> float:
        counted = self._parameters.counted(self.get_parameters())
        world: Any = self.grad_stats_parallel_group
        groups = self.tp_group, self.expert_tp_group
        return count_zeros(counted, world, *groups, self._parameters.are_grads_rounded)

    # ---- step

    @override
    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Unscale, clip and apply; return (updated, gradient norm, zeros), the norm in any case."""
        self.grad_norms_by_group = {}
        with profiler_range("optimizer"):
            if self.prepare_grads():
                self._share_stop_signal()
                self._skip_update()
                return False, None, None
            grad_norm = self.clip_grad_norm(self.config.clip_grad)
            num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else 0
            self._share_stop_signal()
            # Not in megatron-core 0.18.
            if grad_norm > getattr(self.config, "grad_norm_skip_threshold", float("inf")):
                self._skip_update()
                return False, grad_norm, num_zeros
            self._skip_unchanged = not self._is_clipped(grad_norm)
            for chunk in self.model_chunks:  # an evaluation may have gathered since the sync
                chunk.runtime.await_readers()
            if self._host_states is not None:
                self._host_states.update()
            return self.step_with_ready_grads(), grad_norm, num_zeros

    def _is_clipped(self, grad_norm: float) -> bool:
        limit = self.config.clip_grad
        return limit > 0.0 and limit / (grad_norm + 1.0e-6) < 1.0

    def _skip_update(self) -> None:
        for chunk in self.model_chunks:
            chunk.runtime.skip_update()

    def _inverse_scale(self) -> torch.Tensor | None:
        return self.grad_scaler.inv_scale if self.grad_scaler else None

    def _share_stop_signal(self) -> None:
        chunk = self.model_chunks[0]
        chunk.communication.stop_signal.share(chunk.units[0].device)

    def _copy_main_params_to_model_params(self) -> None:
        self.model_chunks[0].communication.take_free_memory()
        for chunk in self.model_chunks:
            chunk.runtime.sync_params(self._skip_unchanged)
        self._skip_unchanged = False

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        if state_dict is not None:
            raise NotImplementedError("--load-main-params-from-ckpt is refused")
        for chunk in self.model_chunks:
            for unit in chunk.units:
                unit.copy_model_to_main()

    # ---- asleep

    def sleep(self, level: int = 1) -> None:
        """Free device memory between two steps, as ShardedModel.sleep does. Collective.

        A checkpoint can be saved meanwhile. level 1 frees gradients and optimizer states, 2
        parameter shards too. Raises ConfigurationError within a step and while asleep.
        """
        self._sleeper.sleep(level)

    def wake(self) -> None:
        """Bring back what `sleep` took. Collective. Raises ConfigurationError if awake."""
        self._sleeper.wake()

    def _state_for_sleep(self) -> Any:
        self._init_state()
        return self.optimizer.state

    # ---- checkpoints

    @override
    def state_dict(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("--use-asynchzp writes checkpoints with --ckpt-format torch_dist")

    @override
    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> dict:
        runtime = self.model_chunks[0].runtime
        if is_loading:
            runtime.check_awake()
        if not runtime.is_asleep:
            runtime.settle()
            self._init_state()
        if is_loading:
            return self._checkpoint.sharded_state_dict(is_loading, metadata)
        first = self.model_chunks[0]
        records = first.communication.grad_records(first.pp_group)
        return self._checkpoint.sharded_state_dict(is_loading, metadata, records)

    def _init_state(self) -> None:
        """Create a first step's states: Megatron makes no momentum for SGD, no step for Adam."""
        on_host = nullcontext() if self._host_states is None else self._host_states.making_states()
        with on_host:
            if self.init_state_fn is not None:
                self.init_state_fn(self.optimizer, self.config)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        state = self.optimizer.state[param]
                        if group.get("momentum") and "momentum_buffer" not in state:
                            state["momentum_buffer"] = torch.zeros_like(param)
                        if isinstance(optimizer, TORCHS_ADAM) and "step" not in state:
                            state["step"] = torch.tensor(0.0, device=param.device)

    @override
    def load_state_dict(self, state_dict: dict) -> None:
        self._checkpoint.load_state_dict(state_dict)
        first, records = self.model_chunks[0], self._checkpoint.grad_records_in(state_dict)
        first.communication.expect_grads(records, first.pp_group)
        self._use_fused_steps()

    def _use_fused_steps(self) -> None:
        for optimizer in self._optimizers:
            if type(optimizer) in TORCHS_ADAM:
                for group in optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False


class JoinedOptimizers:
    """Optimizers of different parameters as one, which share one state by parameter from now on."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self._parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = parts[0].state
        for part in parts:
            part.state = self.state

    def step(self) -> None:
        for part in self._parts:
            part.step()


class ShardedParameters:
    """This rank's fragments of the main parameters, as parameters of an inner optimizer."""

    def __init__(self, model_chunks: Sequence[AsyncHZPDataParallel]):
        # The fragment of each model parameter that this rank owns a part of: 1-D fp32, a view of
        # main_param, with the attributes that norms and parameter groups read.
        self.by_model_param: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._grads: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._counted: set[torch.nn.Parameter] = set()
        self.places: dict[torch.nn.Parameter, FragmentPlace] = {}
        self.by_unit: dict[HZPUnit, list[torch.nn.Parameter]] = {}
        for chunk in model_chunks:
            for unit in chunk.units:
                if unit.is_trained:
                    self._add(chunk, unit)

    def _add(self, chunk: AsyncHZPDataParallel, unit: HZPUnit) -> None:
        owned = self.by_unit[unit] = []
        for model_param, own in zip(unit.params, unit.new_fragments(), strict=True):
            fragment = own.param
            if fragment.numel() == 0:
                continue
            copy_optimizer_param_metadata(fragment, model_param)
            tensor_parallel.copy_tensor_model_parallel_attributes(fragment, model_param)
            model_param.main_param = fragment  # pyright: ignore[reportAttributeAccessIssue]
            self.by_model_param[model_param] = fragment
            self._grads[fragment] = own.grad
            owned.append(fragment)
            self.places[fragment] = FragmentPlace(chunk.checkpoint, unit, own.index)
            if unit.is_first_replica:
                self._counted.add(fragment)

    def attach_grads(self) -> None:
        """Make each fragment's gradient a view of its place in main_grad, without a copy."""
        for fragment, grad in self._grads.items():
            give_grad(fragment, grad)

    @property
    def are_grads_rounded(self) -> bool:
        """Return whether main gradients are in bf16; ConfigurationError if only some can."""
        dtypes = {grad.dtype for grad in self._grads.values()}
        others = [unit.name for unit in self.by_unit if unit.dtype != torch.bfloat16]
        if dtypes == {torch.bfloat16} and others:
            raise ConfigurationError(
                f"--main-grads-dtype bf16: parameters of {others[0]} are not in bf16, and one norm "
                "cannot be taken of gradients in two dtypes; drop the flag"
            )
        return dtypes == {torch.bfloat16}

    def counted(self, params: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return those of `params` that count in sums over the world: the first replica's."""
        return [param for param in params if param in self._counted]


def _create_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    if not (config.fp16 or config.bf16):
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,  # pyright: ignore[reportArgumentType]
        hysteresis=config.hysteresis,
    )


def get_asynchzp_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[AsyncHZPDataParallel],
    config_overrides: dict | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    moments: MomentDtypes = MomentDtypes(),
) -> AsyncHZPOptimizer:
    """Build the optimizer of wrapped chunks, with Megatron's parameter groups. Collective."""
    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    check_config_overrides_consistency(config, config_overrides)
    if pg_collection is None:
        pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    is_muon = config.optimizer == "muon"
    if is_muon:
        # Imported here, because it needs a package that only Muon uses.
        from megatron_asynchzp.mcore.step.muon import build_muon, muon_overrides

        config_overrides = config_overrides | muon_overrides()
    # By its name there: a framework may have replaced it for groups of its own.
    grouped = megatron_optimizer._get_param_groups
    param_groups = grouped(list(model_chunks), config, config_overrides)
    parameters = ShardedParameters(model_chunks)
    if is_rounded := parameters.are_grads_rounded:
        # Megatron, and Transformer Engine for it, then look for gradients in decoupled_grad.
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    for group in param_groups:
        owned = (parameters.by_model_param.get(param) for param in group["params"])
        group["params"] = [fragment for fragment in owned if fragment is not None]
    if is_muon:
        optimizers, init_state_fn = build_muon(
            config, model_chunks, param_groups, parameters.by_model_param, pg_collection
        )
    else:
        built: Any
        if moments.is_rounded or is_rounded:
            built = build_rounded_adam(config, param_groups, moments, is_rounded)
        else:
            built = _get_megatron_optimizer_based_on_param_groups(
                config, list(model_chunks), param_groups, skip_megatron_wrapping=True
            )
        optimizers, init_state_fn = [built[0]], built[1]
    scaler = _create_grad_scaler(config)
    return AsyncHZPOptimizer(
        optimizers, config, scaler, init_state_fn, model_chunks, parameters, pg_collection
    )
