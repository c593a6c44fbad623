# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The systems that the benchmarks compare, in two families.

A `Contender` is a row of the comparison: one GPT trained by Megatron's command line
(`megatron_run`) or by torch and DeepSpeed (`torch_run`). A `System` is a live model of blocks with
a way to step it (`systems`). Both have the settings of `fsdp2`, the optimizer of `adam` and the
emulated computation of `layer_delay`.
"""
