# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Megatron with Transformer Engine's own layers and fused optimizers, over the stand-in for its
extension, on the emulated device: as stock DDP trains it, in bf16 and in FP8."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from scripts.testbed.device.delays import Delays
from scripts.testbed.device.worlds import DeviceFailure, DeviceWorlds
from scripts.testbed.megatron_flags import (
    FULL_RECOMPUTE,
    MIXTURE_OF_EXPERTS,
    PIPELINE_PARALLEL,
    TENSOR_PARALLEL,
    size_flags,
)
from scripts.testbed.megatron_runs import RunRecord, Steps, gpt_args, on_device, run_pretrain

pytestmark = pytest.mark.slow

# fmt: off
RECIPES = {
    "bf16": ["--bf16"],
    "tensorwise": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "delayed": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed",
                "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"],
    "blockwise": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    # Unclipped: a norm that is summed in another order moves an fp32 parameter by a last bit, and
    # the grid of FP8 makes 1e-4 of it.
    "tensorwise of fp32": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise",
                           "--clip-grad", "0"],
    "mxfp8": ["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
    "nvfp4": ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"],
}
BASE = gpt_args("--train-iters", "4", "--hidden-size", "128",
                "--attention-backend", "unfused", "--no-bias-swiglu-fusion")
FEWER = ["--global-batch-size", "4"]  # two micro-batches a rank, for what takes many steps
GROUPED_EXPERTS = [*MIXTURE_OF_EXPERTS, "--moe-grouped-gemm"]
FUSED = ["--use-transformer-engine-op-fuser", "--swiglu"]
# fmt: on
BLACKWELL = {"ASYNCHZP_DEVICE_MAJOR": "10"}
# Megatron fuses experts with a GPU's kernels in mind, and Transformer Engine goes without here.
FUSES_EXPERTS = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}
# Each law of delay with other sizes.
OURS = [
    (Delays(), (2, 2, 2)),
    (Delays("uniform", 1), (2, 2, 2)),
    (Delays("slow-stream", 2), (1, 1, 2)),
    (Delays("slow-rank", 3), (1, 2, 2)),
    (Delays("on-demand", 4, 200), (2, 2, 2)),
]


class Run(NamedTuple):
    """fp8: whether a layer quantised anything; copies: bytes of quantised weights at the end;
    counted, planned: the same as the start table and the planner have them."""

    steps: Steps
    fp8: bool
    copies: int
    counted: int
    planned: float
    log: str


def quantised(model_chunks: list, optimizer: Any) -> tuple[bool, int, int, float]:
    from megatron.core.parallel_state import get_pipeline_model_parallel_rank
    from megatron.training import get_args

    from megatron_asynchzp.mcore.run.planned import costing_of
    from megatron_asynchzp.mcore.start.low_precision import kept_nbytes

    planned = 0.0
    if getattr(get_args(), "use_asynchzp", False):
        memory = costing_of(get_args()).stage_memory(get_pipeline_model_parallel_rank())
        planned = memory.in_flight.get("quantised copies of weights", 0.0)
    counted = sum(kept_nbytes(chunk.module, chunk.config) for chunk in model_chunks)
    layers = [layer for chunk in model_chunks for layer in chunk.modules()]
    kept = [one for layer in layers for one in getattr(layer, "_fp8_workspaces", {}).values()]
    parts = [part for one in kept for part in vars(one).values() if isinstance(part, torch.Tensor)]
    nbytes = sum(part.nbytes for part in parts)
    return any(getattr(layer, "fp8", False) for layer in layers), nbytes, counted, planned


def train(argv: Sequence[str], prepare: Callable[[list], list] | None = None) -> Run:
    with on_device(uses_te=True):
        record: RunRecord = run_pretrain([*argv], inspect=quantised, prepare=prepare)
    return Run(record.losses_and_norms, *record.inspected, record.log)


