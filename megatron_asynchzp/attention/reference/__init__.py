# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What training uses where there is no kernel, in plain torch on any device, written to be read
beside the paper. Not fast."""
