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
from megatron.core import package_info

from megatron_asynchzp.mcore import patches, patching
from megatron_asynchzp.mcore.patches import PATCHES
from megatron_asynchzp.mcore.patching import (
    IncompatibleMegatron,
    Patch,
    apply_patches,
    remove_patches,
)
from megatron_asynchzp.mcore.unsupported import ConfigurationError, UnsupportedConfiguration

_PATCH_IDS = [patch.attribute for patch in PATCHES]


def _add_one(original):
    def replacement(number):
        return original(number) + 1

    return replacement


_STUB_PATCH = Patch("asynchzp_stub", "double", ("number",), _add_one, "a test", "never")


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
def unpatched():
    """The real wheel without patches; what another test module applied comes back afterwards."""
    were_applied = _is_applied(PATCHES[0])
    remove_patches(PATCHES)
    yield
    remove_patches(PATCHES)
    if were_applied:
        apply_patches(PATCHES)


def _current(patch: Patch):
    return getattr(importlib.import_module(patch.module), patch.attribute)


def _is_applied(patch: Patch) -> bool:
    return patching._find_replacement(_current(patch)) is not None


# --- stub modules ------------------------------------------------------------------------------


def test_a_patch_replaces_the_function_and_every_copy_made_by_name(stub):
    apply_patches([_STUB_PATCH])
    assert stub.double(3) == stub.reader.double(3) == stub.reader.other_name(3) == 7


def test_applying_twice_patches_once(stub):
    apply_patches([_STUB_PATCH])
    once = stub.double
    apply_patches([_STUB_PATCH])
    assert stub.double is once and stub.double(3) == 7


def test_removing_puts_the_very_same_function_back_everywhere(stub):
    before = dict(vars(stub)), dict(vars(stub.reader))
    apply_patches([_STUB_PATCH])
    late = ModuleType("asynchzp_stub_late")
    late.double = stub.double  # imported by name after patching
    sys.modules["asynchzp_stub_late"] = late
    try:
        remove_patches([_STUB_PATCH])
    finally:
        del sys.modules["asynchzp_stub_late"]
    assert (dict(vars(stub)), dict(vars(stub.reader))) == before
    assert late.double is stub.double


def test_removing_what_was_never_applied_changes_nothing(stub):
    before = stub.double
    remove_patches([_STUB_PATCH])
    assert stub.double is before


def test_a_replacement_keeps_name_signature_and_original(stub):
    original = stub.double
    apply_patches([_STUB_PATCH])
    assert stub.double.__wrapped__ is original
    assert stub.double.__name__ == "double"
    assert inspect.signature(stub.double) == inspect.signature(original)


def test_a_changed_signature_fails_loudly_and_patches_nothing(stub):
    before = stub.double
    changed = Patch("asynchzp_stub", "double", ("number", "factor"), _add_one, "a test", "never")
    with pytest.raises(IncompatibleMegatron) as failed:
        apply_patches([_STUB_PATCH, changed])
    told = str(failed.value)
    assert "asynchzp_stub.double takes (number), not (number, factor)" in told
    assert "0.19.x" in told and f"found {package_info.__version__}" in told and "\n" not in told
    assert stub.double is before


@pytest.mark.parametrize("module, name", [("asynchzp_stub", "gone"), ("megatron.core.gone", "f")])
def test_a_missing_symbol_fails_loudly_naming_it_and_both_versions(stub, module, name):
    with pytest.raises(IncompatibleMegatron) as failed:
        apply_patches([Patch(module, name, (), _add_one, "a test", "never")])
    told = str(failed.value)
    assert told.startswith(f"{module}.{name} does not exist; ")
    assert "0.19.x" in told and f"found {package_info.__version__}" in told


def test_a_wrapper_that_somebody_put_on_top_is_not_lost_by_removing(stub):
    apply_patches([_STUB_PATCH])
    ours = stub.double
    stub.double = functools.wraps(ours)(lambda number: -ours(number))
    apply_patches([_STUB_PATCH])
    assert stub.double(3) == -7  # ours is still below: not applied a second time
    with pytest.raises(RuntimeError, match="asynchzp_stub.double was wrapped again"):
        remove_patches([_STUB_PATCH])


