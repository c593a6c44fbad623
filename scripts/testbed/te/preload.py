# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Imported by a server of ranks: Megatron with Transformer Engine, so that every rank has both."""

from unittest import mock

import torch

# To count devices would be the first use of CUDA, after which no rank can be forked.
with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1):
    from scripts.testbed.te.environment import install

    install()

    import megatron.core.extensions.transformer_engine
    import megatron.training.training  # noqa: F401
