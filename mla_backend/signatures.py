"""Functions of an engine that a plugin replaces or calls, known by their arguments."""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


def change(functions: Mapping[str, tuple[str, ...]], engine: str) -> str | None:
    """Which of these functions an engine, such as "vLLM 0.33", lacks or has with other arguments; None if none.

    Args:
        functions: by where the engine has one, "module:name", its arguments without self or cls.
    """
    for where, known in functions.items():
        found, name = arguments_of(where), where.replace(":", ".")
        if found is None:
            return f"{engine} has no {name}"
        if found != known:
            new, gone = (", ".join(sorted({*a} - {*b})) for a, b in ((found, known), (known, found)))
            changed = "; ".join([f"{new} new"] * bool(new) + [f"{gone} gone"] * bool(gone)) or "in another order"
            return f"{name} of {engine} has other arguments ({changed})"
    return None


def arguments_of(where: str) -> tuple[str, ...] | None:
    """The arguments of an engine's function, without self or cls; None if there is none. Imports nothing: what has not
    been imported is read."""
    module, _, name = where.partition(":")
    try:
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        is_theirs = not str(getattr(found, "__module__", "")).startswith("mla_backend.")  # ours may be there
        names = list(inspect.signature(found).parameters) if is_theirs else _read(module, name)
    except AttributeError:
        return None
    except (KeyError, TypeError, ValueError):  # not imported, or an object that doesn't say
        names = _read(module, name)
    return None if names is None else tuple(names[names[:1] in (["self"], ["cls"]) :])


def _read(module: str, name: str) -> list[str] | None:
    path = source_of(module)
    if path is None:
        return None
    body = list(_statements(_parsed(path).body))
    head, _, rest = name.partition(".")
    for one in body:
        if isinstance(one, ast.ImportFrom):
            for alias in one.names:
                if (alias.asname or alias.name) == head:
                    package = module.split(".")[: (1 if path.name == "__init__.py" else 0) - one.level or None]
                    source = ".".join([*(package if one.level else ()), *filter(None, [one.module])])
                    return _read(source, ".".join(filter(None, [alias.name, rest])))
        elif rest and isinstance(one, ast.ClassDef) and one.name == head:
            body = list(_statements(one.body))
            return next((_names(f.args) for f in body if isinstance(f, ast.FunctionDef) and f.name == rest), None)
        elif not rest and isinstance(one, ast.FunctionDef) and one.name == head:
            return _names(one.args)
    return None


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module or a class, also those under a condition."""
    for one in body:
        yield one
        if isinstance(one, (ast.If, ast.Try)):
            yield from _statements([*one.body, *one.orelse])


def _names(given: ast.arguments) -> list[str]:
    positional, named = [*given.posonlyargs, *given.args], given.kwonlyargs
    return [one.arg for one in (*positional, given.vararg, *named, given.kwarg) if one is not None]


@cache
def source_of(module: str) -> Path | None:
    """The file of an engine's module. Imports nothing."""
    package, *path_in_it = module.split(".")
    engine = importlib.util.find_spec(package)
    if engine is None or engine.origin is None:
        return None
    path = Path(engine.origin).parent.joinpath(*path_in_it)
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
