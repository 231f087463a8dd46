"""From what a user hands over to plain config values: read it, rename old keys, check names, resolve "auto".

Nothing here knows what a value means; `engine.config` checks values.
"""

from __future__ import annotations

import base64
import binascii
import json
import typing
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from engine.config_tables import ALIASES, OLD_SWITCHES, REFUSED, UNUSED, Tree

AUTO = "auto"


class _Object(dict):
    """A JSON object that remembers which of its keys the text gave twice."""

    duplicates: list[str]


def read_source(config: dict | str | Path) -> tuple[dict[str, Any], str]:
    """The raw config, and a prefix for error messages that says where it came from ("" for a dict).

    Raises:
        ValueError: not JSON, not an object, or a key given twice.
        FileNotFoundError: a path that does not exist.
    """
    if isinstance(config, dict):
        return config, ""
    if not isinstance(config, str | Path):
        raise ValueError(
            f"config is a {type(config).__name__}: give a dict, the path of a .json file or an EngineConfig"
        )
    path = Path(config)
    if _is_file(path):
        return _parse(path.read_text(encoding="utf-8"), f"config {path}: "), f"config {path}: "
    decoded = None if isinstance(config, Path) else _decode(config)
    if decoded is None:
        shown = str(config) if len(str(config)) <= 200 else str(config)[:200] + "..."
        raise FileNotFoundError(f"config {shown}: no such file (and not a base64 text of JSON): check the path")
    return _parse(decoded, "config (base64): "), "config (base64): "


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a base64 text can be longer than a file name may be
        return False


def _decode(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}holds a {type(value).__name__}: it must be one JSON object")
    for path in _duplicates(value, ""):
        raise ValueError(f"{where}key {path} is given twice: keep one")
    return value


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    keys = [key for key, _ in pairs]
    result.duplicates = [key for key in result if keys.count(key) > 1]
    return result


def _duplicates(value: Any, prefix: str) -> list[str]:
    if isinstance(value, list):
        return [path for element in value for path in _duplicates(element, prefix)]
    if not isinstance(value, _Object):
        return []
    nested = [path for key, child in value.items() for path in _duplicates(child, f"{prefix}{key}.")]
    return [prefix + key for key in value.duplicates] + nested


