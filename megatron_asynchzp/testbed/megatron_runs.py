# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's own `pretrain()` on a tiny GPT, many configurations one after another in the
same gloo ranks, and records the numbers of every step. Knows no flag of any configuration.

Starting Megatron costs more than the steps of a toy, hence one set of ranks for many runs:

    def body():                       # on every rank
        stock = run_pretrain(gpt_args("--bf16"))
        ours = run_pretrain(gpt_args("--bf16", "--use-asynchzp"))
        return stock.losses, ours.losses
    on_ranks(body, 4)
"""

import contextlib
import gc
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_asynchzp.testbed.tiny_gpt import LineDataset, seed_parameters

BASE_ARGS = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "127",
    "--make-vocab-size-divisible-by",
    "64",
    "--no-create-attention-mask-in-dataloader",
    "--mock-data",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "8",
    "--train-iters",
    "6",
    "--lr",
    "3e-3",
    "--min-lr",
    "3e-4",
    "--lr-decay-style",
    "cosine",
    "--lr-decay-iters",
    "100",
    "--lr-warmup-iters",
    "2",
    "--weight-decay",
    "0.1",
    "--clip-grad",
    "1.0",
    "--init-method-std",
    "0.05",
    "--seed",
    "1234",
    "--eval-iters",
    "0",
    "--eval-interval",
    "1000",
    "--log-interval",
    "1000",
    "--log-num-zeros-in-grad",
    "--no-one-logger",
    "--distributed-timeout-minutes",
    "1",
    "--logging-level",
    "40",
]

DISTRIBUTED_OPTIMIZER = [
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
]
# fmt: off
MEGATRON_FSDP = [*DISTRIBUTED_OPTIMIZER, "--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor",
                 "--data-parallel-sharding-strategy", "optim_grads_params"]
# fmt: on
# Without --overlap-grad-reduce stock HSDP gave wrong gradients behind the CPU platform (gradient
# norm 0.675 instead of 0.943), so the oracle always has it.
MEGATRON_HSDP = [*MEGATRON_FSDP, "--num-distributed-optimizer-instances", "2"]
# fmt: off
MIXTURE_OF_EXPERTS = ["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall",
                      "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none",
                      "--disable-bias-linear"]
# fmt: on
UNTIED = ["--untie-embeddings-and-output-weights"]
# fmt: off
FULL_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1"]
# fmt: on
FP16 = ["--fp16", "--initial-loss-scale", "65536"]
BF16 = ["--bf16"]


def gpt_args(*more: str) -> list[str]:
    """The tiny GPT with further flags; of a flag that appears twice the last one counts."""
    return [*BASE_ARGS, *more]


@dataclass(frozen=True)
class StepRecord:
    """What one call of Megatron's train_step told, unrounded."""

    loss: float | None  # mean over the tokens of the global batch; None: stage without loss
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    is_skipped: bool
    learning_rate: float | None


@dataclass
class RunRecord:
    """A whole run on this rank; losses are filled in on pipeline stages that have none."""

    steps: list[StepRecord] = field(default_factory=list)
    validation_loss: float | None = None
    inspected: Any = None
    step_s: list[float] = field(default_factory=list)  # seconds in train_step, by step
    total_s: float = 0.0
    log: str = ""

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step.grad_norm for step in self.steps]


def run_pretrain(argv: list[str], inspect: Callable[[list, Any], Any] | None = None) -> RunRecord:
    """Run Megatron's pretrain() with this command line, on ranks whose default group is gloo.

    The CPU platform is in place afterwards; everything else of the run is taken down, so that the
    next one starts from the same seed in the same processes. With `--use-asynchzp` the plugin's
    patches are applied for this run only. `inspect(model_chunks, optimizer)` is called after the
    last step, before anything is torn down, and its result kept in the record.

    A collective call: all ranks run the same command lines in the same order.
    """
    from megatron_asynchzp.mcore import cpu_platform

    cpu_platform.install()
    record, told, start_s = RunRecord(), io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(told), _patched(argv), _recording(record, inspect):
            pretrain(argv)
            _close_communication()
        _fill_in_losses(record)
        dist.barrier()  # nobody closes a group that a peer still uses
    except BaseException as error:
        error.add_note(f"run_pretrain {' '.join(argv)}\n{told.getvalue()[-2000:]}")
        raise
    finally:
        _tear_down()
    record.total_s = time.perf_counter() - start_s
    record.log = told.getvalue()
    return record


def initialized_args(argv: list[str]) -> Any:
    """Megatron's arguments, checked and made its global ones."""
    from megatron.training import arguments, global_vars

    from megatron_asynchzp.mcore import cpu_platform

    with mock.patch.object(sys, "argv", ["run_pretrain", *argv]):
        args = arguments.parse_args()
    cpu_platform.apply_cpu_defaults(args)
    arguments.validate_args(args, {})
    global_vars.set_global_variables(args)
    return args


