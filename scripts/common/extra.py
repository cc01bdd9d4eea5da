"""Optional parts of the product, by name: `scripts/extra` may be left out, and the commands that
can use a part of it say what is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from outrider.conf.errors import UserError

PACKAGE = "outrider.scripts.extra"


def extra(name: str, wanted_by: str) -> ModuleType:
    """The module `scripts.extra.NAME`. wanted_by: the key or word that asked for it.

    Raises UserError where that part is not installed; an import that fails within it is a bug and
    keeps its traceback.
    """
    module = f"{PACKAGE}.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        place = module.removeprefix("outrider.").replace(".", "/")
        raise UserError(f"{wanted_by}: needs {place}, which is not installed") from None
