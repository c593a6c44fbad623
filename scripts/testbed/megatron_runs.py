# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's own `pretrain()` on a tiny GPT, many configurations in the same gloo ranks.

It records the numbers of every step.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import signature
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scripts.testbed.megatron_flags import small_gpt
from scripts.testbed.tiny_gpt import BASE_SEED, LineDataset, seed_parameters

# fmt: off
BASE_ARGS = [
    *small_gpt(
        layers=2, hidden=64, seq_length=32, micro_batch_size=1, global_batch_size=8, train_iters=6,
        lr="3e-3", min_lr="3e-4", lr_decay_style="cosine", lr_decay_iters=100, lr_warmup_iters=2,
        weight_decay=0.1, clip_grad=1.0, seed=BASE_SEED,
    ),
    "--log-num-zeros-in-grad",
]
# fmt: on


def gpt_args(*more: str) -> list[str]:
    """The tiny GPT with further flags; of a flag that appears twice the last one counts."""
    return [*BASE_ARGS, *more]


@dataclass(frozen=True)
class StepRecord:
    """What one call of Megatron's train_step returned, unrounded."""

    loss: float | None  # mean over the tokens of the global batch; None: stage without loss
    grad_norm: float | None
    num_zeros: float | None
    loss_scale: float
    is_skipped: bool
    learning_rate: float | None
    params_norm: float | None  # with --log-params-norm
    # Of the router (auxiliary, z) and of further predicted tokens, summed over micro-batches, by
    # layer; of all ranks one after another.
    more_losses: dict[str, tuple[float, ...]]


Steps = list[tuple[float | None, float | None]]
"""Loss and gradient norm of each step."""


@dataclass
class RunRecord:
    """A whole run on this rank; losses are filled in on pipeline stages that have none."""

    steps: list[StepRecord] = field(default_factory=list)
    validation_loss: float | None = None
    inspected: Any = None
    step_s: list[float] = field(default_factory=list)  # seconds in train_step, by step
    begins_s: list[float] = field(default_factory=list)  # when it was called, of perf_counter
    total_s: float = 0.0
    log: str = ""

    @property
    def losses(self) -> list[float | None]:
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float | None]:
        return [step.grad_norm for step in self.steps]

    @property
    def losses_and_norms(self) -> Steps:
        return list(zip(self.losses, self.grad_norms, strict=True))

    @property
    def params_norms(self) -> list[float | None]:
        return [step.params_norm for step in self.steps]


def run_pretrain(
    argv: list[str],
    inspect: Callable[[list, Any], Any] | None = None,
    prepare: Callable[[list], list] | None = None,
) -> RunRecord:
    """Run Megatron's pretrain() with this command line, on ranks whose default group is gloo.

    The CPU platform is in place afterwards; everything else of the run is taken down, so that the
    next one starts from the same seed in the same processes. With `--use-asynchzp` the plugin's
    patches are applied for this run only. `inspect(model_chunks, optimizer)` is called after the
    last step, before anything is torn down, and its result kept in the record. `prepare` is given
    the model chunks before they are wrapped; by default their weights are drawn from their names.

    A collective call: all ranks run the same command lines in the same order.
    """
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    record, gathered, start_s = RunRecord(), io.StringIO(), time.perf_counter()
    recorder = _Recorder(record, inspect)
    try:
        with (
            contextlib.redirect_stdout(gathered),
            patched(argv),
            listening(
                recorder.begin_step,
                recorder.end_step,
                train_step=recorder.stepped,
                setup_model_and_optimizer=recorder.set_up,
                evaluate=recorder.evaluated,
            ),
        ):
            try:
                pretrain(argv, prepare)
            except SystemExit:  # Megatron ends the run by itself, on all ranks
                close_communication()
                raise
            close_communication()
        _fill_in_losses(record)
        dist.barrier()  # no rank closes a group that a peer still uses
    except BaseException as error:
        error.add_note(f"run_pretrain {' '.join(argv)}\n{gathered.getvalue()[-2000:]}")
        raise
    finally:
        tear_down()
    record.total_s = time.perf_counter() - start_s
    record.log = gathered.getvalue()
    return record


def initialized_args(argv: list[str]) -> Any:
    """Megatron's arguments, checked and made its global ones."""
    from megatron.training import arguments, global_vars

    from megatron_asynchzp import cpu_platform

    with mock.patch.object(sys, "argv", ["run_pretrain", *argv]):
        args = arguments.parse_args()
    cpu_platform.apply_cpu_defaults(args)
    # No caller reads its 800 lines, which take an eighth of a start.
    with mock.patch.object(arguments, "_print_args", lambda *_: None):
        arguments.validate_args(args, {})
    global_vars.set_global_variables(args)
    return args


