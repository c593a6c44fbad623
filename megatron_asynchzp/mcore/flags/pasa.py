# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The flags of PASA attention and the Megatron flags that it refuses. Loads no torch."""

from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_asynchzp.errors import no_file_at
from megatron_asynchzp.mcore.flags.refusals import IGNORES_FLAGS
from megatron_asynchzp.mcore.flags.rules import Rule, because, equal_to, other_than, refusal

# As in attention/; a test compares them.
MODE_CHOICES = ("delegate", "block")
VENDOR_CHOICES = ("auto", "npu-fusion", "flash-attn", "te", "cudnn", "sdpa")


@dataclass(frozen=True)
class PasaOptions:
    """The options of attention that the flags ask for."""

    mode: str = "delegate"
    vendor: str = "auto"
    shifts_values: bool = False
    # Honour a mask that was given for causal attention (--reset-attention-mask); otherwise it is
    # the causal triangle, which need not be read.
    uses_causal_mask: bool = False

    @classmethod
    def of(cls, args: Any) -> "PasaOptions":
        """Make the options from settings by name."""
        mask = bool(args.reset_attention_mask)
        return cls(args.pasa_mode, args.pasa_vendor, args.pasa_shift_values, mask)


def add_pasa_arguments(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group(title="pasa attention")
    group.add_argument(
        "--use-pasa-attention",
        action="store_true",
        help="Shift keys by their mean in every attention layer (with or without --use-asynchzp).",
    )
    group.add_argument(
        "--pasa-mode",
        choices=MODE_CHOICES,
        default="delegate",
        help="One shift per head, computed by the fastest attention present (delegate, the "
        "default), or one per 128 keys by our own kernels (block).",
    )
    group.add_argument(
        "--pasa-vendor",
        choices=VENDOR_CHOICES,
        default="auto",
        help="The attention that mode delegate hands shifted keys to. Default: the fastest one.",
    )
    group.add_argument(
        "--pasa-shift-values",
        action="store_true",
        help="Shift values as well: gradients then do not depend on their bias either. Keeps one "
        "more activation of the size of the attention's output per layer.",
    )
    group.add_argument(
        "--asynchzp-capture-attention",
        type=_capture_words,
        default=None,
        metavar="STEP:FILE",
        help="In step STEP, counted from 1, write the queries and keys of rank 0's layers to FILE, "
        "for asynchzp inspect (with or without the other flags). Default: nothing.",
    )
    return parser


class CaptureRequest(NamedTuple):
    """The step to write, counted from 1, and the file to write it to."""

    step: int
    path: Path

    @classmethod
    def of(cls, word: str | None) -> "CaptureRequest | None":
        """Return the capture that --asynchzp-capture-attention asks for, None without it."""
        if word is None:
            return None
        step, _, name = word.partition(":")
        return cls(int(step), Path(name))


def _capture_words(word: str) -> str:
    # Megatron keeps its arguments in checkpoints: a word, not an object of ours.
    step, _, name = word.partition(":")
    if not step.isdecimal() or int(step) < 1 or not name:
        raise ArgumentTypeError(f"{word} is not STEP:FILE with a step from 1")
    if fault := no_file_at(Path(name)):
        raise ArgumentTypeError(f"{name}: {fault}")
    return word


PASA = "--use-pasa-attention"
_because = partial(because, of=PASA)
_DROP = "drop one of the two flags"


def _with_dropout(example: str, name: str, value: object) -> Rule:
    return refusal(
        example,
        lambda s: getattr(s, name) == value and s.attention_dropout > 0,
        "block with attention dropout" if value == "block" else "with attention dropout",
    )


PASA_REFUSALS: tuple[Rule, ...] = (
    *_because(*IGNORES_FLAGS),
    *_because(
        "it chooses another attention",
        "use --pasa-vendor instead",
        refusal(
            "--attention-backend flash",
            lambda s: getattr(s.attention_backend, "name", s.attention_backend) != "auto",
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
        "look at it with asynchzp inspect",
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
        refusal(
            "--hybrid-context-parallel",
            lambda s: s.hybrid_context_parallel and not s.use_asynchzp,
            "without --use-asynchzp",
        ),
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
