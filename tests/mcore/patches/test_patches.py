# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Patching the installed Megatron, and what each replacement does with what it is given. How names
are replaced and come back is in tests/test_replacements.py."""

import contextlib
import inspect
import pkgutil
import re
import sys
from argparse import ArgumentParser, Namespace
from unittest import mock

import pytest
import torch
from megatron.core import package_info

from megatron_asynchzp.engine.sharding.topology import ShardSizes
from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.flags.command_line import own_flags
from megatron_asynchzp.mcore.patches import model, offloading, table
from megatron_asynchzp.mcore.patches.patch import (
    Patch,
    apply_patches,
    found_version,
    remove_patches,
    replaces,
)
from megatron_asynchzp.mcore.run.settings import Run, RunSettings
from megatron_asynchzp.mcore.start.startup import patch_megatron
from megatron_asynchzp.versions import MEGATRON

PATCHES = [one for one in table.PATCHES if one.is_needed_in(package_info.__version__)]
_PATCH_IDS = [patch.attribute for patch in PATCHES]


@pytest.fixture(scope="module")
def as_before():
    """What another test module has applied comes back afterwards."""
    were_applied = _is_applied(PATCHES[0])
    remove_patches()
    yield
    if were_applied:
        apply_patches(PATCHES)


@pytest.fixture
def unpatched(as_before):
    """The real wheel without patches."""
    yield
    remove_patches()


def _owner(patch: Patch):
    """The module, or the class in one, that has the function."""
    return pkgutil.resolve_name(patch.module)


def _current(patch: Patch):
    return getattr(_owner(patch), patch.attribute)


def _is_applied(patch: Patch) -> bool:
    return hasattr(_current(patch), "__wrapped__")


# --- what is checked before --------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, output",
    [
        ("megatron.training.training.gone", "does not exist; "),
        ("megatron.core.gone.function", "does not exist; "),
        ("megatron.core.datasets.utils.compile_helpers", "takes (), not (number) as expected; "),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_naming_both_versions_and_nothing_is_patched(
    unpatched, target, output
):
    another = replaces(target, "number", why="a test", drop_when="never")(_Recorder())
    with pytest.raises(ConfigurationError) as failed:
        apply_patches([*PATCHES, another])
    line = str(failed.value)
    assert line.startswith(f"{target} {output}") and "\n" not in line
    assert "0.18, 0.19, 0.20;" in line and f"megatron-core {package_info.__version__} was" in line
    assert not any(_is_applied(patch) for patch in PATCHES)


@pytest.mark.parametrize("version", ["0.17.1", "0.9.0"])
def test_a_megatron_older_than_any_that_was_tested_is_refused_before_anything_is_patched(
    monkeypatch, unpatched, version
):
    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(
        ConfigurationError, match=f"megatron-core {version} was found .* needs 0.18"
    ):
        apply_patches(PATCHES)
    assert not any(_is_applied(patch) for patch in PATCHES)


def test_a_torch_older_than_any_that_was_tested_is_refused_before_anything_is_patched(
    monkeypatch, unpatched
):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    line = r"^torch 2\.10\.1\+cu128 was found at .* needs 2\.11 or later; install one$"
    with pytest.raises(ConfigurationError, match=line):
        patch_megatron()
    assert not any(_is_applied(patch) for patch in PATCHES)


def test_a_parameter_is_expected_from_its_first_version_on_and_up_to_its_last():
    patch = replaces("a.b", "x old[-0.18] new[0.19] y", why="a test", drop_when="never")(
        _Recorder()
    )
    assert patch.parameters_in("0.17.0") == patch.parameters_in("0.18.2") == ("x", "old", "y")
    assert patch.parameters_in("0.19.0") == patch.parameters_in("0.20.1") == ("x", "new", "y")


def test_a_patch_that_a_later_version_does_not_need_is_not_looked_for_in_it(monkeypatch, unpatched):
    def patch(last: str) -> Patch:
        made = replaces("megatron.core.gone.f", "x", why="a test", drop_when="never", last=last)
        return made(_Recorder())

    monkeypatch.setattr(package_info, "__version__", "0.19.1")
    apply_patches([patch(last="0.18")])
    for last in ("", "0.19"):
        with pytest.raises(ConfigurationError, match="megatron.core.gone.f does not exist"):
            apply_patches([patch(last)])


@pytest.mark.parametrize("patch", PATCHES, ids=_PATCH_IDS)
def test_a_function_that_lost_a_parameter_or_is_gone_is_refused_by_name(
    patch, monkeypatch, unpatched
):
    module = _owner(patch)
    monkeypatch.setattr(module, patch.attribute, lambda another: None)
    with pytest.raises(ConfigurationError, match=re.escape(f"{patch.target} takes (another)")):
        apply_patches(PATCHES)
    monkeypatch.delattr(module, patch.attribute)
    with pytest.raises(ConfigurationError, match=re.escape(f"{patch.target} does not exist")):
        apply_patches(PATCHES)


def test_a_missing_megatron_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    command = 'pip install "megatron_asynchzp[megatron]"'
    with pytest.raises(ConfigurationError, match=re.escape(command)):
        found_version()


# --- the real wheel ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", MEGATRON)
@pytest.mark.parametrize("patch", table.PATCHES, ids=lambda patch: patch.attribute)
def test_a_replacement_takes_every_argument_by_name_as_megatron_may_give_it(patch, version):
    names = patch.parameters_in(version)
    if "args" in names and "kwargs" in names:
        names = names[:-2]  # *args and **kwargs
    inspect.signature(patch.call).bind("the original", **dict.fromkeys(names))


def test_patching_reaches_megatrons_own_copies_is_idempotent_and_undone_exactly(unpatched):
    import megatron.core.optimizer
    import megatron.training.training as copied

    before = [_current(patch) for patch in PATCHES]
    apply_patches(PATCHES)
    patched = [_current(patch) for patch in PATCHES]
    assert all(now.__wrapped__ is was for now, was in zip(patched, before))
    assert megatron.core.optimizer.get_megatron_optimizer is copied.get_megatron_optimizer
    apply_patches(PATCHES)
    assert all(now is _current(patch) for now, patch in zip(patched, PATCHES))
    remove_patches()
    assert all(was is _current(patch) for was, patch in zip(before, PATCHES))


def test_patching_adds_our_flags_and_nothing_else(unpatched):
    from megatron.training import arguments

    def flags() -> set[str]:
        parser = ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        return {flag for action in parser._actions for flag in action.option_strings}

    stock = flags()
    apply_patches(PATCHES)
    assert flags() - stock == own_flags() - stock and "--use-asynchzp" not in stock


class _Recorder:
    """Stands for an original: remembers its calls and answers with itself."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self


