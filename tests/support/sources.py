# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""The sources of packages that run on devices alone, by the Python files of their wheels."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def sources(folder: Path, package: str, version: str) -> Path:
    """The modules of the newest release of a minor version."""
    install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--no-config"]
    wanted = f"{package}=={version}.*"
    subprocess.run([*install, "--target", str(folder), wanted], check=True)
    return folder / package


def parameters_of_method(file: Path, owner: str, name: str) -> list[str]:
    """Of a method of a class, without self, in their order."""
    classes = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == owner
    ]
    (found,) = [one for node in classes for one in _functions(node) if one.name == name]
    return _parameters(found)[1:]


def parameters_of_function(file: Path, name: str) -> list[str]:
    """Of a function of a module, in their order."""
    (found,) = [one for one in _functions(ast.parse(file.read_text())) if one.name == name]
    return _parameters(found)


def defined_names(file: Path) -> set[str]:
    """What a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name for one in node.names}
    return found


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    return (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.FunctionDef))


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
