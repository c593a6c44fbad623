# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""How Megatron and transformers spell a model, and what is refused."""

import dataclasses
import json
from argparse import Namespace

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.config import read_config, write_config
from megatron_asynchzp.hf.shape import read_arguments, write_arguments
from tests.hf.models import NAMES, configs, shapes

SHAPES = shapes() | {"gelu_new": dataclasses.replace(shapes()["gpt2"], is_gelu_tanh=True)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_survives_megatrons_arguments_and_the_config_of_transformers(shape, tmp_path):
    assert read_arguments(write_arguments(shape)) == shape
    write_config(shape, tmp_path, torch.float32)
    assert read_config(tmp_path, 128) == shape


def test_a_vocabulary_is_known_where_training_or_the_caller_said_its_size():
    args = write_arguments(shapes()[NAMES[0]])
    assert read_arguments(args).is_vocab_known
    args.vocab_size = None
    unknown, said = read_arguments(args), read_arguments(args, args.padded_vocab_size)
    assert unknown.vocab_size == said.vocab_size == args.padded_vocab_size
    assert said.is_vocab_known and not unknown.is_vocab_known


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_transformers_has_the_shape_of_its_model(name, tmp_path):
    configs()[name].save_pretrained(tmp_path)
    assert read_config(tmp_path, 128) == shapes()[name]


def test_megatrons_fused_gelu_is_the_approximation_that_the_config_names(tmp_path):
    from megatron.core.fusions.fused_bias_gelu import bias_gelu
    from transformers.activations import ACT2FN

    write_config(SHAPES["gelu_new"], tmp_path, torch.float32)
    name = json.loads((tmp_path / "config.json").read_text())["activation_function"]
    x = torch.linspace(-6, 6, 1001)
    with torch.compiler.set_stance("force_eager"):  # a compiler would take 2 s of a core
        ours = bias_gelu(torch.zeros(()), x)
    torch.testing.assert_close(ours, ACT2FN[name](x), rtol=0, atol=1e-6)


def test_transformers_4_finds_the_base_of_the_rotary_positions_too(tmp_path):
    write_config(shapes()["llama-tied-scaled-rope"], tmp_path, torch.float32)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert entries["rope_theta"] == 500000
    assert entries["rope_scaling"]["rope_type"] == "llama3"


def test_the_number_of_experts_is_also_written_and_read_as_transformers_4_calls_it(tmp_path):
    write_config(shapes()["qwen3_moe"], tmp_path, torch.float32)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert entries["num_experts"] == entries.pop("num_local_experts") == 4
    (tmp_path / "config.json").write_text(json.dumps(entries))
    assert read_config(tmp_path, 128) == shapes()["qwen3_moe"]


@pytest.mark.parametrize("changes", [{"ffn_hidden_size": 500}, {"moe_aux_loss_coeff": 0.01}])
def test_what_no_expert_computes_with_does_not_change_the_shape(changes):
    shape = shapes()["mixtral"]
    args = Namespace(**(vars(write_arguments(shape)) | changes))
    args.moe_router_load_balancing_type = ["seq_aux_loss", "aux_loss"]
    assert read_arguments(args) == shape


@pytest.mark.parametrize(
    "name, changes, output",
    [
        ("qwen2", {"num_experts": 8}, r"experts \(num_experts = 8\) with biases"),
        ("gpt2", {"num_experts": 8}, r"experts \(num_experts = 8\) with biases"),
        ("mixtral", {"swiglu": False}, "without SwiGLU"),
        ("mixtral", {"moe_layer_freq": [0, 1]}, r"by a pattern of layers .*\[0, 1\]"),
        ("mixtral", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("mixtral", {"moe_single_grouped_weight": True}, "experts in one parameter"),
        ("qwen3_moe", {"moe_shared_expert_intermediate_size": 64}, "shared experts"),
        ("qwen3_moe", {"moe_latent_size": 32}, "moe_latent_size = 32"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "score_function = sigmoid"),
        ("mixtral", {"moe_router_enable_expert_bias": True}, "bias on the choice"),
        ("mixtral", {"moe_router_topk_scaling_factor": 2.5}, "scaled weights"),
        ("mixtral", {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "by group"),
        ("mixtral", {"moe_router_topk_limited_devices": 2}, "by group"),
        ("mixtral", {"moe_router_force_load_balancing": True}, "random scores"),
        ("mixtral", {"moe_router_force_biased": 0.5}, "random scores"),
        ("mixtral", {"moe_router_load_balancing_type": "sinkhorn"}, "type = sinkhorn"),
        (
            "mixtral",
            {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
            "type = quantile_balancing",
        ),
        ("mixtral", {"moe_input_jitter_eps": 0.01}, "noise in its router"),
        ("mixtral", {"moe_expert_capacity_factor": 1.0}, "drop tokens"),
        ("mixtral", {"moe_apply_probs_on_input": True}, "on the input of its experts"),
        ("mixtral", {"moe_mlp_glu_interleave_size": 32}, "interleaved halves"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_router_pre_softmax = True"),
        ("llama", {"multi_latent_attention": True}, "multi-latent"),
        ("llama", {"hybrid_layer_pattern": "M*-"}, "hybrid"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ("qwen2", {"qk_layernorm": True}, "norms of queries and keys"),
        ("llama", {"window_size": (128, 0)}, "window"),
        ("llama", {"mtp_num_layers": 1}, "mtp_num_layers"),
        ("llama", {"layernorm_zero_centered_gamma": True}, "centred at zero"),
        ("llama", {"swiglu": False}, "swiglu = False"),
        ("llama", {"normalization": "LayerNorm"}, "normalization = LayerNorm"),
        ("llama", {"add_bias_linear": True}, "add_bias_linear = True"),
        ("llama-tied-scaled-rope", {"rope_scaling_factor": 32.0}, "rope_scaling_factor = 32.0"),
        ("qwen2", {"kv_channels": 32}, "hidden size"),
        ("gpt2", {"squared_relu": True}, "squared ReLU"),
        ("gpt2", {"position_embedding_type": "rope"}, "position_embedding_type = rope"),
        ("gpt2", {"group_query_attention": True, "num_query_groups": 2}, "grouped queries"),
        ("gpt2", {"kv_channels": 32}, "hidden size"),
        ("gpt2", {"vocab_size": 200}, "vocabulary of 200"),
    ],
)
def test_a_megatron_model_of_no_family_is_refused_in_one_line(name, changes, output):
    with pytest.raises(ConfigurationError, match=output) as refusal:
        read_arguments(Namespace(**(vars(write_arguments(shapes()[name])) | changes)))
    assert "\n" not in str(refusal.value)


def test_an_older_transformers_is_refused_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_asynchzp.hf.config.version", lambda name: "4.57.6")
    line = r"transformers 4\.57\.6 is installed, .* install 'transformers>=5'"
    with pytest.raises(ConfigurationError, match=line):
        write_config(shapes()["gpt2"], tmp_path, torch.bfloat16)
    with pytest.raises(ConfigurationError, match=line):
        read_config(tmp_path, 128)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, changes, output",
    [
        ("llama", {"model_type": "qwen2_moe"}, "model_type = qwen2_moe"),
        ("mixtral", {"sliding_window": 16}, "sliding_window = 16"),
        ("mixtral", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "linear",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4 + 0.5}},
            "10000.5",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_model_of_transformers_that_megatron_does_not_compute_is_refused_in_one_line(
    name, changes, output, tmp_path
):
    configs()[name].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigurationError, match=output) as refusal:
        read_config(tmp_path, 128)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": '])
def test_a_broken_config_is_refused_in_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.json is not .*JSON") as refusal:
        read_config(tmp_path, 128)
    assert "\n" not in str(refusal.value)


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        read_config(tmp_path, 128)
