# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The error that every part of the package raises for bad input."""


class ConfigurationError(ValueError):
    """A run that cannot start as asked. The message is one line, for the user."""
