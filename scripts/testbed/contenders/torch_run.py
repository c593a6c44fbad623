# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains Megatron's GPT by torch's FSDP2 or by DeepSpeed, and measures its steps."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scripts.testbed.contenders.adam import new_adamw
from scripts.testbed.contenders.fsdp2 import SHARDINGS, Sharding, gpt_units, shard_fully
from scripts.testbed.contenders.layer_delay import layers_take
from scripts.testbed.contenders.step_meter import StepMeter
from scripts.testbed.contenders.workload import RankReport, Workload
from scripts.testbed.fabric.network import Network
from scripts.testbed.fabric.streams import install_streams
from scripts.testbed.megatron_runs import compiled_helpers, initialized_args
from scripts.testbed.tiny_gpt import LineDataset, seed_parameters

DEEPSPEED = "deepspeed==0.19.8"


class Stepper:
    """A model and its way of learning from a loss; `forward` computes token losses."""

    def __init__(self, forward: Callable, learn: Callable[[torch.Tensor], None]):
        self._forward, self._learn = forward, learn

    def step(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> float:
        """Learn from this rank's samples; the mean loss over all ranks, before that."""
        loss = self._forward(tokens, positions, None, labels=labels).float().mean()
        self._learn(loss)
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()


def missing(system: str) -> str:
    """Why a system cannot run here, or nothing."""
    if system.startswith("deepspeed") and find_spec("deepspeed") is None:
        return f"not installed (pip install {DEEPSPEED})"
    return ""


def train_torch(network: Network, workload: Workload, system: str) -> RankReport:
    """The measured steps of a system. For Cluster.run."""
    install_streams()
    meter = StepMeter(network, workload)
    with layers_take(workload.layer_ms):
        initialize(workload)
        stepper = new_stepper(system, new_model(), workload, network)
        for batch in batches(workload):
            meter.begin_step()
            meter.add_loss(stepper.step(*batch))
    return meter.report


def initialize(workload: Workload) -> None:
    """Megatron in this process, once, before any model."""
    from megatron.training.initialize import initialize_megatron

    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    initialized_args(workload.argv(workload.samples // dist.get_world_size()))
    with compiled_helpers():
        initialize_megatron()


def new_model() -> nn.Module:
    """The model that Megatron's pretrain() would build, with the same weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args

    args: Any = get_args()
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups)
    seed_parameters([model])
    return model


def new_stepper(system: str, model: nn.Module, workload: Workload, network: Network) -> Stepper:
    """`model`, given to a system: one of SHARDINGS, or DeepSpeed."""
    ranks_per_node = network.profile.ranks_per_node
    if system in SHARDINGS:
        return _fsdp2(model, workload, SHARDINGS[system], ranks_per_node)
    return _deepspeed(model, workload, ranks_per_node if system == "deepspeed-hpz" else 1)


def batches(workload: Workload) -> Iterator[tuple[torch.Tensor, ...]]:
    """This rank's samples of every global batch, as Megatron's sampler deals them out."""
    from megatron.training import get_args

    args: Any = get_args()
    data = LineDataset(workload.seq_length, args.vocab_size, seed=1)
    batch = workload.samples // dist.get_world_size()
    for step in range(workload.warm_up + workload.steps + 1):
        first = step * workload.samples + dist.get_rank() * batch
        samples = [data[index] for index in range(first, first + batch)]
        yield tuple(
            torch.stack([sample[key] for sample in samples])
            for key in ("tokens", "labels", "position_ids")
        )


def _new_adamw(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return new_adamw(model.parameters(), workload.learning_rate)


def _fsdp2(
    model: nn.Module, workload: Workload, sharding: Sharding, ranks_per_node: int
) -> Stepper:
    """What backward begins with is kept from forward: the last layer and the output."""
    units = gpt_units(model)
    cluster = dist.get_world_size() // ranks_per_node, ranks_per_node
    shard_fully(model, units, sharding, cluster, num_last=2, unread_in_backward=[units[0][0]])
    optimizer = _new_adamw(model, workload)

    def learn(loss: torch.Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.clip_grad, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return Stepper(model, learn)


def _deepspeed(model: nn.Module, workload: Workload, node_copies: int) -> Stepper:
    """Return ZeRO-3 with settings scaled to a model of this size.

    It prefetches one layer and keeps one, as its defaults do for large models. `node_copies`: hpZ's
    ranks of a secondary copy.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore[reportMissingImports]

    batch = workload.samples // dist.get_world_size()
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": workload.layer_numel,
        "stage3_prefetch_bucket_size": workload.layer_numel,
        "stage3_max_live_parameters": 3 * workload.layer_numel,
        "stage3_max_reuse_distance": workload.layer_numel,
        "stage3_param_persistence_threshold": 0,
        "zero_hpz_partition_size": node_copies,
    }
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": workload.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }
    engine = deepspeed.initialize(
        model=model, optimizer=_new_adamw(model, workload), config=config
    )[0]

    def learn(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Stepper(engine, learn)
