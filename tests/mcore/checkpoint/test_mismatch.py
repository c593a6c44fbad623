# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another model is refused by the flag that differs, and by no other."""

import contextlib
import io
import re
from argparse import ArgumentParser, Namespace
from itertools import chain, permutations
from typing import Any, NamedTuple

import pytest

from megatron_asynchzp.checkpoint_files.peers import Peers
from megatron_asynchzp.mcore.checkpoint import mismatch
from megatron_asynchzp.mcore.checkpoint.causes import CAUSES, flag_of
from megatron_asynchzp.mcore.checkpoint.mismatch import compare
from scripts.testbed.megatron_runs import gpt_args, initialized_args, tear_down
from tests.support.selection import slow_unless
from tests.support.world import on_ranks

_ROPE = "--position-embedding-type rope"
_LATENT = f"{_ROPE} --multi-latent-attention"
_QUERY_GROUPS = "--group-query-attention --num-query-groups"
_NO_BIAS = "--disable-bias-linear"
_EXPERTS = f"{_NO_BIAS} --num-experts"
MODELS = (
    "",
    "--num-layers 4",
    "--hidden-size 32",
    "--num-attention-heads 2",
    "--kv-channels 32",
    f"{_QUERY_GROUPS} 2",
    "--qk-layernorm",
    "--normalization RMSNorm",
    "--ffn-hidden-size 128",
    "--swiglu",
    "--untie-embeddings-and-output-weights",
    "--vocab-size 100",
    "--max-position-embeddings 64",
    _ROPE,
    f"{_ROPE} --mtp-num-layers 1",
    _LATENT,
    f"{_LATENT} --q-lora-rank 24",
    f"{_LATENT} --kv-lora-rank 24",
    f"{_LATENT} --v-head-dim 64",
    _NO_BIAS,
    f"{_NO_BIAS} --add-qkv-bias",
    f"{_EXPERTS} 4",
    f"{_EXPERTS} 8",
    f"{_EXPERTS} 4 --moe-ffn-hidden-size 128",
    f"{_EXPERTS} 4 --moe-shared-expert-intermediate-size 64",
    f"{_EXPERTS} 4 --moe-layer-freq 2",
)
# One of each kind of cause; to build a model takes longer than to compare all.
FEW = (
    *("", "--num-layers 4", "--qk-layernorm", "--swiglu", "--vocab-size 100"),
    *(_ROPE, f"{_ROPE} --mtp-num-layers 1", _LATENT, f"{_LATENT} --q-lora-rank 24"),
    *(_NO_BIAS, f"{_EXPERTS} 4", f"{_EXPERTS} 8"),
)
# The same model: a vocabulary is padded and cut, the others mean nothing beside what is given.
SAME = {
    "": ("--make-vocab-size-divisible-by 256", "--kv-lora-rank 24"),
    _ROPE: (f"{_ROPE} --max-position-embeddings 64",),
}


class Wanted(NamedTuple):
    """What is compared of a ShardedTensor."""

    key: str
    global_shape: tuple[int, ...]
    allow_shape_mismatch: bool


class Model(NamedTuple):
    """args: of a run that is about to load; saved: as training leaves them; tensors: its own."""

    args: Namespace
    saved: Namespace
    tensors: list[Wanted]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {one.key: one.global_shape for one in self.tensors}


def _describe(line: str) -> Model:
    """Megatron's own model for this command line."""
    from megatron.core import tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, initialize, training

    try:
        args = initialized_args(gpt_args(*line.split()))
        initialize._initialize_distributed(None, None, None)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = argument_utils.gpt_config_from_args(args)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        build = config.get_builder_cls()(config).build_distributed_models
        (model,) = build(pg_collection=groups, wrap_with_ddp=False)
        module = getattr(model, "module", model)
        tensors = [
            Wanted(one.key, tuple(one.global_shape), one.allow_shape_mismatch)
            for one in mismatch.wanted_tensors(module.sharded_state_dict())
        ]
        before = _plain(args)
        training.num_floating_point_operations(args, 8)
        return Model(before, _plain(args), tensors)
    finally:
        tear_down()


def _plain(args: Namespace) -> Namespace:
    kinds = bool | int | float | str | list | None
    return Namespace(
        **{name: value for name, value in vars(args).items() if isinstance(value, kinds)}
    )


