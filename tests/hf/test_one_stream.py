# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A running model of tensor parallelism 2 is streamed, saved and followed through a step, and what
cannot be is refused in one line on all ranks; another one is followed where two ranks share its
optimizer's states. More layouts are in test_weight_stream.py."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
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
from scripts.testbed.megatron_flags import BF16, UNTIED, size_flags
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.hf.models import load_model, logits_of
from tests.hf.test_weight_stream import frozen
from tests.hf.trained import _logits
from tests.support.world import on_ranks

# fmt: off
_LLAMA = ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size",
          "96", "--position-embedding-type", "rope", "--group-query-attention",
          "--num-query-groups", "2", *UNTIED, "--vocab-size", "101",
          "--make-vocab-size-divisible-by", "16", "--train-iters", "2", "--asynchzp-device", "cpu"]
FLAGS = [*_LLAMA, "--tensor-model-parallel-size", "2", "--use-asynchzp"]
# fmt: on
_SMALL = 20_000  # bytes: less than a layer, so that several exchanges and files are made


WAYS = "whole", "in parts", "followed", "afterwards"


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
        found["most at once"], found["most received"] = most_at_once(model)
        found["refused"] = refusals(model, optimizer, folder / "saved")
        found["afterwards"] = taken()

    listening = megatron_runs.listening(
        mark, lambda _: None, setup_model_and_optimizer=lambda built: model.extend(built[0])
    )
    with listening:
        run_pretrain(gpt_args(*FLAGS), inspect)
    return found


def most_at_once(model: list) -> tuple[int, int]:
    """While all weights are streamed in small parts: whole units in memory, and bytes of what other
    ranks sent."""
    alive, most, received = weakref.WeakSet[torch.Tensor](), 0, [0]
    gather, deliver = weight_stream.whole_unit, weight_stream.deliver

    def counted(unit: Any) -> torch.Tensor:
        nonlocal most
        whole = gather(unit).detach()
        alive.add(whole)
        most = max(most, len(alive))
        return whole

    def delivered(parcels: Any) -> None:
        coming = [one.tensor.nbytes for one in parcels if one.receiver == dist.get_rank()]
        received.append(sum(coming))
        deliver(parcels)

    with (
        mock.patch.object(weight_stream, "_TOGETHER_NBYTES", _SMALL),
        mock.patch.object(weight_stream, "whole_unit", counted),
        mock.patch.object(weight_stream, "deliver", delivered),
    ):
        for _ in stream_weights(model):
            pass
    return most, max(received)


def follow_a_replica() -> tuple[list[str], int, dict[str, bool]]:
    """Body of a rank, in data parallelism: what changed in a small step, for rank 1 alone. Names of
    the deltas, their bytes, and of each tensor whether it is as it is now."""
    model, marked, found = list[Any](), list[dict[str, torch.Tensor]](), []

    def taken() -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in stream_weights(model, receivers=(1,))}

    def mark() -> None:
        if not marked:
            mark_weights(model, "start")
            marked.append(taken())

    def inspect(*_: Any) -> None:
        nbytes = {}
        for delta in stream_changes(model, "start", receivers=(1,)):
            nbytes[delta.name] = delta.nbytes
            apply_delta(marked[0], delta)
        same = {name: torch.equal(marked[0][name], one) for name, one in taken().items()}
        found.extend((list(nbytes), sum(nbytes.values()), same))

    rates = ["--lr", "1e-6", "--min-lr", "1e-6", "--lr-warmup-iters", "0"]
    listening = megatron_runs.listening(
        mark, lambda _: None, setup_model_and_optimizer=lambda built: model.extend(built[0])
    )
    with frozen("self_attention"), listening:
        run_pretrain(gpt_args(*_LLAMA, *BF16, *rates, *size_flags((1, 1, 2))), inspect)
    names, nbytes, same = found
    return names, nbytes, same


def stream_both(folder: Path) -> tuple[dict[str, Any], tuple[list[str], int, dict[str, bool]]]:
    return stream_and_save(folder), follow_a_replica()