def train_beside(line: Sequence[str], more: Sequence[str] = ()) -> list[Run]:
    """Stock DDP, and each of OURS, with more flags."""
    from scripts.testbed.device import inside

    found = [train(line)]
    for law, sizes in OURS:
        inside.set_delays(law, dist.get_rank(), dist.get_world_size())
        found.append(train([*line, *more, *size_flags(sizes)]))
    return found


def env_of(recipe: str) -> dict[str, str]:
    return BLACKWELL if recipe in ("mxfp8", "nvfp4") else {}


def equal(ours: Steps, stock: Steps) -> bool:
    """Losses bit for bit; norms, whose squares are summed by fragments, within 1e-6."""
    return [loss for loss, _ in ours] == [loss for loss, _ in stock] and all(
        mine == pytest.approx(other, rel=1e-6) for (_, mine), (_, other) in zip(ours, stock)
    )


CODES = ["--fp8-param-gather"]
FOUR_BIT_CODES = ["--fp4-param-gather"]


def codes_of(recipe: str) -> list[str]:
    """Flags that gather weights as codes where that changes no bit."""
    none = {"bf16": [], "delayed": [], "nvfp4": FOUR_BIT_CODES}
    return none.get(recipe, CODES)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_gathers_as_codes_leave_every_bit_as_it_is(te_worlds: DeviceWorlds, recipe: str):
    line, codes, env = [*BASE, *RECIPES[recipe]], codes_of(recipe), env_of(recipe)
    stock, *ours = te_worlds.run(train_beside, 2, line, codes, timeout_s=850, env=env)[0]
    for run in ours:
        assert equal(run.steps, stock.steps)
        assert run.copies == 0 and "gathered as codes" in run.log


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_stock_ddp_bit_for_bit_under_every_law_of_delay(
    te_worlds: DeviceWorlds, recipe: str
):
    line = [*BASE, *FEWER, *RECIPES[recipe]]
    stock, *ours = te_worlds.run(train_beside, 2, line, timeout_s=590, env=env_of(recipe))[0]
    assert stock.fp8 == (recipe != "bf16")
    assert len(stock.steps) == 4 and len({loss for loss, _ in stock.steps}) == 4
    for run in ours:
        assert run.fp8 == stock.fp8
        assert equal(run.steps, stock.steps)
        # Delayed scaling alone keeps copies of weights: backward would find another scale.
        assert run.copies == (stock.copies if recipe == "delayed" else 0)
        assert run.copies == pytest.approx(run.counted, rel=0.01)
        assert run.planned == run.counted
    assert (stock.copies > 0) == stock.fp8


# fmt: off
TENSOR = [*TENSOR_PARALLEL, "--sequence-parallel"]
VARIANTS = {
    "first and last layers in bf16": (2, "tensorwise", [
        "--num-layers", "4", "--first-last-layers-bf16"]),
    "grouped experts": (2, "blockwise", [*GROUPED_EXPERTS, "--expert-model-parallel-size", "2"]),
    # Unclipped: see "tensorwise of fp32".
    "grouped experts, tensorwise": (2, "tensorwise", [
        *GROUPED_EXPERTS, "--mtp-num-layers", "1", "--position-embedding-type", "rope",
        "--clip-grad", "0"]),
    "grouped experts, delayed": (2, "delayed", GROUPED_EXPERTS),
    "grouped experts, nvfp4": (2, "nvfp4", [
        *GROUPED_EXPERTS, "--moe-router-padding-for-quantization", "--clip-grad", "0"]),
    "recomputation": (2, "tensorwise", FULL_RECOMPUTE),
    "recomputation, delayed": (2, "delayed", FULL_RECOMPUTE),
    "pipeline": (2, "delayed", PIPELINE_PARALLEL),
    "tensor": (4, "tensorwise", TENSOR),
    "tensor, delayed": (4, "delayed", TENSOR),
    "tensor, mxfp8": (4, "mxfp8", TENSOR),
    "pipeline, mxfp8": (2, "mxfp8", PIPELINE_PARALLEL),
    "recomputation, mxfp8": (2, "mxfp8", FULL_RECOMPUTE),
    "selective recomputation, mxfp8": (2, "mxfp8", ["--disable-bias-linear"]),
    "selective recomputation, blockwise": (2, "blockwise", ["--disable-bias-linear"]),
}
# For ours alone: in stock this changes losses from the third step on. With biases it is refused.
SELECTIVE = ["--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp"]
RECOMPUTED = dict.fromkeys(
    ["selective recomputation, blockwise", "selective recomputation, mxfp8"], SELECTIVE)
