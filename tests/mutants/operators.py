# SPDX-FileCopyrightText: 2026 The megatron_asynchzp authors
# SPDX-License-Identifier: Apache-2.0
"""Makes small faults in Python source: each is one change of its syntax tree, written back into the
text. Knows no file and no test.
"""

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip
_NAMES = (ast.Name, ast.Attribute)
_SKIPPED_FIELDS = {"annotation", "returns", "type_params", "decorator_list"}


@dataclass(frozen=True)
class Change:
    """A fault: the text between two character offsets of a source, replaced.

    key: the same as long as the line and its function are, wherever they move.
    """

    operator: str
    function: str
    line: int
    start: int
    stop: int
    new: str
    key: str = ""

    def apply(self, text: str) -> str:
        """Return `text` with the fault."""
        return text[: self.start] + self.new + text[self.stop :]


def find_changes(text: str, name: str) -> list[Change]:
    """Return all faults for a source; `name` is that of its file, for their keys."""
    lines = text.split("\n")
    seen: Counter[str] = Counter()
    changes = []
    for change in _Finder(text).visit(ast.parse(text), "", None):
        if change.apply(text) == text:
            continue  # both arguments are the same
        words = (name, change.function, lines[change.line - 1].strip(), change.operator, change.new)
        digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:10]
        seen[digest] += 1
        key = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        changes.append(Change(**(vars(change) | {"key": key})))
    return changes


class _Finder:
    def __init__(self, text: str) -> None:
        # ast counts columns in bytes.
        self._lines = [line.encode() for line in text.split("\n")]
        self._begins = [0]
        for line in text.split("\n"):
            self._begins.append(self._begins[-1] + len(line) + 1)

    def visit(self, node: ast.AST, function: str, parent: ast.AST | None) -> Iterator[Change]:
        """Yield the faults of a node and of all below it."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return  # texts for the user
        for operator, old, new in _faults(node, parent):
            yield self._change(operator, function, old, new)
        for field, value in ast.iter_fields(node):
            if field in _SKIPPED_FIELDS:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.visit(child, function, node)

    def _change(
        self, operator: str, function: str, old: list[ast.stmt] | ast.AST, new: ast.AST | str
    ) -> Change:
        first, last = (old[0], old[-1]) if isinstance(old, list) else (old, old)
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(new, ast.expr) and not isinstance(new, ast.Constant | ast.Call | ast.Name):
            text = f"({text})"
        start, stop = (
            self._begins[line - 1] + len(self._lines[line - 1][:column].decode())
            for line, column in (
                (first.lineno, first.col_offset),  # type: ignore[attr-defined]
                (last.end_lineno, last.end_col_offset),  # type: ignore[attr-defined]
            )
        )
        return Change(operator, function, first.lineno, start, stop, text)  # type: ignore[attr-defined]


Fault = tuple[str, list[ast.stmt] | ast.AST, ast.AST | str]


def _faults(node: ast.AST, parent: ast.AST | None) -> Iterator[Fault]:
    """Yield name, old nodes and new code of each fault of this node alone."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                yield "comparison", node, _with(node, "ops", _COMPARISONS[type(operator)](), index)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, _with(node, "op", _ARITHMETIC[type(node.op)]())
        case ast.BoolOp():
            new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", node, _with(node, "op", new)
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", node, node.operand
        case ast.Constant(value=bool()):
            yield "boolean", node, str(not node.value)
        case ast.Constant(value=float()) if abs(node.value) > 100:
            yield "constant", node, repr(2 * node.value)  # one more would be lost in rounding
        case ast.Constant(value=int() | float()):
            yield "constant", node, repr(node.value + 1)
        case ast.Expr(value=ast.Await() | ast.Call() | ast.YieldFrom()):
            yield "dropped call", node, "pass"
        case ast.Continue():
            yield "early end", node, "break"
        case ast.Call() if not node.keywords or node.args:
            for index, (first, second) in enumerate(zip(node.args, node.args[1:])):
                alike = isinstance(first, _NAMES) and isinstance(second, _NAMES)
                if alike and ast.unparse(node.func) not in ("isinstance", "issubclass", "getattr"):
                    swapped = [*node.args[:index], second, first, *node.args[index + 2 :]]
                    yield "swapped arguments", node, _with(node, "args", swapped)
        case ast.If():
            yield from _negated(node.test)
            if not isinstance(node.body[0], ast.Pass | ast.Raise):
                yield "empty branch", node.body, "pass"
            if node.orelse and not isinstance(node.orelse[0], ast.If | ast.Raise):
                yield "empty branch", node.orelse, "pass"
        case ast.IfExp():
            yield from _negated(node.test)
        case ast.FunctionDef() if len(node.body) > 1 and not _returns_value(node):
            for index, statement in enumerate(node.body[1:], 1):
                if isinstance(statement, ast.For | ast.If | ast.With | ast.Assign | ast.Expr):
                    yield "early end", node.body[index:], "return"
    return


def _negated(test: ast.expr) -> Iterator[Fault]:
    if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp):  # have their own
        yield "boolean", test, ast.UnaryOp(ast.Not(), test)


def _with(node: ast.AST, field: str, value: object, index: int | None = None) -> ast.AST:
    new = copy.copy(node)
    if index is not None:
        values = list(getattr(node, field))
        values[index] = value
        value = values
    setattr(new, field, value)
    return new


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    parts = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    texts = (ast.JoinedStr, ast.List, ast.Tuple)
    return any(
        isinstance(part, texts)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        or (isinstance(part, ast.BinOp) and _is_text(part))
        for part in parts
    )


def _returns_value(node: ast.FunctionDef) -> bool:
    ends = (ast.Return, ast.Yield, ast.YieldFrom)
    return any(isinstance(part, ends) and part.value is not None for part in ast.walk(node))
