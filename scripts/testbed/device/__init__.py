# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA on a CPU: torch's own device path on a machine without a GPU.

torch's CUDA wheel runs unmodified (caching allocator, streams and events, autograd's threads of a
device, ProcessGroupNCCL). Below it, CUDA's runtime and NCCL are implemented anew, for tests: a
stream is a thread with a queue, a collective a kernel that waits for its peers in shared memory, an
operation of aten a kernel that runs the CPU's on the same memory. No device code is translated.
"""