# fmt: on


PREDICTED_AND_SHARED = (
    "--mtp-num-layers 1 --position-embedding-type rope --moe-shared-expert-intermediate-size 64"
)


def train_two(line: Sequence[str], ours: Sequence[str]) -> list[Run]:
    return [train(line), train([*line, *ours])]


@pytest.mark.parametrize("name", VARIANTS)
def test_other_models_have_the_losses_of_stock_too(te_worlds: DeviceWorlds, name: str):
    """Ours gathers as codes where that changes no bit."""
    ranks, recipe, more = VARIANTS[name]
    line, codes = [*BASE, *RECIPES[recipe], *more], codes_of(recipe)
    sizes = (1, 1, 1) if "pipeline" in name else (2, 2, 2)
    env = env_of(recipe) | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ranks == 4 else {})
    flags = [*codes, *size_flags(sizes), *RECOMPUTED.get(name, [])]
    stock, ours = te_worlds.run(train_two, ranks, line, flags, timeout_s=590, env=env)[0]
    assert stock.fp8 and ours.fp8
    assert len({loss for loss, _ in stock.steps}) == 4
    for (loss, norm), (stocks, stocks_norm) in zip(ours.steps, stock.steps, strict=True):
        assert loss == pytest.approx(stocks, rel=1e-6)
        assert norm == pytest.approx(stocks_norm, rel=1e-6)
    assert ours.copies == pytest.approx(ours.counted, rel=0.05)  # with the scales of blocks
    assert ours.planned == pytest.approx(ours.counted, rel=0.02)  # with a router
    assert ("quantised copies of weights" in ours.log) == (ours.counted > 0)


LAYERNORM = "--recompute-granularity selective --recompute-modules layernorm moe_act"
GATHERS = [*CODES, "--reuse-grad-buf-for-mxfp8-param-ag", "--use-distributed-optimizer"]
ON_TWO = " ".join([*GROUPED_EXPERTS, "--expert-model-parallel-size", "2"])
LATE = f"{ON_TWO} --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
FUSES = " ".join(FUSED)
SHARED = "--moe-shared-expert-intermediate-size 64"
FUSED_OR_LATE = {
    "late: predicted, shared": ("bf16", f"{LATE} {PREDICTED_AND_SHARED}"),
    "late: dense layer, shared, recomputed": (
        "bf16",
        f"{LATE} {LAYERNORM} mlp shared_experts --num-layers 3 --moe-layer-freq [0,1,1] {SHARED}",
    ),
    "late: codes, predicted, shared, recomputed": (
        "tensorwise",
        f"{LATE} --fp8-param-gather {LAYERNORM} {PREDICTED_AND_SHARED}",
    ),
    "late: delayed": ("delayed", LATE),
    "late: blockwise": ("blockwise", LATE),
    "late: mxfp8, shared": ("mxfp8", f"{LATE} {SHARED}"),
    "late: mxfp8, as codes": ("mxfp8", " ".join([LATE, *GATHERS])),
    "late: nvfp4, recomputed": (
        "nvfp4",
        f"{LATE} --moe-router-padding-for-quantization {LAYERNORM}",
    ),
    "fused: dense": ("bf16", f"{FUSES} --normalization RMSNorm"),
    "fused: experts": ("mxfp8", " ".join([FUSES, ON_TWO, *GATHERS])),
    "fused, late: experts": ("mxfp8", f"{FUSES} {LATE}"),
    "fused: experts, predicted, recomputed": (
        "bf16",
        f"{FUSES} {' '.join(GROUPED_EXPERTS)} {PREDICTED_AND_SHARED} "
        "--recompute-granularity selective --recompute-modules moe layernorm core_attn",
    ),
}


