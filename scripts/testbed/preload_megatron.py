# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Does once in the server of the ranks (ranks.preload) what each rank would do."""

import functools
import importlib
import pkgutil
import warnings
from argparse import ArgumentParser

# Megatron imports these when it builds a tokenizer, an optimizer or a table of the start; the first
# imports transformers, which takes longer than a whole run of the tiny GPT. The last are ours.
# fmt: off
_LATE = (
    "megatron.core.tokenizers.text", "megatron.core.models.mimo",
    "megatron.core.datasets.helpers_cpp", "rich.console", "rich.table", "einops", "pytest",
    "hypothesis",
    "megatron_asynchzp.cpu_platform.platform", "megatron_asynchzp.library.sharded_model",
    "megatron_asynchzp.mcore.start.startup", "megatron_asynchzp.mcore.step.data_parallel",
    "megatron_asynchzp.mcore.step.optimizer", "megatron_asynchzp.mcore.start.start_table",
    "megatron_asynchzp.mcore.start.construction", "megatron_asynchzp.mcore.run.planned",
    "megatron_asynchzp.mcore.start.state_bytes", "megatron_asynchzp.mcore.step.whole_tensors",
    "scripts.train.model_of_flags",
)
# fmt: on
_WHOLE = ("megatron_asynchzp.mcore.checkpoint", "megatron_asynchzp.checkpoint_files")


def _keep_docstrings() -> None:
    """Megatron parses the source of 26 classes for the help of its flags, twice in every run."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    original = ArgumentGroupFactory._get_field_docstrings
    any_factory = ArgumentGroupFactory.__new__(ArgumentGroupFactory)
    read = functools.cache(lambda config: original(any_factory, config))
    ArgumentGroupFactory._get_field_docstrings = lambda self, src_cfg_class: read(src_cfg_class)
    arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.training  # noqa: F401

    paths = {package: importlib.import_module(package).__path__ for package in _WHOLE}
    within = [pkgutil.walk_packages(path, f"{package}.") for package, path in paths.items()]
    for name in (*_LATE, *(module.name for modules in within for module in modules)):
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # a rank that needs it raises the error
    _keep_docstrings()
