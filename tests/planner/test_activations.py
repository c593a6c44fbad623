# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps for backward, by formula: the bytes that a count found in Megatron's local
layers, and laws between the choices."""

from dataclasses import replace

import pytest

from megatron_asynchzp.planner.activations import (
    FP4_COPIES_NBYTES,
    FP8_COPIES_NBYTES,
    FUSED,
    LOCAL,
    Kernels,
    Recompute,
    RunShape,
    final_norm_nbytes,
    gradient_nbytes,
    layer_nbytes,
)
from megatron_asynchzp.planner.memory import micro_batches_in_flight, stage_activations
from megatron_asynchzp.planner.model import (
    Adapters,
    Attention,
    Batch,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    Parallel,
)

_GELU, _GATED = Mlp(512, False), Mlp(320, True)
_HEADS, _GROUPED = Attention(4, 4, 32), Attention(4, 2, 32)
_LATENT = LatentAttention(4, 32, 16, 16, 16, 16)
_EXPERTS = Experts(4, 2, 320, True)
_MAMBA = Mamba(8, 32, 1, 16)
LAYERS = {
    "dense": Layer(_HEADS, _GELU),
    "gated": Layer(_HEADS, _GATED),
    "grouped": Layer(_GROUPED, _GATED),
    "latent": Layer(_LATENT, _GATED),
    "experts": Layer(_HEADS, _EXPERTS),
    "mamba": Layer(_MAMBA, None),
    "attention alone": Layer(_HEADS, None),
}
_PASA = Kernels("pasa", is_fused=False)


def setting(
    layer: Layer, kernels: Kernels = FUSED, number: int = 4, norm: int = 1, **rest
) -> RunShape:
    model = Model(128, 512, (layer,) * number, norm_numel=norm)
    return RunShape(model, rest.pop("parallel", Parallel()), Batch(2, 128), kernels, **rest)


# Bytes of the storages that autograd saved in one layer of 128 channels and 2 x 128 tokens, in
# bf16, with the causal mask; parameters aside. tests/support/counted_peaks.py counts whole runs.
COUNTED = {
    "dense": (LAYERS["dense"], replace(LOCAL, has_rope=False), 2, 1_329_152),
    "dropout": (
        LAYERS["dense"],
        replace(LOCAL, has_rope=False, dropout=True, attention_dropout=True),
        2,
        1_984_512,
    ),
    "grouped": (LAYERS["grouped"], LOCAL, 1, 2_050_048),
    "latent, PASA": (LAYERS["latent"], _PASA, 1, 2_410_496),
    "PASA": (LAYERS["gated"], _PASA, 1, 1_906_688),
    "experts": (LAYERS["experts"], LOCAL, 1, 3_474_432),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_layer_keeps_the_bytes_that_were_counted(name):
    layer, kernels, norm, counted = COUNTED[name]
    assert layer_nbytes(layer, setting(layer, kernels, norm=norm)) == pytest.approx(
        counted, rel=0.01
    )


def test_two_copies_of_a_weight_have_its_codes_and_in_nvfp4_a_byte_for_each_16():
    assert FP8_COPIES_NBYTES == 2 and FP4_COPIES_NBYTES == 2 * (4 + 8 / 16) / 8


@pytest.mark.parametrize("nbytes", [2, 1.125])
def test_projections_that_compute_in_fp8_and_fp4_keep_a_copy_of_their_inputs_in_it(nbytes):
    """That tests/device/test_low_precision_bytes.py counts in whole steps."""
    layer, tokens = LAYERS["gated"], 2 * 128
    inputs = tokens * (128 + 128 + 128 + 320)
    plain = setting(layer)
    fewer = replace(plain, kernels=replace(FUSED, copies_nbytes=nbytes))
    assert layer_nbytes(layer, plain) - layer_nbytes(layer, fewer) == inputs * (2 - nbytes / 2)
    more = gradient_nbytes(layer, fewer) - gradient_nbytes(layer, plain)
    assert more == tokens * 2 * 320 * nbytes
    adapted = replace(fewer, model=replace(fewer.model, adapters=Adapters(4, frozenset())))
    assert layer_nbytes(layer, adapted) == layer_nbytes(layer, replace(adapted, kernels=FUSED))


@pytest.mark.parametrize("kernels", [LOCAL, FUSED, _PASA], ids=["local", "fused", "pasa"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_is_recomputed_is_not_kept(layer, kernels):
    plain = setting(layer, kernels)
    core = layer_nbytes(layer, replace(plain, recompute=Recompute("selective")))
    assert 0 < core <= layer_nbytes(layer, plain)
    if kernels.core == "scores" and layer.mixer is not _MAMBA:
        assert core < layer_nbytes(layer, plain)
    kept = {
        how: stage_activations(replace(plain, recompute=how), 0).kept
        for how in (Recompute(), Recompute("full", "block", 2), Recompute("full", "uniform", 1))
    }
    none, half, all_of_them = kept.values()
    assert all_of_them < half < none


@pytest.mark.parametrize("module", ["layernorm", "mlp", "moe", "moe_act", "mla_up_proj"])
def test_each_module_of_selective_recomputation_keeps_less_in_the_layers_that_have_it(module):
    how = Recompute("selective", modules=frozenset({module}))
    has = {
        "mlp": lambda of: isinstance(of.mlp, Mlp),
        "moe": lambda of: isinstance(of.mlp, Experts),
        "moe_act": lambda of: isinstance(of.mlp, Experts),
        "mla_up_proj": lambda of: isinstance(of.mixer, LatentAttention),
        "layernorm": lambda of: True,
    }
    for layer in LAYERS.values():
        plain = setting(layer, LOCAL)
        less = layer_nbytes(layer, replace(plain, recompute=how)) < layer_nbytes(layer, plain)
        assert less == has[module](layer), layer


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_tensor_and_sequence_parallelism_divide_what_a_layer_keeps(layer):
    whole = layer_nbytes(layer, setting(layer))
    half = setting(layer, parallel=Parallel(tp=2, sequence_parallel=True))
    shared = 0.02 * whole  # what every rank keeps: compressed queries and keys
    if layer.mixer is _LATENT:
        shared += 256 * (32 + 16 + 16) * 2
    if layer.mlp is _EXPERTS:  # whose tokens each rank gathers
        shared += 256 * 2 * 128 * 2 / 2
    assert whole / 2 <= layer_nbytes(layer, half) + 1 <= whole / 2 + shared + 1
    alone = setting(layer, parallel=Parallel(tp=2))
    assert layer_nbytes(layer, half) < layer_nbytes(layer, alone) < whole


def _most_in_flight(stage: int, of: RunShape) -> float:
    """By playing the schedule: forwards of the warm-up, then one forward and one backward."""
    pp, virtual = of.parallel.pp, of.parallel.virtual
    total = of.batch.num_micro_batches * virtual
    warm_up = pp - stage - 1
    if virtual > 1:
        warm_up = 2 * warm_up + (virtual - 1) * pp
    forwards = backwards = most = 0
    while backwards < total:
        if forwards < total and forwards - backwards <= min(warm_up, total - 1):
            forwards += 1
        else:
            backwards += 1
        most = max(most, forwards - backwards)
    return most / virtual


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_a_stage_keeps_as_many_micro_batches_as_the_schedule_starts_before_it_goes_back(virtual):
    for pp in (2, 3, 4):
        for number in (pp, 2 * pp, 5 * pp):
            plain = setting(LAYERS["dense"], number=12, parallel=Parallel(pp=pp, virtual=virtual))
            of = replace(plain, batch=Batch(1, 16, number))
            for stage in range(pp):
                assert micro_batches_in_flight(of, stage) == _most_in_flight(stage, of)


@pytest.mark.parametrize(
    "how", [Recompute(), Recompute("full", "uniform", 1)], ids=["none", "full"]
)
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_every_chunk_but_the_models_first_keeps_the_hidden_states_that_it_received(virtual, how):
    """In each micro-batch that a stage has in flight, beside what its own layers keep."""
    for pp in (2, 3, 4):
        parallel = Parallel(pp=pp, virtual=virtual)
        of = replace(setting(LAYERS["dense"], number=72, parallel=parallel), recompute=how)
        of = replace(of, batch=Batch(1, 16, 4 * pp))
        alone = replace(of, parallel=Parallel())
        norm = final_norm_nbytes(of)
        layers = (stage_activations(alone, 0).kept - norm) / len(of.model.layers)
        for stage in range(pp):
            ends = norm if stage == pp - 1 else 0.0
            kept = stage_activations(of, stage).kept - ends
            own = layers * len(of.model.layers) / pp
            received = kept / micro_batches_in_flight(of, stage) - own
            chunks = virtual - 1 if stage == 0 else virtual
            assert received == pytest.approx(chunks * of.hidden_nbytes)
