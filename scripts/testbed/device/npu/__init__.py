# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Ascend on a CPU: torch_npu's own device path on a machine without an NPU and without CANN.

torch_npu's wheel runs unmodified (caching allocator, task queue, streams and events,
ProcessGroupHCCL with its watchdog, its formulas of autograd, transfer_to_npu). Below it, ACL and
HCCL are thin layers over the emulated device's runtime and collectives, declared from what their
documentation and the wheel's symbols say. No header of CANN is compiled: its license (CANN Open
Software License 2.0) is for software on Huawei's processors.
"""
