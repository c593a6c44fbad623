# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`--use-pasa-attention` trains as the local attention does, in every kind of layer and with
context parallelism, which the local attention refuses."""

from types import SimpleNamespace

import pytest
import torch

from scripts.testbed.megatron_runs import MIXTURE_OF_EXPERTS, gpt_args, run_pretrain
from tests.support.world import on_ranks

PASA = ["--use-pasa-attention"]
BLOCK = [*PASA, "--pasa-mode", "block"]
ROPE = ["--position-embedding-type", "rope"]
GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
WINDOW = ["--window-size", "7,0", "--window-attn-skip-freq", "2"]
# fmt: off
LATENT = ["--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16",
          "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", *ROPE,
          "--disable-bias-linear"]
# fmt: on
MODELS = {
    "gpt": [],
    "grouped queries, rotary": [*GROUPED, *ROPE],
    "experts": [*MIXTURE_OF_EXPERTS],
    "selective recompute": ["--recompute-granularity", "selective"],
    "query-key layer scaling": [
        "--apply-query-key-layer-scaling",
        "--fp16",
        "--initial-loss-scale",
        "1024",
    ],
}


def _worst(found: list[float], true: list[float]) -> float:
    return max(abs(f - t) / abs(t) for f, t in zip(found, true, strict=True))


WAYS = {"delegate": PASA, "block": BLOCK, "values": [*PASA, "--pasa-shift-values"]}


def _against_local(names: list[str], ways: list[str]) -> dict[str, dict[str, float]]:
    errors = {}
    for name in names:
        argv = gpt_args("--global-batch-size", "2", *MODELS[name])
        stock = run_pretrain(argv)
        assert stock.losses[-1] < stock.losses[0]
        for way in ways:
            ours = run_pretrain([*argv, *WAYS[way]], inspect=_core_attentions)
            assert set(ours.inspected) == {"PasaAttention"}, ours.inspected
            errors[f"{name}, {way}"] = {
                "loss": _worst(ours.losses, stock.losses),
                "gradient norm": _worst(ours.grad_norms, stock.grad_norms),
            }
    return errors


def _core_attentions(model_chunks, optimizer) -> list[str]:
    del optimizer
    return [
        type(module.core_attention).__name__
        for chunk in model_chunks
        for module in chunk.modules()
        if hasattr(module, "core_attention")
    ]


def _check_against_local(names: list[str], ways: list[str]) -> None:
    (errors,) = on_ranks(_against_local, 1, names, ways)
    for name, found in errors.items():
        tolerance = 2e-3 if "scaling" in name else 1e-5  # fp16; all others are fp32
        assert max(found.values()) < tolerance, (name, found)


def test_a_gpt_trains_as_with_the_local_attention():
    _check_against_local(["grouped queries, rotary"], ["delegate", "block"])


@pytest.mark.slow
def test_every_kind_of_layer_trains_as_with_the_local_attention():
    _check_against_local(list(MODELS), list(WAYS))


def _latent() -> dict[str, list[float]]:
    argv = gpt_args("--global-batch-size", "2", *LATENT)
    return {
        "delegate": run_pretrain([*argv, *PASA]).losses,
        "block": run_pretrain([*argv, *BLOCK]).losses,
    }


def test_latent_attention_trains_which_the_local_attention_cannot():
    (losses,) = on_ranks(_latent, 1)
    assert losses["delegate"][-1] < losses["delegate"][0] - 0.1
    assert _worst(losses["block"], losses["delegate"]) < 1e-5


CONTEXT = ["--context-parallel-size", "2"]
PARALLEL = {
    "context": [*CONTEXT, *PASA],
    "tensor": ["--tensor-model-parallel-size", "2", *PASA],
    "context, block": [*CONTEXT, *BLOCK],
    "context, asynchzp": [*CONTEXT, *PASA, "--use-asynchzp"],
}


def _parallel(names: list[str], window: list[str]) -> dict[str, dict[str, float]]:
    """CP = 2 and TP = 2 against two data-parallel ranks with the same batches."""
    few = ("--global-batch-size", "2", "--train-iters", "4")
    argv = gpt_args(*few, *GROUPED, *ROPE, *window)
    alone, errors = run_pretrain([*argv, *PASA]), {}
    for name in names:
        ours = run_pretrain([*argv, *PARALLEL[name]])
        errors[name] = {
            "loss": _worst(ours.losses, alone.losses),
            "gradient norm": _worst(ours.grad_norms, alone.grad_norms),
        }
    return errors


def _check_parallel(names: list[str], window: list[str]) -> None:
    for errors in on_ranks(_parallel, 2, names, window):
        for name, found in errors.items():
            assert max(found.values()) < 1e-5, (name, found)


def test_context_and_tensor_parallel_runs_are_the_run_without():
    _check_parallel(["context", "tensor"], [])


@pytest.mark.slow
@pytest.mark.parametrize("window", [[], WINDOW], ids=["no window", "window"])
def test_every_mode_is_the_same_on_context_parallel_ranks(window):
    _check_parallel(list(PARALLEL), window)


def _dropped() -> list[list[float]]:
    few = ("--global-batch-size", "2", "--train-iters", "2")
    argv = gpt_args(*few, "--attention-dropout", "0.2", *PASA)
    runs = [argv, argv, [*argv, "--attention-dropout", "0"]]
    return [run_pretrain(one).losses for one in runs]


def test_dropout_is_drawn_from_megatrons_random_state():
    ((first, again, without),) = on_ranks(_dropped, 1)
    assert first == again and first != without


# --- masks and layouts, on one module ----------------------------------------------------------


def _attention(cls, mask_type, options=None, **config):
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        **config,
    )
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=None)
    more = {"options": options} if options else {}
    return cls(config, 1, mask_type, "self", pg_collection=groups, **more)


def _qkv(length: int, batch: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, batch, heads, 8, generator=generator) for heads in (4, 2, 2)]


def _masked() -> dict[str, float]:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.mcore.attention.core_attention import PasaAttention
    from megatron_asynchzp.mcore.flags.pasa import PasaOptions

    cpu_platform.install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", 1)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    hidden = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(2)) < 0.4
    hidden[..., 0] = False  # the local attention has no rows without keys
    padding = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    padding[1, ..., 7:] = True
    causal = torch.ones(12, 12, dtype=torch.bool).triu(1)
    cases = {
        "causal": (AttnMaskType.causal, None, None),
        "arbitrary": (AttnMaskType.arbitrary, hidden, None),
        "padding": (AttnMaskType.padding, padding.expand(2, 1, 12, 12), None),
        "reset": (AttnMaskType.causal, hidden | causal, PasaOptions(uses_causal_mask=True)),
    }
    qkv, errors = _qkv(12, 2), {}
    for name, (mask_type, mask, options) in cases.items():
        fusion = {"masked_softmax_fusion": False}
        local = _attention(DotProductAttention, mask_type, **fusion).eval()
        ours = _attention(PasaAttention, mask_type, options, **fusion).eval()
        with torch.no_grad():
            found, true = ours(*qkv, mask), local(*qkv, mask)
        assert found.shape == true.shape == (12, 2, 32)
        errors[name] = (found - true).abs().max().item()
    return errors


def test_masks_mean_what_they_mean_to_the_local_attention():
    (errors,) = on_ranks(_masked, 1)
    assert max(errors.values()) < 1e-5, errors


def _packed() -> float:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_asynchzp.mcore.attention.core_attention import PasaAttention

    ours = _attention(PasaAttention, AttnMaskType.padding_causal).eval()
    qkv = [x.squeeze(1) for x in _qkv(12, 1)]
    edges = torch.tensor([0, 5, 12], dtype=torch.int32)
    params = PackedSeqParams("thd", edges, edges, max_seqlen_q=7, max_seqlen_kv=7)
    found = ours(*qkv, None, packed_seq_params=params)
    assert found.shape == (12, 32)
    alone = [ours(*(x[a:b, None] for x in qkv), None) for a, b in ((0, 5), (5, 12))]
    return (found - torch.cat(alone).squeeze(1)).abs().max().item()


def test_packed_sequences_do_not_see_each_other():
    assert on_ranks(_packed, 1)[0] < 1e-6


def _foreign() -> str:
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_asynchzp.errors import ConfigurationError
    from megatron_asynchzp.mcore.attention.core_attention import use_pasa_in
    from megatron_asynchzp.mcore.flags.pasa import PasaOptions

    class SparseAttention:
        pass

    submodules = SelfAttentionSubmodules(None, SparseAttention, None)
    spec = ModuleSpec(module=SelfAttention, submodules=submodules)
    other = ModuleSpec(module=SelfAttention)
    assert use_pasa_in(other, PasaOptions()) is other and use_pasa_in(int, PasaOptions()) is int
    try:
        use_pasa_in(spec, PasaOptions())
    except ConfigurationError as error:
        assert submodules.core_attention is SparseAttention
        return str(error)
    return ""


def test_an_attention_that_computes_something_else_is_not_replaced():
    assert "cannot take the place of SparseAttention" in on_ranks(_foreign, 1)[0]


def _core_of(layer_spec) -> str:
    from megatron_asynchzp.mcore.attention.core_attention import use_pasa_in
    from megatron_asynchzp.mcore.flags.pasa import PasaOptions

    attention = use_pasa_in(layer_spec.submodules.self_attention, PasaOptions(mode="block"))
    core = attention.submodules.core_attention
    assert core.params["options"].mode == "block"
    # What was given is shared between layers and models: it stays as it is.
    assert layer_spec.submodules.self_attention.submodules.core_attention is not core
    return core.module.__name__


def _specs() -> list[str]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_asynchzp.cpu_platform.local_hybrid import local_hybrid_stack_spec

    layers = [
        get_gpt_layer_local_spec(),
        get_gpt_layer_local_spec(num_experts=4),
        get_gpt_layer_local_spec(multi_latent_attention=True),
        local_hybrid_stack_spec.submodules.attention_layer,
    ]
    return [_core_of(layer) for layer in layers]


def test_dense_expert_latent_and_hybrid_layers_get_it_and_their_specs_are_not_changed():
    assert set(on_ranks(_specs, 1)[0]) == {"PasaAttention"}
