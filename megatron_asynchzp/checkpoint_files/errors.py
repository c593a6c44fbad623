# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the two ways in which checkpoints end a run. Each message is one line for the user."""


class SaveError(RuntimeError):
    """A checkpoint that could not be written while training; the earlier ones are as they were."""


class Damage(ValueError):
    """Fault in the files of a checkpoint. The message completes "it is skipped: ..."."""


def one_line(error: BaseException, limit: int = 200) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."
