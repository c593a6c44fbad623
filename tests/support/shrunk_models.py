# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Published models, shrunk: each has the flags of its recipe, and sizes in the proportions of its
own. The recipes are Megatron-LM's (core_v0.19.0), in examples/post_training/modelopt/conf and, for
DeepSeek-V3, in tests/functional_tests/test_cases/mixtral/deepseekv3_proxy_flex_*. Not from them:
data, precision (fp32, so that bounds are tight), batch, learning rate.
"""

from scripts.testbed.megatron_flags import flags_of
from tests.support.parity import Variant

_UNTIED = ("--untie-embeddings-and-output-weights", "--disable-bias-linear")
_SWIGLU = ("--normalization", "RMSNorm", "--swiglu")
_ROTARY = ("--position-embedding-type", "rope", "--rotary-percent", "1.0")
_GROUPED = ("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16")
_TWO_EXPERT_RANKS = ("--expert-model-parallel-size", "2")
_TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")

# meta-llama/Llama-3.1-8B: 32 layers of 4096, 32 heads in 8 groups, MLP of 14336
LLAMA_3 = (
    *_UNTIED,
    *_SWIGLU,
    *_ROTARY,
    *("--group-query-attention", "--num-query-groups", "2"),
    *flags_of({"ffn-hidden-size": 224, "rotary-base": 500000}),
    "--use-rope-scaling",
)

# Qwen/Qwen3-8B: 36 layers of 4096, 32 heads of 128 in 8 groups, MLP of 12288
QWEN_3 = (
    *_UNTIED,
    *_SWIGLU,
    *_ROTARY,
    *_GROUPED,
    *flags_of({"ffn-hidden-size": 192, "rotary-base": 1000000}),
    *("--qk-layernorm", "--no-bias-swiglu-fusion"),
)

# Qwen/Qwen3-30B-A3B: 128 experts of 768, 8 of them per token, none shared
QWEN_3_EXPERTS = (
    *QWEN_3,
    *flags_of(
        {
            "num-experts": 8,
            "moe-ffn-hidden-size": 24,
            "moe-router-topk": 2,
            "moe-router-dtype": "fp32",
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": "1e-3",
            "moe-token-dispatcher-type": "alltoall",
        }
    ),
    *_TWO_EXPERT_RANKS,
    # With the usual weights two scores of a token are so close in step 19 on 8 ranks that another
    # order of additions, a last bit, sends it to another expert.
    *("--seed", "7"),
)

# DeepSeek-V3: 3 dense layers and 58 of 256 experts, 8 per token from 4 of 8 groups, one shared
DEEPSEEK_3 = (
    *_UNTIED,
    *_SWIGLU,
    *("--position-embedding-type", "rope", "--multi-latent-attention", "--qk-layernorm"),
    *("--moe-router-pre-softmax", "--moe-router-enable-expert-bias"),
    *flags_of(
        {
            "num-layers": 3,
            "ffn-hidden-size": 160,
            "kv-channels": 16,
            "q-lora-rank": 24,
            "kv-lora-rank": 16,
            "qk-head-dim": 16,
            "qk-pos-emb-head-dim": 8,
            "v-head-dim": 16,
            "rotary-scaling-factor": 40,
            "mscale": 1.0,
            "mscale-all-dim": 1.0,
            "num-experts": 8,
            "moe-layer-freq": "([0]*1+[1]*2)",
            "moe-ffn-hidden-size": 32,
            "moe-shared-expert-intermediate-size": 32,
            "moe-router-load-balancing-type": "seq_aux_loss",
            "moe-router-topk": 4,
            "moe-router-num-groups": 4,
            "moe-router-group-topk": 2,
            "moe-router-topk-scaling-factor": 2.5,
            "moe-router-score-function": "sigmoid",
            "moe-router-bias-update-rate": "1e-3",
            "moe-router-dtype": "fp32",
            "moe-aux-loss-coeff": "1e-4",
            "moe-token-dispatcher-type": "alltoall",
            "mtp-num-layers": 1,
            "mtp-loss-scaling-factor": 0.1,
        }
    ),
    *_TWO_EXPERT_RANKS,
)

# openai/gpt-oss-20b: 24 layers of 2880, every other one with a window of 128 keys, and a learned
# sink in each; 32 experts, 4 per token; auxiliary losses of examples/gptoss/02_train.sh
GPT_OSS = (
    *("--untie-embeddings-and-output-weights", "--normalization", "RMSNorm", "--quick-geglu"),
    *("--no-yarn-correction-range-round-to-int", "--no-bias-gelu-fusion"),
    *_GROUPED,
    *flags_of(
        {
            "ffn-hidden-size": 64,
            "position-embedding-type": "yarn",
            "rotary-percent": 1.0,
            "rotary-base": 150000,
            "rotary-scaling-factor": 32.0,
            "yarn-original-max-position-embeddings": 4096,
            "yarn-beta-fast": 32.0,
            "yarn-beta-slow": 1.0,
            "mscale": 1.0,
            "mscale-all-dim": 0.0,
            "glu-linear-offset": 1.0,
            "activation-func-clamp-value": 7.0,
            "softmax-type": "learnable",
            "window-size": "7,0",
            "window-attn-skip-freq": 2,
            "num-experts": 8,
            "moe-ffn-hidden-size": 64,
            "moe-router-dtype": "fp32",
            "moe-router-topk": 2,
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": "1e-3",
            "moe-z-loss-coeff": "1e-3",
            "moe-token-dispatcher-type": "alltoall",
        }
    ),
    *_TWO_EXPERT_RANKS,
)

_NEMOTRON = (*_UNTIED, "--normalization", "RMSNorm", "--squared-relu", *_GROUPED)

# nvidia/Nemotron-H-8B: Mamba, MLP and few attention layers of 4096, 128 Mamba heads of 64
NEMOTRON_H = (
    *_NEMOTRON,
    *_ROTARY,
    *flags_of(
        {
            "hybrid-layer-pattern": "M-M*-",
            "ffn-hidden-size": 160,
            "mamba-head-dim": 16,
            "mamba-num-heads": 8,
            "mamba-num-groups": 2,
            "mamba-state-dim": 16,
            "rotary-percent": 0.5,
            "rotary-base": 500000,
        }
    ),
)

# nvidia/Nemotron-3-Nano-30B-A3B: 128 experts of 1856, 6 per token and one shared of 3712
NEMOTRON_3 = (
    *_NEMOTRON,
    *("--position-embedding-type", "none", "--moe-router-enable-expert-bias"),
    *flags_of(
        {
            "hybrid-layer-pattern": "MEM*E",
            "ffn-hidden-size": 32,
            "mamba-head-dim": 16,
            "mamba-num-heads": 8,
            "mamba-num-groups": 2,
            "mamba-state-dim": 16,
            "num-experts": 8,
            "moe-router-topk": 2,
            "moe-router-topk-scaling-factor": 2.5,
            "moe-router-score-function": "sigmoid",
            "moe-router-dtype": "fp32",
            "moe-router-load-balancing-type": "seq_aux_loss",
            "moe-aux-loss-coeff": "1e-4",
            "moe-shared-expert-intermediate-size": 64,
            "moe-token-dispatcher-type": "alltoall",
        }
    ),
    *_TWO_EXPERT_RANKS,
)


# Two micro-batches each.
SHRUNK_MODELS = [
    Variant("Llama-3.1 8B", LLAMA_3, 2),
    Variant("Qwen3 8B", QWEN_3, 2),
    Variant("Qwen3 30B-A3B", QWEN_3_EXPERTS, 2),
    Variant("DeepSeek-V3", DEEPSEEK_3, 2),
    Variant("gpt-oss 20B", GPT_OSS, 2),
    Variant("Nemotron-H 8B", NEMOTRON_H, 2),
    Variant("Nemotron-3 Nano", NEMOTRON_3, 2),
]

# As their recipes lay them out, on the two ranks of a model that 8 ranks have room for.
_LAYOUT = ("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|ttmL")
SHRUNK_MODELS_IN_PARALLEL = [
    Variant("Llama-3.1 8B, tensor and sequence parallel", (*LLAMA_3, *_TENSOR), 2, 2),
    Variant("Qwen3 30B-A3B, tensor and sequence parallel", (*QWEN_3_EXPERTS, *_TENSOR), 2, 2),
    Variant("DeepSeek-V3, tensor and sequence parallel", (*DEEPSEEK_3, *_TENSOR), 2, 2),
    Variant("DeepSeek-V3, pipeline with a layout", (*DEEPSEEK_3, *_LAYOUT), 2, 2),
    Variant("Nemotron-H 8B, tensor and sequence parallel", (*NEMOTRON_H, *_TENSOR), 2, 2),
]
