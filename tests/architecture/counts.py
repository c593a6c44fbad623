# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Counts what makes the package hard to read.

`python -m tests.architecture.counts [CHECKOUT...]` prints a column of counts for each checkout.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Phrases that hide the actor or leave out the verb, in docstrings and comments.
PATTERNS = {
    "what is": r"\bwhat is\b",
    "of what": r"\bof what\b",
    "of which": r"\bof which\b",
    "somebody, nobody, whoever": r"\b(?:somebody|nobody|whoever)\b",
    "beside": r"\bbeside\b",
    "of one": r"\bof one\b",
    "None where": r"\bNone where\b",
}
# Names that say that a thing exists, and not what it is.
EMPTY_NAMES = ("one", "found", "other", "what", "where")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _raises_configuration_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and "ConfigurationError" in ast.unparse(node)


def _is_context_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ContextVar")


def _replaces_class(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(it, ast.Attribute) and it.attr == "__class__" for it in targets)


def _reads_stack_frames(node: ast.AST) -> bool:
    frames = ("_getframe", "currentframe", "stack")
    calls = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in frames
    return calls and ast.unparse(node).startswith(("sys.", "inspect."))


def counts(checkout: Path) -> dict[str, int]:
    """Count words, names and constructs of the package in `checkout`."""
    found = Counter[str]()
    prose: list[str] = []
    bound = Counter[str]()
    classes = Counter[str]()
    refusals: set[str] = set()
    for path in sorted((checkout / "megatron_asynchzp").rglob("*.py")):
        text = path.read_text()
        found["lines"] += len(text.splitlines())
        prose.extend(_comments(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
                prose.append(docstring)
                found["docstring words"] += len(docstring.split())
                found["docstring lines"] += len(docstring.splitlines())
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                methods = sum(isinstance(item, FUNCTION) for item in node.body)
                if node.name == "HZPUnit":
                    found["methods of HZPUnit"] += methods
                if node.name in ("StepScheduler", "HZPRuntime"):
                    found["methods of StepScheduler and HZPRuntime"] += methods
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += 1
            if isinstance(node, ast.arg):
                bound[node.arg] += 1
            if isinstance(node, FUNCTION) and node.name.lstrip("_").startswith("refuse"):
                refusals.add(node.name)
            found["raise ConfigurationError"] += _raises_configuration_error(node)
            found["context variables"] += _is_context_variable(node)
            found["assignments of __class__"] += _replaces_class(node)
            found["reads of stack frames"] += _reads_stack_frames(node)
    found["functions called refuse_*"] = len(refusals)
    found["class names with two meanings"] = sum(number > 1 for number in classes.values())
    whole = "\n".join(prose)
    for name, pattern in PATTERNS.items():
        found[f'"{name}"'] = len(re.findall(pattern, whole, re.IGNORECASE))
    for name in EMPTY_NAMES:
        found[f"variables called {name}"] = bound[name]
    return dict(found)


if __name__ == "__main__":
    columns = [counts(Path(checkout)) for checkout in sys.argv[1:] or ["."]]
    for row in columns[0]:
        print(f"{row:42}", *(f"{column.get(row, 0):8,}" for column in columns))
