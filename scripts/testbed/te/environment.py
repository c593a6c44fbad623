# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Puts Transformer Engine's own Python over the stand-in for its extension.

The Python is that of its package on the registry. `python -m scripts.testbed.te.environment
[VERSION...]` fetches it ahead of time into the cache that `scripts.testbed.compiler` keeps; nothing
of it is part of this project.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from scripts.testbed.compiler import CompileError, compiled_once, fetch_package

VERSION = "2.20"
# The minor version that `install` takes instead of VERSION.
_CHOICE = "ASYNCHZP_TE_VERSION"
# Layers otherwise ask torch's compiler, and attention for kernels that are not here.
_SETTINGS = {"NVTE_TORCH_COMPILE": "0", "NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}


def te_folder(version: str = VERSION) -> Path:
    """The folder with the package `transformer_engine` of the newest release of a minor version.

    Raises CompileError where it is not in the cache and the registry does not give it.
    """
    return compiled_once(
        f"transformer-engine-{version}",
        lambda out: fetch_package("transformer_engine", version, out),
    )


def install() -> Any:
    """Put `transformer_engine.pytorch` over the stand-in, in this process from here on."""
    if "transformer_engine_torch" in sys.modules:
        return sys.modules["transformer_engine.pytorch"]
    if "megatron.core" in sys.modules:
        raise RuntimeError("Megatron has been imported without Transformer Engine")
    folder = te_folder(os.environ.get(_CHOICE, VERSION))
    sys.path.append(str(folder))
    os.environ.update(_SETTINGS)
    with warnings.catch_warnings(), mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1"):
        warnings.simplefilter("ignore")
        import transformer_engine  # finds no extension, and goes on without pytorch  # pyright: ignore[reportMissingImports]

        from scripts.testbed.te.extension import extension

        sys.modules["transformer_engine_torch"] = extension
        # It imports another package for a form of export that no training has.
        sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
        transformer_engine.common.load_framework_extension = lambda framework: None
        transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")
    return transformer_engine.pytorch


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:] or [VERSION]:
            print(te_folder(wanted))
    except CompileError as error:
        sys.exit(str(error))