def pretrain(argv: list[str], prepare: Callable[[list], list] | None = None) -> None:
    """Train a GPT or a hybrid model by Megatron's own loop; `prepare` as in run_pretrain.

    It records nothing and takes nothing down; the CPU platform is in place, and the plugin's
    patches if asked for.
    """
    from megatron.core.enums import ModelType
    from megatron.training import ft_integration, training

    from megatron_asynchzp.mcore.checkpoint.save_guard import return_results_in_process
    from scripts.train.model_of_flags import model_for_pretrain

    args = initialized_args(argv)
    if args.save and not args.async_save:
        return_results_in_process()
    # It parses every flag once more, a third of a start, to find one that these runs do not have.
    with compiled_helpers(), mock.patch.object(ft_integration, "setup", lambda: None):
        training.pretrain(
            train_valid_test_dataset_provider=_datasets,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=_forward_step,
            **model_for_pretrain(args, prepare or seed_parameters),
        )


def compiled_helpers() -> contextlib.AbstractContextManager[Any]:
    """Let stock Megatron take the dataset helpers of its wheel, as the plugin's patches do."""
    from megatron.core.datasets import utils

    from megatron_asynchzp.mcore.patches.datasets import compile_helpers
    from megatron_asynchzp.mcore.process.platform import lend_dataset_helpers

    lend_dataset_helpers()
    ours = compile_helpers.make(utils.compile_helpers)
    return mock.patch.object(utils, "compile_helpers", ours)


def _datasets(num_samples: Any, vp_stage: int | None = None) -> tuple:
    from megatron.training import get_args

    args: Any = get_args()
    make = partial(LineDataset, seq_length=args.seq_length, vocab_size=args.vocab_size)
    return make(seed=1), make(seed=2) if args.eval_iters else None, None


_datasets.is_distributed = True  # every tensor parallel rank reads its own copy: no broadcast