@pytest.mark.parametrize("name", FUSED_OR_LATE)
def test_fused_operations_and_weight_gradients_that_come_late_have_the_losses_of_stock(
    te_worlds: DeviceWorlds, name: str
):
    """Late: from the third step on a unit goes without saved-tensor hooks, which would gather it
    where a part does not name it."""
    recipe, more = FUSED_OR_LATE[name]
    line = [*BASE, *RECIPES[recipe], "--clip-grad", "1000"]
    stocks = [flag for flag in more.split() if flag not in GATHERS]
    ours = [*size_flags((2, 2, 2)), *more.split()]
    env = (FUSES_EXPERTS if "fused" in name else {}) | env_of(recipe)
    stock, run = te_worlds.run(train_two, 2, [*line, *stocks], ours, timeout_s=590, env=env)[0]
    assert "op_fuser = False" not in run.log and "delay_wgrad_compute = False" not in run.log
    assert len({loss for loss, _ in stock.steps}) == 4
    assert equal(run.steps, stock.steps)
    if "fused" in name:
        assert run.planned == run.counted and (run.counted > 0) == (recipe == "mxfp8")


def saved_and_resumed(base: Sequence[str], more: Sequence[str], folder: str) -> list[Run]:
    """A whole run; one that saves after two steps; and three that go on from there: with the same
    sizes, with others, and stock. more: flags of ours."""
    save = ["--save", folder, "--save-interval", "2", "--ckpt-format", "torch_dist"]
    load = ["--load", folder, "--ckpt-step", "2", "--ckpt-format", "torch_dist"]
    ours, others = [*more, *size_flags((2, 2, 2))], [*more, *size_flags((1, 1, 2))]
    lines = [ours, [*ours, *save], [*ours, *load], [*others, *load], load]
    return [train([*base, *line]) for line in lines]


# fmt: off
GRADS = "main gradients in bf16"
# Stock keeps them so too, for one micro-batch after the other, and clips copies in fp32.
STOCKS_GRADS = ["--bf16", "--grad-reduce-in-bf16", "--clip-grad", "0"]
OUR_GRADS = ["--main-grads-dtype", "bf16"]
# fmt: on


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", GRADS])
def test_a_run_goes_on_with_its_histories_in_other_sizes_and_in_stock(
    te_worlds: DeviceWorlds, tmp_path: Path, recipe: str
):
    base = [*BASE, *RECIPES.get(recipe, STOCKS_GRADS)]
    more = OUR_GRADS if recipe == GRADS else CODES * (recipe == "mxfp8")
    if recipe == GRADS:  # with more of them sizes decide when sums are rounded
        base += ["--global-batch-size", "2"]
    # Transformer Engine from 2.20 on wants to be told that its pickled histories may be loaded.
    env = {"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"} | env_of(recipe)
    whole, saving, *resumed = te_worlds.run(
        saved_and_resumed, 2, base, more, str(tmp_path), timeout_s=590, env=env
    )[0]
    assert saving.steps == whole.steps
    for run in resumed:
        assert equal(run.steps, whole.steps[2:])


def test_a_recipe_that_the_gpu_cannot_compute_is_refused_before_the_model_is_built(
    te_worlds: DeviceWorlds,
):
    line = [*BASE, *RECIPES["mxfp8"], *size_flags((1, 2, 2))]
    with pytest.raises(DeviceFailure) as failure:
        te_worlds.run(train, 2, line)
    assert "ConfigurationError: --fp8-format e4m3 --fp8-recipe mxfp8: Device compute" in str(
        failure.value
    )