def normalise(raw: dict[str, Any], schema: type[BaseModel], auto: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Today's names only, "auto" resolved, unused keys taken out; and the list of those, dotted.

    A null, and an "auto" that `auto` has no value for, are left out: the schema's default stands.

    Raises:
        ValueError: an unknown key (with the nearest known one), an old and a new spelling of one key
            together, or an unused key set to what would train something else.
    """
    for path in auto:
        nested: Any = AUTO
        for part in reversed(path.split(".")):
            nested = {part: nested}
        _Walk(schema, {}).section(nested)
    walk = _Walk(schema, auto)
    return walk.section(_rename(raw)), walk.ignored


def _rename(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy with every old spelling replaced by today's."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    zero = values.get("zero_optimization")
    if isinstance(zero, dict):
        _rename_switches(zero)
    for old, new in ALIASES.items():
        *parents, old_key = old.split(".")
        owner = values
        for parent in parents:
            owner = owner.get(parent)
        if not isinstance(owner, dict) or old_key not in owner:
            continue
        new_key = new.rpartition(".")[2]
        if new_key in owner:
            raise ValueError(f"config keys {old} and {new} are one setting under its old and its new name: keep {new}")
        owner[new_key] = owner.pop(old_key)
    return values


def _rename_switches(zero: dict[str, Any]) -> None:
    pin_memory = zero.pop("cpu_offload_use_pin_memory", None)
    for old, section in OLD_SWITCHES.items():
        if old not in zero:
            continue
        value = zero.pop(old)
        if value not in (True, False, None):
            raise ValueError(f"config key zero_optimization.{old} is {value!r}: use {section}.device 'cpu' or 'none'")
        if section in zero:
            raise ValueError(
                f"config keys zero_optimization.{old} and zero_optimization.{section} are one setting under "
                f"its old and its new name: keep {section}"
            )
        if value:
            zero[section] = {"device": "cpu", **({} if pin_memory is None else {"pin_memory": pin_memory})}


class _Walk:
    """One pass over a config, section by section."""

    def __init__(self, schema: type[BaseModel], auto: dict[str, Any]):
        self._root = schema
        self._auto = auto
        self.ignored: list[str] = []

    def section(
        self,
        values: dict[str, Any],
        schema: type[BaseModel] | None = None,
        unused: Tree = UNUSED,
        prefix: str = "",
    ) -> dict[str, Any]:
        """`values` of the section that starts with `prefix`, as `normalise` returns them."""
        fields = (schema or self._root).model_fields
        result = {}
        for key, value in values.items():
            path = f"{prefix}{key}"
            if key not in fields:
                if key not in unused:
                    raise ValueError(_unknown(path, self._root))
                self._check_unused(value, unused[key], path)
                self.ignored.append(path)
                continue
            if isinstance(value, str) and value == AUTO:
                value = self._auto.get(path)
            if value is None:
                continue
            nested = _section(fields[key].annotation)
            if nested is not None and isinstance(value, dict):
                value = self.section(value, nested, unused.get(key) or {}, f"{path}.")
            elif isinstance(value, dict):
                value = self._params(value, f"{path}.")
            result[key] = value
        return result

    def _params(self, values: dict[str, Any], prefix: str) -> dict[str, Any]:
        resolved = {
            key: self._auto.get(prefix + key) if isinstance(value, str) and value == AUTO else value
            for key, value in values.items()
        }
        return {key: value for key, value in resolved.items() if value is not None}

    def _check_unused(self, value: Any, names: Tree | None, path: str) -> None:
        """Names inside an unused section are checked too, and refused settings found."""
        if path in REFUSED:
            refused, instead = REFUSED[path]
            if _is_refused(value, refused):
                raise ValueError(f"config key {path} is {json.dumps(value)}, which this engine does not do: {instead}")
        if not isinstance(value, dict):
            return
        for key, child in value.items():
            if names is not None and key not in names:
                raise ValueError(_unknown(f"{path}.{key}", self._root))
            self._check_unused(child, names[key] if names else None, f"{path}.{key}")


def _is_refused(value: Any, refused: str) -> bool:
    match refused:
        case "true":
            return value is True
        case "false":
            return value is False
        case ">1":
            return isinstance(value, int | float) and value > 1
        case _:
            return value == refused


def _section(annotation: Any) -> type[BaseModel] | None:
    for choice in (annotation, *typing.get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def known_keys(schema: type[BaseModel], unused: Tree = UNUSED, prefix: str = "") -> list[str]:
    """Every key that a config may hold under today's names, dotted: the schema's, then the unused ones."""
    keys = []
    for key, field in schema.model_fields.items():
        keys.append(prefix + key)
        section = _section(field.annotation)
        if section is not None:
            keys += known_keys(section, unused.get(key) or {}, f"{prefix}{key}.")
    return keys + [path for path in _tree_keys(unused, prefix) if path not in keys]


def _tree_keys(tree: Tree, prefix: str) -> list[str]:
    keys = []
    for key, child in tree.items():
        keys += [prefix + key, *_tree_keys(child or {}, f"{prefix}{key}.")]
    return keys


def _unknown(path: str, schema: type[BaseModel]) -> str:
    parent, _, key = path.rpartition(".")
    spellings = {known: known for known in known_keys(schema)}
    spellings |= ALIASES
    spellings |= {f"zero_optimization.{old}": f"zero_optimization.{new}" for old, new in OLD_SWITCHES.items()}

    def closeness(known: str) -> float:
        known_parent, _, known_key = known.rpartition(".")
        # a sibling is likelier meant than an equally spelled key elsewhere
        return SequenceMatcher(None, key.lower(), known_key).ratio() + 0.1 * (known_parent == parent)

    return f"unknown config key {path}: did you mean {spellings[max(spellings, key=closeness)]}?"
