# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Pretends a cluster in one process without a device, for Megatron's own parser and validation."""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
import re
import runpy
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from difflib import get_close_matches
from math import lcm
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from megatron_asynchzp.commands.launch_words import DEFAULT_SCRIPT
from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags import checks
from megatron_asynchzp.mcore.flags.arguments import DryRunStop
from megatron_asynchzp.mcore.process import platform
from megatron_asynchzp.mcore.run.settings import Run

# Megatron asks more of the environment (CUDA_DEVICE_MAX_CONNECTIONS) of Hopper and older.
_CAPABILITY = (9, 0)
_TRANSFORMER_ENGINE = "2.20.0"  # the latest whose Python the tests run

_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# Megatron's own, whose model is what the flags say.
OF_FLAGS = (DEFAULT_SCRIPT, "pretrain_hybrid.py", "pretrain_mamba.py")
_STOP = ("--asynchzp-dry-run", "0")  # a script stops where Megatron has validated its arguments

# How our lines begin in what validation prints.
_OURS = "megatron_asynchzp: "


class NotValidated(ConfigurationError):
    """Raised for a script that did not reach Megatron's validation."""


@contextlib.contextmanager
def _answers_of_a_gpu() -> Iterator[None]:
    """Answer Megatron's questions to torch.cuda and Transformer Engine while it validates."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    properties = SimpleNamespace(major=_CAPABILITY[0], minor=_CAPABILITY[1])
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    engine = utils.get_te_version() if has_engine else Version(_TRANSFORMER_ENGINE)
    with (
        mock.patch.multiple(
            torch.cuda,
            device_count=lambda: 1,
            get_device_properties=lambda *_: properties,
            get_device_capability=lambda *_: _CAPABILITY,
        ),
        mock.patch.object(utils, "_te_version", engine),
        mock.patch.multiple(rope_utils, **_kernels(rope_utils)),
        mock.patch.multiple(moe_utils, **_kernels(moe_utils)),
    ):
        yield


def _kernels(module: ModuleType) -> dict[str, Any]:
    names = [name for name in vars(module) if name.startswith("fused_")]
    return {name: vars(module)[name] or _identity for name in names}


@contextlib.contextmanager
def _silence() -> Iterator[io.StringIO]:
    text = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield text
    finally:
        logging.disable(level)


def _one_line(error: BaseException, printed: str) -> str:
    if isinstance(error, SystemExit):
        last = (printed.strip().splitlines() or ["the command line was refused"])[-1]
        return last.removeprefix(_OURS) + _nearest(last)
    if text := " ".join(str(error).split()):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"Megatron refuses it in {os.path.basename(frame.filename)}: {frame.line}"


def megatron_flags() -> dict[str, argparse.Action]:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(parser)
    return dict(parser._option_string_actions)


def given(flags: Sequence[str]) -> Namespace:
    """Parse Megatron's flags and ours without validation. Raises ConfigurationError."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    try:
        return add_megatron_arguments(parser).parse_known_args(flags)[0]
    except argparse.ArgumentError as error:
        raise ConfigurationError(str(error)) from None


def _nearest(line: str) -> str:
    unknown = re.search(r"unrecognized arguments: .*?(--[\w-]+)", line)
    near = get_close_matches(unknown[1], megatron_flags(), 1, 0.8) if unknown else []
    return f"; the nearest to {unknown[1]} is {near[0]}" if unknown and near else ""


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    is_hidden = sys.modules.setdefault(package, cast(ModuleType, None)) is None
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[package]


def _identity(function: Callable | None = None, **_: object) -> Callable:
    """Replace torch.compile: nothing is computed, and half of Megatron's imports is a compiler."""
    return function or (lambda inner: inner)


def patch_megatron() -> None:
    """Import Megatron without its advice on packages, and patch it, or refuse it. Idempotent."""
    if sys.stderr.isatty() and "megatron.training" not in sys.modules:
        print(f"{_OURS}importing Megatron, which can take half a minute", file=sys.stderr)
    with _silence(), _without("wandb"), mock.patch.object(torch, "compile", _identity):
        from megatron_asynchzp.mcore.start import startup

        try:
            startup.patch_megatron()
        except ConfigurationError as error:
            raise ConfigurationError(str(error)) from error


def parse(flags: list[str], world_size: int, ranks_per_node: int) -> tuple[Namespace, list[str]]:
    """Return validated arguments of rank 0 and our log lines, or refuse the flags."""

    def validated() -> Namespace:
        from megatron.training import arguments

        args = arguments.parse_args()
        arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
        return args

    return _parse(validated, [DEFAULT_SCRIPT, *flags], world_size, ranks_per_node)


def parse_script(
    script: Path, flags: list[str], world_size: int, ranks_per_node: int
) -> tuple[Namespace, list[str]]:
    """Parse as `parse` does, by running `script` up to Megatron's validation (flags: a dry run)."""

    def validated() -> Namespace:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except DryRunStop as stop:
            return stop.validated
        raise NotValidated(f"{script} ended before Megatron validated its arguments")

    return _parse(validated, [str(script), *flags], world_size, ranks_per_node)


def parse_command(
    command: Sequence[str], world_size: int, ranks_per_node: int
) -> tuple[Namespace, list[str]]:
    """Parse by `parse_script` if the script exists, else by `parse`; data may be elsewhere."""
    script, flags = Path(command[0]), list(command[1:])
    with mock.patch.object(checks, "faults_of_files", lambda _: ()):
        if script.is_file():
            sys.path.insert(0, str(script.resolve().parent))
            return parse_script(script, [*flags, *_STOP], world_size, ranks_per_node)
        return parse(flags, world_size, ranks_per_node)


