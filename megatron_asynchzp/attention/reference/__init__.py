# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What is right, in plain torch on any device, written to be read beside the paper: `exact`,
`paper` (the published arithmetic) and `block` (what training uses). None is fast."""
