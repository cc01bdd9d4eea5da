"""The unit tests that a mutant is tried on: those about its module, the fast ones."""

from __future__ import annotations

import contextlib
import io

import pytest

# The test files about each module.
TESTS = {
    "decode/verify.py": ["test_verify.py", "test_verify_edges.py", "test_verify_extremes.py"],
    "decode/sampling.py": ["test_sampling.py"],
    "decode/rng.py": ["test_sampling.py"],
    "decode/engine.py": ["test_engine.py"],
    "decode/cache.py": ["test_cache.py"],
    "decode/masks.py": ["test_masks.py"],
    "decode/grow.py": ["test_sequential_heads.py", "test_small_lm.py", "test_tree.py"],
    "decode/adaptive.py": ["test_adaptive.py"],
    "decode/draft_model.py": ["test_small_lm.py"],
    "heads/parallel/drafter.py": ["test_sequential_heads.py", "test_medusa.py"],
    "heads/eagle/drafter.py": ["test_eagle.py", "test_parity.py"],
}


def unit_tests(file: str) -> None:
    """The fast unit tests about `file`; the first red one ends it. Raises AssertionError that
    names it.
    """
    paths = [f"tests/{name}" for name in TESTS[file]]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *paths])
    red = [line for line in said.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert code == 0, red[0] if red else said.getvalue()[-300:]
