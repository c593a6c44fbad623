# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrapper: what train_step, schedules and finalize_model_grads call."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import MakeViewlessTensor

from megatron_asynchzp.engine.at_rest.host_states import move_to_host
from megatron_asynchzp.engine.comm.groups import ShardGroups
from megatron_asynchzp.engine.device import device_of
from megatron_asynchzp.engine.zero.autograd import HZPRuntime
from megatron_asynchzp.engine.zero.construction import Construction
from megatron_asynchzp.engine.zero.params import refuse_params
from megatron_asynchzp.engine.zero.step import KeepBudgets
from megatron_asynchzp.engine.zero.unit import HZPUnit
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.checkpoint.shards import ChunkCheckpoint
from megatron_asynchzp.mcore.run.settings import RunSettings
from megatron_asynchzp.mcore.start.construction import current_construction
from megatron_asynchzp.mcore.start.low_precision import forget_copies, send_codes
from megatron_asynchzp.mcore.start.shard_groups import (
    broadcast_from_first_rank,
    communication_device,
    create_shard_groups,
)
from megatron_asynchzp.mcore.start.units import (
    mark_softmax_offsets,
    plan_megatron_units,
    seat_captured,
    sharding_group_key,
)
from megatron_asynchzp.mcore.step.communication import Communication
from megatron_asynchzp.mcore.step.differences import called_by_megatron
from megatron_asynchzp.mcore.step.schedule_plan import tell_of_parts