def compared_with_references() -> None:
    """Transformer Engine's own Python beside the stand-in for its kernels."""
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling
    from transformer_engine.pytorch import quantization
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as references
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    from scripts.testbed.te import extension, formats

    device = torch.device("cuda", dist.get_rank())
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).to(device).bfloat16()
    made = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device)(x)
    reference = references.CurrentScalingQuantizerRef(formats.E4M3).quantize(x)
    assert torch.equal(made._data, reference.data.view(torch.uint8))
    assert torch.equal(made._transpose, reference.data_t.view(torch.uint8))
    assert torch.equal(made._scale_inv.view(-1), reference.scale.view(-1))

    for dimension in (1, 2):
        for way in ("rowwise", "columnwise"):
            ways = {one: one == way for one in ("rowwise", "columnwise")}
            quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=dimension, **ways)
            tensor = quantizer(x)
            own = extension._values(tensor, way == "rowwise").bfloat16()
            assert torch.equal(tensor.dequantize(dtype=torch.bfloat16), own)

    for is_weight in (False, True):
        quantizer = NVFP4Quantizer(with_rht=not is_weight, with_2d_quantization=is_weight)
        shape = (16, 16) if is_weight else (1, 16)
        of_te = NVFP4QuantizerRef(Fp4Formats.E2M1, True, True, quant_tile_shape=shape)
        of_te.with_rht = quantizer.with_rht
        made, reference = quantizer(x), of_te.quantize(x)
        for name, codes, scales in (
            ("rowwise", reference.data, reference.scale),
            ("columnwise", reference.data_t, reference.scale_t),
        ):
            assert torch.equal(getattr(made, f"_{name}_data"), codes)
            found = getattr(made, f"_{name}_scale_inv").view(formats.E4M3)
            rows, columns = scales.shape
            assert torch.equal(found[:rows, :columns].float(), scales.float())
        assert torch.equal(made._amax_columnwise, reference.global_amax_col)
    # Rounded at random the mean is the value.
    values = torch.linspace(-6, 6, 97, device=device)[:, None].expand(-1, 4000)
    codes = formats.e2m1_of(values, torch.rand(values.shape, device=device)).long()
    of_codes = torch.tensor([*formats.E2M1_VALUES, *(-v for v in formats.E2M1_VALUES)])
    mean = of_codes.to(device)[codes].mean(1)
    assert (mean - values[:, 0]).abs().max() < 0.06

    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo="max")
    history, scale = torch.rand(3, 2, device=device), torch.rand(2, device=device)
    theirs, their_scale = history.clone(), scale.clone()
    newest = torch.tensor([5.0, 0.0], device=device)
    theirs[0] = newest
    quantization._amax_and_scale_update(theirs, their_scale, 448.0, recipe)
    extension.fused_amax_and_scale_update_after_reduction(
        newest, [history], [scale], "max", DType.kFloat8E4M3, 0
    )
    assert torch.equal(history, theirs)
    torch.testing.assert_close(scale, their_scale, rtol=1e-6, atol=0)  # theirs is rounded twice
    assert Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale


def test_the_stand_in_agrees_with_the_references_in_transformer_engine(te_worlds: DeviceWorlds):
    te_worlds.run(compared_with_references, 1)


