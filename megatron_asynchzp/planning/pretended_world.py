# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Owns the pretence of a cluster in one process without a device: Megatron's own parser and
validation, its process groups over torch's fake backend, and its models on the meta device.
"""

import contextlib
import io
import logging
import os
import runpy
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.asynchzp import DryRunStop
from megatron_asynchzp.mcore.process import platform

# Megatron asks more of the environment (CUDA_DEVICE_MAX_CONNECTIONS) of Hopper and older.
_CAPABILITY = (9, 0)

_WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)

# How our lines begin in what validation prints.
_OURS = "megatron_asynchzp: "


class Refused(ConfigurationError):
    """A command line that cannot run. The message is one line, for the user."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage as its first rank has it, valid while its world is there.

    chunks: the model's, on the meta device, in the dtype of training; empty for a hybrid model,
    whose layers need the kernels of a device to be built; groups: Megatron's
    ProcessGroupCollection; rank: the global rank; num_ranks: of the stage.
    """

    index: int
    chunks: Sequence[torch.nn.Module]
    groups: Any
    rank: int
    num_ranks: int


@contextlib.contextmanager
def _answers_of_a_gpu() -> Iterator[None]:
    """What Megatron asks torch.cuda while it parses and builds."""
    properties = SimpleNamespace(major=_CAPABILITY[0], minor=_CAPABILITY[1])
    with mock.patch.multiple(
        torch.cuda,
        device_count=lambda: 1,
        get_device_properties=lambda *_: properties,
        get_device_capability=lambda *_: _CAPABILITY,
        current_device=lambda: torch.device("meta"),
        Stream=platform.stream_without_device(),
    ):
        yield


@contextlib.contextmanager
def _silence() -> Iterator[io.StringIO]:
    """Everything that is printed, logged or warned of goes into one text."""
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
    """What was wrong: the message, what argparse printed last, or the assertion that failed."""
    if isinstance(error, SystemExit):
        last = (printed.strip().splitlines() or ["the command line was refused"])[-1]
        return last.removeprefix(_OURS)
    if text := " ".join(str(error).split()):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {os.path.basename(frame.filename)}: {frame.line}"


def patch_megatron() -> None:
    """Import Megatron, without its advice on what is not installed here, and patch it. Idempotent.

    Raises Refused for a Megatron that we do not know.
    """
    with _silence():
        from megatron_asynchzp.mcore.patch import IncompatibleMegatron, apply_patches
        from megatron_asynchzp.mcore.patches.table import PATCHES

        try:
            apply_patches(PATCHES)
        except IncompatibleMegatron as error:
            raise Refused(str(error)) from error


def parse(flags: list[str], world_size: int, ranks_per_node: int) -> tuple[Namespace, list[str]]:
    """Megatron's validated arguments of rank 0 of such a run, and the lines that we log of them.

    Raises Refused for what Megatron or --use-asynchzp refuses.
    """

    def validated() -> Namespace:
        from megatron.training import arguments

        args = arguments.parse_args()
        arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
        return args

    return _parse(validated, ["pretrain_gpt.py", *flags], world_size, ranks_per_node)


def parse_script(
    script: Path, flags: list[str], world_size: int, ranks_per_node: int
) -> tuple[Namespace, list[str]]:
    """As `parse`, with the flags and defaults that `script` adds: it runs until Megatron has
    validated its arguments. flags: --asynchzp-dry-run is among them."""

    def validated() -> Namespace:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except DryRunStop as stop:
            return stop.validated
        raise ConfigurationError(f"{script} ended before Megatron validated its arguments")

    return _parse(validated, [str(script), *flags], world_size, ranks_per_node)


def _parse(
    validated: Callable[[], Namespace], argv: list[str], world_size: int, ranks_per_node: int
) -> tuple[Namespace, list[str]]:
    patch_megatron()
    world = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(ranks_per_node)}
    is_cpu = platform.is_cpu_asked(argv)
    with (
        mock.patch.dict(os.environ, world),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(platform, "is_on_cpu", lambda: is_cpu),
        mock.patch("megatron_asynchzp.mcore.startup.choose_platform", lambda _: None),
        _answers_of_a_gpu(),
        _silence() as printed,
    ):
        try:
            args = validated()
            _set_padded_vocabulary(args)
        except (Exception, SystemExit) as error:
            raise Refused(_one_line(error, printed.getvalue())) from error
    own = [line for line in printed.getvalue().splitlines() if line.startswith(_OURS)]
    return args, [line.removeprefix(_OURS) for line in own]


def _set_padded_vocabulary(args: Namespace) -> None:
    """As the run will: from the tokenizer."""
    if args.padded_vocab_size is None:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

        build_tokenizer(args)


def _number(flags: list[str], flag: str, default: int = 1) -> int:
    """The last value of a flag, `default` where it is not given or not a number."""
    with contextlib.suppress(ValueError, IndexError):
        return int(flags[len(flags) - flags[::-1].index(flag)])
    return default


def fewest_ranks(flags: list[str]) -> int:
    """The first of the usual worlds that the parallel sizes, the shard sizes and the batch divide,
    or the smallest world that the sizes allow."""
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


def stages(args: Namespace) -> Iterator[Stage]:
    """Each pipeline stage in turn, in a world of its first rank. args: as `parse` returns them.

    The layers are Megatron's local ones: their parameters have the shapes of Transformer
    Engine's, which need not be installed here.
    """
    num_stages = args.pipeline_model_parallel_size
    num_ranks = args.world_size // num_stages
    apart = num_ranks
    if args.use_tp_pp_dp_mapping:
        apart = args.tensor_model_parallel_size * args.context_parallel_size
    for index in range(num_stages):
        with _world(args, index * apart) as groups:
            try:
                with _answers_of_a_gpu(), _silence():
                    chunks = () if args.hybrid_layer_pattern else _build(args, groups)
            except Exception as error:
                raise Refused(_one_line(error, "")) from error
            yield Stage(index, chunks, groups, index * apart, num_ranks)


@contextlib.contextmanager
def _world(args: Namespace, rank: int) -> Iterator[object]:
    """Megatron's process groups as `rank` sees them; nothing is ever sent."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=args.world_size, store=FakeStore())
    try:
        with _silence():
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
                create_gloo_process_groups=False,
            )
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(args: Namespace, groups: Any) -> list[torch.nn.Module]:
    """This stage's model chunks with Megatron's own builder, without memory and without values."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models import build_virtual_pipeline_stages

    without_kernels = platform.values_without_device() | {"perform_initialization": False}
    config = gpt_config_from_args(Namespace(**(vars(args) | without_kernels)))
    # Checked by now, and refused by the local layers; it changes no shape.
    config.transformer.sequence_parallel = False

    def without_checks(self: torch.nn.Module, *_: object, **__: object) -> None:
        torch.nn.Module.__init__(self)  # the core attention has no parameters

    with (
        mock.patch.object(DotProductAttention, "__init__", without_checks),
        # A tied embedding on two stages is sent from one to the other.
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    ):
        with torch.device("meta"):
            build = config.get_builder_cls()(config).build_model
            virtual = args.virtual_pipeline_model_parallel_size
            chunks: list[torch.nn.Module] = [*build_virtual_pipeline_stages(build, groups, virtual)]
    # As Float16Module does.
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return [chunk.to(dtype) for chunk in chunks]
