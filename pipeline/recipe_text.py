"""The text of a recipe: YAML and `--set` to a mapping, and what is wrong with it to sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

_SOURCE = re.compile(r"(data\.[^.=]+)\.source=")


class RecipeError(ValueError):
    """A recipe that cannot be run as written; the message names the field and the remedy."""


def read_content(
    text: str,
    overrides: Sequence[str],
    origin: str,
    tell: Callable[[str], None] | None,
) -> dict[str, Any]:
    """The mapping of a recipe's YAML with the overrides in place; see `parse_recipe`.

    Raises:
        RecipeError: for text that is no mapping, or an override that names nothing.
    """
    try:
        content = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: not valid YAML: {error}") from None
    except RecursionError:
        raise RecipeError(f"{origin}: nested too deeply for a recipe") from None
    except ValueError as error:  # a date that is none, a number of 5,000 digits
        raise RecipeError(f"{origin}: a value cannot be read: {error}") from None
    if not isinstance(content, dict):
        found = {list: "a list", type(None): "empty"}.get(type(content), "a number or text")
        raise RecipeError(
            f"{origin}: a recipe is a YAML mapping (name: …, data: …, phases: …), this is {found}"
        )
    changed = {override.partition("=")[0] for override in overrides}
    for override in overrides:
        node = _apply_override(content, override)
        new_source = _SOURCE.match(override)
        if new_source is None or f"{new_source[1]}.origin" in changed:
            continue
        stale = node.pop("origin", None)
        if stale and tell is not None:
            tell(
                f"{new_source[1]}.origin ({stale!r}) tells of another source and is left out; to "
                f"say where the pictures come from: --set {new_source[1]}.origin=…"
            )
    return content


class _UniqueKeys(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {min(twice)!r} stands twice; keep one", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _apply_override(content: dict[str, Any], override: str) -> dict[str, Any]:
    """Sets the key that an override names; the mapping in which it stands."""
    path, equals, value = override.partition("=")
    *parents, last = path.split(".")
    if not equals or not all((*parents, last)):
        raise RecipeError(f"--set {override!r}: write it as path=value, as in model.size=nano")
    node: Any = content
    for depth, key in enumerate(parents):
        if isinstance(node, list):
            position = _position(node, key, override)
            # A YAML alias stands in several places: only this one is meant.
            node[position] = dict(node[position])
            node = node[position]
            continue
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override!r}: {'.'.join(parents[:depth])} has no keys")
        below = node.get(key)
        node[key] = {} if below is None else below
        if isinstance(below, dict | list):
            node[key] = below.copy()
        node = node[key]
    if isinstance(node, list):
        raise RecipeError(f"--set {override!r}: name a key of a list member, not the member itself")
    if not isinstance(node, dict):
        raise RecipeError(f"--set {override!r}: {'.'.join(parents)} has no keys")
    try:
        node[last] = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        raise RecipeError(f"--set {override[:80]!r}: the value is not valid YAML") from None
    is_plain = value.strip()[:1] not in tuple("'\"{[&*!|>%@")
    if is_plain and isinstance(node[last], str | dict):
        node[last] = value.strip()  # a path may hold what YAML takes for a comment or a key
    return node


def _position(members: list[Any], name: str, override: str) -> int:
    known = [member.get("name") if isinstance(member, dict) else None for member in members]
    if name not in known:
        raise RecipeError(f"--set {override!r}: no member is called {name!r}; known: {known}")
    return known.index(name)


def readable(error: ValidationError, content: Any, origin: str) -> str:
    """What pydantic found, one line a field: its dotted path, its value, what is allowed."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        field, node = _path_of(problem["loc"], content)
        message = problem["msg"].removeprefix("Value error, ")
        if field.endswith(".resources.workers"):  # one field, of two kinds
            message = f"is {node!r}: allowed are 0 (this process), a number, or [min, max]"
        if problem["type"] == "extra_forbidden":
            message = "unknown key; check its spelling, or remove it"
        elif problem["type"] == "missing":
            message = "is missing; add it"
        elif not isinstance(node, dict | list) and "is " not in message.split(":")[0]:
            message = f"is {node!r}: {message}"
        line = f"  {field + ': ' if field else ''}{message}"
        if line not in lines:
            lines.append(line)
    return f"{origin}: {len(lines)} problem(s)\n" + "\n".join(lines)


def _path_of(location: tuple[int | str, ...], content: Any) -> tuple[str, Any]:
    """The dotted path with list members by their name, and the value that stands there."""
    parts: list[str] = []
    node = content
    for key in location:
        if key == "[key]":  # pydantic's own words for: the key itself, not its value
            return ".".join(parts), parts[-1]
        if isinstance(key, str) and not isinstance(node, dict):
            break  # the name of one of the types that a value may have
        try:
            node = node[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            node = None
        named = isinstance(key, int) and isinstance(node, dict) and "name" in node
        parts.append(str(node["name"]) if named else str(key))
    return ".".join(parts), node
