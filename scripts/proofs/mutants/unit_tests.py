"""The unit tests that a mutant is tried on: those about its module, the fast ones."""

from __future__ import annotations

import contextlib
import io

import pytest

VERIFIER = [
    "decode/test_verify.py",
    "decode/test_verify_edges.py",
    "decode/test_verify_extremes.py",
]
# The test files about each module.
TESTS = {
    "decode/verify.py": VERIFIER,
    "decode/unasked.py": VERIFIER,
    "decode/inner.py": [*VERIFIER, "decode/test_tree.py"],
    "decode/inverse_cdf.py": ["decode/test_sampling.py", "decode/test_verify_edges.py"],
    "decode/sampling.py": ["decode/test_sampling.py", "decode/test_verify_edges.py"],
    "decode/rng.py": ["decode/test_sampling.py"],
    "decode/engine.py": ["decode/test_engine.py"],
    "decode/cache.py": ["decode/test_cache.py"],
    "decode/masks.py": ["decode/test_masks.py"],
    "decode/grow.py": [
        "heads/test_sequential_heads.py",
        "heads/test_small_lm.py",
        "decode/test_tree.py",
        "decode/test_price.py",
    ],
    "decode/levels.py": ["decode/test_tree.py", "heads/test_sequential_heads.py"],
    "decode/price.py": ["decode/test_price.py"],
    "decode/adaptive.py": ["decode/test_adaptive.py"],
    "decode/union.py": ["decode/test_union.py"],
    "decode/draft_model.py": ["heads/test_small_lm.py"],
    "heads/drafting.py": ["heads/test_sequential_heads.py", "heads/test_medusa.py"],
    "heads/parallel/drafter.py": ["heads/test_sequential_heads.py", "heads/test_medusa.py"],
    "heads/parallel/medusa.py": ["heads/test_sequential_heads.py", "heads/test_medusa.py"],
    "heads/eagle/drafter.py": ["heads/test_eagle.py", "heads/test_parity.py"],
}


def unit_tests(file: str) -> None:
    """The fast unit tests about `file`. Raises AssertionError with the first red one."""
    paths = [f"tests/{name}" for name in TESTS[file]]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *paths])
    red = [line for line in said.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert code == 0, red[0] if red else said.getvalue()[-300:]
