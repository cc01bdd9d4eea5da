"""The Python side, under a short name: see scripts/api.py.

from outrider.api import generate, load_target, train
"""

from outrider.scripts.api import (
    Answer,
    Piece,
    UserError,
    generate,
    load_drafter,
    load_target,
    train,
)

__all__ = ["Answer", "Piece", "UserError", "generate", "load_drafter", "load_target", "train"]
