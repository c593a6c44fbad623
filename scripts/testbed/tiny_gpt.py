# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes data and weights of the parity runs, as functions of a name and a seed."""

import zlib
from typing import Any

import torch

# The weights drawn with it are those of the name alone; another --seed draws others.
BASE_SEED = 1234


class LineDataset(torch.utils.data.Dataset):
    """Samples that count through the vocabulary, each from its own start with its own step."""

    def __init__(self, seq_length: int, vocab_size: int, seed: int):
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._seed = seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, step = 7919 * (index + self._seed), 1 + (index + self._seed) % 5
        line = (start + step * torch.arange(self._seq_length + 1)) % self._vocab_size
        return {
            "tokens": line[:-1],
            "labels": line[1:],
            "loss_mask": torch.ones(self._seq_length),
            "position_ids": torch.arange(self._seq_length),
        }


def seed_parameters(model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Draw every matrix from its name in the unsharded model, and --seed.

    Megatron's own initialisation depends on the layout: each pipeline stage has another seed, and
    experts draw from one sequence per rank. This one gives a layer the same weights wherever it
    lives, and a tensor parallel rank its slice of them. Vectors (biases, norms) keep Megatron's
    constants. With --data-parallel-random-init each rank of a sharding group adds its own number to
    its matrices, which the first rank's are to replace. For use as a `pre_wrap_hook` of a model
    config.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    args: Any = get_args()
    own = 0.0
    if args.data_parallel_random_init:
        own = 0.01 * parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for chunk in model_chunks:
        renames = _global_names(chunk)
        for name, param in chunk.named_parameters():
            if param.dim() > 1:
                with torch.no_grad():
                    param.copy_(_slice_of_full(param, _rename(name, param, renames)) + own)
    return model_chunks


def _global_names(chunk: torch.nn.Module) -> dict[str, str]:
    """Local prefix -> prefix in the unsharded model, for layers and experts."""
    from megatron.core import parallel_state

    renames = {}
    modules: dict[str, Any] = dict(chunk.named_modules())
    for name, module in modules.items():
        parent, _, _index = name.rpartition(".")
        if parent.endswith("layers") and hasattr(module, "layer_number"):
            renames[f"{name}."] = f"{parent}.{module.layer_number - 1}."
        if name.endswith("local_experts"):
            first = parallel_state.get_expert_model_parallel_rank() * len(module)
            for local in range(len(module)):
                renames[f"{name}.{local}."] = f"{name}.{first + local}."
    return renames


def _rename(name: str, param: torch.Tensor, renames: dict[str, str]) -> str:
    if getattr(param, "shared_embedding", False):
        return "embedding.word_embeddings.weight"  # its copy on the last stage has another name
    for local in sorted(renames, key=len, reverse=True):  # an expert's prefix before its layer's
        if name.startswith(local):
            inner = renames[local] + name[len(local) :]
            outer = [prefix for prefix in renames if inner.startswith(prefix) and prefix != local]
            layer = max((p for p in outer if local.startswith(p)), key=len, default=None)
            return renames[layer] + inner[len(layer) :] if layer else inner
    return name


def _slice_of_full(param: Any, name: str) -> torch.Tensor:
    from megatron.core import parallel_state
    from megatron.training import get_args

    args: Any = get_args()
    is_expert = not getattr(param, "allreduce", True)
    size: Any  # Megatron's functions have no types
    if is_expert:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    is_split = getattr(param, "tensor_model_parallel", False) and size > 1
    shape = list(param.shape)
    if is_split:
        shape[param.partition_dim] *= size
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + args.seed - BASE_SEED)
    full = args.init_method_std * torch.randn(shape, generator=generator)
    if not is_split:
        return full
    pieces = full.chunk(size * getattr(param, "partition_stride", 1), dim=param.partition_dim)
    return torch.cat(pieces[rank::size], dim=param.partition_dim)
