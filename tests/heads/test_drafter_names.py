"""The one grammar of drafters' names: every form with what it means, every wrong one with its
line, paths with "@".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.conf.errors import UserError
from outrider.heads.names import DraftSpec, members, parse, split

LEGAL = {
    "none": DraftSpec("none"),
    "ngram@chain:4@adaptive": DraftSpec("ngram", "chain", depth=4, adaptive=True),
    "runs/m+ngram": DraftSpec("runs/m+ngram", parts=(DraftSpec("runs/m"), DraftSpec("ngram"))),
    "runs/m@tree:16+ngram@tree@adaptive": DraftSpec(
        "runs/m@tree:16+ngram@tree",
        adaptive=True,
        parts=(DraftSpec("runs/m", "tree", nodes=16), DraftSpec("ngram", "tree")),
    ),
    "ngram+runs/m+Qwen/Qwen3-0.6B@chain:2": DraftSpec(
        "ngram+runs/m+Qwen/Qwen3-0.6B@chain:2",
        parts=(
            DraftSpec("ngram"),
            DraftSpec("runs/m"),
            DraftSpec("Qwen/Qwen3-0.6B", "chain", depth=2),
        ),
    ),
    "runs/m": DraftSpec("runs/m"),
    "runs/m@tree@adaptive": DraftSpec("runs/m", "tree", adaptive=True),
    "runs/m@adaptive": DraftSpec("runs/m", adaptive=True),
}

ILLEGAL = {
    "": "names no drafter",
    "@tree": "names no drafter",
    "none@tree": "write none",
    "ngram@4": "unknown shape '4'",
    "runs/m+": "names no drafter on one side of a +",
    "none+ngram": "none drafts nothing to join; write ngram",
    "runs/m@star+ngram": "unknown shape 'star'",
    "runs/m@chian:4": "unknown shape 'chian:4'",
    "runs/m@chain:0": "unknown shape 'chain:0'",
    "runs/m@": "unknown shape ''",
    "runs/m@chain@tree": "@tree is one too many",
}


def test_adaptive_is_said_of_all_of_a_union_behind_any_of_it() -> None:
    whole = parse("runs/m+ngram@adaptive")
    assert whole.adaptive and not any(part.adaptive for part in whole.parts)
    assert parse("runs/m@adaptive+ngram") == whole
    assert parse("runs/m@adaptive+ngram@adaptive") == whole


def test_a_legal_name() -> None:
    for spec, wanted in LEGAL.items():
        assert parse(spec) == wanted and str(wanted) == spec


def test_an_illegal_name_costs_one_line() -> None:
    for spec, said in ILLEGAL.items():
        with pytest.raises(UserError) as message:
            parse(spec)
        line = str(message.value)
        assert said in line and "\n" not in line and line.startswith("drafters: "), spec


def test_the_longest_path_that_exists_is_the_source(tmp_path: Path) -> None:
    home = tmp_path / "me@work"
    (home / "runs/m@tree").mkdir(parents=True)
    (home / "runs/chain").mkdir()
    (home / "runs/m").mkdir()
    assert parse(f"{home}/runs/m@tree") == DraftSpec(f"{home}/runs/m@tree")
    assert parse(f"{home}/runs/m@tree@chain:2") == DraftSpec(
        f"{home}/runs/m@tree", "chain", depth=2
    )
    assert parse(f"{home}/runs/chain@tree") == DraftSpec(f"{home}/runs/chain", "tree")
    with pytest.raises(UserError, match="unknown shape 'star'"):
        parse(f"{home}/runs/chain@star")
    with pytest.raises(UserError, match="unknown shape 'adaptve'"):
        parse(f"{home}/runs/chain@tree@adaptve")


def test_a_plus_in_a_path_that_exists_belongs_to_the_path(tmp_path: Path) -> None:
    one, other = tmp_path / "c++/runs/m", tmp_path / "a+b@tree"
    one.mkdir(parents=True)
    other.mkdir()
    assert members(f"{one}@tree+ngram") == [f"{one}@tree", "ngram"]
    assert members(f"{one}+{other}@chain+ngram") == [str(one), f"{other}@chain", "ngram"]
    assert members(f"{one}") == [str(one)] and members(f"{other}@tree") == [f"{other}@tree"]
    assert parse(f"ngram+{other}").parts == (DraftSpec("ngram"), DraftSpec(str(other)))
    assert parse(f"ngram+{other}@chain:2@adaptive").parts[1] == DraftSpec(
        str(other), "chain", depth=2
    )


def test_split_never_raises() -> None:
    for spec in (
        "",
        "@",
        "a@b@c",
        "none (x) #2",
        "ngram@wide@",
        "\0@tree",
        "~nobody-here@tree",
        "a" * 5000 + "@tree",
        "+a@+tree+",
    ):
        assert "+".join(members(spec)) == spec
        source, options = split(spec)
        assert "@".join([source, *options]) == spec
