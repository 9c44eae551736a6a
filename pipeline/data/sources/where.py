"""Row-wise filters over metadata, as in `width >= 256 and height >= 256 and punsafe < 0.5`."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]
"""Metadata of one image, by column name in lower case."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}


class Where:
    """Which images of a source are taken, by their metadata; public, and decided row by row.

    Columns (any case), numbers, strings and tuples of these, compared by < <= > >= == != in, not
    in; joined by and, or, not. A comparison with a value that is missing, null, NaN or of another
    kind (text with a number) is false, and so is its `not in` or `!=`; so what is unknown is left
    out, unless `not` is written around it.

    Raises:
        ValueError: the text is no such expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        try:
            tree = ast.parse(text.strip(), mode="eval")
            self._keeps = self._condition(tree.body)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(f"where={text!r} is no expression: {error}") from None

    def keeps(self, row: Row) -> bool:
        """Whether an image with this metadata is taken."""
        return self._keeps(row)

    def __reduce__(self) -> tuple[Any, ...]:
        return Where, (self.text,)

    def _refuse(self, node: ast.AST) -> ValueError:
        return ValueError(
            f"where={self.text!r}: {ast.unparse(node)!r} is not understood; write comparisons"
            " of columns with numbers or strings, joined by and, or, not, as in"
            ' "width >= 256 and punsafe < 0.5"'
        )

    def _condition(self, node: ast.AST) -> Callable[[Row], bool]:
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(value) for value in node.values]
            join = all if isinstance(node.op, ast.And) else any
            return lambda row: join(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._condition(node.operand)
            return lambda row: not inner(row)
        if not isinstance(node, ast.Compare):
            raise self._refuse(node)
        values = [self._value(each) for each in (node.left, *node.comparators)]
        compares = [_COMPARISONS.get(type(each)) for each in node.ops]
        if None in compares:
            raise self._refuse(node)
        steps = list(zip(values, compares, values[1:], strict=False))
        return lambda row: all(_holds(left(row), how, right(row)) for left, how, right in steps)

    def _value(self, node: ast.AST) -> Callable[[Row], Any]:
        if isinstance(node, ast.Name):
            name = node.id.lower()
            self.names.add(name)
            return lambda row: row.get(name)
        value = self._constant(node)
        return lambda row: value

    def _constant(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self._constant(each) for each in node.elts)
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        if not isinstance(node, ast.Constant) or not isinstance(node.value, int | float | str):
            raise self._refuse(node)
        if isinstance(node.value, str):
            if sign < 0:
                raise self._refuse(node)
            return node.value
        return sign * node.value


def _holds(left: Any, how: Any, right: Any) -> bool:
    if _is_unknown(left) or _is_unknown(right):
        return False
    if not isinstance(right, tuple) and isinstance(left, str) != isinstance(right, str):
        return False
    try:
        return bool(how(left, right))
    except TypeError:
        return False


def _is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def lowered(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Metadata with its names in lower case."""
    return {str(name).lower(): value for name, value in row.items()}
