# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces how Megatron builds and wraps a model, its optimizer and its attention, by our flags."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from megatron_asynchzp.errors import ConfigurationError, raise_first
from megatron_asynchzp.mcore.flags.checks import faults_of_tokens
from megatron_asynchzp.mcore.patches.patch import replaces
from megatron_asynchzp.mcore.run.settings import Run, RunSettings, run_args


class Seam(NamedTuple):
    """What a script, or a framework, gets where it wraps a model and makes its optimizer."""

    wrapper: type  # in place of DistributedDataParallel
    make_optimizer: Callable[[Mapping[str, Any]], Any]  # of get_megatron_optimizer's arguments


def _build(original: Callable, *args: Any, **options: Any) -> Any:
    build, run = partial(original, *args, **options), Run.current()
    if run is None or (run.settings is None and run.capture is None):
        return build()
    given = signature(original).bind(*args, **options)
    given.apply_defaults()
    if not given.arguments["wrap_with_ddp"]:
        return build()
    model = _build_in_shards(run, given.arguments, build) if run.settings else build()
    if run.capture is not None:
        from megatron_asynchzp.mcore.attention.capture import capture_attention

        capture_attention(run.capture, run.megatron, [chunk.module for chunk in model])
    return model


def _build_in_shards(run: Run, given: Mapping[str, Any], build: Callable[[], Any]) -> Any:
    from megatron_asynchzp.mcore.start.construction import constructing
    from megatron_asynchzp.mcore.start.low_precision import faults_of_machine

    args, settings = run.megatron, run.settings
    assert settings is not None
    raise_first(faults_of_machine(args))
    if args.cuda_graph_impl == "local":
        _prepare_own_graphs()
    if args.rank == 0:
        raise_first(faults_of_tokens(args))
        print("megatron_asynchzp: building the model, one layer at a time", flush=True)
    groups = given["pg_collection"] or _process_groups()
    with constructing(settings, groups, has_experts=args.expert_model_parallel_size > 1):
        return build()


build_models = replaces(
    "megatron.training.models.dist_utils.unimodal_build_distributed_models",
    "build_model_func transformer_config pg_collection ddp_config "
    "overlap_param_gather_with_optimizer_step use_megatron_fsdp use_torch_fsdp2 wrap_with_ddp "
    "data_parallel_random_init mixed_precision_wrapper pre_wrap_hook model_type "
    "use_layer_wise_distributed_optimizer[0.20] use_layer_wise_param_layout[0.20]",
    why="model builders build models here: each layer is sharded as soon as it is complete",
    drop_when="a builder calls back when a layer is complete",
)(_build)

get_model = replaces(
    "megatron.training.training.get_model",
    "model_provider_func model_type wrap_with_ddp config pg_collection",
    why="scripts that pass a model_provider build models here, as above",
    drop_when="Megatron drops get_model",
)(_build)


def _prepare_own_graphs() -> None:
    # Before graphs have memory Megatron would go on on another stream, which waits for nothing.
    import torch
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    if CudaGraphManager.global_mempool is None:
        CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()


def _process_groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