def said(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except ConfigurationError as error:
        return str(error)
    return ""


def refusals(model: list, optimizer: Any, occupied: Path) -> dict[str, str]:
    """What each wrong call says, by what is wrong."""
    from megatron.training import get_args

    rank, args = dist.get_rank(), get_args()
    found = {
        "no ranks": said(stream_weights, model, receivers=()),
        "other ranks": said(stream_weights, model, receivers=(1, 2)),
        "different": said(stream_weights, model, receivers=(rank,)),
        "dtype on one rank": said(stream_weights, model, dtype=torch.int8 if rank else None),
        "one chunk": said(stream_weights, model[0]),
        "bare": said(stream_weights, [model[0].module]),
        "unknown mark": said(stream_changes, model, "monday"),
        "occupied": said(save_hf, model, occupied),
        "not writable": said(save_hf, model, occupied / "config.json" / "model"),
    }
    with mock.patch.object(args, "squared_relu", True):
        found["unknown"] = said(stream_weights, model)
    positions = torch.arange(32).view(1, 32)
    model[0](positions, positions, None, labels=positions).sum().backward()
    found["in a step"] = said(stream_weights, model)
    model[0].zero_grad_buffer()
    stream = stream_weights(model)
    next(stream)
    model[0].zero_grad_buffer()
    found["interrupted"] = said(next, stream)
    optimizer.sleep(level=2)
    found["asleep"] = said(stream_weights, model)
    optimizer.wake()
    return found


REFUSED = {
    "no ranks": "stream_weights(): receivers = []: give global ranks below 2",
    "other ranks": "stream_weights(): receivers = [1, 2]: give global ranks below 2",
    "different": "stream_weights(): ranks ask for different receivers, dtypes, marks or "
    "vocabularies",
    "dtype on one rank": "stream_weights(): dtype = torch.int8: weights are in fp32, bf16 or fp16",
    "one chunk": "stream_weights(): the model is not the list of chunks of a run with "
    "--use-asynchzp",
    "bare": "stream_weights(): the model is not the list of chunks of a run with --use-asynchzp",
    "unknown mark": "stream_changes(): no mark 'monday' of the weights; there are: start",
    "occupied": "save_hf(): FOLDER exists and is not empty; name another folder",
    "not writable": "save_hf(): [Errno 17] File exists: 'FOLDER/config.json'",
    "unknown": "stream_weights(): the model has squared ReLU (squared_relu = True), which does "
    "not map",
    "in a step": "stream_weights(): within a step: call it after optimizer.step()",
    "interrupted": "stream_weights(): a step began before all weights were taken",
    "asleep": "stream_weights(): the sharded model is asleep. Call wake() first.",
}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> tuple[Path, list]:
    folder = tmp_path_factory.mktemp("streamed")
    return folder, on_ranks(stream_both, 2, folder)


def test_every_way_out_of_a_running_model_gives_the_weights_that_it_computes_with(streamed):
    folder, ((first, _), (second, _)) = streamed
    saved = {}
    for file in sorted((folder / "saved").glob("*.safetensors")):
        saved |= load_file(file)
    assert len(list((folder / "saved").glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        logits_of(load_model(folder / "saved")), torch.from_numpy(first["logits"]),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    ways = [one[way] for one in (first, second) for way in WAYS]
    for way in (*ways, second["to rank 1"]):
        assert way.keys() == saved.keys()
        assert all(torch.equal(way[name], saved[name]) for name in saved)
    assert not first["to rank 1"]
    for name, tensor in second["in bf16"].items():
        assert torch.equal(tensor, saved[name].bfloat16())
    for one in (first, second):
        assert 0 < one["most at once"] <= 2
        largest = max(tensor.nbytes for tensor in saved.values())
        assert 0 < one["most received"] <= max(_SMALL, largest)
        lines = {
            what: line.replace(str(folder / "saved"), "FOLDER")
            for what, line in one["refused"].items()
        }
        assert lines == REFUSED


def test_a_receiver_alone_gets_what_a_small_step_changed_and_nothing_of_what_stayed(streamed):
    _, ((first, of_first), (_, (names, nbytes, same))) = streamed
    assert of_first == ([], 0, {})
    assert same.keys() == first["whole"].keys() and all(same.values())
    assert names and not any("self_attn." in name for name in names)
    assert nbytes < sum(tensor.numel() for tensor in first["whole"].values())  # half of all bytes
