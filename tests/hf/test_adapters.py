# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters are merged into the weights that an export writes, in fp32 and rounded once."""

from argparse import Namespace
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from megatron_asynchzp.hf.torch_dist import (
    TensorReader,
    TensorToWrite,
    read_arguments_of,
    write_checkpoint,
)
from scripts.testbed.adapters import ALPHA, adapted_and_seeded
from scripts.testbed.megatron_flags import size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from scripts.testbed.ranks import run_ranks
from tests.hf import trained
from tests.hf.models import load_model, logits_of, random_model
from tests.hf.test_directories import weights_of
from tests.hf.test_logits import assert_same_logits

LINEAR, RANK = "decoder.layers.mlp.linear_fc2", 3


def write(folder: Path, tensors: dict[str, torch.Tensor], arguments: Namespace) -> None:
    written = [
        TensorToWrite(key, one[0].shape, one.dtype, one.shape[:1], lambda at, t=one: t[at])
        if key.startswith("decoder.layers.")
        else TensorToWrite(key, one.shape, one.dtype, (), lambda at, t=one: t)
        for key, one in tensors.items()
    ]
    write_checkpoint(folder / "release", written, {"common_state/shard_0_1": {"args": arguments}})
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


class Folders:
    """Checkpoints made of one random model in bf16: `whole` with adapters in it, `base` without,
    `part` of adapters alone, `wrapped` as a wrapper writes it that leaves its own name."""

    def __init__(self, folder: Path):
        self.folder = folder
        random_model("llama").to(torch.bfloat16).save_pretrained(folder / "hf")
        import_model(folder / "hf", folder / "base")
        reader = TensorReader(folder / "base" / "release")
        self.tensors = {key: reader.read(key) for key in reader.tensors}
        self.arguments = read_arguments_of(folder / "base" / "release")
        layers, out, into = self.tensors[f"{LINEAR}.weight"].shape
        self.adapter = {
            f"{LINEAR}.adapter.linear_in.weight": torch.randn(layers, RANK, into).bfloat16(),
            f"{LINEAR}.adapter.linear_out.weight": torch.randn(layers, out, RANK).bfloat16(),
        }
        self.write("whole", self.tensors | self.adapter)
        self.write("part", self.adapter)
        renamed = {
            key.replace("linear_fc2.", "linear_fc2.to_wrap."): one
            for key, one in self.tensors.items()
        }
        self.write("wrapped", renamed | self.adapter)

    def write(self, name: str, tensors: dict[str, torch.Tensor], **arguments: object) -> None:
        write(self.folder / name, tensors, Namespace(**{**vars(self.arguments), **arguments}))

    def export(self, name: str, **options) -> dict[str, torch.Tensor]:
        output = Path(mkdtemp(dir=self.folder), "exported")
        export_model(self.folder / name, output, **options)
        return weights_of(output)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_merged_weight_is_the_sum_in_fp32_rounded_once(folders, dtype):
    plain = folders.export("base", dtype=dtype)
    merged = folders.export("whole", adapter_alpha=2.0, dtype=dtype)
    assert plain.keys() == merged.keys()
    into, out = (one.float() for one in folders.adapter.values())
    for layer, weight in enumerate(folders.tensors[f"{LINEAR}.weight"]):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        expected = weight.float() + 2.0 / RANK * (out[layer] @ into[layer])
        assert torch.equal(merged.pop(name), expected.to(dtype or torch.bfloat16))
    assert all(torch.equal(merged[name], plain[name]) for name in merged)


def test_a_wrappers_own_name_and_a_base_that_lies_elsewhere_change_nothing(folders):
    whole = folders.export("whole", adapter_alpha=2.0)
    others = [
        folders.export("wrapped", adapter_alpha=2.0),
        folders.export("part", adapter_alpha=2.0, base=folders.folder / "base"),
    ]
    for other in others:
        assert other.keys() == whole.keys()
        assert all(torch.equal(other[name], whole[name]) for name in whole)


def test_what_was_trained_comes_before_the_base(folders):
    norm = folders.tensors["decoder.final_layernorm.weight"] + 1
    folders.write("trained part", folders.adapter | {"decoder.final_layernorm.weight": norm})
    found = folders.export("trained part", adapter_alpha=2.0, base=folders.folder / "base")
    assert torch.equal(found["model.norm.weight"], norm)


def test_the_alpha_of_the_run_is_taken_where_none_is_given_and_0_is_one(folders):
    folders.write("of a run", folders.tensors | folders.adapter, lora_alpha=2.0)
    plain, merged = folders.export("base"), folders.export("whole", adapter_alpha=2.0)
    for expected, options in ((merged, {}), (plain, {"adapter_alpha": 0.0})):
        found = folders.export("of a run", **options)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_cannot_be_merged_is_refused_by_name(folders):
    (into_key, into), (out_key, out) = folders.adapter.items()
    folders.write("half", folders.tensors | {into_key: into})
    folders.write("other sizes", folders.tensors | {into_key: into[..., 1:].clone(), out_key: out})
    dora = {f"{LINEAR}.adapter.weight_magnitude": out[..., 0].clone()}
    folders.write("dora", folders.tensors | folders.adapter | dora)
    for name, alpha, line in (
        ("whole", None, f"{LINEAR} has an adapter, .* add --adapter-alpha"),
        ("base", 2.0, "--adapter-alpha 2: .* has no adapters"),
        ("whole", float("nan"), "--adapter-alpha nan: give a finite number"),
        ("whole", float("inf"), "--adapter-alpha inf: give a finite number"),
        ("part", 2.0, f"no {LINEAR}.weight; add --base DIR"),
        ("half", 2.0, f"no {out_key}"),
        ("other sizes", 2.0, f"{LINEAR} has size .* does not fit"),
        ("dora", 2.0, "has, and no rule maps, .*weight_magnitude"),
    ):
        with pytest.raises(ConfigurationError, match=line):
            folders.export(name, adapter_alpha=alpha)


MODELS = {
    "llama, grouped queries, untied, TP 2": [],
    "gpt2, untied, distributed optimizer": [],
    "qwen2, grouped queries, untied": size_flags((2, 1, 2)),
    "mixtral, grouped queries, untied, EP 2": size_flags((1, 1, 1)),
}


def train_and_save(folder: Path) -> dict:
    """Logits of the last step's model, by name."""
    found = {}
    for name, sizes in MODELS.items():
        flags = [*trained._SIZES, *trained.TRAINED[name], *trained._TRAIN, *sizes]
        if sizes:
            flags = [flag for flag in flags if flag != "--use-distributed-optimizer"]
        save = ["--save", str(folder / name), "--save-interval", "1000"]
        run = run_pretrain(gpt_args(*flags, *save), trained._logits, adapted_and_seeded)
        found[name] = run.inspected
    return found


@pytest.mark.slow
def test_the_merged_model_has_the_logits_of_the_trained_one(tmp_path, record_property):
    logits = run_ranks(train_and_save, 2, tmp_path)[0]
    for name, found in logits.items():
        print(name)
        export_model(tmp_path / name, tmp_path / "exported" / name, adapter_alpha=ALPHA)
        exported = logits_of(load_model(tmp_path / "exported" / name))
        assert_same_logits(exported, torch.from_numpy(found), record_property)
