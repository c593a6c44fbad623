# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The test-bed: distributed training on an emulated cluster, every rank a process on this machine
and the network between them modelled, and the instruments that count bytes, seconds and memory.
Training does not need it; its instruments import no system that they measure.
"""
