# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What sub-samples ranks get in place of those that Megatron routes, without any rank."""

from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import hybrid_cp_schedule
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.mcore.patches import sub_samples
from megatron_asynchzp.mcore.run.settings import Run, RunSettings

ROUTES = [[[0, 3], [0, 3], [1], [2]], [[4], [4], [4], [4]]]


@pytest.fixture
def rank_two(monkeypatch):
    """Rank 2 of 4, with P = 1 and G = 2; the fields of its run may be changed."""
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": False}
    run = Namespace(num_experts=None, sft=False, **parallel)
    settings = RunSettings(ShardSizes(1, 2, 4))
    monkeypatch.setattr(Run, "_current", Run(run, settings, None, None))
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda with_context_parallel: 2)
    world_size = "get_data_parallel_world_size"
    monkeypatch.setattr(parallel_state, world_size, lambda with_context_parallel: 4)
    return run


def _sample(length: int) -> dict[str, torch.Tensor]:
    values = torch.arange(1, length + 1)
    return {"tokens": values, "own": -values, "loss_mask": torch.ones(length)}


def _given(run: Namespace, routes: list) -> tuple[dict, list]:
    samples = {number: _sample(6 + number) for group in routes for number in group[2]}
    given, filled = next(sub_samples._with_fillers(iter([(samples, routes)]), run, []))
    for number, sample in samples.items():
        assert given[number] is not sample
        for name, values in sample.items():
            assert given[number][name][: len(values)].tolist() == values.tolist()
    return {number: sample for number, sample in given.items() if number not in samples}, filled


def test_the_rank_gets_the_fillers_of_its_own_list_each_with_fields_of_its_own(rank_two):
    routes = [[[0], [], [1], [2, 3, 5]], [[4], [4], [4], [4]]]
    fillers, filled = _given(rank_two, routes)
    assert len(fillers) == 2 and set(fillers) == set(filled[0][2][1:])
    for filler in fillers.values():
        assert {name: value.tolist() for name, value in filler.items()} == {
            "tokens": [1],
            "own": [-1],
            "loss_mask": [0.0],
        }
    first, second = fillers.values()
    first["tokens"] = None
    assert second["tokens"] is not None


def test_a_filler_is_split_over_the_ranks_of_sequence_parallelism(rank_two):
    rank_two.sequence_parallel = True
    (filler,) = _given(rank_two, [[[0], [0], [1], [2, 3]]])[0].values()
    assert filler["tokens"].tolist() == [1, 1] and not filler["loss_mask"].any()


@pytest.mark.parametrize("is_split, more", [(False, 2), (True, 6)])
def test_a_sub_sample_of_two_ranks_grows_to_equal_parts_without_a_loss(rank_two, is_split, more):
    """Each rank has two parts, which ranks of sequence parallelism split once more."""
    rank_two.sequence_parallel = is_split
    routed = iter([({2: _sample(10)}, [[[1], [1], [2], [2]]])])
    sample = next(sub_samples._with_fillers(routed, rank_two, []))[0][2]
    tokens = [*range(1, 11), *[10] * more]
    assert sample["tokens"].tolist() == tokens
    assert sample["own"].tolist() == [-token for token in tokens]
    assert sample["loss_mask"].tolist() == [1.0] * 10 + [0.0] * more


def test_with_experts_all_ranks_get_equally_many(rank_two):
    assert not _given(rank_two, ROUTES)[0]
    rank_two.num_experts = 4
    assert len(_given(rank_two, ROUTES)[0]) == 1


def _report(total: float, tokens: float) -> dict[str, torch.Tensor]:
    return {"lm loss": torch.tensor([total, tokens])}


