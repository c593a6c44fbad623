# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Trains with verl's own functions for Megatron: its get_model, which wraps; weights read into the
wrapped model, as its bridge does; its optimizer, hooks, scheduler, offload and load.

torchrun ... -m tests.door.verl_run OUT.json. AsyncHZP comes by verl's entry point, if at all.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_STEPS, NUM_MICRO_BATCHES, LENGTH = 6, 3, 16


def main(out: Path) -> None:
    """Train a tiny model and write loss and norm of each step, and the wrapper's name."""
    import torch
    import torch.distributed as dist

    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    torch.cuda.device_count = lambda: 2
    import verl  # noqa: F401  loads its plugins  # pyright: ignore[reportMissingImports]
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.utils import megatron_utils  # pyright: ignore[reportMissingImports]
    from verl.utils.megatron import optimizer as verl_optimizer  # pyright: ignore[reportMissingImports]
    from verl.workers.config import McoreOptimizerConfig  # pyright: ignore[reportMissingImports]

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(7 + dist.get_rank())  # ranks differ until weights are read
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )

    def provider(pre_process: bool, post_process: bool, **unused: Any) -> GPTModel:
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            64,
            LENGTH,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
        )

    model = megatron_utils.get_model(
        provider,
        wrap_with_ddp=True,
        use_distributed_optimizer=True,
        transformer_config=config,
        override_ddp_config={"overlap_grad_reduce": True},
    )
    numbers = torch.Generator().manual_seed(3)
    for name, param in model[0].named_parameters():
        is_norm = "layernorm" in name and name.endswith("weight")
        values = 0.05 * torch.randn(param.shape, generator=numbers)
        param.data.copy_(torch.ones(param.shape) if is_norm else values)
    asked = McoreOptimizerConfig(
        lr=1e-2,
        clip_grad=1.0,
        weight_decay=0.1,
        total_training_steps=10,
        lr_warmup_steps=1,
        min_lr=0.0,
    )
    optimizer = verl_optimizer.get_megatron_optimizer(
        model=model,
        config=verl_optimizer.init_megatron_optim_config(
            asked, use_distributed_optimizer=True, bf16=True
        ),
    )
    megatron_utils.register_megatron_training_hooks(model, optimizer)
    scheduler = verl_optimizer.get_megatron_optimizer_param_scheduler(optimizer, asked)

    def batches(step: int) -> Iterator[torch.Tensor]:
        rank = parallel_state.get_data_parallel_rank()
        drawn = torch.Generator().manual_seed(step * 100 + rank)
        while True:
            yield torch.randint(0, 64, (2, LENGTH + 1), generator=drawn)

    def forward_step(data: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[Any, Any]:
        tokens = next(data)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        positions = torch.arange(LENGTH).expand(2, -1)
        labels = tokens[:, 1:].contiguous()
        output = chunk(tokens[:, :-1].contiguous(), positions, mask, labels=labels)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach()}

        return output, loss

    steps, asleep = [], []
    for step in range(NUM_STEPS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=model,
            num_microbatches=NUM_MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        scheduler.step(1)
        mean = torch.stack([loss["loss"] for loss in losses]).mean()
        dist.all_reduce(mean)
        steps.append((float(mean) / 2, float(norm)))
        if step == 2:
            megatron_utils.offload_megatron_model_to_cpu(model)
            megatron_utils.offload_megatron_optimizer(optimizer)
            runtime = getattr(model[0], "runtime", None)
            asleep.append(runtime is not None and runtime.is_asleep)
            megatron_utils.load_megatron_model_to_gpu(model)
            megatron_utils.load_megatron_optimizer(optimizer)
    if dist.get_rank() == 0:
        wrapper = type(model[0]).__name__
        out.write_text(json.dumps({"steps": steps, "wrapper": wrapper, "asleep": asleep}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
