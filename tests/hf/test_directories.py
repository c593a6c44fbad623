# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Directories in and out: nothing is lost or left half done, what does not fit is an error."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.hf import __main__ as command
from megatron_asynchzp.hf.export_model import export_model
from megatron_asynchzp.hf.import_model import import_model
from megatron_asynchzp.hf.mapping import OTHER_KEYS
from megatron_asynchzp.hf.safetensors_folder import TensorInfo, write_folder
from megatron_asynchzp.hf.shape import write_arguments
from megatron_asynchzp.hf.torch_dist import TensorReader, TensorToWrite, write_checkpoint
from tests.hf.models import NAMES, load_model, random_model, shapes
from tests.support.checkpoint_damage import flip


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]):
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_export_of_an_import_gives_the_same_bits(name, dtype, tmp_path):
    random_model(name).to(dtype).save_pretrained(tmp_path / "hf")
    assert import_model(tmp_path / "hf", tmp_path / "megatron") == shapes()[name]
    assert export_model(tmp_path / "megatron", tmp_path / "again") == shapes()[name]
    assert_same_bits(weights_of(tmp_path / "again"), weights_of(tmp_path / "hf"))
    again, before = load_model(tmp_path / "again"), load_model(tmp_path / "hf")
    assert type(again) is type(before) and again.dtype == dtype
    assert_same_bits(again.state_dict(), before.state_dict())


@pytest.fixture
def llama(tmp_path) -> Path:
    """A folder with a directory `hf` and the checkpoint `megatron` made of it."""
    random_model("llama").save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "megatron")
    return tmp_path


def test_large_models_are_written_in_several_files_with_an_index(llama):
    export_model(llama / "megatron", llama / "again", max_file_nbytes=60_000)
    index = json.loads((llama / "again" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (llama / "again").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert all((llama / "again" / file).stat().st_size < 62_000 for file in files)
    assert_same_bits(weights_of(llama / "again"), weights_of(llama / "hf"))
    load_model(llama / "again")
    import_model(llama / "again", llama / "once more")  # read through the index
    left, right = (TensorReader(llama / name / "release") for name in ("once more", "megatron"))
    assert_same_bits(*({key: one.read(key) for key in one.tensors} for one in (left, right)))


@pytest.mark.parametrize(
    "lengths, files",
    [
        ([6, 6, 3, 1, 6], [[6], [6, 3, 1], [6]]),
        ([4, 6, 11, 1, 9], [[4, 6], [11], [1, 9]]),  # one alone is larger than a file
        ([10], [[10]]),
    ],
)
def test_a_file_ends_where_the_next_tensor_does_not_fit(tmp_path, lengths, files):
    tensors = {f"w{i}": torch.full((n,), i, dtype=torch.bfloat16) for i, n in enumerate(lengths)}
    infos = {name: TensorInfo(one.shape, one.dtype) for name, one in tensors.items()}
    write_folder(tmp_path, infos, tensors.items(), max_file_nbytes=20)
    paths = sorted(tmp_path.glob("*.safetensors"))
    held = [load_file(path) for path in paths]
    assert [[len(one) for _, one in sorted(each.items())] for each in held] == files
    assert_same_bits({name: one for each in held for name, one in each.items()}, tensors)


def test_the_vocabulary_is_padded_with_zeros_on_import_and_cut_on_export(llama):
    table = TensorReader(llama / "megatron" / "release").read("embedding.word_embeddings.weight")
    assert table.shape == (128, 64) and not table[101:].any() and table[:101].any(dim=1).all()
    shape = export_model(llama / "megatron", llama / "smaller", vocab_size=90)
    assert shape.vocab_size == 90
    assert load_model(llama / "smaller").get_input_embeddings().weight.shape == (90, 64)


def write_again(folder: Path, rename: Callable[[str], str], change: dict[str, object]) -> None:
    """The tensors of `megatron` in a checkpoint `other`, under other names and arguments."""
    reader, args = TensorReader(folder / "megatron" / "release"), write_arguments(shapes()["llama"])
    vars(args).update(change)
    tensors = [
        TensorToWrite(rename(key), one.size, torch.float32, (), lambda _, key=key: reader.read(key))
        for key, one in reader.tensors.items()
    ]
    objects = {"common_state/shard_0_1": {"args": args}}
    write_checkpoint(folder / "other" / "iter_0000007", tensors, objects)


def test_norms_that_a_checkpoint_keeps_by_themselves_are_found(llama):
    write_again(llama, lambda key: OTHER_KEYS.get(key, key), {})
    export_model(llama / "other", llama / "again", step=7)
    assert_same_bits(weights_of(llama / "again"), weights_of(llama / "hf"))


def test_an_import_keeps_the_norm_before_experts_where_either_layer_of_megatron_looks(tmp_path):
    random_model("mixtral").save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "megatron")
    reader = TensorReader(tmp_path / "megatron" / "release")
    own = reader.read("decoder.layers.mlp.linear_fc1.layer_norm_weight")
    of_transformer_engine = reader.read("decoder.layers.pre_mlp_layernorm.weight")
    assert own.std() > 0.1 and torch.equal(own, of_transformer_engine)


def test_gpt2_directories_without_the_outer_module_are_read(tmp_path):
    model: Any = random_model("gpt2")
    model.save_pretrained(tmp_path / "hf")
    bare = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)  # the causal mask, as old directories have it
    save_file(bare, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    import_model(tmp_path / "hf", tmp_path / "megatron")
    export_model(tmp_path / "megatron", tmp_path / "again")
    assert_same_bits(load_model(tmp_path / "again").state_dict(), model.state_dict())


def _change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_fp64_weights_are_cast_as_dtype_asks(llama):
    _change_weights(llama / "hf", lambda w: w.update({n: one.double() for n, one in w.items()}))
    import_model(llama / "hf", llama / "cast", dtype=torch.float32)
    left, right = (TensorReader(llama / name / "release") for name in ("cast", "megatron"))
    assert_same_bits(*({key: one.read(key) for key in one.tensors} for one in (left, right)))


@pytest.mark.parametrize(
    "change, output",
    [
        (lambda w: w.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda w: w.update({"model.layers.0.q_norm.weight": torch.ones(16)}), r"q_norm\.weight"),
        (lambda w: w.update({"model.norm.weight": torch.ones(63)}), r"\[63\].*\[64\]"),
        (lambda w: w.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "is in I8"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(64).double()}),
            "is in F64.*--dtype casts",
        ),
        (lambda w: w.update({"model.norm.weight": torch.ones(64).bfloat16()}), "mixes"),
    ],
)
def test_a_directory_with_other_tensors_is_refused_and_nothing_is_written(change, output, llama):
    _change_weights(llama / "hf", change)
    with pytest.raises(ConfigurationError, match=output) as refusal:
        import_model(llama / "hf", llama / "new")
    assert "\n" not in str(refusal.value)
    assert sorted(os.listdir(llama)) == ["hf", "megatron"]


