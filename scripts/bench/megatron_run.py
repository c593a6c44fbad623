# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's own pretrain() on one rank of an emulated cluster and measures its steps. Must
not know which flags belong to which contender.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any
from unittest import mock

import torch

from scripts.bench.layer_delay import layers_take
from scripts.bench.step_meter import StepMeter
from scripts.bench.workload import RankReport, Workload
from scripts.testbed import streams
from scripts.testbed.network import Network
from tests.support.tiny_gpt import LineDataset, seed_parameters


def train_megatron(
    network: Network, workload: Workload, micro_batch: int, flags: tuple[str, ...]
) -> RankReport:
    """The measured steps of `pretrain()` with these flags. For Cluster.run; the process ends after
    it, so nothing is taken down."""
    from megatron_asynchzp.mcore import cpu_platform

    cpu_platform.install()
    argv, told = [*workload.argv(micro_batch), *flags], io.StringIO()
    # In the other schedules the main thread waits for the network itself, which the network counts.
    is_threaded = "--use-asynchzp" in flags and not {"main-thread", "inline"} & set(flags)
    meter = StepMeter(network, workload, *([_take_exposed_s] if is_threaded else []))
    _give_cuda_streams(meter)
    try:
        with (
            contextlib.redirect_stdout(told),
            layers_take(workload.layer_ms),
            _recording(meter, workload),
        ):
            if "--use-asynchzp" in flags:
                from megatron_asynchzp.mcore.patches import PATCHES
                from megatron_asynchzp.mcore.patching import apply_patches

                apply_patches(PATCHES)
            if "--use-megatron-fsdp" in flags:
                _gather_without_stream()
            pretrain(argv)
            if communication := sys.modules.get("megatron_asynchzp.mcore.communication"):
                communication.Communication.close_all()
    except BaseException as error:
        error.add_note(f"{' '.join(flags)}\n{told.getvalue()[-1500:]}")
        raise
    return meter.report


def _take_exposed_s() -> float:
    from megatron_asynchzp.mcore.communication import Communication

    return Communication.take_exposed_s()


def _give_cuda_streams(meter: StepMeter) -> None:
    """Megatron asks torch.cuda for its streams. The platform's are inert; these let what waits on
    a side stream go on, as a device would. From the first step on: what builds the model on a side
    stream reads results on the host, which on a device would wait by itself."""
    for name in ("Stream", "Event", "current_stream", "synchronize"):
        setattr(torch.cuda, name, getattr(streams, name))
    torch.cuda.stream = lambda stream: streams.stream(stream if meter.num_steps else None)


def _gather_without_stream() -> None:
    """Megatron-FSDP frees memory that its gathering stream still uses, which is right where memory
    belongs to streams. Here it gathers on the default one, by handles: beside computation all the
    same, as nothing else is on that stream."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    pipeline = param_and_grad_buffer.AllGatherPipeline
    begin = pipeline.__init__
    pipeline.__init__ = lambda self, buffer, ag_stream=None: begin(self, buffer)


def pretrain(argv: list[str]) -> None:
    """Megatron's own training of a GPT whose weights are drawn from their names."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, training

    args = initialized_args(argv)
    model_config = argument_utils.gpt_config_from_args(args)
    model_config.pre_wrap_hooks.append(seed_parameters)
    training.pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, model_config),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


def initialized_args(argv: list[str]) -> Any:
    """Megatron's arguments, checked and made its global ones."""
    from megatron.training import arguments, global_vars
    from megatron_asynchzp.mcore import cpu_platform

    with mock.patch.object(sys, "argv", ["compare", *argv]):
        args = arguments.parse_args()
    cpu_platform.apply_cpu_defaults(args)
    arguments.validate_args(args, {})
    global_vars.set_global_variables(args)
    return args


def datasets(num_samples: Any, vp_stage: int | None = None) -> tuple:
    from megatron.training import get_args

    args = get_args()
    return LineDataset(args.seq_length, args.vocab_size, seed=1), None, None


datasets.is_distributed = True  # every tensor parallel rank reads its own copy: no broadcast


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    """One micro-batch: the output and what makes a loss of it."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = next(data_iterator)
    is_edge = [get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process")]
    if not any(is_edge):
        batch = dict.fromkeys(batch)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, _sum_loss


def _sum_loss(losses: torch.Tensor) -> tuple:
    total, num_tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    report = torch.stack([total.detach(), num_tokens.float()])
    return total, num_tokens, {"lm loss": report}


@contextlib.contextmanager
def _recording(meter: StepMeter, workload: Workload) -> Iterator[None]:
    """Listen to two functions of Megatron's training loop; both still do their work."""
    from megatron.training import training

    log, step = training.training_log, training.train_step
    log_signature = signature(log)

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        meter.begin_step()
        return step(*args, **kwargs)

    def recorded_log(*args: Any, **kwargs: Any) -> Any:
        told = log_signature.bind(*args, **kwargs).arguments
        loss = told["loss_dict"].get("lm loss")
        meter.add_loss(None if loss is None else float(loss))
        return log(*args, **kwargs)

    with mock.patch.multiple(training, train_step=recorded_step, training_log=recorded_log):
        yield
