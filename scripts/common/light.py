"""A command's `--help` without the frameworks that its modules import: help needs names, comments
and defaults, and torch alone takes seconds to load.

Stand-ins take the place of the heavy packages, as Sphinx's autodoc_mock_imports does for
documentation; then the file runs as it is. So the text is the one that the file itself prints.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

HEAVY = frozenset(
    [
        "accelerate",
        "datasets",
        "detect_secrets",
        "gguf",
        "httpx",
        "jinja2",
        "matplotlib",
        "numpy",
        "peft",
        "phonenumbers",
        "prometheus_client",
        "rich",
        "safetensors",
        "starlette",
        "torch",
        "transformers",
        "uvicorn",
        "wandb",
    ]
)
HELP = {"-h", "--help"}


class Stand:
    """Whatever a module is asked for while it is imported: a base class, a type, a decorator, a
    constant."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _stand(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        decorated = len(args) == 1 and isinstance(args[0], types.FunctionType | type)
        return args[0] if decorated else Stand()

    def __getitem__(self, _: Any) -> Stand:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # else `__getitem__` makes it endless

    def __neg__(self) -> Stand:
        return self

    def __or__(self, _: Any) -> Stand:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


def _stand(name: str) -> Stand:
    if name.startswith("__"):
        raise AttributeError(name)
    return Stand()


class Stands(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of HEAVY."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in; None for any other module."""
        heavy = name.partition(".")[0] in HEAVY
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if heavy else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Let the module have every name."""
        module.__getattr__ = _stand  # type: ignore[method-assign]  # PEP 562


def stand_in() -> None:
    """Import stand-ins from now on: this process is for nothing but help."""
    sys.meta_path.insert(0, Stands())


def told(words: Sequence[str]) -> None:
    """Run `python WORDS`, which ask for help, in this process."""
    stand_in()
    os.execv = _handed
    _run(words)


def _handed(_: Any, words: Any) -> NoReturn:
    """A file makes way for another one (scripts/validate.py)."""
    _run(words[1:])
    raise SystemExit(0)


def _run(words: Sequence[str]) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