def _replacement(attribute: str, original: _Recorder):
    return next(p for p in PATCHES if p.attribute == attribute).make(original)


ASKED_BY_FLAG = [
    *("get_megatron_optimizer", "build_module", "save", "get_model", "save_checkpoint"),
    *("load_checkpoint", "load_args_from_checkpoint", "read_metadata"),
    "_load_global_dist_base_checkpoint",
]


@pytest.mark.parametrize("attribute", ASKED_BY_FLAG)
@pytest.mark.parametrize("run", [None, Namespace(), Namespace(use_asynchzp=False)])
def test_without_use_asynchzp_a_replacement_passes_its_arguments_on(
    monkeypatch, unpatched, attribute, run
):
    monkeypatch.setattr(Run, "_current", None)
    if run is not None:
        Run.begin(run)
    patch = next(patch for patch in PATCHES if patch.attribute == attribute)
    signature = inspect.signature(_current(patch))
    kinds = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    given = {
        name: Namespace() for name, one in signature.parameters.items() if one.kind not in kinds
    }
    original = _Recorder()
    assert patch.make(original)(**given) is original
    ((args, kwargs),) = original.calls
    assert signature.bind(*args, **kwargs).arguments == given


def test_a_stock_run_in_the_process_of_ours_has_no_settings_of_it(monkeypatch):
    ours = Run(Namespace(), RunSettings(ShardSizes(1, 1, 1)), None, None)
    monkeypatch.setattr(Run, "_current", ours)
    assert Run.current_settings() is ours.settings
    Run.begin(Namespace(use_asynchzp=False))
    assert Run.current_settings() is None


