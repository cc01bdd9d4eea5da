"""Short labels: one name each, no more of the path than it takes to tell drafters apart."""

from __future__ import annotations

import pytest

from outrider.scripts.common.names import clipped, label, labels


@pytest.mark.parametrize(
    "names, found",
    [
        (["none", "runs/a@tree", "ngram@adaptive"], ["none", "a@tree", "ngram@adaptive"]),
        (
            ["/srv/x/runs/medusa/head@tree", "/srv/x/runs/medusa/head@chain"],
            ["medusa@tree", "medusa@chain"],
        ),
        (["runs/a/head@tree", "runs/b/best@tree:16"], ["a@tree", "b@tree:16"]),
        (["runs/a/checkpoints/step-40@tree"], ["step-40@tree"]),
        (["runs/a/checkpoints/step-40", "runs/b/checkpoints/step-40"], ["a/step-40", "b/step-40"]),
        (["old/m@tree", "new/m@tree", "new/n@tree"], ["old/m@tree", "new/m@tree", "n@tree"]),
        (
            ["runs/a@tree", "runs/a/head@tree", "runs/a/best@tree"],
            ["runs/a@tree", "a/head@tree", "a/best@tree"],
        ),
        (
            [
                "hf_assisted@runs/draft/head",
                "hf_assisted@runs/draft/head (defaults)",
                "runs/draft/head@chain",
            ],
            ["hf_assisted@draft", "hf_assisted@draft (defaults)", "draft@chain"],
        ),
        (["none (smollm2)", "ngram", "ngram #2"], ["none (smollm2)", "ngram", "ngram #2"]),
        (["/m", "m", "a/../m", ""], ["/m", "m", "../m", ""]),
    ],
)
def test_labels(names: list[str], found: list[str]) -> None:
    assert labels(names) == found


def test_labels_never_meet() -> None:
    names = [
        f"{a}/{b}{c}@{d}"
        for a in ("x", "/x", "y/x")
        for b in ("m", "n")
        for c in ("", "/head", "/best")
        for d in ("chain", "tree")
    ]
    assert len(set(labels(names))) == len(names)
    assert label("runs/x/head") == "x" and label("head") == "head"


def test_clipped() -> None:
    assert clipped("short") == "short" and clipped("a" * 20 + "@tree", 11) == "aaaaa…@tree"
    assert len(clipped("b" * 99)) == 30
