# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Run unmodified Megatron-LM on the CPU with gloo: `install()` and `uninstall()`.

`install()` imports Megatron; importing this package does not. The platform lets a laptop compare
AsyncHZP with stock Megatron in numbers. It shows nothing about speed on a GPU.
"""

from megatron_asynchzp.cpu_platform.arguments import apply_cpu_defaults
from megatron_asynchzp.cpu_platform.platform import install, is_installed, uninstall

__all__ = ["apply_cpu_defaults", "install", "is_installed", "uninstall"]
