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

ONE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
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


Change = Callable[[Path], object]
"""Of a directory of transformers."""
Weights = dict[str, torch.Tensor]


def weights(change: Callable[[Weights], object]) -> Change:
    """Of the one file of weights."""

    def edit(folder: Path) -> None:
        found = load_file(folder / ONE)
        change(found)
        save_file(found, folder / ONE, metadata={"format": "pt"})

    return edit


def entries(name: str, change: Callable[[dict], object]) -> Change:
    """Of a file of JSON."""

    def edit(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))

    return edit


def config(**new: object) -> Change:
    return entries(CONFIG, lambda found: found.update(new))


def config_without(*names: str) -> Change:
    return entries(CONFIG, lambda found: [found.pop(name, None) for name in names])


def written(name: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content)


def names(new_name: Callable[[str], str]) -> Callable[[Weights], object]:
    def rename(found: Weights) -> None:
        renamed = {new_name(name): tensor for name, tensor in found.items()}
        found.clear()
        found.update(renamed)

    return rename


def moved(name: str, new_name: str) -> Callable[[Weights], object]:
    return lambda found: found.update({new_name: found.pop(name)})


def without_outer(name: str) -> str:
    return name.removeprefix("model.").removeprefix("transformer.")


def copy_older(folder: Path) -> None:
    for path in (folder.parent / "older").glob("model*"):
        shutil.copy(path, folder)


def own_head(found: Weights) -> None:
    found[HEAD] = found[EMBEDDING].flip(0).contiguous()


def as_in_a_cache(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        path.symlink_to(f"../blobs/{number}")


def named_in_config(folder: Path) -> None:
    shutil.copytree(folder, folder / "other")
    weights(lambda w: w.update({"model.norm.weight": torch.ones(64)}))(folder / "other")
    shutil.move(folder / "other" / ONE, folder / "other.safetensors")
    shutil.rmtree(folder / "other")
    config(transformers_weights="other.safetensors")(folder)


def doubled(folder: Path) -> None:
    """A tensor in two shards, with other values in the last."""
    first, *_, last = sorted(folder.glob("*.safetensors"))
    (name, tensor), *_ = load_file(first).items()
    save_file(load_file(last) | {name: tensor + 0.5}, last, metadata={"format": "pt"})


def extra_shard(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model-9-of-9.safetensors")


def other_shards(index: dict) -> None:
    named = index["weight_map"]
    index["weight_map"] = dict(zip(named, sorted(named.values(), reverse=True), strict=True))


def one_file_of_an_index(folder: Path) -> None:
    os.rename(folder / ONE, folder / "only.safetensors")
    written(INDEX, '{"metadata": {}, "weight_map": {"a": "only.safetensors"}}')(folder)


def files_beside(folder: Path) -> None:
    others = ("generation_config.json.bak", "tokenizer.json", "training_args.bin", "optimizer.pt")
    for name in (*others, "model.fp16.safetensors"):
        (folder / name).write_text("{")


TIED, HEAD, EMBEDDING = "llama-tied-scaled-rope", "lm_head.weight", "model.embed_tokens.weight"
ALONE, LAYER_ALONE = (
    weights(names(new_name))
    for new_name in (
        without_outer,
        lambda name: without_outer(name) if "layers.0" in name else name,
    )
)
NO_FILES = '{"metadata": {}, "weight_map": {"a": "gone"}}'
DEFAULTS = ("hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps", "architectures", "head_dim")
DEFAULTS += ("rope_parameters", "initializer_range", "use_cache")
SAME: dict[str, tuple[str, Change]] = {
    "a head of its own that is the embedding": (
        TIED, weights(lambda w: w.update({HEAD: w[EMBEDDING].clone()}))),
    "a head of its own that differs from the embedding": (TIED, weights(own_head)),
    "a head that the flag ties, untied in the file": ("llama", config(tie_word_embeddings=True)),
    "the tied head alone": (TIED, weights(moved(EMBEDDING, HEAD))),
    "no word on tying": ("llama", config_without("tie_word_embeddings")),
    "one file beside older shards and their index": ("llama", copy_older),
    "one file beside an index of files that are gone": ("llama", written(INDEX, NO_FILES)),
    "one file beside an index that is no JSON": ("llama", written(INDEX, "{")),
    "shards": ("shards", lambda folder: None),
    "a shard that no index names": ("shards", extra_shard),
    "a tensor in two shards": ("shards", doubled),
    "an index that names other shards for its tensors": ("shards", entries(INDEX, other_shards)),
    "an index with one file": ("llama", one_file_of_an_index),
    "a base model saved alone, tied": (TIED, ALONE),
    "GPT-2 saved alone": ("gpt2", ALONE),
    "a base model with a head": ("llama", ALONE),
    "some names without the outer module": ("qwen3", LAYER_ALONE),
    "an outer module that does not belong": ("llama", weights(moved(HEAD, f"model.{HEAD}"))),
    "the older name of the dtype": (
        "llama", entries(CONFIG, lambda c: c.update(torch_dtype=c.pop("dtype")))),
    "no dtype in the configuration": ("llama", config_without("dtype")),
    "links as in a cache": ("llama", as_in_a_cache),
    "a file that the configuration names": ("llama", named_in_config),
    "a configuration that leaves out defaults": ("llama", config_without(*DEFAULTS)),
    "other files beside": ("llama", files_beside),
}  # fmt: skip


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


def shard_of(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def cut(name: str, part: float) -> Change:
    """name: or a pattern."""

    def cut_one(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])

    return cut_one


def only(*kept: str) -> Change:
    return lambda folder: [path.unlink() for path in folder.iterdir() if path.name not in kept]


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / ONE), folder / "pytorch_model.bin")
    (folder / ONE).unlink()


