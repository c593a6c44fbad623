# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The test-bed: distributed training on an emulated cluster.

Every rank is a process on this machine; the network between them is modelled; instruments count
bytes, seconds and memory. Training does not need it; its instruments import no system that they
measure.
"""
