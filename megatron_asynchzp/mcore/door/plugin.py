# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Calls `install()` with the environment's choices when a framework imports this file.

verl imports it by VERL_USE_EXTERNAL_MODULES, ms-swift by --external_plugins. It is no entry point:
verl goes on without one that raises, and would train with stock's optimizer after a refusal.
"""

from megatron_asynchzp.mcore.door.install import install

install()