def a_link_to_nothing(folder: Path) -> None:
    (folder / ONE).unlink()
    (folder / ONE).symlink_to("../blobs/1")


def without_its_head(found: Weights) -> None:
    names(without_outer)(found)
    found.pop(HEAD)


SECOND = "model-00002-of-*"  # of the shards
HTML = "<html>none</html>" * 9
# Directory, what is done to it, and what the one line must tell.
REFUSED: dict[str, tuple[str, Change, str]] = {
    "a pointer for the weights": ("llama", written(ONE, POINTER), f"{ONE} .*git lfs pull"),
    "a pointer for a shard": (
        "shards", lambda f: shard_of(f).write_text(POINTER), "model-00002-of.*git lfs pull"),
    "a pointer for the index": ("shards", written(INDEX, POINTER), f"{INDEX} .*git lfs pull"),
    "a pointer for the configuration": (
        "llama", written(CONFIG, POINTER), "config.json .*git lfs pull"),
    "half a file": ("llama", cut(ONE, 0.5), f"{ONE}, of .* bytes.*download"),
    "a file cut in its header": ("llama", cut(ONE, 0.005), f"{ONE}.*download"),
    "an empty file": ("llama", cut(ONE, 0), f"{ONE}, of 0 bytes.*download"),
    "half a shard": ("shards", cut(SECOND, 0.5), "model-00002-of.*download"),
    "a file of something else": ("llama", written(ONE, HTML), f"{ONE}.*download"),
    "a shard that is gone": ("shards", lambda f: shard_of(f).unlink(), "no model-00002-of.*copy"),
    "an index that is no JSON": ("shards", cut(INDEX, 0.5), f"{INDEX} is not JSON"),
    "an index that is a list": ("shards", written(INDEX, "[1]"), f"{INDEX} is not a JSON object"),
    "an index without a map": (
        "shards", entries(INDEX, lambda i: i.pop("weight_map")), "no weight_map"),
    "an index whose map is a list": (
        "shards", entries(INDEX, lambda i: i.update(weight_map=[1])), "weight_map"),
    "an index whose map leads to numbers": (
        "shards", entries(INDEX, lambda i: i.update(weight_map={"a": 1})), "weight_map"),
    "weights of torch.save": ("llama", as_bin, "neither .* but pytorch_model.bin.*save_pretrained"),
    "another case of the name": (
        "llama", lambda f: os.rename(f / ONE, f / "Model.safetensors"), "but Model.safe.*names"),
    "adapters": (
        "llama", written("adapter_config.json", "{}"), "adapter_config.json.*merge_and_unload"),
    "a configuration without weights": (
        "llama", only(CONFIG, "generation_config.json"), "no weights"),
    "weights without a configuration": (
        "llama", lambda f: (f / CONFIG).unlink(), "no config.json"),
    "nothing": ("llama", only(), "no config.json"),
    "a link to nothing": (
        "llama", a_link_to_nothing, f"{ONE} is a link to a missing file"),
    "a configuration of nothing": (
        "llama", written(CONFIG, "[]"), "config.json is not a JSON object"),
    "a configuration of bytes": (
        "llama", written(CONFIG, b"\xff\xfe\x00"), "config.json is not JSON"),
    "no kind of model": ("llama", config_without("model_type"), "model_type"),
    "a size in words": ("llama", config(hidden_size="big"), "config.json is not"),
    "no heads": ("llama", config(num_attention_heads=0), "config.json is not|heads"),
    "positions of no kind": (
        "llama", config(rope_parameters={"rope_type": "of mine"}), "config.json is not|rope"),
    "quantised": (
        "llama", config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "a base model without its head": (
        "llama", weights(without_its_head), "lacks lm_head.weight"),
    "no embedding": (TIED, weights(lambda w: w.pop(EMBEDDING)), "lacks model.embed"),
    "a name in both spellings": (
        "llama", weights(lambda w: w.update({"norm.weight": torch.ones(64)})),
        "model.norm.weight twice"),
    "a named file that is not there": (
        "llama", config(transformers_weights="no.safetensors"), "no no.safetensors.*config"),
}  # fmt: skip


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
