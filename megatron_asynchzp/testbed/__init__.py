# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The measuring ground: a modelled network for torch.distributed on CPUs, and what counts on it
(wire bytes, busy seconds, memory). Beside the package, not in it: nobody who trains needs it, and
it must not know the engine, so that every contender is measured by the same ruler.
"""
