# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""ms-swift's `megatron sft` trains and exports alike with stock DDP and with AsyncHZP."""

from pathlib import Path

import pytest

from tests.door.environment import ROOT, SIZES, check_built_in_shards, check_equal, folder_of, run
from tests.door.tiny_models import make_model, write_sums

PACKAGES = (
    "ms-swift==4.6.0 mcore-bridge==1.6.5 transformers==5.19.0 peft==0.20.0 trl==0.29.1 "
    "datasets==4.8.4 modelscope==1.40.2 modelscope-hub addict aiohappyeyeballs aiohttp aiosignal "
    "attrdict attrs binpacking cffi cpm-kernels cryptography dacite dill fastapi frozenlist "
    "importlib-metadata jieba jiter joblib json-repair multidict multiprocess nltk openai oss2 "
    "pandas propcache rouge scipy simplejson sortedcontainers starlette tensorboard tiktoken "
    "transformers-stream-generator tzdata uvicorn werkzeug xxhash yarl zipp zstandard "
    "cloudpickle msgspec pyzmq"
)
# Not clipped, so that norms in another order of sums change no weight.
ARGUMENTS = (
    "--clip_grad 100 "
    "--model_type qwen2 --template qwen2_5 --micro_batch_size 2 "
    "--global_batch_size 8 --train_iters 6 --save_steps 3 --padding_free false "
    "--attention_backend unfused --ddp_backend gloo --lr 1e-3 --min_lr 1e-4 --max_length 128 "
    "--masked_softmax_fusion false --bias_dropout_fusion false "
    "--bias_activation_fusion false --cross_entropy_loss_fusion false --apply_rope_fusion false "
    "--use_hf true --check_model false --dataset_num_proc 1 --dataloader_num_workers 0 "
    "--add_version false --logging_steps 1 --split_dataset_ratio 0 "
    "--recompute_granularity none --overlap_grad_reduce true --overlap_param_gather true"
)
PLUGIN = ROOT / "megatron_asynchzp" / "mcore" / "door" / "plugin.py"
# The kind of training, its arguments, the one that names a checkpoint to resume, and the folders of
# a checkpoint in which weights are exported.
KINDS = {
    "full": ("--tuner_type full", "--mcore_model", {"": "model.safetensors"}),
    "lora": (
        "--tuner_type lora --lora_rank 4 --target_modules all-linear",
        "--mcore_adapter",
        {"": "adapter_model.safetensors", "-merged": "model.safetensors"},
    ),
}


def command(tmp_path: Path, name: str, *arguments: str, ours: bool = True) -> list[str]:
    """The arguments of the run `name`, which saves into its folder."""
    if not (model := tmp_path / "model").exists():
        make_model(model)
        write_sums(model / "data.jsonl")
    words = ["--model", str(model), "--dataset", str(model / "data.jsonl"), *ARGUMENTS.split()]
    words += ["--output_dir", str(tmp_path / name), *arguments]
    return words + ["--external_plugins", str(PLUGIN)] if ours else words


def sft(folder: Path, tmp_path: Path, name: str, *arguments: str, ours: bool = True) -> dict:
    """What `swift_run` notes of the run `name`, and what it exports."""
    from safetensors.torch import load_file

    words, env = command(tmp_path, name, *arguments, ours=ours), SIZES if ours else {}
    result = run(folder, "swift_run", tmp_path / f"{name}.json", *words, env=env)
    paths = sorted(tmp_path.glob(f"{name}/checkpoint-*/*.safetensors"))
    result["exports"] = {str(p.relative_to(tmp_path / name)): load_file(p) for p in paths}
    return result


def check_exports(some: dict, others: dict, step: int) -> None:
    import torch

    names = [name for name in some if name.startswith(f"checkpoint-{step}")]
    assert names
    for name in names:
        assert some[name].keys() == others[name].keys()
        for key, value in some[name].items():
            assert torch.equal(value, others[name][key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_megatron_sft_trains_resumes_and_exports_as_with_stock(tmp_path: Path, kind: str):
    folder, (words, resumes, exports) = folder_of(PACKAGES.split()), KINDS[kind]
    begins = [*words.split(), "--finetune", "true"]
    runs: dict[str, dict] = {}
    for name, is_ours in (("stock", False), ("ours", True)):
        goes_on = [*words.split(), "--finetune", "false", resumes]
        runs[name] = sft(folder, tmp_path, name, *begins, ours=is_ours)
        last = str(tmp_path / name / "checkpoint-3")
        again = f"{name} resumed"
        runs[again] = sft(folder, tmp_path, again, *goes_on, last, ours=is_ours)
    stock, ours, resumed = runs["stock"], runs["ours"], runs["ours resumed"]
    check_equal(stock, ours)
    assert "whole at most, while the model was built" in ours["log"]
    assert {f"checkpoint-6{end}/{file}" for end, file in exports.items()} <= ours["exports"].keys()
    for step in (3, 6):
        check_exports(stock["exports"], ours["exports"], step)
    losses, _ = zip(*resumed["steps"])
    assert losses == tuple(loss for loss, _ in runs["stock resumed"]["steps"])
    check_exports(runs["stock resumed"]["exports"], resumed["exports"], 6)
    if kind == "full":  # a merge rounds the base of adapters, also in stock
        assert resumed["steps"] == ours["steps"][3:]


_ADAPTERS = "--tuner_type lora --lora_dropout 0 --target_modules all-linear"
OTHERS = {
    "preferences": f"--rlhf_type dpo --merge_lora true {_ADAPTERS}",
    "whole modules": f"--modules_to_save word_embeddings output_layer {_ADAPTERS}",
    "frozen layers": "--tuner_type full --freeze_parameters_ratio 0.4",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_trainings_give_the_weights_of_stock(tmp_path: Path, kind: str):
    folder, words = folder_of(PACKAGES.split()), [*OTHERS[kind].split(), "--finetune", "true"]
    stock, ours = (sft(folder, tmp_path, f"{is_ours}", *words, ours=is_ours) for is_ours in (0, 1))
    check_equal(stock, ours)
    for step in (3, 6):
        check_exports(stock["exports"], ours["exports"], step)


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shards_and_two_units_while_a_model_is_built(tmp_path: Path):
    make_model(tmp_path / "model", num_layers=12)
    write_sums(tmp_path / "model" / "data.jsonl")
    words = ["--tuner_type", "full", "--finetune", "true", "--train_iters", "1"]
    check_built_in_shards(sft(folder_of(PACKAGES.split()), tmp_path, "ours", *words))


@pytest.mark.slow
def test_megatron_sft_with_all_frozen_is_refused_in_one_line(tmp_path: Path):
    words = ["--tuner_type", "full", "--finetune", "true", "--freeze_parameters_ratio", "1"]
    with pytest.raises(AssertionError, match="no parameter of the model needs a gradient"):
        sft(folder_of(PACKAGES.split()), tmp_path, "frozen", *words)