def _forward_step(
    data_iterator: Iterator, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple:
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

    batch: dict[str, Any] = next(data_iterator)
    cp_group: Any = parallel_state.get_context_parallel_group()
    if cp_group.size() > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    is_edge = [get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process")]
    if not any(is_edge):
        batch = dict.fromkeys(batch)
    call: Any = model.build_schedule_plan if return_schedule_plan else model
    output = call(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple:
    weights = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * weights).sum()
    num_tokens = weights.sum()
    report = torch.stack([total.detach(), num_tokens])
    return total, num_tokens.int(), {"lm loss": report}


@contextlib.contextmanager
def patched(argv: Sequence[str]) -> Iterator[None]:
    """With the plugin's patches, where the command line asks for them."""
    if not {"--use-asynchzp", "--use-pasa-attention"} & set(argv):
        yield
        return
    from megatron_asynchzp.mcore.patches.patch import apply_patches, remove_patches
    from megatron_asynchzp.mcore.patches.table import PATCHES

    apply_patches(PATCHES)
    try:
        yield
    finally:
        remove_patches()


@contextlib.contextmanager
def on_device(uses_te: bool = False) -> Iterator[None]:
    """Run on this rank's CUDA device instead of gloo.

    The CPU platform's implementations are chosen, and nothing else of it. `uses_te`: with layers of
    Transformer Engine, experts in groups and Mamba among them.
    """
    from megatron.core.ssm import mamba_mixer

    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.cpu_platform.arguments import CPU_VALUES
    from megatron_asynchzp.cpu_platform.platform import replace_mamba
    from megatron_asynchzp.replacements import Replacements

    values = CPU_VALUES | {"distributed_backend": "nccl"}
    del values["use_cpu_initialization"], values["nccl_ub"]  # as the flags say
    if uses_te:
        values |= {"transformer_impl": "transformer_engine"}
        del values["moe_grouped_gemm"], values["te_rng_tracker"]
    forward_step, names = _forward_step, Replacements("megatron")
    replace_mamba(names, mamba_mixer)

    def choose(args: Any) -> list[str]:
        for name, value in values.items():
            if hasattr(args, name):
                setattr(args, name, value)
        return []

    def forward_on_device(batches: Iterator, model: torch.nn.Module, **options: Any) -> tuple:
        batch = {name: value.cuda() for name, value in next(batches).items()}
        return forward_step(iter([batch]), model, **options)

    with (
        mock.patch.multiple(cpu_platform, install=lambda: None, apply_cpu_defaults=choose),
        mock.patch.dict(globals(), _forward_step=forward_on_device),
    ):
        try:
            yield
        finally:
            names.restore()


@contextlib.contextmanager
def listening(
    begin_step: Callable[[], None],
    end_step: Callable[[dict[str, Any]], None],
    **others: Callable[[Any], None],
) -> Iterator[None]:
    """Listen to functions of Megatron's training loop; all still do their work.

    begin_step: called before train_step; end_step: with the arguments of training_log, by name;
    others: with the result of the function of that name.
    """
    from megatron.training import training

    def heard(original: Callable, listener: Callable[[Any], None]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            listener(result)
            return result

        return call

    replaced: dict[str, Any] = {
        name: heard(getattr(training, name), fn) for name, fn in others.items()
    }
    log, step = training.training_log, replaced.get("train_step", training.train_step)
    log_signature = signature(log)

    def heard_step(*args: Any, **kwargs: Any) -> Any:
        begin_step()
        return step(*args, **kwargs)

    @wraps(log)  # with its signature, so that one may listen to a run that is listened to
    def heard_log(*args: Any, **kwargs: Any) -> Any:
        end_step(log_signature.bind(*args, **kwargs).arguments)
        return log(*args, **kwargs)

    replaced |= {"train_step": heard_step, "training_log": heard_log}
    with mock.patch.multiple(training, **replaced):
        yield


class _Recorder:
    """Fills in a record. `inspect` as in run_pretrain."""

    def __init__(self, record: RunRecord, inspect: Callable | None):
        self._record, self._inspect = record, inspect
        self._live: tuple = ()
        self._begin_s = 0.0

    def set_up(self, built: tuple) -> None:
        self._live = built[:2]  # model chunks, optimizer

    def begin_step(self) -> None:
        self._begin_s = time.perf_counter()
        self._record.begins_s.append(self._begin_s)

    def stepped(self, _: Any) -> None:
        self._record.step_s.append(time.perf_counter() - self._begin_s)

    def end_step(self, logged: dict[str, Any]) -> None:
        from megatron.training import get_args

        args: Any = get_args()
        self._record.steps.append(_step_record(logged))
        if self._inspect is not None and logged["iteration"] == args.train_iters:
            self._record.inspected = self._inspect(*self._live)

    def evaluated(self, result: tuple) -> None:
        self._record.validation_loss = _number((result[0] or {}).get("lm loss"))


def _step_record(gathered: dict[str, Any]) -> StepRecord:
    return StepRecord(
        loss=_number(gathered["loss_dict"].get("lm loss")),
        grad_norm=_number(gathered["grad_norm"]),
        num_zeros=_number(gathered["num_zeros_in_grad"]),
        loss_scale=float(gathered["loss_scale"]),
        is_skipped=bool(gathered["skipped_iter"]),
        learning_rate=_number(gathered["learning_rate"]),
        params_norm=_number(gathered["params_norm"]),
        more_losses=_more_losses(),
    )


def _more_losses() -> dict[str, tuple[float, ...]]:
    """The values of a step that Megatron keeps with the loss, before it reduces and logs them."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    kept = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    if (predicted := MTPLossLoggingHelper.tracker.get("loss_values")) is not None:
        kept["prediction"] = predicted
    return {name: tuple(values.tolist()) for name, values in kept.items()}


def _number(value: Any) -> float | None:
    """A Python float of a number or one-element tensor, in full precision."""
    return None if value is None else float(value)


def _forget_losses() -> None:
    """Megatron keeps these of a process, with the groups and the layers of the last model."""
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker = {}


def _fill_in_losses(record: RunRecord):
    """Give the stages without a loss the one of the last stage, and all ranks what each kept."""
    gathered: list[Any] = [None] * dist.get_world_size()
    kept = [step.more_losses for step in record.steps]
    dist.all_gather_object(gathered, (record.losses, record.validation_loss, kept))
    losses, validation_loss, _ = next(one for one in gathered if None not in one[0])
    of_ranks = zip(*(kept for _, _, kept in gathered), strict=True)
    record.steps = [
        replace(step, loss=loss, more_losses=_joined(by_rank))
        for step, loss, by_rank in zip(record.steps, losses, of_ranks, strict=True)
    ]
    if record.validation_loss is None:
        record.validation_loss = validation_loss


def _joined(by_rank: Sequence[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    names = sorted({name for kept in by_rank for name in kept})
    return {name: tuple(v for kept in by_rank for v in kept.get(name, ())) for name in names}


def close_communication():
    """Finish what the last step left in flight while every rank is still here."""
    if communication := sys.modules.get("megatron_asynchzp.mcore.step.communication"):
        communication.Communication.close_all()


def tear_down():
    """Leave only the default process group and the platform behind."""
    from megatron.training import training

    training.destroy_global_state()
    _forget_losses()
    if graphs := sys.modules.get("megatron.core.transformer.cuda_graphs"):
        graphs.delete_cuda_graphs()
    if graphs := sys.modules.get("megatron.core.full_cuda_graph"):
        for buffers in graphs.StaticBufferLoader.static_buffers.values():
            buffers.clear()  # of the last run's sizes
        graphs.FullCudaGraphWrapper.curr_iteration.update(training=0, validation=0)
    if te := sys.modules.get("transformer_engine.pytorch"):
        te.quantization.FP8GlobalStateManager.reset()  # it knows the last model's groups
    writer: Any = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if writer is not None:
        writer._results_queue = None  # with it goes the process of its manager, where it has one
    groups = dist.distributed_c10d._world.pg_map
    for group in [group for group in groups if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()  # models are cycles: hooks hold them
