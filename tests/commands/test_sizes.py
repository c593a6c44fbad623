# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes that have to divide others, kind by kind: what is said before a start is what a start
says."""

import itertools
import re
import shlex
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state

from megatron_asynchzp.commands import pretended_world
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags import checks
from megatron_asynchzp.planner.model import Attention, Layer, Mlp, Model, Parallel
from megatron_asynchzp.planner.space import undivided
from scripts.testbed.megatron_runs import gpt_args, run_pretrain
from tests.support.world import on_ranks

RANKS = 4
BASE = "--bf16 --use-asynchzp --train-iters 1 --transformer-impl local --no-persist-layer-norm "
BASE += "--num-layers 4 --max-position-embeddings 64"
TP, PP, EP = (f"--{name}-model-parallel-size " for name in ("tensor", "pipeline", "expert"))
CP, ETP, SP = "--context-parallel-size ", "--expert-tensor-parallel-size ", "--sequence-parallel "
MOE = "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
MOE += "--disable-bias-linear "
GQA = "--group-query-attention --num-query-groups "
STAGES = "--num-virtual-stages-per-pipeline-rank "
LAYOUT = "--pipeline-model-parallel-layout "
MTP = "--mtp-num-layers 1 --position-embedding-type rope "
HYBRID = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
HYBRID += "--mamba-num-heads 8 --mamba-num-groups 2 --hybrid-layer-pattern "
MLA = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
MLA += "--v-head-dim 8 --position-embedding-type rope "
# Of each kind: what does not start, and what does.
KINDS = {
    "ranks": ([TP + "3", PP + "3", CP + "3"], [TP + "4", PP + "4"]),
    "experts and pipelines": (
        [MOE + PP + "2 " + EP + "4", MOE + PP + "4 " + EP + "2", MOE + TP + "2 " + EP + "4 " + SP],
        [MOE + PP + "2 " + EP + "2", MOE + TP + "2 " + SP + ETP + "1 " + EP + "4"],
    ),
    "experts": (
        [MOE + f"--num-experts {number} {EP}{ranks}" for number, ranks in ((6, 4), (3, 2), (7, 4))],
        [MOE + EP + "4"],
    ),
    "experts to choose from": (
        [
            MOE + "--moe-router-topk 9",
            MOE + "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 1",
            MOE + "--moe-router-num-groups 3 --moe-router-group-topk 1",
        ],
        [MOE + "--moe-router-topk 8", MOE + "--moe-router-num-groups 4 --moe-router-group-topk 2"],
    ),
    "experts by layer": (
        [MOE + f"--moe-layer-freq [{one}]*{number}" for one, number in ((1, 3), (0, 5), (1, 1))],
        [MOE + "--moe-layer-freq [0,1]*2", MOE + "--moe-layer-freq 3"],
    ),
    "experts beside tensor parallelism": (
        [MOE + TP + "2", MOE + TP + "4", MOE + TP + "2 " + ETP + "1 " + EP + "2"],
        [MOE + TP + "2 " + SP],
    ),
    "heads": (
        [f"--num-attention-heads {heads} --kv-channels 8 {TP}4" for heads in (2, 6, 7)],
        ["--num-attention-heads 8 " + TP + "4"],
    ),
    "groups of queries": (
        [
            f"--num-attention-heads 8 {GQA}3 {TP}2",
            f"--num-attention-heads 8 {GQA}3",
            f"--num-attention-heads 12 --kv-channels 8 {GQA}6 {TP}4",
        ],
        [f"--num-attention-heads 8 {GQA}2 {TP}4"],  # ranks share a group
    ),
    "widths": (
        ["--ffn-hidden-size 130 " + TP + "4", "--ffn-hidden-size 129 " + TP + "2",
         MOE + "--moe-layer-freq [0,1]*2 --ffn-hidden-size 130 --moe-ffn-hidden-size 64 " + SP
         + TP + "4"],
        ["--ffn-hidden-size 130 " + TP + "2",  # and where no layer has that MLP:
         MOE + "--moe-ffn-hidden-size 64 --ffn-hidden-size 130 " + SP + TP + "4"],
    ),
    "widths of experts": (
        [
            MOE + SP + TP + "2 " + ETP + "2 --moe-ffn-hidden-size 65",
            MOE + SP + TP + "4 --moe-ffn-hidden-size 66",
            MOE + SP + TP + "2 " + ETP + "1 --moe-shared-expert-intermediate-size 65",
        ],
        [MOE + SP + TP + "2 " + ETP + "1 --moe-ffn-hidden-size 65"],
    ),
    "sequences": (
        [f"{SP}{TP}{ranks} --seq-length {tokens}" for ranks, tokens in ((2, 33), (4, 30), (4, 34))],
        [SP + TP + "2 --seq-length 34"],
    ),
    "layers": (
        ["--num-layers 3 " + PP + "2", "--num-layers 6 " + PP + "4",
         "--num-layers 6 --decoder-first-pipeline-num-layers 1 "
         "--decoder-last-pipeline-num-layers 2 " + PP + "4"],
        ["--decoder-first-pipeline-num-layers 1 " + PP + "4",
         "--num-layers 3 --account-for-embedding-in-pipeline-split " + PP + "2"],
    ),
    "virtual stages": (
        [STAGES + "3 " + PP + "2", STAGES + "2",
         "--num-layers 6 --num-layers-per-virtual-pipeline-stage 2 " + PP + "2"],
        [STAGES + "2 " + PP + "2"],
    ),
    "micro-batches of virtual stages": (
        [
            STAGES + "2 --global-batch-size 6 " + PP + "2",
            STAGES + "2 --global-batch-size 2 " + PP + "2",
            STAGES + "2 --microbatch-group-size-per-virtual-pipeline-stage 3 " + PP + "2",
        ],
        [STAGES + "2 --global-batch-size 10 --microbatch-group-size-per-virtual-pipeline-stage 3 "
         + PP + "2"],
    ),
    "layouts": (
        [f"{LAYOUT}{text} {PP}2" for text in ("Ett|tL", "Ett|t|tL", "tt|EttL")],
        [LAYOUT + "Ett|ttL " + PP + "2"],
    ),
    "predicted tokens": (
        [MTP + LAYOUT + "Ett|ttL " + PP + "2", MTP + LAYOUT + "Ettm|ttL " + PP + "2",
         "--mtp-num-layers 1"],
        [MTP + PP + "2"],
    ),
    "batches": (
        ["--global-batch-size 6", "--micro-batch-size 3", "--eval-global-batch-size 6"],
        ["--micro-batch-size 2"],
    ),
    "growing batches": (
        [f"--step-batch-size-schedule {text}" for text in ("0:6,128:8", "0:4,16:8", "64:4,128:8")],
        ["--step-batch-size-schedule 0:4,128:8"],
    ),
    "hybrid layers": (
        [HYBRID + "MMMM --mamba-num-heads 6 " + TP + "4", HYBRID + "MMMM " + TP + "4",
         HYBRID + "MMMM --mamba-num-heads 7", HYBRID + "MMM " + PP + "2"],
        [HYBRID + "MMMM " + TP + "2"],
    ),
    "latent attention": (
        [MLA + TP + "2 --kv-lora-rank 17", MLA + TP + "2 --q-lora-rank 15",
         MLA + TP + "4 --num-attention-heads 2"],
        [MLA + TP + "2"],
    ),
    "orders of ranks": (
        [MOE + "--use-tp-pp-dp-mapping " + PP + "2 " + EP + "2",
         MOE + "--use-tp-pp-dp-mapping " + SP + TP + "2 " + ETP + "1 " + PP + "2",
         MOE + "--use-tp-pp-dp-mapping " + PP + "2 " + SP + TP + "2 " + ETP + "1"],
        ["--use-tp-pp-dp-mapping " + PP + "2"],
    ),
    "steps of a schedule": (
        ["--lr-warmup-iters 3 --lr-decay-iters 2", "--lr-warmup-iters 100",
         "--lr-warmup-fraction 1.0"],
        ["--lr-warmup-iters 1 --lr-decay-iters 2"],
    ),
}  # fmt: skip


def words_of(line: str) -> list[str]:
    words = gpt_args(*shlex.split(f"{BASE} {line}"))
    if "--step-batch-size-schedule" in words:
        place = words.index("--global-batch-size")
        del words[place : place + 2]
    return words


def said(line: str) -> str:
    """The refusal before a start of 4 ranks; "" where there is none."""
    try:
        pretended_world.parse(words_of(line), RANKS, RANKS)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def one_connection(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_do_not_divide_are_refused_before_a_start(kind):
    refused, started = KINDS[kind]
    assert len(refused) >= 3
    for line in refused:
        assert said(line), line
    for line in started:
        assert not said(line), line


@pytest.mark.parametrize(
    "more, line",
    [
        ("--moe-router-topk 9", "--moe-router-topk 9 is above --num-experts 8; lower it"),
        ("--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
         "--moe-router-topk 6 over --moe-router-group-topk 2 needs 3 experts of a group, but each "
         "of the 4 groups has 2; lower the first, or raise the second"),
    ],
)  # fmt: skip
def test_more_experts_for_a_token_than_there_are_are_named_with_what_there_is(more, line):
    assert said(MOE + more) == line


def test_a_world_is_refused_where_megatrons_groups_refuse_it_and_nowhere_else():
    refused = {True: 0, False: 0}
    names = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    for ranks, *sizes in itertools.product(
        (4, 8, 12), (1, 2), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2)
    ):
        given = {f"{name}_parallel_size": size for name, size in zip(names, sizes, strict=True)}
        args = SimpleNamespace(**given, world_size=ranks, hybrid_context_parallel=False)
        for name in ("global_batch_size", "micro_batch_size", "decrease_batch_size_if_needed"):
            vars(args).update({name: None, f"eval_{name}": None})
        try:
            with pretended_world.groups_of(ranks):
                parallel_state.initialize_model_parallel(**given, order="tp-cp-ep-dp-pp")
            is_legal = True
        except RuntimeError:
            is_legal = False
        refused[not is_legal] += 1
        faults = [*checks.faults_of_sizes(args)]
        assert is_legal == (not faults)
        if faults:
            assert "are not a multiple of" in faults[0]
            # What it advises is a world that Megatron takes.
            advised = int(re.search(r"start (\d+) ranks", faults[0])[1])
            with pretended_world.groups_of(advised):
                parallel_state.initialize_model_parallel(**given, order="tp-cp-ep-dp-pp")
    assert min(refused.values()) > 30


def start_each(lines: list[str]) -> list[str]:
    """What refuses each; "" where a step was made. Collective."""
    found = []
    for line in lines:
        try:
            run_pretrain(words_of(line))
            found.append("")
        except (Exception, SystemExit) as error:
            found.append(f"{type(error).__name__} {error}")
    return found


@pytest.mark.slow
def test_a_start_says_the_same_of_sizes():
    lines = [line for kind in KINDS.values() for part in kind for line in part if CP not in line]
    answers = on_ranks(start_each, RANKS, lines, timeout_s=3000)[0]
    unlike = [
        (line, answer, before)
        for line, answer in zip(lines, answers, strict=True)
        if bool(answer) != bool(before := said(line))
    ]
    assert not unlike


def test_the_planner_tries_what_megatron_takes():
    layer = Layer(Attention(32, 8, 128), Mlp(14336, True))
    model = Model(4096, 32000, (layer,) * 32)
    assert not [*undivided(model, Parallel(tp=16), 8192)]  # two ranks share a group
    assert [*undivided(model, Parallel(tp=64), 8192)] == [
        ("num-attention-heads", 32, "tensor-model-parallel-size", 64)
    ]
    assert [*undivided(model, Parallel(pp=4, virtual=3), 8192)]