@pytest.mark.parametrize("version", ["0.18.0", "0.20.0", "1.19.2"])
def test_another_megatron_version_is_refused_before_anything_is_patched(
    monkeypatch, unpatched, version
):
    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(IncompatibleMegatron, match=f"megatron-core {version} was found .* 0.19.x"):
        apply_patches(PATCHES)
    assert not any(_is_applied(patch) for patch in PATCHES)


def test_a_missing_megatron_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)
    with pytest.raises(IncompatibleMegatron, match=re.escape("megatron-core[training]==0.19.2")):
        patching.check_version()


# --- the real wheel ----------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=_PATCH_IDS)
def test_every_patch_fits_the_installed_megatron(unpatched, patch):
    assert tuple(inspect.signature(_current(patch)).parameters) == patch.parameters


def test_patching_the_wheel_is_idempotent_and_undone_exactly(unpatched):
    before = [_current(patch) for patch in PATCHES]
    apply_patches(PATCHES)
    patched = [_current(patch) for patch in PATCHES]
    assert all(now.__wrapped__ is was for now, was in zip(patched, before))
    apply_patches(PATCHES)
    assert all(now is _current(patch) for now, patch in zip(patched, PATCHES))
    remove_patches(PATCHES)
    assert all(was is _current(patch) for was, patch in zip(before, PATCHES))


def test_megatrons_own_copies_are_replaced_too(unpatched):
    import megatron.core.optimizer
    import megatron.training.training

    apply_patches(PATCHES)
    assert (
        megatron.core.optimizer.get_megatron_optimizer
        is megatron.training.training.get_megatron_optimizer
    )


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
        "--asynchzp-schedule",
        "--asynchzp-prefetch-depth",
        "--no-asynchzp-check-order",
        "--asynchzp-trace",
        "--asynchzp-verify",
        "--asynchzp-device",
        "--use-pasa-attention",
        "--pasa-mode",
        "--pasa-vendor",
        "--pasa-shift-values",
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

    run = Namespace(use_asynchzp=True)
    monkeypatch.setattr(megatron.training, "get_args", lambda: run)
    monkeypatch.setattr(patches, "_wrap", lambda args, chunks, ddp, groups: (args, chunks, groups))
    monkeypatch.setattr(optimizer, "get_asynchzp_optimizer", lambda *args: args)
    assert data_parallel  # imported: the adapter can be loaded
    never = _Recorder()
    wrapped = _replacement("_ddp_wrap", never)([1], True, "ddp", False, pg_collection="groups")
    assert wrapped == (run, [1], "groups")
    legacy = _replacement("wrap_model_chunks_with_ddp", never)([1], "config", "ddp", DP=object)
    assert legacy == (run, [1], None)
    build = _replacement("get_megatron_optimizer", never)
    assert build("config", [1], config_overrides={}) == ("config", [1], {}, None)
    assert build("config", [1], {}, pg_collection="groups") == ("config", [1], {}, "groups")
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
    # --use-megatron-fsdp without its other flags would end in one of Megatron's assertions.
    args = parser.parse_args(["--use-asynchzp", "--use-megatron-fsdp"])
    args.rank, args.world_size = 0, 1
    with pytest.raises(UnsupportedConfiguration, match="--use-megatron-fsdp"):
        arguments.validate_args(args)


def test_what_the_cpu_cannot_do_is_told_in_one_line(monkeypatch):
    from megatron_asynchzp.mcore import cpu_platform

    def refuse(args):
        raise ValueError("not possible on the CPU platform:\n  --fp8: needs a GPU")

    monkeypatch.setattr(cpu_platform, "is_installed", lambda: True)
    monkeypatch.setattr(cpu_platform, "apply_cpu_defaults", refuse)
    with pytest.raises(ConfigurationError, match="CPU platform: --fp8: needs a GPU"):
        _replacement("validate_args", _Recorder())(Namespace(rank=0))