@called_by_megatron()
class AsyncHZPDataParallel(DistributedDataParallel):
    """A model chunk whose states are sharded by an HZPRuntime.

    A subclass of DistributedDataParallel by name only, so that unwrap_model and the schedules
    recognise it without a patch; none of its buffers is built. It is whole until `shard`.

    Args:
        config: TransformerConfig; all arguments are those of DistributedDataParallel.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: Any = None,
    ):
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        self.given_groups = pg_collection
        self.construction = current_construction()  # until it is sharded
        # Read by Megatron's exit path and schedules.
        self.buffers: list = []
        self.expert_parallel_buffers: list = []
        self.bucket_groups: list = []
        self.expert_parallel_bucket_groups: list = []
        self.force_all_reduce = False

    def shard(
        self,
        index: int,
        pg_collection: ProcessGroupCollection,
        groups: dict[str, ShardGroups],
        communication: Communication,
        takes_snapshots: bool = False,
        construction: Construction | None = None,
    ) -> None:
        """Shard the chunk, number `index` of its rank. Collective over the sharding groups.

        All chunks of a rank share `groups` (see create_shard_groups) and `communication`. See
        ChunkCheckpoint for takes_snapshots, HZPRuntime for construction.
        """
        module, config = self.module, self.config
        self.dp_cp_group = pg_collection.dp_cp
        self.tp_group = pg_collection.tp
        self.pp_group = pg_collection.pp
        self.groups = groups
        # Megatron averages over data x context parallel ranks, experts included, unless the loss
        # is normalised per token, which finalize_model_grads does itself.
        grad_scale = 1.0 if config.calculate_per_token_loss else 1.0 / self.dp_cp_group.size()
        self.communication = communication
        if config.gradient_accumulation_fusion and communication.schedule.keep_grads_nbytes:
            raise ConfigurationError(
                "--asynchzp-keep-grads-gb: layers that write weight gradients themselves would "
                "write over those that are kept; add --no-gradient-accumulation-fusion"
            )
        refuse_params(module)
        forget_copies(module, config)
        mark_softmax_offsets(module)
        plans = seat_captured(module, plan_megatron_units(module, index))
        try:
            self.runtime = HZPRuntime(
                module,
                plans,
                groups,
                communication.schedule,
                communication.driver,
                grad_scale,
                construction,
                config.gradient_accumulation_fusion,
                communication.budgets,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"--asynchzp-memory-in-flight-gb: {error}") from error
        _give_gradients_to_autograd(module)
        if config.overlap_moe_expert_parallel_comm:
            tell_of_parts(module, self.runtime)
        communication.runtimes.append(self.runtime)
        self.checkpoint = ChunkCheckpoint(self.runtime, module, takes_snapshots)
        self._provide_main_grads()

    def _provide_main_grads(self) -> None:
        # finalize_model_grads all-reduces param.main_grad between tensor-parallel peers and
        # between the two copies of a tied embedding. Those sums are element-wise and the layouts
        # of such ranks agree, so they may work on this rank's fragments. (Not those of expert
        # biases under tensor parallelism, which are refused.)
        for unit in self.runtime.units:
            if unit.is_trained:
                for param, fragment in zip(unit.params, unit.main_grad_fragments(), strict=True):
                    param.main_grad = fragment  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def units(self) -> list[HZPUnit]:
        return self.runtime.units

    # ---- the contract

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.cuda_graph_impl != "local":
            return super().forward(*args, **kwargs)
        try:
            output = super().forward(*args, **kwargs)
        except AssertionError as error:
            if "no matching cudagraph" not in str(error) and "argument mismatch" not in str(error):
                raise
            raise ConfigurationError(
                "--cuda-graph-impl local: a layer is called with other inputs than its graph was "
                "captured with. Keep the micro-batch size, the sequence length and the arguments "
                "of layers, or drop the flag"
            ) from error
        # Megatron empties a tensor that it has sent; a graph's output would stay empty.
        is_tensor = isinstance(output, torch.Tensor)
        return MakeViewlessTensor.apply(output, output.requires_grad) if is_tensor else output

    @override
    def no_sync(self) -> AbstractContextManager:
        """Wrap all micro-batches except the last, which reduces over the whole sharding group."""
        return self.runtime.no_sync()

    @override
    def zero_grad_buffer(self) -> None:
        if self.runtime.is_rehearsing:
            return  # gradients of a capture do not count
        self.runtime.zero_grads(self.communication.number_of_step())
        if self.runtime is self.communication.runtimes[0]:
            self.communication.begin_step(self.runtime.step)

    @override
    @wraps(DistributedDataParallel.start_grad_sync)
    def start_grad_sync(self, *unused: Any, **kwargs: Any) -> None:
        """Do nothing: gradients have left already, micro-batch by micro-batch."""

    start_param_sync = override(  # by its own name, see DoorDataParallel.no_sync
        wraps(DistributedDataParallel.start_param_sync)(lambda self, *_, **__: None)
    )
    # Nor here: shard_chunks broadcasts before it shards, the optimizer starts the exchange of
    # parameters, the engine's hooks are always on and gathered parameters never stale.
    broadcast_params = free_overlap_buffers = start_grad_sync
    enable_forward_pre_hook = disable_forward_pre_hook = start_grad_sync

    @override
    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Complete the gradients over the whole sharding group, on each rank's O shard."""
        self.runtime.sync_grads()
        if self.config.gradient_accumulation_fusion:
            self._provide_main_grads()  # in backward they were whole gradients
        self._check_grads()

    def _check_grads(self) -> None:
        """Stop on gradients that are not finite and report large ones, as the flags ask."""
        # Stock DDP checks before it reduces. Here backward reduces, so a rank's bad value reaches
        # the owner of the shard.
        machine: Any = get_rerun_state_machine()
        # Ten times what was seen so far, as in stock Megatron.
        is_large = partial(machine.is_unexpectedly_large, threshold=10, context="grads")
        checks: list[tuple[Any, str, bool]] = []
        if self.ddp_config.check_for_nan_in_grad:
            checks += [(torch.isnan, "NaN", True), (torch.isinf, "Inf", True)]
        if self.ddp_config.check_for_large_grads:
            checks += [(is_large, "unexpectedly large values", False)]
        units = [unit for unit in self.runtime.units if unit.is_trained] if checks else []
        if not units:
            return
        fp32 = torch.float32
        norms = [unit.main_grad.view(unit.optim_range).norm(p=2, dtype=fp32) for unit in units]
        # All together: each copy to the host would wait for the device.
        for unit, norm in zip(units, torch.stack(norms).cpu(), strict=True):
            for is_bad, fault, is_fatal in checks:
                machine.validate_result(
                    result=norm,
                    rejection_func=is_bad,
                    message=f"found {fault} in the gradient shard of unit {unit.name}",
                    tolerance=0.001,  # attention backward may not be deterministic
                    fatal=is_fatal,
                )

    @override
    def scale_gradients(self, scaling_factor: float) -> None:
        for unit in self.runtime.units:
            if unit.is_trained:
                unit.main_grad.view(unit.optim_range).mul_(scaling_factor)

    @override
    def state_dict(self, *args: Any, **kwargs: Any):
        raise NotImplementedError("--use-asynchzp writes checkpoints with --ckpt-format torch_dist")

    state_dict_for_save_checkpoint = state_dict

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load strictly: otherwise Megatron tries again, and trains on with the old values."""
        self.checkpoint.load_state_dict(state_dict)


def _give_gradients_to_autograd(model: torch.nn.Module) -> None:
    # Megatron's own linear layers, such as the output layer, read main_grad in forward, before the
    # engine has memory for a gradient.
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.gradient_accumulation_fusion = False


def is_true_anywhere(mine: bool) -> bool:
    """Return whether `mine` is true on any rank: a pipeline stage may have no experts."""
    everyone = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return any(everyone)


def refuse_all_trained(chunks: Sequence[AsyncHZPDataParallel]) -> None:
    """Refuse --asynchzp-save-trained-only without a frozen unit on any rank. Collective."""
    if not is_true_anywhere(any(not unit.is_trained for chunk in chunks for unit in chunk.units)):
        raise ConfigurationError(
            "--asynchzp-save-trained-only: every parameter is trained; freeze the base before the "
            "model is wrapped, or leave the flag out"
        )


def shard_chunks(
    chunks: Sequence[AsyncHZPDataParallel],
    pg_collection: ProcessGroupCollection,
    settings: RunSettings,
    construction: Construction | None = None,
) -> None:
    """Shard the wrapped chunks of this rank, and end their construction. Collective."""
    params = [param for chunk in chunks for param in chunk.parameters()]
    # Megatron wraps on its own stream. Parameters are memory of the default stream: if freed while
    # another stream still copies them, they could be reused. So work on the default stream.
    with device_of(params[0]).on_default_stream():
        if any(param.is_cpu for param in params):  # Megatron 0.19 moves nothing that it built there
            for chunk in chunks:
                chunk.module.to(communication_device(pg_collection.dp_cp))
        has_experts = is_true_anywhere(any(sharding_group_key(p) == "expert" for p in params))
        groups = {} if construction is None else dict(construction.groups)
        if "dense" not in groups or (has_experts and "expert" not in groups):
            groups = create_shard_groups(settings, pg_collection, has_experts) | groups
        schedule, device = settings.schedule, params[0].device
        communication = Communication(
            schedule, device_of(params[0]), settings.trace, settings.number_of_step
        )
        communication.budgets = KeepBudgets.of(schedule, communication.driver, groups.values())
        # Megatron's writer itself copies tensors of an accelerator.
        takes_snapshots = settings.saves_beside_training and device.type == "cpu"
        if construction is not None:
            construction.note_whole(params)
        if settings.starts_differ:
            for param in params:
                if construction is None or not construction.holds(param):
                    broadcast_from_first_rank(param, pg_collection)
        for index, chunk in enumerate(chunks):
            chunk.shard(index, pg_collection, groups, communication, takes_snapshots, construction)
            chunk.construction = None
        if settings.sends_codes:
            for chunk in chunks:
                send_codes(chunk.module, chunk.config, chunk.units)
        if construction is not None:
            construction.close()
        move_to_host([chunk.runtime for chunk in chunks], settings.offload)


def reduce_last_micro_batch(chunks: Sequence[AsyncHZPDataParallel]) -> None:
    """Let Megatron's schedules reduce over the whole sharding group with the last micro-batch."""
    # They read it from the first chunk's config, and chunks need not share one.
    no_syncs: Any = [chunk.no_sync for chunk in chunks]
    for chunk in chunks:
        chunk.config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
