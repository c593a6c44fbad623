# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Patching: on stub modules, where everything can be bent, and on the real wheel."""

import functools
import importlib
import inspect
import re
import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

import pytest
import torch
from megatron.core import package_info

from megatron_asynchzp.errors import ConfigurationError
from megatron_asynchzp.mcore.patch import (
    Patch,
    apply_patches,
    check_version,
    remove_patches,
    replaces,
)
from megatron_asynchzp.mcore.patches import model
from megatron_asynchzp.mcore.patches.table import PATCHES
from megatron_asynchzp.mcore.rounded_adam import MomentDtypes
from megatron_asynchzp.replacements import Replacements

_PATCH_IDS = [patch.attribute for patch in PATCHES]


def _add_one(original, number):
    return original(number) + 1


def _stub_patch(target: str = "asynchzp_stub.double", parameters: str = "number") -> Patch:
    return replaces(target, parameters, why="a test", drop_when="never")(_add_one)


_STUB_PATCH = _stub_patch()


@pytest.fixture
def stub(monkeypatch):
    """A module with one function to patch, and a reader that imported it by name."""
    module, reader = ModuleType("asynchzp_stub"), ModuleType("asynchzp_stub_reader")
    exec("def double(number):\n    return 2 * number", vars(module))
    reader.double = reader.other_name = module.double
    monkeypatch.setitem(sys.modules, "asynchzp_stub", module)
    monkeypatch.setitem(sys.modules, "asynchzp_stub_reader", reader)
    module.reader = reader
    return module


@pytest.fixture
def names():
    """Where the replacements of one test are remembered."""
    return Replacements()


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


def _current(patch: Patch):
    return getattr(importlib.import_module(patch.module), patch.attribute)


def _is_applied(patch: Patch) -> bool:
    return hasattr(_current(patch), "__wrapped__")


# --- stub modules ------------------------------------------------------------------------------


def test_a_patch_replaces_the_function_and_every_copy_made_by_name(stub, names):
    apply_patches([_STUB_PATCH], names)
    assert stub.double(3) == stub.reader.double(3) == stub.reader.other_name(3) == 7


def test_applying_twice_patches_once(stub, names):
    apply_patches([_STUB_PATCH], names)
    once = stub.double
    apply_patches([_STUB_PATCH], names)
    assert stub.double is once and stub.double(3) == 7


def test_removing_puts_the_very_same_function_back_everywhere(stub, names):
    before = dict(vars(stub)), dict(vars(stub.reader))
    apply_patches([_STUB_PATCH], names)
    late = ModuleType("asynchzp_stub_late")
    late.double = stub.double  # imported by name after patching
    sys.modules["asynchzp_stub_late"] = late
    try:
        remove_patches(names)
    finally:
        del sys.modules["asynchzp_stub_late"]
    assert (dict(vars(stub)), dict(vars(stub.reader))) == before
    assert late.double is stub.double


def test_removing_what_was_never_applied_changes_nothing(stub, names):
    before = stub.double
    remove_patches(names)
    assert stub.double is before


def test_a_replacement_keeps_name_signature_and_original(stub, names):
    original = stub.double
    apply_patches([_STUB_PATCH], names)
    assert stub.double.__wrapped__ is original
    assert stub.double.__name__ == "double"
    assert inspect.signature(stub.double) == inspect.signature(original)


def test_a_changed_signature_fails_loudly_and_patches_nothing(stub, names):
    before = stub.double
    changed = _stub_patch(parameters="number factor")
    with pytest.raises(ConfigurationError) as failed:
        apply_patches([_STUB_PATCH, changed], names)
    line = str(failed.value)
    assert "asynchzp_stub.double takes (number), not (number, factor)" in line
    assert "0.19.x" in line and f"found {package_info.__version__}" in line and "\n" not in line
    assert stub.double is before


@pytest.mark.parametrize("module, name", [("asynchzp_stub", "gone"), ("megatron.core.gone", "f")])
def test_a_missing_symbol_fails_loudly_naming_it_and_both_versions(stub, names, module, name):
    with pytest.raises(ConfigurationError) as failed:
        apply_patches([_stub_patch(f"{module}.{name}", "")], names)
    line = str(failed.value)
    assert line.startswith(f"{module}.{name} does not exist; ")
    assert "0.19.x" in line and f"found {package_info.__version__}" in line


