# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Converts models to and from Hugging Face directories, in one process without torchrun.

Importing this folder loads neither megatron, torch nor transformers.
"""
