# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A training loop on megatron.core alone, in the manner of Megatron-LM's
examples/run_simple_mcore_train_loop.py. It knows nothing of this package: stock runs it, and
AsyncHZP after `install()`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, LENGTH, BATCH = 64, 16, 2
Steps = list[tuple[float, float]]
"""Loss, mean over the world, and gradient norm of each step."""


@dataclass
class Loop:
    """A tiny GPT in a plain loop. The fields are settings of megatron.core's dataclasses."""

    dtype: torch.dtype = torch.float32
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    experts: int = 0
    expert_parallel: int = 1
    num_micro_batches: int = 3
    overlaps: bool = False  # as a framework does it: it asserts no_sync_func is None, and sets it
    is_distributed: bool = False  # Megatron's distributed optimizer, in stock
    clip: float = 1.0
    num_layers: int = 2
    hidden: int = 16
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    ddp_options: dict[str, Any] = field(default_factory=dict)
    transformer_options: dict[str, Any] = field(default_factory=dict)
    set_later: dict[str, Any] = field(default_factory=dict)  # of the OptimizerConfig
    has_optimizer: bool = True
    forward_step: Any = None  # in place of _forward_step
    frozen: str = ""  # a part of the names of parameters that are not trained, and saved
    trained: str = ""  # a part of the names of parameters that are trained, and saved alone

    def build(self) -> "Loop":
        """Initialise parallel groups, the model, its wrapper and its optimizer."""
        self.build_model()
        if self.has_optimizer:
            self.make_optimizer()
        return self

    def build_model(self) -> None:
        self.initialize()
        self.build_modules()
        self.wrap()

    def initialize(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.tensor,
            self.pipeline,
            self.virtual,
            expert_model_parallel_size=self.expert_parallel,
        )
        model_parallel_cuda_manual_seed(123)

    def build_modules(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.manual_seed(7)
        experts: dict[str, Any] = {}
        if self.experts:
            experts = {
                "num_moe_experts": self.experts,
                "expert_model_parallel_size": self.expert_parallel,
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "alltoall",
                "add_bias_linear": False,
            }
        self.config = config = TransformerConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden,
            num_attention_heads=4,
            use_cpu_initialization=True,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=self.tensor,
            pipeline_model_parallel_size=self.pipeline,
            virtual_pipeline_model_parallel_size=self.virtual,
            persist_layer_norm=False,
            **(experts | self.transformer_options),
        )

        def chunk(stage: int | None) -> torch.nn.Module:
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=self.experts or None),
                VOCABULARY,
                LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(False, stage),
                post_process=parallel_state.is_pipeline_last_stage(False, stage),
                vp_stage=stage,
                share_embeddings_and_output_weights=False,
            )
            return Float16Module(config, model) if config.bf16 else model

        numbers = range(self.virtual) if self.virtual else [None]
        self.modules = [chunk(stage) for stage in numbers]

    def wrap(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.ddp = DistributedDataParallelConfig(
            **{
                "grad_reduce_in_fp32": True,
                "overlap_grad_reduce": self.overlaps,
                "use_distributed_optimizer": self.is_distributed,
                **self.ddp_options,
            }
        )
        for module in self.modules:
            for name, param in module.named_parameters():
                is_frozen = bool(self.frozen) and self.frozen in name
                param.requires_grad_(self.trained in name and not is_frozen)
        self.model = [
            DistributedDataParallel(self.config, self.ddp, module, disable_bucketing=index > 0)
            for index, module in enumerate(self.modules)
        ]

    def make_optimizer(self) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = self.config
        asked = OptimizerConfig(
            **{
                "optimizer": "adam",
                "lr": 1e-2,
                "weight_decay": 0.1,
                "clip_grad": self.clip,
                "bf16": config.bf16,
                "params_dtype": self.dtype,
                "use_distributed_optimizer": self.is_distributed,
                **self.optimizer_options,
            }
        )
        vars(asked).update(self.set_later)
        self.optimizer = get_megatron_optimizer(asked, self.model)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if self.overlaps:
            assert config.no_sync_func is None
            no_syncs = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]

    def train(self, first: int, stop: int) -> Steps:
        """Run the steps from `first` to `stop`."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        steps: Steps = []
        for step in range(first, stop):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = [self._batches(step) for _ in self.model]
            losses = get_forward_backward_func()(
                forward_step_func=self.forward_step or _forward_step,
                data_iterator=batches if self.virtual else batches[0],
                model=self.model if self.virtual else self.model[0],
                num_microbatches=self.num_micro_batches,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            _, norm, _ = self.optimizer.step()
            mean = sum(loss["loss"] for loss in losses) / len(losses) if losses else torch.zeros(())
            dist.all_reduce(mean)
            steps.append((float(mean) / dist.get_world_size(), float(norm or 0.0)))
        return steps

    def _batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        numbers = torch.Generator().manual_seed(step * 100 + rank)
        while True:
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=numbers)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    # ---- checkpoints, as frameworks make them: of the unwrapped modules

    def state(self, is_loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        from megatron.core.utils import unwrap_model

        state: dict[str, Any] = {}
        for index, chunk in enumerate(self.model):
            name = f"model{index}" if self.virtual else "model"
            whole = unwrap_model(chunk).sharded_state_dict(prefix="", metadata=metadata)
            state[name] = {key: entry for key, entry in whole.items() if self.trained in key}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state

    def save(self, folder: Path, is_async: bool = False) -> Any:
        """Save; returns the request of an asynchronous save."""
        from megatron.core import dist_checkpointing

        metadata: dict[str, Any] = {}
        if self.is_distributed:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        state = self.state(False, metadata)
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return dist_checkpointing.save(
            state,
            str(folder),
            content_metadata=metadata,
            async_sharded_save=is_async,
            async_strategy="mcore",
        )

    def load(self, folder: Path) -> list[Any]:
        """Load; returns what load_state_dict of each unwrapped module returned."""
        from megatron.core import dist_checkpointing
        from megatron.core.utils import unwrap_model

        metadata = dict(dist_checkpointing.load_content_metadata(str(folder)) or {})
        loaded = dist_checkpointing.load(self.state(True, metadata), str(folder))
        keys = [
            unwrap_model(chunk).load_state_dict(
                loaded[f"model{index}" if self.virtual else "model"], strict=not self.trained
            )
            for index, chunk in enumerate(self.model)
        ]
        self.optimizer.load_state_dict(loaded["optimizer"])
        return keys


def inputs_of(batches: Iterator) -> tuple[tuple, torch.Tensor]:
    """Arguments of the model, and labels."""
    tokens, labels = next(batches)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return (tokens, positions, mask), labels


def _forward_step(batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    inputs, labels = inputs_of(batches)
    output = model(*inputs, labels=labels)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss
