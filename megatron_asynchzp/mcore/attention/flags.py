# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of PASA attention and the Megatron flags that it refuses."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial

from megatron_asynchzp.attention.delegate import VENDOR_NAMES
from megatron_asynchzp.attention.pasa import MODES
from megatron_asynchzp.mcore.flags.refusals import Refusal, because, equal_to, other_than, refuse


@dataclass(frozen=True)
class PasaOptions:
    """What the flags ask of one run's attention.

    uses_causal_mask: honour a mask that was given for causal attention (--reset-attention-mask);
    otherwise it is the causal triangle, which need not be read.
    """

    mode: str = "delegate"
    vendor: str = "auto"
    shifts_values: bool = False
    uses_causal_mask: bool = False


def add_pasa_arguments(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group(title="pasa attention")
    group.add_argument(
        "--use-pasa-attention",
        action="store_true",
        help="Shift keys by their mean in every attention layer (with or without --use-asynchzp).",
    )
    group.add_argument(
        "--pasa-mode",
        choices=MODES,
        default="delegate",
        help="One shift per head, computed by the fastest attention present (delegate, the "
        "default), or one per 128 keys by our own kernels (block).",
    )
    group.add_argument(
        "--pasa-vendor",
        choices=("auto", *VENDOR_NAMES),
        default="auto",
        help="The attention that mode delegate hands shifted keys to. Default: the fastest one.",
    )
    group.add_argument(
        "--pasa-shift-values",
        action="store_true",
        help="Shift values as well: gradients then do not depend on their bias either. Keeps one "
        "more activation of the size of the attention's output per layer.",
    )
    return parser


def pasa_options(args: Namespace) -> PasaOptions:
    return PasaOptions(
        args.pasa_mode, args.pasa_vendor, args.pasa_shift_values, bool(args.reset_attention_mask)
    )


_because = partial(because, beside="--use-pasa-attention")
_DROP = "drop one of the two flags"


def _with_dropout(example: str, name: str, value: object) -> Refusal:
    return Refusal(
        example,
        lambda args: getattr(args, name) == value and args.attention_dropout > 0,
        "block with attention dropout" if value == "block" else "with attention dropout",
    )


PASA_REFUSALS: tuple[Refusal, ...] = (
    *_because(
        "it chooses another attention",
        "use --pasa-vendor instead",
        Refusal(
            "--attention-backend flash",
            lambda args: getattr(args.attention_backend, "name", args.attention_backend) != "auto",
            "other than auto",
        ),
    ),
    *_because(
        "it chooses another attention",
        _DROP,
        "--use-flash-attn",
        "--use-kitchen-attention",
        "--experimental-attention-variant dsa",
    ),
    *_because(
        "a sink is a score of its own, which no shift of the keys reaches",
        _DROP,
        other_than("--softmax-type learnable", "vanilla"),
    ),
    *_because("the largest unshifted score is not computed", _DROP, "--qk-clip"),
    *_because(
        "the largest unshifted score is not computed",
        "look at it with python -m megatron_asynchzp.attention.inspect",
        "--log-max-attention-logit",
    ),
    *_because(
        "its kernels are not the ones that shifted keys are handed to",
        _DROP,
        "--batch-invariant-mode",
    ),
    *_because(
        "keys are gathered over the whole context-parallel group",
        "use --context-parallel-size alone",
        "--hybrid-context-parallel",
        "--hierarchical-context-parallel-sizes 2 2",
    ),
    *_because(
        "its attention is called without Megatron's core attention",
        "use local or transformer_engine",
        equal_to("--transformer-impl inference_optimized"),
    ),
    *_because(
        "block mode has no attention dropout, which is 0.1 by default",
        "add --attention-dropout 0, or use --pasa-mode delegate",
        _with_dropout("--pasa-mode block", "pasa_mode", "block"),
    ),
    *_because(
        "dropped weights do not sum to one, so a shift of the values does not cancel",
        "add --attention-dropout 0, or drop the flag",
        _with_dropout("--pasa-shift-values", "pasa_shift_values", True),
    ),
)


def refuse_unsupported_attention(args: Namespace) -> None:
    """Raise ConfigurationError for the first flag that `--use-pasa-attention` does not support."""
    refuse(PASA_REFUSALS, args)