def test_in_018_a_common_state_among_the_shards_is_read_by_our_runs_alone(tmp_path, monkeypatch):
    from megatron_asynchzp.checkpoint_files.index import COMMON_OBJECT
    from megatron_asynchzp.hf.torch_dist import write_checkpoint

    write_checkpoint(tmp_path / "it", [], {COMMON_OBJECT: {"iteration": 3}})
    patch = next(patch for patch in table.PATCHES if patch.attribute == "load_common")
    assert patch.is_needed_in("0.18.2") and not patch.is_needed_in("0.19.0")
    for is_ours in (True, False):
        settings = RunSettings(ShardSizes(1, 1, 1)) if is_ours else None
        monkeypatch.setattr(Run, "_current", Run(Namespace(), settings, None, None))
        original = _Recorder()
        found = patch.make(original)(str(tmp_path / "it"))
        assert found == {"iteration": 3} if is_ours else found is original


def test_the_default_arguments_of_validate_args_are_megatrons(unpatched):
    from megatron.training import arguments

    stock = inspect.signature(arguments.validate_args)
    original = _Recorder()
    args = Namespace(use_asynchzp=False, rank=1)
    assert _replacement("validate_args", original)(args) is original
    assert original.calls == [((args, stock.parameters["defaults"].default), {})]


def test_what_the_cpu_cannot_do_is_one_line(monkeypatch):
    from megatron_asynchzp import cpu_platform

    def refuse(args):
        raise ValueError("not possible on the CPU platform:\n  --fp8: needs a GPU")

    monkeypatch.setattr(cpu_platform, "is_installed", lambda: True)
    monkeypatch.setattr(cpu_platform, "apply_cpu_defaults", refuse)
    with pytest.raises(ConfigurationError, match="CPU platform: --fp8: needs a GPU"):
        _replacement("validate_args", _Recorder())(Namespace(rank=0))


def test_what_cannot_be_captured_ends_in_one_line_and_the_rehearsal_with_it(monkeypatch):
    monkeypatch.setattr(model, "run_args", Namespace)
    chunk, helper = mock.MagicMock(), mock.Mock()
    helper.create_cudagraphs.side_effect = RuntimeError("operation not permitted\nin a capture")
    made = model.capture_layers.make(lambda *args: helper)([chunk])
    line = r"^--cuda-graph-impl .*operation not permitted\); name other parts .*$"
    with pytest.raises(ConfigurationError, match=line):
        made.create_cudagraphs()
    assert chunk.runtime.rehearsing.return_value.__exit__.call_count == 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_drawn_to_warm_up_a_capture_is_drawn_again(monkeypatch, fails):
    """On the device's own generator and on Megatron's."""
    default, own = (torch.Generator().manual_seed(seed) for seed in (3, 5))
    monkeypatch.setattr(torch.cuda, "default_generators", (None, default))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    rng = "megatron.core.tensor_parallel.random.get_all_rng_states"
    monkeypatch.setattr(rng, lambda: {"experts": own})

    def draw() -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in (default, own)]

    with contextlib.suppress(KeyError), model._random_numbers_kept():
        warm = draw()
        if fails:
            raise KeyError
    assert draw() == warm and len(set(warm)) == 2 and draw() != warm


