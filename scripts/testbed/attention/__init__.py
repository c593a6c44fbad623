# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""What attention is measured against: exact results, the paper's algorithm, the paper's inputs."""
