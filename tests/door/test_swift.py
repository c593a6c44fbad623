# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""ms-swift's `megatron sft` trains and exports alike with stock DDP and with AsyncHZP."""

from pathlib import Path

import pytest

from tests.door.environment import ROOT, SIZES, check_equal, folder_of, run
from tests.door.tiny_qwen import make_model

PACKAGES = (
    "ms-swift==4.6.0 mcore-bridge==1.6.5 transformers==5.19.0 peft==0.20.0 trl==0.29.1 "
    "datasets==4.8.4 modelscope==1.40.2 modelscope-hub addict aiohappyeyeballs aiohttp aiosignal "
    "attrdict attrs binpacking cffi cpm-kernels cryptography dacite dill fastapi frozenlist "
    "importlib-metadata jieba jiter joblib json-repair multidict multiprocess nltk openai oss2 "
    "pandas propcache rouge scipy simplejson sortedcontainers starlette tensorboard tiktoken "
    "transformers-stream-generator tzdata uvicorn werkzeug xxhash yarl zipp zstandard"
)
ARGUMENTS = (
    "--model_type qwen2 --template qwen2_5 --tuner_type full --micro_batch_size 2 "
    "--global_batch_size 8 --train_iters 6 --save_steps 6 --padding_free false "
    "--attention_backend unfused --ddp_backend gloo --lr 1e-3 --min_lr 1e-4 --max_length 128 "
    "--finetune true --masked_softmax_fusion false --bias_dropout_fusion false "
    "--bias_activation_fusion false --cross_entropy_loss_fusion false --apply_rope_fusion false "
    "--use_hf true --check_model false --dataset_num_proc 1 --dataloader_num_workers 0 "
    "--add_version false --logging_steps 1 --split_dataset_ratio 0 --no_save_rng true "
    "--recompute_granularity none --overlap_grad_reduce true --overlap_param_gather true"
)
PLUGIN = ROOT / "megatron_asynchzp" / "mcore" / "door" / "plugin.py"


@pytest.mark.slow
def test_megatron_sft_trains_and_exports_as_with_stock(tmp_path: Path):
    import torch
    from safetensors.torch import load_file

    folder = folder_of(PACKAGES.split())
    make_model(tmp_path / "model")
    common = ["--model", str(tmp_path / "model"), *ARGUMENTS.split()]
    common += ["--dataset", str(tmp_path / "model" / "data.jsonl"), "--output_dir"]
    results, weights = {}, {}
    for name, more, env in (
        ("stock", [], {}),
        ("ours", ["--external_plugins", str(PLUGIN)], SIZES),
    ):
        arguments = [*common, str(tmp_path / name), *more]
        results[name] = run(folder, "swift_run", tmp_path / f"{name}.json", *arguments, env=env)
        weights[name] = load_file(tmp_path / name / "checkpoint-6" / "model.safetensors")
    check_equal(results["stock"], results["ours"])
    assert weights["stock"].keys() == weights["ours"].keys()
    for name, value in weights["stock"].items():
        assert torch.equal(value, weights["ours"][name]), name
