# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The systems that the benchmarks compare, each built and stepped in the same way: torch's DDP,
FSDP2 and HSDP, DeepSpeed, Megatron's own parallelisms, a small baseline and AsyncHZP.
"""
