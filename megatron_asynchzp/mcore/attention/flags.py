# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the flags of PASA attention and the table of Megatron flags it refuses. Must not know how
attention is computed, nor the flags of the ZeRO engine.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron_asynchzp.attention.delegate import VENDOR_NAMES
from megatron_asynchzp.attention.pasa import MODES
from megatron_asynchzp.mcore.flags.refusals import Refusal, UnsupportedConfiguration


@dataclass(frozen=True)
class PasaOptions:
    """What the flags say about one run's attention.

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
        help="One shift per head, computed by the fastest attention present (delegate), or one "
        "per 128 keys by our own kernels (block).",
    )
    group.add_argument(
        "--pasa-vendor",
        choices=("auto", *VENDOR_NAMES),
        default="auto",
        help="The attention that mode delegate hands shifted keys to.",
    )
    group.add_argument(
        "--pasa-shift-values",
        action="store_true",
        help="Shift values as well: gradients then do not depend on their bias either; keeps one "
        "more activation of the size of the attention's output per layer.",
    )
    return parser


def pasa_options(args: Namespace) -> PasaOptions:
    return PasaOptions(
        args.pasa_mode, args.pasa_vendor, args.pasa_shift_values, bool(args.reset_attention_mask)
    )


@dataclass(frozen=True)
class PasaRefusal(Refusal):
    """A Megatron feature that does not work beside `--use-pasa-attention`."""

    def __str__(self) -> str:
        told = f"{self.flag} is not supported with --use-pasa-attention"
        return f"{told}: {self.reason}; {self.remedy}"


def _is_given(name: str) -> Callable[[Namespace], bool]:
    return lambda args: bool(getattr(args, name, None))


_CHOOSES = "it chooses another attention"
_DROP = "drop one of the two flags"

PASA_REFUSALS: tuple[PasaRefusal, ...] = (
    PasaRefusal(
        "--attention-backend flash",
        lambda args: getattr(args.attention_backend, "name", args.attention_backend) != "auto",
        _CHOOSES,
        "use --pasa-vendor instead",
    ),
    PasaRefusal("--use-flash-attn", _is_given("use_flash_attn"), _CHOOSES, _DROP),
    PasaRefusal("--use-kitchen-attention", _is_given("use_kitchen_attention"), _CHOOSES, _DROP),
    PasaRefusal(
        "--experimental-attention-variant dsa",
        _is_given("experimental_attention_variant"),
        _CHOOSES,
        _DROP,
    ),
    PasaRefusal(
        "--softmax-type learnable",
        lambda args: args.softmax_type != "vanilla",
        "a sink is a score of its own, which no shift of the keys reaches",
        _DROP,
    ),
    PasaRefusal(
        "--qk-clip", _is_given("qk_clip"), "the largest unshifted score is not computed", _DROP
    ),
    PasaRefusal(
        "--log-max-attention-logit",
        _is_given("log_max_attention_logit"),
        "the largest unshifted score is not computed",
        "look at it with python -m megatron_asynchzp.attention.inspect",
    ),
    PasaRefusal(
        "--batch-invariant-mode",
        _is_given("batch_invariant_mode"),
        "its kernels are not the ones that shifted keys are handed to",
        _DROP,
    ),
    PasaRefusal(
        "--hybrid-context-parallel",
        _is_given("hybrid_context_parallel"),
        "keys are gathered over the whole context-parallel group",
        "use --context-parallel-size alone",
    ),
    PasaRefusal(
        "--hierarchical-context-parallel-sizes 2 2",
        _is_given("hierarchical_context_parallel_sizes"),
        "keys are gathered over the whole context-parallel group",
        "use --context-parallel-size alone",
    ),
    PasaRefusal(
        "--transformer-impl inference_optimized",
        lambda args: args.transformer_impl == "inference_optimized",
        "its attention is called without Megatron's core attention",
        "use local or transformer_engine",
    ),
    PasaRefusal(
        "--pasa-mode block",
        lambda args: args.pasa_mode == "block" and args.attention_dropout > 0,
        "block mode has no attention dropout, which is 0.1 by default",
        "add --attention-dropout 0, or use --pasa-mode delegate",
    ),
    PasaRefusal(
        "--pasa-shift-values",
        lambda args: args.pasa_shift_values and args.attention_dropout > 0,
        "dropped weights do not sum to one, so a shift of the values does not cancel",
        "add --attention-dropout 0, or drop the flag",
    ),
)


def refuse_unsupported_attention(args: Namespace) -> None:
    """Raise UnsupportedConfiguration, one line, for the first flag that is not supported."""
    for refusal in PASA_REFUSALS:
        if refusal.is_asked(args):
            raise UnsupportedConfiguration(str(refusal))