def train_with_grads_in_bf16(micro_batches: int) -> list[tuple[bool, Run]]:
    """Stock DDP, and ours with four choices of sizes; whether G is 1."""
    batch = ["--global-batch-size", str(2 * micro_batches)]
    found = [(True, train([*BASE, *STOCKS_GRADS, *batch]))]
    for sizes in ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)):
        line = [*BASE, *STOCKS_GRADS, *batch, *OUR_GRADS, *size_flags(sizes)]
        found.append((sizes[1] == 1, train(line)))
    return found


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_main_gradients_in_bf16_are_stocks(te_worlds: DeviceWorlds, micro_batches: int):
    """Bit for bit where the ranks are summed after the micro-batches, as stock does it, or there is
    one; else each micro-batch's sum over G is rounded."""
    runs = te_worlds.run(train_with_grads_in_bf16, 2, micro_batches, timeout_s=590)[0]
    (_, stock), *ours = runs
    assert len({loss for loss, _ in stock.steps}) == 4
    for is_first, run in ours:
        assert "keeps main gradients in bf16" in run.log
        if is_first or micro_batches == 1:
            assert equal(run.steps, stock.steps)
            continue
        for (loss, norm), (stocks, stocks_norm) in zip(run.steps, stock.steps, strict=True):
            assert loss == pytest.approx(stocks, rel=2e-4)
            assert norm == pytest.approx(stocks_norm, rel=2e-3)


def train_with_flags_for_gathers(line: Sequence[str]) -> list[Run]:
    """Stock, stock with the flags, the same with its overlap, and ours with them: each from
    Megatron's own weights, because stock's main parameters begin with the values that Transformer
    Engine kept while it built them, not with what the test-bed draws afterwards."""
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    lines = [[], GATHERS, [*GATHERS, *overlap], [*GATHERS, *overlap, *size_flags((2, 2, 2))]]
    return [train([*line, *flags], prepare=lambda chunks: chunks) for flags in lines]


def test_mxfp8_with_the_flags_for_its_gathers_is_stocks_with_and_without_them(
    te_worlds: DeviceWorlds,
):
    """Stock frees parameters while its stream still copies them into its buffers, and orders that
    stream before the memory can be handed out again. Where memory is poisoned as soon as it is
    freed, it trains on NaN."""
    line, late = [*BASE, *RECIPES["mxfp8"]], {"ASYNCHZP_DEVICE_FREES": "late"}
    env = env_of("mxfp8") | late
    runs = te_worlds.run(train_with_flags_for_gathers, 2, line, timeout_s=590, env=env)[0]
    stock, *with_flags, ours = runs
    assert all(run.fp8 for run in runs) and len({loss for loss, _ in stock.steps}) == 4
    assert all(run.steps == stock.steps for run in with_flags)
    assert equal(ours.steps, stock.steps) and ours.copies == 0
    assert ours.log.count("are gathered as codes") == 2
    with pytest.raises(DeviceFailure, match="freeing .* writes .* that aten::copy_ .* reads"):
        te_worlds.run(train, 2, [*line, "--use-distributed-optimizer"], env=env_of("mxfp8"))


OTHER_VERSIONS = ["2.15", "2.16", "2.17", "2.18", "2.19"]


def train_recipes() -> list[tuple[str, Run, Run]]:
    """Of two recipes, and of grouped experts: stock, and ours."""
    lines = {name: [*BASE, *RECIPES[name]] for name in ("tensorwise", "delayed", "blockwise")}
    lines["grouped experts"] = [*lines["blockwise"], *GROUPED_EXPERTS]
    shared = ["--train-iters", "2"]
    found = []
    for name, line in lines.items():
        ours = [*shared, *(CODES if name == "tensorwise" else []), *size_flags((2, 2, 2))]
        found.append((name, train([*line, *shared]), train([*line, *ours])))
    return found


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_earlier_versions_of_transformer_engine_train_as_stock(
    monkeypatch: pytest.MonkeyPatch, version: str
):
    """Before 2.16 every recipe keeps the quantised copy of a weight, as the start table counts."""
    monkeypatch.setenv("ASYNCHZP_TE_VERSION", version)
    with DeviceWorlds(["scripts.testbed.te.preload"]) as of_version:
        found = of_version.run(train_recipes, 2, timeout_s=590)[0]
    for name, stock, ours in found:
        assert stock.fp8 and ours.fp8
        assert equal(ours.steps, stock.steps), name
        assert ours.copies == pytest.approx(ours.counted, rel=0.05), name
        keeps = name in ("delayed", "grouped experts") or version == "2.15"
        assert (ours.copies > 0) == keeps, name
