# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT with nothing but the wheels: Megatron's flags, plus --use-asynchzp and its own.

torchrun --nproc-per-node 4 scripts/train/pretrain_gpt.py --use-asynchzp [Megatron's flags]
"""

import megatron_asynchzp.mcore.adaptor  # noqa: F401  before Megatron: chooses platform, patches it

# isort: split
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from loss_checks import check_loss
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_timers, pretrain
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage
from model_of_flags import model_for_pretrain
from run_report import RunReport, add_report_arguments
from text_datasets import build_datasets

_BATCH_KEYS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")


def read_batch(data_iterator: Iterator, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """The next micro-batch on the device; all None on a pipeline stage that needs no data."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    sample = next(data_iterator)
    batch = {key: sample.get(key) for key in _BATCH_KEYS}
    batch = {
        key: value if value is None else value.cuda(non_blocking=True)
        for key, value in batch.items()
    }
    if mpu.get_context_parallel_world_size() == 1:
        return batch
    batch["cu_seqlens"] = None  # whole sequences are split, not documents
    group: Any = mpu.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def sum_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> tuple:
    """Sum of the losses of the tokens that count, their number, and both for the log.

    Megatron divides: by this micro-batch's tokens, or with --calculate-per-token-loss by the
    tokens of the whole batch.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(token_losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    check_loss(loss)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Callable]:
    """One micro-batch: the model's output, and the function that makes the loss of it.

    return_schedule_plan: in place of the output, by what --overlap-moe-expert-parallel-comm makes
    it in parts.
    """
    timers: Any = get_timers()
    timers("batch-generator", log_level=2).start()
    batch: Any = read_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))  # pyright: ignore[reportArgumentType]
    timers("batch-generator").stop()
    call: Any = model.build_schedule_plan if return_schedule_plan else model
    output = call(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(sum_loss, batch["loss_mask"])


def main() -> None:
    args = parse_and_validate_args(
        extra_args_provider=add_report_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    report = RunReport()
    pretrain(
        train_valid_test_dataset_provider=build_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=report.watch(forward_step),
        **model_for_pretrain(args),
    )
    report.finish(args)


if __name__ == "__main__":
    main()
