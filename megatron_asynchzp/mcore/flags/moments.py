# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""In which dtypes Adam's moments and main gradients are stored: Megatron's flags of its
precision-aware optimizer."""

from argparse import Namespace

from megatron_asynchzp.errors import ConfigurationError

_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_FP32 = "fp32"
_KNOWN = (_FP32, "bf16")


def take_moment_dtypes(args: Namespace) -> list[str]:
    """Move the dtypes to `asynchzp_moment_dtypes`, two words, and switch Megatron's own optimizer
    of that name off; returns the line to log. Raises ConfigurationError for dtypes that cannot be.

    args: before Megatron's validation, which turns the words into dtypes.
    """
    words = tuple(getattr(args, name) for name in _MOMENTS)
    for name, word in zip(_MOMENTS, words, strict=True):
        flag = "--" + name.replace("_", "-")
        if word not in _KNOWN:
            raise ConfigurationError(
                f"{flag} {word} is not supported with --use-asynchzp: moments are stored in fp32 "
                "or bf16; use bf16"
            )
        if word != _FP32 and not args.use_precision_aware_optimizer:
            raise ConfigurationError(
                f"{flag} {word} has no effect without --use-precision-aware-optimizer; add it"
            )
    args.asynchzp_moment_dtypes = words
    lines = _take_main_grads_dtype(args)
    if not args.use_precision_aware_optimizer:
        return lines
    if args.optimizer != "adam":
        raise ConfigurationError(
            f"--use-precision-aware-optimizer is for --optimizer adam, not {args.optimizer}; drop "
            "the flag"
        )
    args.use_precision_aware_optimizer = False
    for name in _MOMENTS:
        setattr(args, name, _FP32)
    return [
        *lines,
        f"use_precision_aware_optimizer = False: the sharded Adam stores its moments in {words[0]} "
        f"and {words[1]}, and computes in fp32 (--use-precision-aware-optimizer)",
    ]


def _take_main_grads_dtype(args: Namespace) -> list[str]:
    """The same of main gradients, whose word moves to `asynchzp_main_grads_dtype`."""
    args.asynchzp_main_grads_dtype = word = args.main_grads_dtype
    if word == _FP32:
        return []
    args.main_grads_dtype = _FP32
    return [
        "main_grads_dtype = fp32: the engine keeps main gradients in bf16 by itself, sums what "
        "travels, in bf16, in fp32, and Adam reads bf16 (--main-grads-dtype)"
    ]
