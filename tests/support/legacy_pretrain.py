# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A training script of the older kind: it gives `pretrain` a model_provider, so that Megatron's
get_model wraps the model. Knows nothing of asynchzp; started by the launcher in tests.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def provide_model(
    pre_process: bool = True, post_process: bool = True, vp_stage=None, config=None, **groups
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config or core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        **groups,
    )


def sum_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    words = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    return model(*words, labels=batch["labels"]), partial(sum_loss, batch["loss_mask"])


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True


def train(forward_step: Callable = forward_step) -> None:
    """Run Megatron's pretrain() as the command line says."""
    pretrain(
        pretrain_cfg_container_from_args(parse_and_validate_args()),
        build_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=provide_model,
    )


if __name__ == "__main__":
    train()
