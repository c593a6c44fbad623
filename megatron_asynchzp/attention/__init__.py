# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Attention whose keys are shifted by their mean: PASA (arXiv 2503.01873) and what training
needs of it. Importing this folder loads neither triton nor any vendor's library."""
