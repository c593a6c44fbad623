# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""`--use-pasa-attention` trains as the local attention does, in every kind of layer and with
context parallelism, which the local attention refuses."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from scripts.testbed.differences import largest
from scripts.testbed.megatron_flags import MIXTURE_OF_EXPERTS
from scripts.testbed.megatron_runs import RunRecord, gpt_args, run_pretrain
from tests.support.selection import some_and_rest
from tests.support.world import on_ranks

ROPE = ["--position-embedding-type", "rope"]
GROUPED = ["--group-query-attention", "--num-query-groups", "2"]
WINDOW = ["--window-size", "7,0", "--window-attn-skip-freq", "2"]
SCALED = ["--apply-query-key-layer-scaling", "--fp16", "--initial-loss-scale", "1024"]
# fmt: off
LATENT = ["--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16",
          "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", *ROPE,
          "--disable-bias-linear"]
# fmt: on
PASA = ["--use-pasa-attention"]
BLOCK, VALUES = [*PASA, "--pasa-mode", "block"], [*PASA, "--pasa-shift-values"]
CONTEXT, TENSOR = ["--context-parallel-size", "2"], ["--tensor-model-parallel-size", "2"]
PARALLEL = [[*CONTEXT, *BLOCK], [*CONTEXT, *PASA, "--use-asynchzp"]]


class Case(NamedTuple):
    """A model, the attention of the reference, what is to train as it, and how far apart both may
    be, relatively. The references of parallel runs are as many data-parallel ranks."""

    model: list[str]
    reference: list[str]
    others: list[list[str]]
    tolerance: float = 1e-5


LOCAL = {
    "grouped queries, rotary": Case([*GROUPED, *ROPE], [], [PASA]),
    "grouped queries, rotary, block": Case([*GROUPED, *ROPE], [], [BLOCK]),
    # Which the local attention cannot.
    "latent": Case(LATENT, PASA, [BLOCK]),
    "shifted values": Case([*GROUPED, *ROPE], [], [VALUES]),
    "gpt": Case([], [], [PASA, BLOCK, VALUES]),
    "experts": Case(MIXTURE_OF_EXPERTS, [], [PASA, BLOCK, VALUES]),
    "recomputed": Case(["--recompute-granularity", "selective"], [], [PASA, BLOCK, VALUES]),
    "query-key layer scaling": Case(SCALED, [], [PASA, BLOCK, VALUES], 2e-3),
}
ON_TWO_RANKS = {
    "parallel": Case([*GROUPED, *ROPE], PASA, [[*CONTEXT, *PASA], [*TENSOR, *PASA]]),
    "context parallel": Case([*GROUPED, *ROPE], PASA, PARALLEL),
    "context parallel, window": Case([*GROUPED, *ROPE, *WINDOW], PASA, PARALLEL),
}


def _run(flags: list[str]) -> RunRecord:
    return run_pretrain(gpt_args("--global-batch-size", "2", *flags), inspect=_core_attentions)


def _core_attentions(model_chunks, optimizer) -> set[str]:
    del optimizer
    return {
        type(module.core_attention).__name__
        for chunk in model_chunks
        for module in chunk.modules()
        if hasattr(module, "core_attention")
    }


def _compare(cases: dict[str, Case]) -> None:
    for name, (model, reference, others, tolerance) in cases.items():
        theirs = _run([*model, *reference])
        assert theirs.losses[-1] < theirs.losses[0], name
        for other in others:
            ours = _run([*model, *other])
            assert ours.inspected == {"PasaAttention"}
            assert ours.losses == pytest.approx(theirs.losses, rel=tolerance), (name, other)
            assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=tolerance), name


@pytest.mark.parametrize("names", some_and_rest(LOCAL, ["grouped queries, rotary", "latent"]))
def test_every_kind_of_layer_trains_as_with_the_local_attention(names):
    on_ranks(_compare, 1, {name: LOCAL[name] for name in names})


@pytest.mark.parametrize("names", some_and_rest(ON_TWO_RANKS, ["parallel"]))
def test_context_and_tensor_parallel_runs_are_the_run_without(names):
    on_ranks(_compare, 2, {name: ON_TWO_RANKS[name] for name in names})


# --- masks and layouts, on one module ----------------------------------------------------------


def _attention(cls, mask_type, options=None, dropout=0.0, **config):
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=dropout,
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
    assert largest(errors.values()) < 1e-5, errors


def _dropped() -> list[list]:
    """Twice with one seed of Megatron's random state, once with another, and without dropout."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_asynchzp import cpu_platform
    from megatron_asynchzp.mcore.attention.core_attention import PasaAttention

    cpu_platform.install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    found = []
    for seed, dropout in ((1, 0.2), (1, 0.2), (2, 0.2), (1, 0.0)):
        tracker.reset()
        tracker.add("model-parallel-rng", seed)
        torch.manual_seed(len(found))
        ours = _attention(PasaAttention, AttnMaskType.causal, dropout=dropout).train()
        found.append(ours(*_qkv(12, 2), None).tolist())
    return found


def test_dropout_is_drawn_from_megatrons_random_state():
    ((first, again, other, without),) = on_ranks(_dropped, 1)
    assert first == again and first != other and without not in (first, other)


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

    from megatron_asynchzp.cpu_platform.local_hybrid import local_hybrid_stack_spec
    from megatron_asynchzp.errors import ConfigurationError
    from megatron_asynchzp.mcore.attention.core_attention import use_pasa_in
    from megatron_asynchzp.mcore.flags.pasa import PasaOptions

    class SparseAttention:
        pass

    ours = use_pasa_in(
        local_hybrid_stack_spec.submodules.attention_layer.submodules.self_attention, PasaOptions()
    )
    assert ours.submodules.core_attention.module.__name__ == "PasaAttention"
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


def test_attention_of_a_hybrid_model_is_replaced_and_one_that_computes_something_else_is_not():
    assert "cannot take the place of SparseAttention" in on_ranks(_foreign, 1)[0]