def _describe_all(names: tuple[str, ...]) -> dict[str, Model]:
    from megatron_asynchzp import cpu_platform

    cpu_platform.install()
    lines = (*names, *chain.from_iterable(SAME.values()))
    with contextlib.redirect_stdout(io.StringIO()):
        return {line: _describe(line) for line in lines}


@pytest.fixture(
    scope="module", params=[slow_unless(True, FEW, id="few"), slow_unless(False, MODELS, id="all")]
)
def models(request) -> dict[str, Model]:
    return on_ranks(_describe_all, 1, request.param, timeout_s=600.0)[0]


def _compare(saved: Model, run: Model, **changed: Any) -> str | None:
    args = Namespace(**vars(run.args) | changed)
    return compare(args, saved.saved, saved.shapes, run.tensors, Peers())


def _flags(line: str) -> dict[str, str]:
    return dict(re.findall(r"(--\S+)(?: (?!--)(\S+))?", line))


def test_a_model_is_refused_by_a_flag_that_was_given_to_one_run_and_not_to_the_other(models):
    for saved, run in permutations([line for line in MODELS if line in models], 2):
        line = _compare(models[saved], models[run])
        assert line is not None and "\n" not in line, (saved, run)
        named = re.match(r"is of another model: (--\S+) is (.+) in the checkpoint and ", line)
        assert named, (saved, run, line)
        flag = named[1]
        assert _flags(saved).get(flag) != _flags(run).get(flag), (saved, run, line)


def test_the_same_model_is_never_refused(models):
    for line in set(MODELS) & models.keys():
        for one, other in permutations([line, line, *SAME.get(line, ())], 2):
            assert _compare(models[one], models[other]) is None, (one, other)


@pytest.mark.parametrize("changed", [{"finetune": True}, {"dist_ckpt_strictness": "log_all"}])
def test_a_part_of_a_checkpoint_is_loaded_where_that_is_asked_for(models, changed):
    more, less = models[f"{_ROPE} --mtp-num-layers 1"], models[_ROPE]
    assert _compare(more, less, **changed) is None
    assert "--dist-ckpt-strictness log_all loads the rest" in _compare(more, less)


def test_every_flag_that_can_be_named_is_one_of_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False)
    getattr(add_megatron_arguments, "__wrapped__", add_megatron_arguments)(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag_of(name) for name in (*CAUSES, *mismatch.FIXED)} <= known


# --- the optimizer's part ----------------------------------------------------------------------


def _with_states(model: Model, *kinds: str) -> Model:
    states = [
        one._replace(key=f"optimizer.state.{kind}.{one.key}")
        for kind in kinds
        for one in model.tensors
    ]
    return model._replace(tensors=model.tensors + states)


ADAM = ("fp32_param", "exp_avg", "exp_avg_sq")
SGD = ("fp32_param", "momentum_buffer")
STATES = {
    (ADAM, ()): "holds no state of an optimizer (--no-save-optim); add --no-load-optim",
    (ADAM, ("fp32_param",)): "was saved before the first step of its optimizer and holds no moment",
    (SGD, ("fp32_param",)): "was saved before the first step of its optimizer and holds no moment",
    (ADAM, ADAM[:2]): "is of another model: it has no tensor optimizer.state.exp_avg_sq.",
}


@pytest.mark.parametrize(("run", "saved"), STATES)
def test_a_state_that_is_not_there_is_no_matter_of_the_model(models, run, saved):
    plain = models[""]
    line = _compare(_with_states(plain, *saved), _with_states(plain, *run))
    assert line.startswith(STATES[run, saved])


@pytest.mark.parametrize(
    ("saved", "run", "changed", "flag"),
    [
        (ADAM, SGD, {"optimizer": "sgd"}, "--optimizer is adam"),
        (SGD[:1], SGD, {"sgd_momentum": 0.5}, "--sgd-momentum is 0.9"),
        (ADAM[1:], ADAM, {"bf16": True}, "--bf16 is False"),
    ],
)
def test_another_optimizer_is_named_by_its_flag(models, saved, run, changed, flag):
    states = (_with_states(models[""], *kinds) for kinds in (saved, run))
    assert _compare(*states, **changed).startswith(f"is of another optimizer: {flag} in the check")


def test_a_state_of_a_tensor_that_the_model_lacks_is_a_matter_of_the_model(models):
    saved, run = (_with_states(models[line], *ADAM) for line in ("", "--qk-layernorm"))
    run = run._replace(tensors=run.tensors[::-1])
    assert _compare(saved, run).startswith("is of another model: --qk-layernorm is False")