@pytest.mark.parametrize(
    "change, output",
    [
        ({"num_layers": 3}, r"\[2, 64\].*\[3, 64\]"),
        ({"untie_embeddings_and_output_weights": False}, r"no rule maps, output_layer\.weight"),
        ({"add_qkv_bias": True}, r"lacks decoder\.layers\.self_attention\.linear_qkv\.bias"),
        ({"num_experts": 4}, r"lacks decoder\.layers\.mlp\.router\.weight"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_and_nothing_is_written(change, output, llama):
    write_again(llama, lambda key: key, change)
    with pytest.raises(ConfigurationError, match=output) as refusal:
        export_model(llama / "other", llama / "new", step=7)
    assert "\n" not in str(refusal.value)
    assert sorted(os.listdir(llama)) == ["hf", "megatron", "other"]


def test_a_folder_that_holds_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no checkpoint of Megatron"):
        export_model(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="--ckpt-step 5: .*there is no such directory"):
        export_model(tmp_path, tmp_path / "out", step=5)


def test_the_checkpoint_that_training_would_start_from_is_exported(llama, capsys):
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(llama / "megatron" / "release", llama / "run" / name)
    (llama / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    damaged = llama / "run" / "iter_0000002" / "__0_0.distcp"
    damaged.write_bytes(flip(damaged.read_bytes(), damaged.read_bytes().index(b"/data/0") + 150))
    with pytest.raises(
        ConfigurationError, match=r"--ckpt-step 2: .*__0_0\.distcp: .* --ckpt-step 1$"
    ):
        export_model(llama / "run", llama / "out", step=2)
    command.main(["export", "--load", f"{llama}/run", "--output", f"{llama}/out"])
    assert "iter_0000002 is skipped: __0_0.distcp: " in capsys.readouterr().err
    assert_same_bits(weights_of(llama / "out"), weights_of(llama / "hf"))
    unverified = ["--output", f"{llama}/unverified", "--verify", "structure"]
    command.main(["export", "--load", f"{llama}/run", *unverified])
    assert "skipped" not in capsys.readouterr().err


def test_what_is_there_already_is_never_written_over(llama):
    (llama / "taken").mkdir()
    (llama / "taken" / "mine").touch()
    with pytest.raises(ConfigurationError, match="not empty"):
        export_model(llama / "megatron", llama / "taken")
    with pytest.raises(ConfigurationError, match="not empty"):
        import_model(llama / "hf", llama / "taken")
    assert os.listdir(llama / "taken") == ["mine"]


def test_a_conversion_that_breaks_off_leaves_nothing(llama):
    def breaking(steps, total):
        yield next(iter(steps))
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export_model(llama / "megatron", llama / "new", progress=breaking)
    with pytest.raises(OSError, match="disk full"):
        import_model(llama / "hf", llama / "new", progress=breaking)
    assert sorted(os.listdir(llama)) == ["hf", "megatron"]


def test_the_commands_convert_and_print_the_flags_of_the_model(llama, capsys):
    unpadded = ("--make-vocab-size-divisible-by", "1")
    words = ["import", "--load", f"{llama}/hf", "--save", f"{llama}/new", "--dtype", "bf16"]
    command.main([*words, *unpadded])
    stored = TensorReader(llama / "new" / "release").tensors
    assert {it.properties.dtype for it in stored.values()} == {torch.bfloat16}
    output = capsys.readouterr().out
    for flag in ("--num-layers 2", "--num-query-groups 2", "--finetune", "--vocab-size 101"):
        assert flag in output
    command.main(
        ["export", "--load", f"{llama}/new", "--output", f"{llama}/out", "--dtype", "fp32"]
    )
    output = capsys.readouterr().out
    assert "llama, 2 layers, vocabulary 101" in output and "All rows" not in output
    assert load_model(llama / "out").dtype == torch.float32
    assert {tensor.dtype for tensor in weights_of(llama / "out").values()} == {torch.float32}


def test_the_commands_end_with_one_line_and_a_status(llama, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        command.main(["export", "--load", f"{llama}/megatron", "--output", f"{llama}/hf"])
    output = capsys.readouterr().err
    assert end.value.code == 2 and output.count("\n") == 1
    assert output.startswith("megatron_asynchzp: ") and "not empty" in output
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit):
        command.main(["export", "--load", f"{llama}/megatron", "--output", f"{llama}/out"])
    said = capsys.readouterr().err
    assert 'safetensors, which is not installed; pip install "megatron_asynchzp[hf]"' in said