def pretrain(argv: list[str]) -> None:
    """Megatron's own training of a GPT whose weights are drawn from their names. Records nothing
    and takes nothing down; the CPU platform is in place, and the plugin's patches if asked for."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, training

    from megatron_asynchzp.mcore.save_queue import return_results_in_process

    args = initialized_args(argv)
    if args.save and not args.async_save:
        return_results_in_process()
    model_config = argument_utils.gpt_config_from_args(args)
    model_config.pre_wrap_hooks.append(seed_parameters)
    training.pretrain(
        argument_utils.pretrain_cfg_container_from_args(args, model_config),
        _datasets,
        ModelType.encoder_or_decoder,
        _forward_step,
    )


def _datasets(num_samples: Any, vp_stage: int | None = None) -> tuple:
    from megatron.training import get_args

    args = get_args()
    make = partial(LineDataset, seq_length=args.seq_length, vocab_size=args.vocab_size)
    return make(seed=1), make(seed=2) if args.eval_iters else None, None


_datasets.is_distributed = True  # every tensor parallel rank reads its own copy: no broadcast


def _forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple:
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

    batch = next(data_iterator)
    if (cp_group := parallel_state.get_context_parallel_group()).size() > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    is_edge = [get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process")]
    if not any(is_edge):
        batch = dict.fromkeys(batch)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    weights = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * weights).sum()
    num_tokens = weights.sum()
    report = torch.stack([total.detach(), num_tokens])
    return total, num_tokens.int(), {"lm loss": report}


@contextlib.contextmanager
def _patched(argv: list[str]) -> Iterator[None]:
    if not {"--use-asynchzp", "--use-pasa-attention"} & set(argv):
        yield
        return
    from megatron_asynchzp.mcore.patches import PATCHES
    from megatron_asynchzp.mcore.patching import apply_patches, remove_patches

    apply_patches(PATCHES)
    try:
        yield
    finally:
        remove_patches(PATCHES)


@contextlib.contextmanager
def _recording(record: RunRecord, inspect: Callable | None) -> Iterator[None]:
    """Listen to four functions of Megatron's training loop; all still do their work."""
    from megatron.training import get_args, training

    log, evaluate = training.training_log, training.evaluate
    set_up, step = training.setup_model_and_optimizer, training.train_step
    log_signature = signature(log)
    live: dict[str, Any] = {}

    def recorded_set_up(*args: Any, **kwargs: Any) -> Any:
        built = set_up(*args, **kwargs)
        live["model"], live["optimizer"] = built[:2]
        return built

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        result = step(*args, **kwargs)
        record.step_s.append(time.perf_counter() - start_s)
        return result

    def recorded_log(*args: Any, **kwargs: Any) -> Any:
        told = log_signature.bind(*args, **kwargs).arguments
        record.steps.append(_step_record(told))
        if inspect is not None and told["iteration"] == get_args().train_iters:
            record.inspected = inspect(live["model"], live["optimizer"])
        return log(*args, **kwargs)

    def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        record.validation_loss = _number((result[0] or {}).get("lm loss"))
        return result

    with mock.patch.multiple(
        training,
        setup_model_and_optimizer=recorded_set_up,
        train_step=recorded_step,
        training_log=recorded_log,
        evaluate=recorded_evaluate,
    ):
        yield


def _step_record(told: dict[str, Any]) -> StepRecord:
    return StepRecord(
        loss=_number(told["loss_dict"].get("lm loss")),
        grad_norm=_number(told["grad_norm"]),
        num_zeros=_number(told["num_zeros_in_grad"]),
        loss_scale=_number(told["loss_scale"]),
        is_skipped=bool(told["skipped_iter"]),
        learning_rate=_number(told["learning_rate"]),
    )


def _number(value: Any) -> float | None:
    """A Python float of a number or one-element tensor, in full precision."""
    return None if value is None else float(value)


def _fill_in_losses(record: RunRecord):
    """Give the stages without a loss the one of the last stage."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (record.losses, record.validation_loss))
    losses, validation_loss = next(one for one in told if None not in one[0])
    if None in record.losses:
        pairs = zip(record.steps, losses, strict=True)
        record.steps = [replace(step, loss=loss) for step, loss in pairs]
    if record.validation_loss is None:
        record.validation_loss = validation_loss


def _close_communication():
    """Finish what the last step left in flight while every rank is still here."""
    if communication := sys.modules.get("megatron_asynchzp.mcore.communication"):
        communication.Communication.close_all()


def _tear_down():
    """Leave only the default process group and the platform behind."""
    from megatron.training import training

    training.destroy_global_state()
    if writer := sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async"):
        writer._results_queue = None  # with it goes the process of its manager, where it has one
    groups = dist.distributed_c10d._world.pg_map
    for group in [group for group in groups if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()  # models are cycles: hooks hold them
