# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""PASA (arXiv 2503.01873): attention whose keys are shifted by their mean, for training.

Importing this folder loads neither triton nor any vendor's library.
"""
