# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Imported by a server of ranks: Megatron with Transformer Engine, so that every rank has both."""

from unittest import mock

import torch

# To count devices, or to ask what they are, would be the first use of CUDA, after which no rank can
# be forked. Megatron-core 0.20 asks.
_ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "get_device_name": "emulated",
    "get_device_capability": (9, 0),
    "get_device_properties": None,
}
_ASKED = {name: lambda *_, answer=answer: answer for name, answer in _ANSWERS.items()}
with mock.patch.multiple(torch.cuda, **_ASKED):
    from scripts.testbed.te.environment import install

    install()

    import megatron.core.extensions.transformer_engine
    import megatron.training.training  # noqa: F401
