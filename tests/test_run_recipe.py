# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Recipes that run for a few steps: what of a recipe is changed, and a run to the end."""

from pathlib import Path

import pytest

from scripts.train.census import Case
from scripts.train.run_recipe import Outcome, command_line, main

ROOT = Path(__file__).parents[1]
_RECIPE = """
MODEL_ARGS:
  --num-layers: 2
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 4
  --global-batch-size: 64
  --train-iters: 1000
  --lr: 1e-3
  --save: ${CHECKPOINTS}
  --wandb-project: releases
  --tokenizer-type: NullTokenizer
  --vocab-size: 127
  --attention-backend: fused
  --use-distributed-optimizer: true
  --bf16: true
"""


def _value(flags: list[str], flag: str) -> str:
    """The one that Megatron takes: the last."""
    return flags[len(flags) - 1 - flags[::-1].index(flag) + 1]


def test_a_recipe_keeps_its_flags_but_for_places_services_and_its_length():
    given = ["--spec", "a", "b", "--lr", "-1e-3", "--save", "1", "--wandb-project", "releases"]
    given += ["--train-iters", "1000", "--micro-batch-size", "4", "--bf16"]
    flags = command_line(Case(Path("recipe"), given), "here", 4, ["--num-layers", "2"])
    assert " ".join(flags).startswith("--spec a b --lr -1e-3 --save here --train-iters")
    assert "--wandb-project" not in flags and "--bf16" in flags and flags[-1] == "2"
    assert _value(flags, "--save-interval") == "2"  # without one the flags are refused
    assert _value(flags, "--train-iters") == "2" and _value(flags, "--global-batch-size") == "4"


def test_a_folder_without_megatron_or_recipe_is_one_line(tmp_path, capsys):
    for arguments, message in (
        ([str(tmp_path), "gpt/a"], "no Megatron-LM checkout"),
        ([str(ROOT / "scripts" / "train"), "gpt/a"], "no such recipe"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_run_without_a_finite_loss_in_every_step_is_not_trained(broken):
    assert Outcome({1: 4.9, 2: 4.6}, "", 0).is_trained
    assert not Outcome({1: 4.9, 2: broken}, "", 0).is_trained
    assert not Outcome({1: 4.9}, "", 0).is_trained


@pytest.mark.slow
def test_a_recipe_trains_and_one_that_is_refused_counts_as_failed(tmp_path, capsys):
    for name, more in (("right", ""), ("refused", "  --fp4-format: e2m1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_config.yaml").write_text(_RECIPE + more)
    scripts = str(ROOT / "scripts" / "train")  # whose pretrain_gpt.py needs the wheel alone
    recipes = [str(tmp_path / "right"), str(tmp_path / "refused")]
    assert main([scripts, *recipes, "--ranks", "2"]) == 1
    right, refused = capsys.readouterr().out.split(recipes[1])
    assert "trained: " in right and "use_distributed_optimizer = False" in right
    assert "FAILED with status 1" in refused and "--fp4-format" in refused
