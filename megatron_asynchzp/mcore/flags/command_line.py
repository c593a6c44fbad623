# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the words of a command line show by themselves, before torch and Megatron are imported: a
mistake that is found here costs a second, not half a minute on every rank.
"""

import math
import re
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from difflib import get_close_matches

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import checks
from megatron_asynchzp.mcore.flags.arguments import add_asynchzp_arguments, config_of
from megatron_asynchzp.mcore.flags.megatron_settings import MegatronSettings
from megatron_asynchzp.mcore.flags.pasa import PASA, add_pasa_arguments
from megatron_asynchzp.mcore.flags.rule_table import RULES
from megatron_asynchzp.mcore.flags.rules import OURS, Rule, argument_of, refuse
from megatron_asynchzp.mcore.flags.shard_sizes import (
    resolve_shard_sizes,
    sharding_group_size,
    sharding_ranks_per_node,
)

# Flags of ours that mean something without the flag that their names begin with.
_STAND_ALONE = (
    "--use-asynchzp",
    "--use-pasa-attention",
    "--asynchzp-device",
    "--asynchzp-device-gb",
    "--asynchzp-dry-run",
    "--asynchzp-capture-attention",
)
# How alike a flag that is not ours must be to one that is; no flag of Megatron's comes near it.
_ALIKE = 0.9
# fmt: off
_MEGATRON_INTEGERS = {
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
    "expert-model-parallel-size": 1, "micro-batch-size": None, "global-batch-size": None,
    "eval-micro-batch-size": None, "eval-global-batch-size": None,
    "num-distributed-optimizer-instances": 1, "save-interval": None, "train-iters": None,
    "distributed-timeout-minutes": 10, "log-interval": 100, "non-persistent-save-interval": None,
    "replication-jump": None, "replication-factor": 2, "tensor-parallel-num-weight-shards": None,
    "expert-tensor-parallel-num-weight-shards": None, "expert-tensor-parallel-size": None,
}
_MEGATRON_SWITCHES = (
    "bf16", "fp16", "use-tp-pp-dp-mapping",
    "use-torch-fsdp2", "use-megatron-fsdp", "sft", "async-save",
    "use-persistent-ckpt-worker", "use-checkpoint-args", "decrease-batch-size-if-needed",
    "replication", "use-distributed-optimizer", "grad-reduce-in-bf16",
)
_MEGATRON_WORDS = {
    "data-parallel-sharding-strategy": "optim_grads_params",
    "outer-dp-sharding-strategy": "no_shard", "async-strategy": "nvrx", "save": None, "load": None,
    "tensorboard-dir": None, "non-persistent-ckpt-type": None,
    "non-persistent-local-ckpt-dir": None,
    "pretrained-checkpoint": None, "data-args-path": None, "per-split-data-args-path": None,
    "per-dataset-sequences-path": None, "vocab-file": None, "merge-file": None,
    "tokenizer-type": None, "tokenizer-model": None, "main-grads-dtype": "fp32",
}
_MEGATRON_LISTS = (
    "data-path", "train-data-path", "valid-data-path", "test-data-path",
)
# fmt: on


def check_command_line(argv: Sequence[str], world_size: int | None = None) -> None:
    """Raise ConfigurationError, one line, for a command line that cannot be meant.

    argv: the words after the script.
    world_size: ranks, None where it is not known; what depends on it is then left to the check that
        every run makes when Megatron has parsed its flags (checks.prepare_args). A command line
        that passes here may still be refused there.
    """
    for flag in ("--use-asynchzp", "--use-pasa-attention"):
        checks.refuse_yaml(list(argv), flag)
    flags = _flags_given(argv)
    _refuse_mistyped(flags)
    args = parse_words(argv)
    _refuse_without_effect(flags, args)
    if args.use_pasa_attention:
        _refuse_given(RULES[PASA], argv)
    if not args.use_asynchzp:
        return
    _refuse_given(RULES[OURS], argv)
    if args.bf16 and args.fp16:
        raise ConfigurationError("--bf16 and --fp16 exclude each other; give one of them")
    config = config_of(args)
    config.check_trace()
    config.check_cluster()
    checks.refuse_missing_data(args)
    checks.refuse_useless_saves(args)
    checks.refuse_unwritable_folders(args)
    checks.refuse_useless_load(args)
    if world_size is not None and not args.use_checkpoint_args:
        args.world_size = world_size
        checks.refuse_sizes(args)
        # Where all ranks are one node, no size is refused that smaller nodes could have.
        _refuse_shard_sizes(args, world_size)


def check_numbers_of_nodes(argv: Sequence[str], nodes: range, ranks_per_node: int) -> None:
    """Raise ConfigurationError, one line, for a batch or sizes that some number of nodes in `nodes`
    could not have: a run whose nodes come and go would find that out when one is gone.

    argv: passes check_command_line.
    """
    args = parse_words(argv)
    if not args.use_asynchzp or args.use_checkpoint_args:
        return
    for number in nodes:
        args.world_size = number * ranks_per_node
        try:
            checks.refuse_sizes(args)
            _refuse_shard_sizes(args, ranks_per_node)
        except ConfigurationError as error:
            advice = _batch_for_all(args, [one * ranks_per_node for one in nodes])
            raise ConfigurationError(
                f"with {number} of {nodes[0]} to {nodes[-1]} nodes: {error}{advice}"
            ) from error


def _batch_for_all(args: Namespace, worlds: Sequence[int]) -> str:
    """Advise a batch for all of `worlds`, where it is the batch that one of them cannot have."""
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    batch, micro = args.global_batch_size, args.micro_batch_size
    if not batch or not micro or any(world % model_size for world in worlds):
        return ""
    whole = math.lcm(*(micro * world // model_size for world in worlds))
    return "" if batch % whole == 0 else f" (of {whole} for every number of nodes)"


def _refuse_shard_sizes(args: Namespace, node_size: int) -> None:
    on_node = sharding_ranks_per_node(args, node_size)
    resolve_shard_sizes(args, sharding_group_size(args), on_node)


def own_flags() -> set[str]:
    """Every flag that this package adds to Megatron's."""
    return {flag for action in _own_parser()._actions for flag in action.option_strings}


