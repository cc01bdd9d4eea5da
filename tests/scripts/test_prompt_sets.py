"""Public prompts by name: every description reads the form that its set was published in, written
small; what is left out is counted; a file beside the data holds what is asked, in an order of its
own; mistakes are a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.common.prompts import DEMO, load_prompts
from outrider.scripts.data.prompt_sets import PromptSet, known, prompt_set, prompts_of
from outrider.scripts.data.questions import Questions
from outrider.scripts.data.run import synthesize
from tests.scripts.test_from_server import config, serving


def chat(*texts: str, user: str = "user", model: str = "assistant") -> list[dict[str, str]]:
    return [{"role": (user, model)[i % 2], "content": text} for i, text in enumerate(texts)]


def shared(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


# Rows in the form of each published set, and the user turns that they ask.
SETS: dict[str, list[tuple[dict[str, Any], list[str]]]] = {
    "ultrachat": [
        (
            {"prompt": "A", "prompt_id": "x", "messages": chat("A", "said", "And B?", "said")},
            ["A", "And B?"],
        )
    ],
    "sharegpt": [({"id": "a_0", "conversations": shared("Why?", "said")}, ["Why?"])],
    "perfectblend": [({"conversations": shared("Sum.", "said"), "source": "s"}, ["Sum."])],
    "magicoder": [({"lang": "python", "problem": "Write f.", "solution": "def f"}, ["Write f."])],
    "evol_codealpaca": [({"instruction": "Write g.", "output": "def g"}, ["Write g."])],
    "numinamath": [({"source": "amc", "problem": "Solve $x$.", "solution": "1"}, ["Solve $x$."])],
    "gsm8k_train": [({"question": "How many?", "answer": "#### 3"}, ["How many?"])],
    "aya": [({"inputs": "Hvad er dette?", "targets": "t", "language": "da"}, ["Hvad er dette?"])],
    "wildchat": [
        ({"conversation": chat("Hej", "said", "Mere"), "toxic": False}, ["Hej", "Mere"]),
        ({"conversation": chat("Bad", "said"), "toxic": True}, []),
    ],
    "magpie": [({"instruction": "Plan.", "response": "said", "uuid": "1"}, ["Plan."])],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(path: Path) -> list[list[str]]:
    questions = Questions(path)
    assert not questions.bad
    return [
        [m["content"] for m in turns if m["role"] == "user"] for _, (turns, _) in questions.asked
    ]


def test_the_form_of_every_set_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, and from the folder that holds it."""
    assert set(known()) == set(SETS)
    for name, rows in SETS.items():
        file = written(tmp_path / name, name, [row for row, _ in rows])
        wanted = [turns for _, turns in rows if turns]
        monkeypatch.chdir(file.parent)
        for number, place in enumerate((file, ".")):
            which = replace(prompt_set(name), path=str(place))
            assert asked(prompts_of(which, tmp_path / f"{name}{number}", [])) == wanted, name
        said = capsys.readouterr().err
        assert f"licence: {which.licence}" in said
        assert f"{len(wanted)} prompts of {len(rows)} rows" in said


def test_what_cannot_be_asked_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"conversations": shared("Why do cats purr?", "said")},
        {"conversations": shared("why do CATS purr", "said")},
        {"conversations": shared("x", "y")[1:]},
        {"conversations": shared("", "said")},
        {"conversations": shared("long " * 3000, "said")},
        {"conversations": [{"from": "tool", "value": "t"}]},
        {"conversations": []},
        {"conversations": [{"from": "system", "value": "Be brief."}, *shared("Hi", "said")]},
        {"conversations": shared(load_prompts(DEMO)[0].turns[0], "said")},
        {"conversations": shared("Natalia sold 48 clips.", "said")},
    ]
    folder = tmp_path / "sets"
    written(folder, "sharegpt", rows)
    seen = written(tmp_path, "seen", [{"prompt": "Natalia  sold 48 clips"}])
    which = replace(prompt_set("sharegpt"), path=str(folder))
    path = prompts_of(which, tmp_path / "a.jsonl", [str(seen), "humaneval"])
    lines = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert len(lines) == 2
    assert [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}] in lines
    found = json.loads((tmp_path / "a.jsonl.prompts.json").read_text())
    left = found["left_out"]
    assert (
        sum(left.values()) == 8
        and left["asked already"] == 1
        and left["begins with an answer"] == 2
    )
    assert left["in demo"] == left[f"in {seen}"] == left["above 12,000 characters"] == 1
    assert list(found["compared_with"]) == sorted(["demo", str(seen)])
    assert "not compared with humaneval, " in capsys.readouterr().err


