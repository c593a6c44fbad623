# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Whether collectives that ranks launched can wait for each other in a circle, on any device."""