def test_a_wrapper_that_somebody_put_on_top_is_not_lost_by_removing(stub, names):
    apply_patches([_STUB_PATCH], names)
    ours = stub.double
    stub.double = functools.wraps(ours)(lambda number: -ours(number))
    apply_patches([_STUB_PATCH], names)
    assert stub.double(3) == -7  # ours is still below: not applied a second time
    with pytest.raises(RuntimeError, match="asynchzp_stub.double was wrapped after"):
        remove_patches(names)


@pytest.mark.parametrize("version", ["0.18.0", "0.20.0", "1.19.2"])
def test_another_megatron_version_is_refused_before_anything_is_patched(
    monkeypatch, unpatched, version
):
    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(ConfigurationError, match=f"megatron-core {version} was found .* 0.19.x"):
        apply_patches(PATCHES)
    assert not any(_is_applied(patch) for patch in PATCHES)


def test_a_missing_megatron_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    with pytest.raises(ConfigurationError, match=re.escape("megatron-core[training]>=0.19,<0.20")):
        check_version()


# --- the real wheel ----------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=_PATCH_IDS)
def test_every_patch_fits_the_installed_megatron(unpatched, patch):
    assert tuple(inspect.signature(_current(patch)).parameters) == patch.parameters


@pytest.mark.parametrize("patch", PATCHES, ids=_PATCH_IDS)
def test_a_replacement_takes_every_argument_by_name_as_megatron_may_give_it(patch):
    if "args" in patch.parameters and "kwargs" in patch.parameters:
        names = patch.parameters[:-2]  # *args and **kwargs
    else:
        names = patch.parameters
    inspect.signature(patch.call).bind("the original", **dict.fromkeys(names))


def test_patching_the_wheel_is_idempotent_and_undone_exactly(unpatched):
    before = [_current(patch) for patch in PATCHES]
    apply_patches(PATCHES)
    patched = [_current(patch) for patch in PATCHES]
    assert all(now.__wrapped__ is was for now, was in zip(patched, before))
    apply_patches(PATCHES)
    assert all(now is _current(patch) for now, patch in zip(patched, PATCHES))
    remove_patches()
    assert all(was is _current(patch) for was, patch in zip(before, PATCHES))


def test_megatrons_own_copies_are_replaced_too(unpatched):
    import megatron.core.optimizer
    import megatron.training.training

    apply_patches(PATCHES)
    assert (
        megatron.core.optimizer.get_megatron_optimizer
        is megatron.training.training.get_megatron_optimizer
    )


def test_the_wheels_dataset_helpers_are_used_as_they_are_on_every_platform(unpatched):
    from megatron.core.datasets import utils

    from megatron_asynchzp import cpu_platform

    assert not cpu_platform.is_installed()
    apply_patches(PATCHES)
    utils.compile_helpers()  # where it runs `make` without a Makefile it exits


def test_patching_adds_our_flags_and_nothing_else(unpatched):
    from megatron.training import arguments

    def flags() -> set[str]:
        parser = ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        return {flag for action in parser._actions for flag in action.option_strings}

    stock = flags()
    apply_patches(PATCHES)
    assert flags() - stock == {
        "--use-asynchzp",
        "--asynchzp-param-shard-size",
        "--asynchzp-grad-shard-size",
        "--asynchzp-optim-shard-size",
        "--asynchzp-cluster",
        "--asynchzp-schedule",
        "--asynchzp-prefetch-depth",
        "--asynchzp-memory-in-flight-gb",
        "--asynchzp-grad-slot-mb",
        "--asynchzp-keep-params-gb",
        "--asynchzp-keep-grads-gb",
        "--asynchzp-dry-run",
        "--asynchzp-device-gb",
        "--no-asynchzp-check-order",
        "--asynchzp-trace",
        "--asynchzp-verify",
        "--asynchzp-device",
        "--use-pasa-attention",
        "--pasa-mode",
        "--pasa-vendor",
        "--pasa-shift-values",
        "--asynchzp-capture-attention",
    }


