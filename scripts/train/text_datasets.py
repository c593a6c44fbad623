# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the datasets of pretrain_gpt.py from Megatron's flags."""

from functools import partial
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage


def _dataset_config() -> GPTDatasetConfig:
    args: Any = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple:
    """Training, validation and test sets.

    Every tensor-parallel rank reads its own copy of a batch: the files are shared by the page
    cache, and no broadcast is needed.
    """
    args: Any = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    is_needed = partial(is_first_or_last_pipeline_stage, vp_stage)
    builder = BlendedMegatronDatasetBuilder(kind, num_samples, is_needed, _dataset_config())
    return tuple(builder.build())


build_datasets.is_distributed = True  # Megatron: call it on every rank
