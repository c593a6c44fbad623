# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A running model of tensor parallelism 2 is streamed, saved and followed through a step. More
layouts are in test_weight_stream.py."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_asynchzp import (
    ConfigurationError,
    apply_delta,
    mark_weights,
    save_hf,
    stream_changes,
    stream_weights,
)
from megatron_asynchzp.hf import weight_stream
from scripts.testbed import megatron_runs
from scripts.testbed.megatron_flags import UNTIED
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.hf.models import load_model, logits_of
from tests.hf.trained import _logits
from tests.support.world import on_ranks

# fmt: off
FLAGS = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size",
         "96", "--position-embedding-type", "rope", "--group-query-attention",
         "--num-query-groups", "2", *UNTIED, "--tensor-model-parallel-size", "2", "--vocab-size",
         "101", "--make-vocab-size-divisible-by", "16", "--train-iters", "2", "--use-asynchzp",
         "--asynchzp-device", "cpu"]
# fmt: on
_SMALL = 20_000  # bytes: less than a layer, so that several exchanges and files are made


def stream_and_save(folder: Path) -> dict[str, Any]:
    """Body of a rank: what it is given, and what its model computes."""
    model, marked, found = list[Any](), dict[str, torch.Tensor](), dict[str, Any]()

    def taken(**options: Any) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in stream_weights(model, **options)}

    def mark() -> None:
        if not marked:
            mark_weights(model, "start")
            marked.update(taken())

    def inspect(chunks: list, optimizer: Any) -> None:
        found["logits"] = _logits(chunks, optimizer)
        found["whole"] = taken()
        with mock.patch.object(weight_stream, "_TOGETHER_NBYTES", _SMALL):
            found["in parts"] = taken()
        found["to rank 1"] = taken(receivers=(1,))
        found["in bf16"] = taken(dtype=torch.bfloat16)
        for delta in stream_changes(model, "start"):
            apply_delta(marked, delta)
        found["followed"] = marked
        save_hf(model, folder / "saved", max_file_nbytes=_SMALL)
        with pytest.raises(ConfigurationError, match="not empty") as refusal:
            save_hf(model, folder / "saved")
        found["refusal"] = str(refusal.value)

    listening = megatron_runs.listening(
        mark, lambda _: None, setup_model_and_optimizer=lambda built: model.extend(built[0])
    )
    with listening:
        run_pretrain(gpt_args(*FLAGS), inspect)
    return found


def test_every_way_out_of_a_running_model_gives_the_weights_that_it_computes_with(tmp_path):
    first, second = on_ranks(stream_and_save, 2, tmp_path)
    saved = {}
    for file in sorted((tmp_path / "saved").glob("*.safetensors")):
        saved |= load_file(file)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        logits_of(load_model(tmp_path / "saved")), torch.from_numpy(first["logits"]),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    ways = [one[way] for one in (first, second) for way in ("whole", "in parts", "followed")]
    for way in (*ways, second["to rank 1"]):
        assert way.keys() == saved.keys()
        assert all(torch.equal(way[name], saved[name]) for name in saved)
    assert not first["to rank 1"]
    for name, tensor in second["in bf16"].items():
        assert torch.equal(tensor, saved[name].bfloat16())
    assert first["refusal"] == second["refusal"] and "save_hf()" in first["refusal"]
