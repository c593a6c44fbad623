# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""AsyncHZP for frameworks on megatron.core, which have dataclasses in place of arguments."""
