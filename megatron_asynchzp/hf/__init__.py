# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Models in and out of Hugging Face directories: `python -m megatron_asynchzp.hf export | import`.
Importing this folder loads neither megatron, torch nor transformers."""