@pytest.mark.parametrize("is_sft, is_evaluation", [(True, True), (False, True), (True, False)])
def test_an_evaluation_with_sft_reports_packed_samples(
    rank_two, is_sft, is_evaluation, monkeypatch
):
    """Two packed samples, of two sub-samples and one, which the rank runs last to first."""
    rank_two.sft = is_sft
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda **_: 0)
    groups = {"get_data_parallel_group": "data", "get_tensor_model_parallel_group": "tensor"}
    for name, group in groups.items():
        monkeypatch.setattr(parallel_state, name, lambda group=group, **_: group)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 1)
    others = {"data": 2, "tensor": 1}  # as if another rank had the same reports
    monkeypatch.setattr(dist, "all_reduce", lambda totals, group: totals.mul_(others.pop(group)))
    packed = [{"tokens": torch.arange(length)} for length in (5, 3)]

    class Wrapper:
        def __init__(self, data_iterator, config):
            self.data_iterator = data_iterator

        def __next__(self):
            first, second = [
                sample | {"loss_mask": torch.ones(1)} for sample in next(self.data_iterator)
            ]
            parts = [{name: value[i : i + 2] for name, value in first.items()} for i in (0, 2)]
            return {0: parts[0], 1: parts[1], 2: second}, [[[2, 1, 0]]]

    seen = []

    def original(
        forward_step_func, data_iterator, model, num_microbatches, input_tensor,
        output_tensor_grad, forward_data_store, config, collect_non_loss_data, first_val_step,
        forward_only, no_sync_func, total_num_tokens, check_first_val_step, model_type,
    ):  # fmt: skip
        samples, _ = next(data_iterator)
        seen.extend(sample.keys() for sample in samples.values())
        return [_report(3.0, 2.0), _report(5.0, 1.0), _report(1.0, 3.0)], 6

    call = dict.fromkeys(sub_samples.run_samples.parameters_in("0.19"))
    call |= {"forward_only": is_evaluation, "num_microbatches": 2, "data_iterator": iter([packed])}
    with mock.patch("megatron.core.datasets.data_schedule.HybridCPDataLoaderWrapper", Wrapper):
        reports, tokens = sub_samples.run_samples.make(original)(**call)
    assert tokens == 6 and all(names == {"tokens", "loss_mask"} for names in seen)
    sums = (
        [[12.0, 8.0], [6.0, 4.0]]
        if is_sft and is_evaluation
        else [[3.0, 2.0], [5.0, 1.0], [1.0, 3.0]]
    )
    assert [report["lm loss"].tolist() for report in reports] == sums


def test_megatrons_rerun_mode_sees_one_iterator_which_reads_from_that_of_the_data(rank_two):
    data = RerunDataIterator(iter([5]))
    made = sub_samples.route_samples.make(lambda inner, config: inner)(data, None)
    assert isinstance(made, RerunDataIterator) and iter(made) is made
    assert made.iterable is data.iterable and next(made) == 5


def test_megatrons_own_schedule_takes_the_iterator_of_training_as_routed(rank_two):
    routed = sub_samples.route_samples.make(lambda inner, config: inner)(iter([5]), None)
    call = [None] * len(sub_samples.run_samples.parameters_in("0.19"))
    call[1] = routed
    wrapper = "megatron.core.datasets.data_schedule.HybridCPDataLoaderWrapper"
    original = mock.create_autospec(hybrid_cp_schedule.hybrid_context_parallel_forward_backward)
    original.return_value = [], 0
    with mock.patch(wrapper) as wrapped:
        sub_samples.run_samples.make(original)(*call)
    assert not wrapped.called and original.call_count == 1


def test_a_sub_sample_is_given_to_megatrons_functions_in_a_batch_and_stays_as_it_was(rank_two):
    shape = sub_samples.shape_sample.make(lambda batch, **options: batch)
    sample = _sample(6) | {"labels": None, "position_ids": torch.zeros(6)}
    given = shape(sample, is_hybrid_cp=True)
    assert given["tokens"].shape == given["position_ids"].shape == (1, 6)
    assert given["cu_seqlens"].tolist() == [[0, 6]] and given["max_seqlen"].tolist() == [6]
    assert given["labels"] is None and sample["tokens"].shape == (6,)
    assert "cu_seqlens" not in sample
    assert shape(sample, is_hybrid_cp=False) is sample
    assert shape({}, is_hybrid_cp=True) == {}  # a tensor-parallel rank that the first one tells


@pytest.mark.parametrize("is_alone", [True, False])
def test_rotary_positions_follow_the_ranks_of_the_sub_sample(rank_two, is_alone):
    group, groups = object(), SimpleNamespace(cp="all ranks", tp="others")
    attention = SimpleNamespace(pg_collection=groups)
    packed = SimpleNamespace(local_cp_size=2, cp_group=group)
    if is_alone:
        packed = SimpleNamespace(local_cp_size=1, cp_group=None)
    attend = sub_samples.attend.make(lambda self, **options: self.pg_collection)
    seen = attend(attention, packed_seq_params=packed)
    assert seen.tp == "others" and attention.pg_collection is groups and groups.cp == "all ranks"
    if is_alone:
        assert (seen.cp.size(), seen.cp.rank()) == (1, 0)
    else:
        assert seen.cp is group
    assert attend(attention, packed_seq_params=None) is groups
