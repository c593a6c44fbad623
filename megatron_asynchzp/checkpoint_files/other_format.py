# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Recognizes checkpoints of Megatron's older format `torch` and models of Hugging Face.

Importing this file loads no torch.
"""

from pathlib import Path

OTHER_FORMAT = (
    "it is of Megatron's format torch, not torch_dist; convert it with a run without "
    "--use-asynchzp: --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
)


def is_of_format_torch(iteration_dir: Path) -> bool:
    """Return whether there is a folder for a model-parallel rank, which only that format has."""
    return any(iteration_dir.glob("mp_rank_*"))


def all_of_format_torch(load_dir: Path) -> bool:
    """Return whether a folder has checkpoints, none of them of torch_dist."""
    checkpoints = [*load_dir.glob("iter_*"), *load_dir.glob("release")]
    return bool(checkpoints) and all(map(is_of_format_torch, checkpoints))


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a model of Hugging Face, and no checkpoint of Megatron."""
    weights = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
    checkpoints = ("latest_checkpointed_iteration.txt", "iter_*", "release")
    return (
        (folder / "config.json").is_file()
        and any(any(folder.glob(pattern)) for pattern in weights)
        and not any(any(folder.glob(pattern)) for pattern in checkpoints)
    )
