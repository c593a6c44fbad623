# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The test-bed: distributed training on an emulated cluster, every rank a process on this machine
and the network between them modelled, and what counts bytes, seconds and memory on it. Nobody who
trains needs it; its instruments import no system that they measure.
"""
