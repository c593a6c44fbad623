# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "fabric" on CPUs, over a modelled network.

from scripts.testbed import fabric

network = fabric.register()              # the profile of ASYNCHZP_FABRIC_*
dist.init_process_group("fabric")        # or dist.new_group(backend="fabric")
...
network.counters.snapshot()              # wire bytes, operations, busy seconds
"""

from scripts.testbed.fabric.backend import BACKEND, FabricGroup, register

__all__ = ["BACKEND", "FabricGroup", "register"]