@replaces(
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel.__init__",
    "self config ddp_config module disable_bucketing pg_collection full_param_layout[0.19]",
    why="scripts and frameworks wrap a model chunk here; the class is replaced and not its name, "
    "in each module that has imported it",
    drop_when="megatron-core takes the wrapper's class from the DDP configuration",
)
def wrap(original: Callable, self: Any, *args: Any, **options: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel

    if type(self) is DistributedDataParallel and (seam := _seam()) is not None:
        self.__class__ = seam.wrapper
        self.__init__(*args, **options)
    else:
        original(self, *args, **options)


@replaces(
    "megatron.core.optimizer.get_megatron_optimizer",
    "config model_chunks config_overrides use_gloo_process_groups pg_collection "
    "dump_param_to_param_group_map",
    why="scripts and frameworks make the optimizer here, where all chunks of a rank are known: the "
    "model is sharded",
    drop_when="the wrapper may supply its own optimizer",
)
def get_optimizer(original: Callable, *args: Any, **options: Any) -> Any:
    if (seam := _seam()) is None:
        return original(*args, **options)
    given = signature(original).bind(*args, **options)
    given.apply_defaults()
    return seam.make_optimizer(given.arguments)


def _seam() -> Seam | None:
    run = Run.current()
    if run is None or (run.config is None and run.settings is None):
        return None
    if run.seam is not None:
        return run.seam
    from megatron_asynchzp.mcore.step.data_parallel import AsyncHZPDataParallel

    return Seam(AsyncHZPDataParallel, _make_optimizer)


def _make_optimizer(given: Mapping[str, Any]) -> Any:
    from megatron_asynchzp.mcore.step.optimizer import get_asynchzp_optimizer

    chunks, groups, settings = given["model_chunks"], given["pg_collection"], Run.current_settings()
    assert settings is not None
    _shard(run_args(), settings, chunks, groups or chunks[0].given_groups or _process_groups())
    overrides, moments = given["config_overrides"], settings.moments
    return get_asynchzp_optimizer(given["config"], chunks, overrides, groups, moments)


def _shard(args: Any, settings: RunSettings, chunks: Sequence, pg_collection: Any) -> None:
    from megatron_asynchzp.mcore.checkpoint.save_guard import claim_save_directory
    from megatron_asynchzp.mcore.step.data_parallel import reduce_last_micro_batch, shard_chunks

    claim_save_directory(args)
    construction = chunks[0].construction
    shard_chunks(chunks, pg_collection, settings, construction)
    # Megatron sets this for --overlap-grad-reduce, which is switched off: it overlaps anyway.
    reduce_last_micro_batch(chunks)
    if args.qk_clip:
        from megatron_asynchzp.mcore.step.qk_clip import refuse_unknown_attention

        refuse_unknown_attention(chunks)
    if settings.config.save_trained_only:
        from megatron_asynchzp.mcore.step.data_parallel import refuse_all_trained

        refuse_all_trained(chunks)
    if construction is not None and pg_collection.dp_cp.rank() == pg_collection.tp.rank() == 0:
        for line in construction.describe_whole([u for chunk in chunks for u in chunk.units]):
            print(f"megatron_asynchzp: {line}", flush=True)
    if settings.config.adapter_rank is not None:
        from megatron_asynchzp.mcore.run.planned import refuse_other_adapters

        trained = [u.layout.numel for chunk in chunks for u in chunk.units if u.is_trained]
        refuse_other_adapters(args, settings, pg_collection.pp.rank(), sum(trained))
    if args.rank == 0:
        from megatron_asynchzp.mcore.start.start_table import budget_hint, format_start_table

        print(format_start_table(chunks, settings, construction), flush=True)
        batch = args.micro_batch_size * args.data_parallel_size
        if hint := budget_hint(chunks, args.global_batch_size // batch):
            print(f"megatron_asynchzp: {hint}", flush=True)


@replaces(
    "megatron.core.transformer.cuda_graphs.TECudaGraphHelper",
    "model config seq_length micro_batch_size optimizers pg_collection",
    why="layers are captured into CUDA graphs with their parameters in place, and without their "
    "gathers and reductions, which stand around each replay",
    drop_when="the helper tells the wrapper before and after it captures",
)
def capture_layers(original: Callable, model: Sequence, *args: Any, **options: Any) -> Any:
    helper = original(model, *args, **options)
    if run_args() is not None:
        capture = helper.create_cudagraphs

        def create_cudagraphs() -> None:
            from megatron_asynchzp.mcore.step.schedule_plan import keeping_late_grads

            late: set[Any] = set()
            with ExitStack() as chunks:
                for chunk in model:
                    chunks.enter_context(chunk.runtime.rehearsing(late))
                    chunks.enter_context(keeping_late_grads(chunk.module.modules(), late))
                with _named_failure("transformer_engine"):
                    capture()

        helper.create_cudagraphs = create_cudagraphs
    return helper


@contextmanager
def _named_failure(impl: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConfigurationError(
            f"--cuda-graph-impl {impl}: a layer cannot be captured "
            f"({str(error).partition(chr(10))[0]}); name other parts of it with "
            "--cuda-graph-modules, or drop the flag"
        ) from error


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Let random numbers drawn inside, to warm up, be drawn again."""
    import torch
    from megatron.core.tensor_parallel.random import get_all_rng_states

    default = torch.cuda.default_generators[torch.cuda.current_device()]
    generators = [default, *(get_all_rng_states() or {}).values()]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def capture_backward(runner: Any, capture: Callable) -> None:
    for param in runner.params_to_backprop:  # 0.20 skips those that an earlier capture has marked
        param.grad_added_to_main_grad = False
    capture()


@replaces(
    "megatron.core.transformer.cuda_graphs.create_cudagraphs",
    "",
    why="as above, of the layers that Megatron captures by itself, whose graphs add to main_grad",
    drop_when="Megatron asks the wrapper for the place of a gradient and tells it of the capture",
)
def capture_recorded(original: Callable) -> Any:
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

    runners = [runner for runner, *_ in _CudagraphGlobalRecord.cudagraph_record]
    if run_args() is None or not runners:
        return original()
    import torch

    from megatron_asynchzp.mcore.step.communication import Communication

    leaving_grads: set[Any] = set()
    with ExitStack() as chunks:
        for runtime in Communication.open_runtimes():
            chunks.enter_context(runtime.rehearsing(leaving_grads))
        # torch captures no backward whose nodes are those of the default stream.
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        for runner in runners:
            runner.create_bwd_graph = partial(capture_backward, runner, runner.create_bwd_graph)
        with torch.cuda.stream(aside), _random_numbers_kept(), _named_failure("local"):
            result = original()
        here.wait_stream(aside)
        for runner in runners:
            leaving_grads.update(runner.params_to_backprop)
    return result


@replaces(
    "megatron.core.full_cuda_graph.FullCudaGraphWrapper.__call__",
    "self args kwargs",
    why="a whole iteration is captured with its gathers and reductions, and nothing is in flight "
    "before a replay",
    drop_when="the wrapper tells the model chunks before and after it captures and replays",
)
def run_iteration(original: Callable, self: Any, **options: Any) -> Any:
    if run_args() is None:
        return original(self, **options)
    from megatron_asynchzp.mcore.step.captured_iteration import run_iteration as run

    return run(original, self, options)


@replaces(
    "megatron.core.transformer.spec_utils.build_module",
    "spec_or_module args kwargs",
    why="every attention layer, whatever model it belongs to, gets its core attention from the "
    "spec that is built here; and a layer that has been built is complete",
    drop_when="Megatron lets a flag name a core attention, and calls back for each layer",
)
def build_module(original: Callable, spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    if (run := Run.current()) is not None and run.attention is not None:
        from megatron_asynchzp.mcore.attention.core_attention import use_pasa_in

        spec_or_module = use_pasa_in(spec_or_module, run.attention)
    module = original(spec_or_module, *args, **kwargs)
    if run is not None and (run.settings or run.config):
        from megatron_asynchzp.mcore.start.construction import note_built

        note_built(module)
    return module
