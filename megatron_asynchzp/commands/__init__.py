# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What a Megatron command line would be, without running it: in one process, without a device."""
