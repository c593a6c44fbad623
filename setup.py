# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Entry for tools that still call setup.py; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
