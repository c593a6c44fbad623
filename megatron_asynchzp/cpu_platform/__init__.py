# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Runs unmodified Megatron-LM on the CPU with gloo: `install()`, `uninstall()`, and the command
line such a run needs. Megatron is imported by `install()`, never by importing this package.

A platform for development and tests: it lets a laptop run stock Megatron beside AsyncHZP and
compare their numbers. It shows nothing about speed on a GPU.
"""

from megatron_asynchzp.cpu_platform.arguments import apply_cpu_defaults
from megatron_asynchzp.cpu_platform.platform import install, is_installed, uninstall

__all__ = ["apply_cpu_defaults", "install", "is_installed", "uninstall"]