@pytest.mark.parametrize(
    ("is_ours", "runners", "is_rehearsed"), [(True, 2, True), (True, 0, False), (False, 2, False)]
)
def test_megatrons_own_capture_is_rehearsed_where_layers_of_our_run_recorded_any(
    monkeypatch, is_ours, runners, is_rehearsed
):
    from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

    from megatron_asynchzp.mcore.step.communication import Communication

    recorded = [(mock.Mock(params_to_backprop=[number]), "forward") for number in range(runners)]
    runtime, kept = mock.MagicMock(), []
    runtime.rehearsing.side_effect = lambda grads: kept.append(grads) or contextlib.nullcontext()
    monkeypatch.setattr(_CudagraphGlobalRecord, "cudagraph_record", recorded)
    monkeypatch.setattr(Communication, "open_runtimes", lambda: [runtime])
    monkeypatch.setattr(model, "run_args", lambda: Namespace() if is_ours else None)
    monkeypatch.setattr(model, "_random_numbers_kept", contextlib.nullcontext)
    for name in ("current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    assert model.capture_recorded.make(lambda: "captured")() == "captured"
    assert kept == ([{0, 1}] if is_rehearsed else [])


@pytest.mark.parametrize("memory", [None, (7, 7)])
def test_graphs_of_megatrons_own_layers_share_one_pool_of_memory_from_the_start(
    monkeypatch, memory
):
    from megatron.core.transformer.cuda_graphs import CudaGraphManager

    monkeypatch.setattr(package_info, "__version__", "0.19.0")
    monkeypatch.setattr(CudaGraphManager, "global_mempool", memory)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    model._prepare_own_graphs()
    assert CudaGraphManager.global_mempool == (memory or (0, 1))


@pytest.mark.parametrize(("is_ours", "waits"), [(True, ["a"]), (False, [])])
def test_an_offloaded_activation_is_read_when_its_copy_to_the_host_has_ended(
    monkeypatch, is_ours, waits
):
    """Group 1 is on the host; of group 2 the activation is on the device yet."""
    waited, current = [], object()
    groups = [
        Namespace(_tensors={(1, 0): ("on the host",)}),
        Namespace(_tensors={(2, 0): "on the device"}),
    ]
    for name, group in zip("ab", groups, strict=True):
        group.wait_offload_event = lambda stream, name=name: waited.append((name, stream))
    popped = Namespace(offload_groups=groups, tensor_pop=lambda tag: (tag, list(waited)))
    monkeypatch.setattr(offloading, "run_args", lambda: Namespace() if is_ours else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    handler = offloading.offload_chunk.make(lambda *_: popped)(0, None)
    before = [(name, current) for name in waits]
    assert handler.tensor_pop((1, 0)) == ((1, 0), before)
    assert handler.tensor_pop((2, 0)) == ((2, 0), before)
    assert handler.tensor_pop("a tensor") == ("a tensor", before)


@pytest.mark.parametrize(
    "room", ["mcore.start.low_precision.faults_of_machine", "mcore.patches.model.faults_of_tokens"]
)
def test_a_fault_of_the_machine_or_of_the_data_is_raised_before_anything_is_built(
    monkeypatch, room
):
    megatron = Namespace(cuda_graph_impl="none", fp8=None, fp4=None, rank=0, mock_data=True)
    megatron.sft = megatron.padded_vocab_size = None
    run = Run(megatron, RunSettings(ShardSizes(1, 1, 1)), None, None)
    monkeypatch.setattr(Run, "_current", run)
    monkeypatch.setattr(f"megatron_asynchzp.{room}", lambda _: ["it lacks something"])
    get_model = model.get_model.make(
        lambda model_provider, wrap_with_ddp=True: pytest.fail("built")
    )
    with pytest.raises(ConfigurationError, match="^it lacks something$"):
        get_model(None)


def test_each_captured_backward_of_a_layer_adds_its_gradients():
    """Megatron-core 0.20 adds none where an earlier capture has marked the parameter."""
    param, added = Namespace(grad_added_to_main_grad=False), []

    def capture() -> None:
        added.append(not param.grad_added_to_main_grad)
        param.grad_added_to_main_grad = True

    for _ in range(3):
        model.capture_backward(Namespace(params_to_backprop=[param]), capture)
    assert added == [True] * 3
