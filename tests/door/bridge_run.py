# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron Bridge's own pretrain() on its recipe vanilla_gpt, shrunk; notes each step.

torchrun ... -m tests.door.bridge_run OUT.json FOLDER_OF_CHECKPOINTS stock|ours [load]
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.door.te_cpu import prepare

_OFF = (
    "gradient_accumulation_fusion masked_softmax_fusion bias_activation_fusion bias_dropout_fusion "
    "apply_rope_fusion cross_entropy_loss_fusion persist_layer_norm"
)


def main(out: Path, folder: str, system: str, loads: bool) -> None:
    """Train."""
    prepare()
    import megatron.core.datasets.utils as datasets
    import megatron.core.models.hybrid.hybrid_layer_allocation as allocation
    import megatron.core.ssm.mamba_hybrid_layer_allocation as old_allocation
    import torch
    import torch.distributed as dist

    datasets.compile_helpers = lambda: None  # the wheel has no Makefile
    for name in ("Symbols", "get_hybrid_total_layer_count", "parse_hybrid_pattern"):
        if not hasattr(old_allocation, name):  # megatron-core 0.19 has them elsewhere
            setattr(old_allocation, name, getattr(allocation, name))
    if system == "ours":
        from megatron_asynchzp import install

        install()  # the line that a user adds
    import megatron.bridge.training.train as train_module  # pyright: ignore[reportMissingImports]
    from megatron.bridge.models.gpt_provider import local_layer_spec  # pyright: ignore[reportMissingImports]
    from megatron.bridge.recipes.gpt.h100.vanilla_gpt import (  # pyright: ignore[reportMissingImports]
        vanilla_gpt_pretrain_1gpu_h100_bf16_config as recipe,
    )
    from megatron.bridge.training.gpt_step import forward_step  # pyright: ignore[reportMissingImports]
    from megatron.bridge.training.pretrain import pretrain  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.enums import AttnBackend

    config = recipe()
    model = config.model
    model.num_layers, model.hidden_size, model.num_attention_heads = 2, 32, 4
    model.ffn_hidden_size, model.seq_length, model.vocab_size = 64, 64, 128
    model.transformer_layer_spec = local_layer_spec
    model.attention_dropout = model.hidden_dropout = 0.0
    for name in _OFF.split():
        if hasattr(model, name):
            setattr(model, name, False)
    model.use_cpu_initialization = True
    model.attention_backend = AttnBackend.unfused
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = 1
    train = config.train
    train.train_iters, train.global_batch_size, train.micro_batch_size = 6, 8, 2
    config.validation.eval_iters, config.validation.eval_interval = 0, None
    config.dataset.seq_length, config.dataset.num_workers = 64, 0
    if hasattr(config.dataset, "persistent_workers"):
        config.dataset.persistent_workers = False
    config.dataset.split = "100,0,0"
    config.tokenizer.vocab_size = 127
    config.scheduler.lr_warmup_iters = 1
    config.optimizer.lr, config.optimizer.min_lr = 1e-2, 1e-3
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = True
    config.dist.distributed_backend = "gloo"
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.checkpoint.save, config.checkpoint.save_interval = folder, 4
    config.checkpoint.load = folder if loads else None
    config.checkpoint.async_save = False
    config.checkpoint.dist_ckpt_optim_fully_reshardable = True
    if loads:
        config.checkpoint.save, config.checkpoint.ckpt_step = None, 4
    steps: list[tuple[float, float]] = []
    train_step = train_module.train_step

    def noting(*args: Any, **options: Any) -> Any:
        result = train_step(*args, **options)
        loss = next(iter(result[0].values()))
        norm = next(value for value in result[1:] if type(value) is float)
        steps.append((float(torch.as_tensor(loss).flatten()[0]), norm))
        given = [*args, *options.values()]
        chunks = next(value for value in given if isinstance(value, list) and value)
        if dist.get_rank() == 0:
            wrapper = type(chunks[0]).__name__
            out.write_text(json.dumps({"steps": steps, "wrapper": wrapper}))
        return result

    train_module.train_step = noting
    pretrain(config, forward_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "load" in sys.argv)
