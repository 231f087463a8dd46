"""A user's function that judges answers, given as `package.module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.model_files import one_line


def load_gold(spec: str) -> Callable[..., Any]:
    """The function `spec` names; `rlhf.scoring` says how it is called.

    Raises:
        ValueError: not of the form NAME:FUNCTION, the module fails when imported, or it has no such function.
        FileNotFoundError: there is no such file or module. One line each.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"{spec!r} names no function: write module:function or file.py:function")
    module = _from_file(Path(where).expanduser()) if where.endswith(".py") else _from_module(where)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{where} has no function {name}: it has {', '.join(known[:8]) or 'none'}")
    if not callable(function):
        raise ValueError(f"{spec} is a {type(function).__name__}, not a function")
    return function


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: it should hold the function asked for")
    name = f"rlhf_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises is the cause to show
        raise ValueError(f"{path} fails when imported: {type(error).__name__}: {one_line(error)}") from error
    return module


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise FileNotFoundError(f"no module {name}: give a module on Python's path or a file.py") from error
        raise ValueError(f"{name} fails when imported: {one_line(error)}") from error
    except Exception as error:  # as above
        raise ValueError(f"{name} fails when imported: {type(error).__name__}: {one_line(error)}") from error