def test_more_prompts_go_on_where_fewer_ended(tmp_path: Path) -> None:
    """The order follows from the texts, however the set is sorted."""
    rows = [{"problem": f"Question {i}"} for i in range(200)]
    which = prompt_set("numinamath")
    orders = []
    for name, some in (("a", rows), ("b", rows[::-1]), ("c", rows[:150])):
        file = written(tmp_path / name, "numinamath", some)
        orders.append(asked(prompts_of(replace(which, path=str(file)), tmp_path / name / "o", [])))
    assert orders[0] == orders[1] != [[row["problem"]] for row in rows]
    kept = {row["problem"] for row in rows[:150]}
    assert orders[2] == [turns for turns in orders[0] if turns[0] in kept]
    assert len([p for p in tmp_path.glob("*/.*") if p.suffix in (".draft", ".whole")]) == 0


def test_a_description_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nlicence: own\ncolumn: q\nmore: m\nkeep: {lang: en}\n")
    rows = [{"q": "Sum up.", "m": "A text.", "lang": "en"}, {"q": "Nej", "m": "", "lang": "da"}]
    which = replace(prompt_set(str(file)), path=str(written(tmp_path, "rows", rows)))
    assert asked(prompts_of(which, tmp_path / "a.jsonl", [])) == [["Sum up.\n\nA text."]]
    for name, said in (("ultrachart", "did you mean ultrachat"), ("aya", "no column 'inputs'")):
        with pytest.raises(UserError, match=said):
            prompts_of(replace(prompt_set(name), path=which.path), tmp_path / "b.jsonl", [])
    assert not (tmp_path / "b.jsonl.prompts.jsonl").exists()
    file.write_text("name: mine\ncolumns: q\n")
    with pytest.raises(UserError, match=r"mine\.yaml: .*columns"):
        prompt_set(str(file))


def test_a_named_set_is_answered_and_its_name_and_licence_stay_with_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"Write f{i}."} for i in range(12)]
    file = written(tmp_path, "magicoder", rows)
    with serving(tmp_path) as url:
        keys = {"prompts": "magicoder", "prompts_path": str(file)}
        synthesize(config(tmp_path, url, num_conversations=5, **keys))
        first = (tmp_path / "a.jsonl").read_bytes()
        file.unlink()  # what is asked stands beside the data now
        capsys.readouterr()
        synthesize(config(tmp_path, url, **keys))
    assert "reading magicoder" not in capsys.readouterr().err
    whole = (tmp_path / "a.jsonl").read_bytes()
    assert {*first.splitlines()} < {*whole.splitlines()} and len(first.splitlines()) == 5
    texts = [json.loads(line)["messages"][0]["content"] for line in whole.splitlines()]
    assert sorted(texts) == sorted(row["problem"] for row in rows)
    meta = json.loads((tmp_path / "a.jsonl.meta.json").read_text())
    assert meta["prompt_set"]["dataset"] == "ise-uiuc/Magicoder-OSS-Instruct-75K"
    assert meta["prompt_set"]["licence"] == "MIT"
    assert PromptSet(**meta["prompt_set"]).described == meta["prompt_set"]