def mistyped(flag: str, own: set[str]) -> str | None:
    """The flag of ours that `flag`, which is none, was probably meant to be."""
    if flag in own:
        return None
    is_named_so = re.search(r"asynchzp|pasa-", flag) is not None
    near = get_close_matches(flag, sorted(own), 1, cutoff=0.0 if is_named_so else _ALIKE)
    return near[0] if near else None


def _own_parser() -> ArgumentParser:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    return add_pasa_arguments(add_asynchzp_arguments(parser))


def command_line_parser() -> ArgumentParser:
    """Our flags, and those of Megatron's that the checks read, with Megatron's defaults."""
    parser = _own_parser()
    for name, default in _MEGATRON_INTEGERS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in _MEGATRON_SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, default in _MEGATRON_WORDS.items():
        parser.add_argument(f"--{name}", default=default)
    for name in _MEGATRON_LISTS:
        parser.add_argument(f"--{name}", nargs="*")
    return parser


def parse_words(argv: Sequence[str]) -> Namespace:
    """Parse what the checks read. Raises ConfigurationError for a value that is none."""
    try:
        return command_line_parser().parse_known_args(argv)[0]
    except ArgumentError as error:
        name = (error.argument_name or "").split("/")[0]
        raise ConfigurationError(f"{name}: {error.message}") from error


def _flags_given(argv: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in argv if word.startswith("--")]


def _refuse_mistyped(flags: Sequence[str]) -> None:
    own = own_flags()
    for flag in flags:
        if meant := mistyped(flag, own):
            raise ConfigurationError(f"{flag}: no such flag; the nearest is {meant}")


def _refuse_without_effect(flags: Sequence[str], args: Namespace) -> None:
    for flag in flags:
        if flag in _STAND_ALONE or flag not in own_flags():
            continue
        is_pasa = "pasa" in flag
        if not (args.use_pasa_attention if is_pasa else args.use_asynchzp):
            use = "--use-pasa-attention" if is_pasa else "--use-asynchzp"
            raise ConfigurationError(
                f"{flag} has no effect without {use}; add {use}, or leave it out"
            )


def _refuse_given(table: Sequence[Rule], argv: Sequence[str]) -> None:
    """Raise Refused for the rows of `table` that one flag decides. What depends on several is
    decided when Megatron has parsed them all."""
    given = _values(argv)
    args = Namespace(**{argument_of(flag): value for flag, value in given.items()})
    rows = [row for row in table if row.flag in given and row.is_decided_by_flag]
    refuse(rows, MegatronSettings(args))


def _values(argv: Sequence[str]) -> dict[str, object]:
    """Each flag with its first value, a number where it is one; True where none follows."""
    words = [part for word in argv for part in _split_assignment(word)]
    return {
        word: True if following.startswith("--") else _number_or_word(following)
        for word, following in zip(words, [*words[1:], "--"])
        if word.startswith("--")
    }


def _split_assignment(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def _number_or_word(word: str) -> object:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