class _Recorder:
    """Stands for an original: remembers its calls and answers with itself."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self


def _replacement(attribute: str, original: _Recorder):
    return next(p for p in PATCHES if p.attribute == attribute).make(original)


@pytest.mark.parametrize(
    "attribute, args, kwargs",
    [
        ("_ddp_wrap", ([], False, "ddp", False, False), {"use_torch_fsdp2": 1, "pg_collection": 2}),
        ("wrap_model_chunks_with_ddp", ([], "config", "ddp"), {"DP": 1, "pg_collection": None}),
        ("get_megatron_optimizer", ("config", []), {"config_overrides": None}),
        ("build_module", ("spec", 1), {"submodules": 2}),
        ("save_checkpoint", (10, [], "optimizer", None, 0), {"release": True}),
        ("save", ({}, "folder"), {"async_sharded_save": True}),
        ("load_checkpoint", ([], "optimizer", None), {"strict": False}),
        ("load_args_from_checkpoint", (Namespace(),), {"load_arg": "load"}),
        ("read_metadata", ("tracker",), {}),
        ("_load_global_dist_base_checkpoint", ("a", 1, False, {}, 4, False), {"dp_cp_group": 1}),
    ],
)
@pytest.mark.parametrize("run", [None, Namespace(), Namespace(use_asynchzp=False)])
def test_without_use_asynchzp_a_replacement_passes_its_arguments_on(
    monkeypatch, attribute, args, kwargs, run
):
    import megatron.training

    def get_args():
        assert run is not None, "args is not initialized"  # as Megatron's
        return run

    monkeypatch.setattr(megatron.training, "get_args", get_args)
    stock = next(patch for patch in PATCHES if patch.attribute == attribute)
    signature = inspect.signature(getattr(_current(stock), "__wrapped__", _current(stock)))
    original = _Recorder()
    assert _replacement(attribute, original)(*args, **kwargs) is original
    ((passed_args, passed_kwargs),) = original.calls
    passed, asked = signature.bind(*passed_args, **passed_kwargs), signature.bind(*args, **kwargs)
    passed.apply_defaults(), asked.apply_defaults()
    assert passed.arguments == asked.arguments


def test_with_use_asynchzp_the_model_is_wrapped_and_given_its_optimizer(monkeypatch):
    import megatron.training

    from megatron_asynchzp.mcore import data_parallel, optimizer

    run = Namespace(use_asynchzp=True, asynchzp_moment_dtypes=("fp32", "bf16"))
    monkeypatch.setattr(megatron.training, "get_args", lambda: run)
    monkeypatch.setattr(model, "_wrap", lambda args, chunks, ddp, groups: (args, chunks, groups))
    monkeypatch.setattr(optimizer, "get_asynchzp_optimizer", lambda *args: args)
    assert data_parallel  # imported: the adapter can be loaded
    never = _Recorder()
    wrapped = _replacement("_ddp_wrap", never)([1], True, "ddp", False, pg_collection="groups")
    assert wrapped == (run, [1], "groups")
    legacy = _replacement("wrap_model_chunks_with_ddp", never)([1], "config", "ddp", DP=object)
    assert legacy == (run, [1], None)
    build = _replacement("get_megatron_optimizer", never)
    moments = MomentDtypes(torch.float32, torch.bfloat16)
    assert build("config", [1], config_overrides={}) == ("config", [1], {}, None, moments)
    assert build("config", [1], {}, pg_collection="g") == ("config", [1], {}, "g", moments)
    assert never.calls == []


def test_the_default_arguments_of_validate_args_are_megatrons(unpatched):
    from megatron.training import arguments

    stock = inspect.signature(arguments.validate_args)
    original = _Recorder()
    args = Namespace(use_asynchzp=False, rank=1)
    assert _replacement("validate_args", original)(args) is original
    assert original.calls == [((args, stock.parameters["defaults"].default), {})]


def test_validation_refuses_before_megatron_sees_the_arguments(unpatched):
    from megatron.training import arguments

    apply_patches(PATCHES)
    parser = ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    # --skip-train without its other flags would end in one of Megatron's assertions.
    args = parser.parse_args(["--use-asynchzp", "--skip-train"])
    args.rank, args.world_size = 0, 1
    with pytest.raises(ConfigurationError, match="--skip-train"):
        arguments.validate_args(args)


def test_what_the_cpu_cannot_do_is_one_line(monkeypatch):
    from megatron_asynchzp import cpu_platform

    def refuse(args):
        raise ValueError("not possible on the CPU platform:\n  --fp8: needs a GPU")

    monkeypatch.setattr(cpu_platform, "is_installed", lambda: True)
    monkeypatch.setattr(cpu_platform, "apply_cpu_defaults", refuse)
    with pytest.raises(ConfigurationError, match="CPU platform: --fp8: needs a GPU"):
        _replacement("validate_args", _Recorder())(Namespace(rank=0))