def _parse(
    validated: Callable[[], Namespace], argv: list[str], world_size: int, ranks_per_node: int
) -> tuple[Namespace, list[str]]:
    patch_megatron()
    world = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    # A script that would meet others ends, instead of waiting for them.
    kept = {name: it for name, it in os.environ.items() if not name.startswith("MASTER_")}
    is_cpu = platform.is_cpu_asked(argv)
    with (
        mock.patch.dict(os.environ, kept | world, clear=True),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(platform, "is_on_cpu", lambda: is_cpu),
        mock.patch("megatron_asynchzp.mcore.start.startup.choose_platform", lambda _: None),
        mock.patch("megatron_asynchzp.mcore.patches.arguments.check_is_rank", lambda: None),
        mock.patch.object(Run, "begin", lambda _: None),  # nothing is to run in this process
        contextlib.nullcontext() if torch.cuda.is_available() else _answers_of_a_gpu(),
        _silence() as printed,
    ):
        try:
            args = validated()
            _set_padded_vocabulary(args)
            build_as_megatron(args)
            if Path(argv[0]).name in OF_FLAGS:
                from megatron_asynchzp.mcore.run import planned

                raise_first(planned.faults_of_layers(args))
        except (Exception, SystemExit) as error:
            raise ConfigurationError(_one_line(error, printed.getvalue())) from error
    own = [line for line in printed.getvalue().splitlines() if line.startswith(_OURS)]
    return args, [line.removeprefix(_OURS) for line in own]


class _Group:
    """A process group in which every rank is the first."""

    def __init__(self, ranks: Sequence[int], **_: object):
        self._ranks = ranks

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return 0


@contextlib.contextmanager
def groups_of(ranks: int) -> Iterator[None]:
    from megatron.core import parallel_state

    with (
        mock.patch.multiple(
            torch.distributed,
            is_initialized=lambda: True,
            get_world_size=lambda *_: ranks,
            get_rank=lambda *_: 0,
        ),
        mock.patch.object(parallel_state, "create_group", _Group),
    ):
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build_as_megatron(args: Namespace) -> None:
    """Build what every start builds before the model: groups, configuration, counter of steps."""
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, initialize, training

    with (
        groups_of(args.world_size),
        mock.patch.object(initialize, "get_args", lambda: args),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
    ):
        initialize._initialize_distributed(None, None, None)
    arguments.core_transformer_config_from_args(args)
    if getattr(args, "step_batch_size_schedule", None):
        names = "global_batch_size micro_batch_size data_parallel_size seq_length "
        names += "decrease_batch_size_if_needed step_batch_size_schedule"
        given = {name: getattr(args, name) for name in names.split()}
        try:
            num_microbatches_calculator.init_num_microbatches_calculator(rank=0, **given)
            num_microbatches_calculator.update_num_microbatches(0, consistency_check=True)
        finally:
            num_microbatches_calculator.unset_num_microbatches_calculator()
    if args.train_iters and args.lr is not None:
        with mock.patch.object(training, "get_args", lambda: copy(args)):
            training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


def _set_padded_vocabulary(args: Namespace) -> None:
    if args.padded_vocab_size is not None:
        return
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    if args.tokenizer_type != "NullTokenizer":
        try:
            build_tokenizer(args)
        except Exception as error:
            raise ConfigurationError(
                f"--tokenizer-type {args.tokenizer_type}: Megatron cannot make it here "
                f"({_one_line(error, '')[:200]}); give --vocab-file and --merge-file, or "
                "--tokenizer-model, of files that are here"
            ) from None
        return
    known = set(sys.modules)
    with _without("transformers"):  # which takes seconds, and a null tokenizer needs nothing of it
        build_tokenizer(args)
    for name in set(sys.modules) - known:  # another tokenizer may need it
        if name.startswith("megatron.core.tokenizers.text"):
            del sys.modules[name]


def _number(flags: list[str], flag: str) -> int:
    with contextlib.suppress(ValueError, IndexError):
        return max(1, int(flags[len(flags) - flags[::-1].index(flag)]))
    return 1


def fewest_ranks(flags: list[str]) -> int:
    """Return the first usual world that sizes and batch divide, else the smallest possible."""
    flags = [part for word in flags for part in word.split("=", 1)]  # --flag=value
    sizes = [_number(flags, f"--{kind}-parallel-size") for kind in ("tensor-model", "context")]
    dense, expert = sizes[0] * sizes[1], sizes[0]
    if "--expert-tensor-parallel-size" in flags:
        expert = _number(flags, "--expert-tensor-parallel-size")
    expert *= _number(flags, "--expert-model-parallel-size")
    stages = _number(flags, "--pipeline-model-parallel-size")
    shards = _number(flags, "--asynchzp-optim-shard-size") * sizes[0]
    needed = lcm(dense, expert, shards) * stages
    samples = 0  # that any number of ranks can share
    if "--global-batch-size" in flags:
        samples = _number(flags, "--global-batch-size") // _number(flags, "--micro-batch-size")
    worlds = [size for size in _WORLDS if size % needed == 0]
    return next((size for size in worlds if samples % (size // dense // stages) == 0), needed)
