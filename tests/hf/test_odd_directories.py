# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What the importer takes of a directory is what transformers takes of it, or one line with the
file and the remedy."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_asynchzp.hf import __main__ as command
from megatron_asynchzp.hf.export_model import export_model
from tests.hf.models import load_model, logits_of, random_model

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """Directories of transformers, whole and in shards, and one of older weights."""
    folder = tmp_path_factory.mktemp("originals")
    for name in ("llama", "llama-tied-scaled-rope", "gpt2", "qwen3"):
        random_model(name).save_pretrained(folder / name)
    random_model("llama").save_pretrained(folder / "shards", max_shard_size="60KB")
    random_model("llama", seed=1).save_pretrained(folder / "older", max_shard_size="60KB")
    return folder


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / ONE)
    change(weights)
    save_file(weights, folder / ONE, metadata={"format": "pt"})


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    entries = json.loads(path.read_text())
    change(entries)
    path.write_text(json.dumps(entries))


def rename(weights: dict[str, torch.Tensor], new_name: Callable[[str], str]) -> None:
    renamed = {new_name(name): tensor for name, tensor in weights.items()}
    weights.clear()
    weights.update(renamed)


def without_outer(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


def config_of(folder: Path) -> Path:
    return folder / "config.json"


def copy_older(folder: Path) -> None:
    for path in (folder.parent / "older").glob("model*"):
        shutil.copy(path, folder)


def own_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()


def as_in_a_cache(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(f"../blobs/{number}")


def named_in_config(folder: Path) -> None:
    shutil.copytree(folder, folder / "other")
    edit(folder / "other", lambda w: w.update({"model.norm.weight": torch.ones(64)}))
    shutil.move(folder / "other" / ONE, folder / "other.safetensors")
    shutil.rmtree(folder / "other")
    edit_json(config_of(folder), lambda c: c.update(transformers_weights="other.safetensors"))


def doubled(folder: Path) -> None:
    """A tensor in two shards, with other values in the last."""
    first, *_, last = sorted(folder.glob("*.safetensors"))
    (name, tensor), *_ = load_file(first).items()
    weights = load_file(last) | {name: tensor + 0.5}
    save_file(weights, last, metadata={"format": "pt"})


def extra_shard(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model-9-of-9.safetensors")


TIED = "llama-tied-scaled-rope"
SAME: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a head of its own that is the embedding": (
        TIED,
        lambda f: edit(
            f, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
        ),
    ),
    "a head of its own that differs from the embedding": (TIED, lambda f: edit(f, own_head)),
    "a head that the flag ties, untied in the file": (
        "llama",
        lambda f: edit_json(config_of(f), lambda c: c.update(tie_word_embeddings=True)),
    ),
    "the tied head alone": (
        TIED,
        lambda f: edit(
            f, lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")})
        ),
    ),
    "no word on tying": (
        "llama",
        lambda f: edit_json(config_of(f), lambda c: c.pop("tie_word_embeddings")),
    ),
    "one file beside older shards and their index": ("llama", copy_older),
    "one file beside an index of files that are gone": (
        "llama",
        lambda f: (f / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "gone"}}'),
    ),
    "one file beside an index that is no JSON": ("llama", lambda f: (f / INDEX).write_text("{")),
    "shards": ("shards", lambda f: None),
    "a shard that no index names": ("shards", extra_shard),
    "a tensor in two shards": ("shards", doubled),
    "an index that names other shards for its tensors": (
        "shards",
        lambda f: edit_json(
            f / INDEX,
            lambda i: i.update(
                weight_map=dict(
                    zip(
                        i["weight_map"], sorted(i["weight_map"].values(), reverse=True), strict=True
                    )
                )
            ),
        ),
    ),
    "an index with one file": (
        "llama",
        lambda f: (
            os.rename(f / ONE, f / "only.safetensors"),
            (f / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "only.safetensors"}}'),
        ),
    ),
    "a base model saved alone, tied": (TIED, lambda f: edit(f, lambda w: rename(w, without_outer))),
    "GPT-2 saved alone": ("gpt2", lambda f: edit(f, lambda w: rename(w, without_outer))),
    "a base model with a head": ("llama", lambda f: edit(f, lambda w: rename(w, without_outer))),
    "some names without the outer module": (
        "qwen3",
        lambda f: edit(
            f, lambda w: rename(w, lambda name: without_outer(name) if "layers.0" in name else name)
        ),
    ),
    "an outer module that does not belong": (
        "llama",
        lambda f: edit(f, lambda w: w.update({"model.lm_head.weight": w.pop("lm_head.weight")})),
    ),
    "the older name of the dtype": (
        "llama",
        lambda f: edit_json(config_of(f), lambda c: c.update(torch_dtype=c.pop("dtype"))),
    ),
    "no dtype in the configuration": (
        "llama",
        lambda f: edit_json(config_of(f), lambda c: c.pop("dtype")),
    ),
    "links as in a cache": ("llama", as_in_a_cache),
    "a file that the configuration names": ("llama", named_in_config),
    "a configuration that leaves out defaults": (
        "llama",
        lambda f: edit_json(
            config_of(f),
            lambda c: [
                c.pop(k, None)
                for k in (
                    "hidden_act",
                    "attention_bias",
                    "mlp_bias",
                    "rms_norm_eps",
                    "architectures",
                    "head_dim",
                    "rope_parameters",
                    "initializer_range",
                    "use_cache",
                )
            ],
        ),
    ),
    "other files beside": (
        "llama",
        lambda f: [
            (f / name).write_text("{")
            for name in (
                "generation_config.json.bak",
                "tokenizer.json",
                "training_args.bin",
                "optimizer.pt",
                "model.fp16.safetensors",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_what_transformers_takes_of_a_directory_is_imported(name, originals, tmp_path):
    origin, change = SAME[name]
    shutil.copytree(originals / origin, tmp_path / "hf")
    shutil.copytree(originals / "older", tmp_path / "older")
    change(tmp_path / "hf")
    true = load_model(tmp_path / "hf").float()
    command.main(["import", "--load", f"{tmp_path}/hf", "--save", f"{tmp_path}/megatron"])
    export_model(tmp_path / "megatron", tmp_path / "again")
    found = load_model(tmp_path / "again").float()
    assert torch.equal(logits_of(found), logits_of(true))


def cut(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])


def only(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()


def shard_of(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def set_config(**entries: object) -> Callable[[Path], object]:
    return lambda f: edit_json(config_of(f), lambda c: c.update(entries))


# Directory, what is done to it, and what the one line must tell.
REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a pointer for the weights": (
        "llama",
        lambda f: (f / ONE).write_text(POINTER),
        f"{ONE} .*git lfs pull",
    ),
    "a pointer for a shard": (
        "shards",
        lambda f: shard_of(f).write_text(POINTER),
        "model-00002-of.*git lfs pull",
    ),
    "a pointer for the index": (
        "shards",
        lambda f: (f / INDEX).write_text(POINTER),
        f"{INDEX} .*git lfs pull",
    ),
    "a pointer for the configuration": (
        "llama",
        lambda f: config_of(f).write_text(POINTER),
        "config.json .*git lfs pull",
    ),
    "half a file": ("llama", lambda f: cut(f / ONE, 0.5), f"{ONE}, of .* bytes.*download"),
    "a file cut in its header": ("llama", lambda f: cut(f / ONE, 0.005), f"{ONE}.*download"),
    "an empty file": ("llama", lambda f: cut(f / ONE, 0), f"{ONE}, of 0 bytes.*download"),
    "half a shard": ("shards", lambda f: cut(shard_of(f), 0.5), "model-00002-of.*download"),
    "a file of something else": (
        "llama",
        lambda f: (f / ONE).write_bytes(b"<html>none</html>" * 9),
        f"{ONE}.*download",
    ),
    "a shard that is gone": ("shards", lambda f: shard_of(f).unlink(), "no model-00002-of.*copy"),
    "an index that is no JSON": ("shards", lambda f: cut(f / INDEX, 0.5), f"{INDEX} is not JSON"),
    "an index that is a list": (
        "shards",
        lambda f: (f / INDEX).write_text("[1]"),
        f"{INDEX} is not an object",
    ),
    "an index without a map": (
        "shards",
        lambda f: edit_json(f / INDEX, lambda i: i.pop("weight_map")),
        "no weight_map",
    ),
    "an index whose map is a list": (
        "shards",
        lambda f: edit_json(f / INDEX, lambda i: i.update(weight_map=[1])),
        "weight_map",
    ),
    "an index whose map leads to numbers": (
        "shards",
        lambda f: edit_json(f / INDEX, lambda i: i.update(weight_map={"a": 1})),
        "weight_map",
    ),
    "weights of torch.save": ("llama", as_bin, "neither .* but pytorch_model.bin.*save_pretrained"),
    "another case of the name": (
        "llama",
        lambda f: os.rename(f / ONE, f / "Model.safetensors"),
        "but Model.safe.*names",
    ),
    "adapters": (
        "llama",
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "adapter_config.json.*merge_and_unload",
    ),
    "a configuration without weights": (
        "llama",
        lambda f: only(f, "config.json", "generation_config.json"),
        "no weights",
    ),
    "weights without a configuration": ("llama", lambda f: config_of(f).unlink(), "no config.json"),
    "nothing": ("llama", only, "no config.json"),
    "a link to nothing": (
        "llama",
        lambda f: ((f / ONE).unlink(), (f / ONE).symlink_to("../blobs/1")),
        f"{ONE} is a link to a file that is not there",
    ),
    "a configuration of nothing": (
        "llama",
        lambda f: config_of(f).write_text("[]"),
        "config.json is not an object",
    ),
    "a configuration of bytes": (
        "llama",
        lambda f: config_of(f).write_bytes(b"\xff\xfe\x00"),
        "config.json is not JSON",
    ),
    "no kind of model": (
        "llama",
        lambda f: edit_json(config_of(f), lambda c: c.pop("model_type")),
        "model_type",
    ),
    "a size in words": ("llama", set_config(hidden_size="big"), "config.json is not"),
    "no heads": ("llama", set_config(num_attention_heads=0), "config.json is not|heads"),
    "positions of no kind": (
        "llama",
        set_config(rope_parameters={"rope_type": "of mine"}),
        "config.json is not|rope",
    ),
    "quantised": (
        "llama",
        set_config(quantization_config={"quant_method": "fp8"}),
        "quantization_config",
    ),
    "a base model without its head": (
        "llama",
        lambda f: edit(f, lambda w: (rename(w, without_outer), w.pop("lm_head.weight"))),
        "lacks lm_head.weight",
    ),
    "no embedding": (
        TIED,
        lambda f: edit(f, lambda w: w.pop("model.embed_tokens.weight")),
        "lacks model.embed",
    ),
    "a name in both spellings": (
        "llama",
        lambda f: edit(f, lambda w: w.update({"norm.weight": torch.ones(64)})),
        "model.norm.weight twice",
    ),
    "a named file that is not there": (
        "llama",
        set_config(transformers_weights="no.safetensors"),
        "no no.safetensors.*config",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_whole_model_is_refused_in_one_line_with_the_remedy(
    name, originals, tmp_path, capsys
):
    origin, change, line = REFUSED[name]
    shutil.copytree(originals / origin, tmp_path / "hf")
    change(tmp_path / "hf")
    with pytest.raises(SystemExit) as end:
        command.main(["import", "--load", f"{tmp_path}/hf", "--save", f"{tmp_path}/megatron"])
    output = capsys.readouterr().err
    assert end.value.code and output.startswith("megatron_asynchzp: ") and output.count("\n") == 1
    assert re.search(line, output), output
    assert not (tmp_path / "megatron").exists()
