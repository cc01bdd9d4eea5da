"""Configuration: every YAML composes, every key is documented, and every mistake is named at
once.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.help import docs
from outrider.conf.schema import CONF, check, compose, entry, groups
from outrider.conf.typed import default, nested_schema
from outrider.heads.registry import head_class, kinds
from outrider.scripts.cli import FILES, schema_of
from outrider.train.config import HEAD_KEYS, keys_of
from tests.helpers.commands import code_of

ENTRIES: dict[str, type] = {
    Path(file).stem: schema_of(verb) for verb, (file, _) in FILES.items()
} | {name: keys_of(name) for name in HEAD_KEYS}


def problems_of(name: str, overrides: list[str]) -> list[str]:
    """Everything wrong with a command line except that required values are missing."""
    problems = check(name, ENTRIES[name], overrides)[1]
    return [p for p in problems if "is required" not in p and "empty" not in p]


def test_every_yaml_composes_and_validates() -> None:
    """Accelerate reads launch/, `prompts=NAME` prompt_set/ (tests/scripts/test_prompt_sets.py)."""
    roots = {p.stem for p in CONF.glob("*.yaml")} - {"train"}  # what training scripts begin from
    assert roots == set(ENTRIES), "a root file without an entry script, or the reverse"
    assert [(name, p) for name in sorted(roots) for p in problems_of(name, [])] == []
    choices = {name: groups(CONF, name) for name in sorted(roots)}
    others = ("launch", "prompt_set", "words")
    paths = [p for p in sorted(CONF.glob("*/*.yaml")) if p.parent.name not in others]
    for path in paths:
        group = path.parent.name
        users = [name for name in choices if group in choices[name]]
        users.sort(key=lambda name: name not in path.stem)  # a composition takes long
        answers = (problems_of(name, [f"{group}={path.stem}"]) for name in users)
        assert any(answer == [] for answer in answers), f"{path}: no command takes it: {users}"
    assert len(paths) > 40


def test_a_default_stands_once() -> None:
    """In the dataclass; a YAML file holds what departs from it."""
    schemas = {CONF / f"{name}.yaml": schema for name, schema in ENTRIES.items()}
    schemas[CONF / "train.yaml"] = ENTRIES["head"]
    for path in CONF.glob("*/*.yaml"):
        run = ENTRIES["eagle"]
        part = nested_schema(typing.get_type_hints(run).get(path.parent.name))
        if path.parent.name == "head":
            schemas[path] = head_class(yaml.safe_load(path.read_text())["kind"]).Config
        elif part is not None:
            schemas[path] = part
    for path, schema in schemas.items():
        for key, value in (yaml.safe_load(path.read_text()) or {}).items():
            field = {f.name: f for f in dataclasses.fields(schema)}.get(key)
            if field is not None and key != "kind":
                assert default(field) != value, f"{path}: {key}={value} is the default"


def test_every_key_has_a_doc_line() -> None:
    def undocumented(schema: type, prefix: str = "") -> list[str]:
        known, hints = docs(schema), typing.get_type_hints(schema)
        missing = [prefix + f.name for f in dataclasses.fields(schema) if not known.get(f.name)]
        for f in dataclasses.fields(schema):
            nested = nested_schema(hints[f.name])
            missing += undocumented(nested, f"{prefix}{f.name}.") if nested else []
        return missing

    assert [(name, m) for name, schema in ENTRIES.items() if (m := undocumented(schema))] == []


def test_a_configuration_is_made_once_and_never_changed() -> None:
    def loose(schema: Any) -> list[str]:
        found = [] if schema.__dataclass_params__.frozen else [schema.__name__]
        parts = filter(None, map(nested_schema, typing.get_type_hints(schema).values()))
        return found + [name for part in parts for name in loose(part)]

    schemas = [*ENTRIES.values(), *(head_class(kind).Config for kind in kinds())]
    assert [name for schema in schemas for name in loose(schema)] == []


@dataclass
class Part:
    """A group."""

    kind: Literal["a", "b"] = "a"  # which
    size: int = 2  # how large


@dataclass
class Toy:
    """A command."""

    # how many
    steps: int
    # how fast
    rate: float = 1.0
    # what for
    names: list[str] = field(default_factory=list)
    # may be absent
    limit: int | None = None
    # the group
    part: Part = field(default_factory=Part)

    def validate(self) -> list[str]:
        return [f"rate: {self.rate} is above 2; set less"] if self.rate > 2 else []


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "toy.yaml").write_text("defaults: [part: small, _self_]\nsteps: ???\nrate: 0.5\n")
    (tmp_path / "part" / "small.yaml").write_text("kind: a\n")
    return tmp_path


def said(conf: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        compose("toy", Toy, overrides, conf)
    return str(caught.value)


def test_all_mistakes_are_message_at_once(toy: Path) -> None:
    text = said(
        toy, "stepz=3", "+typo=1", "part=large", "m?k=5", "names={a: 4}", "part.sise=1", "limit=x"
    )
    for piece in ("8 problems", "stepz: ", "typo: ", "part=large", "m?k=5", "names: ", "part.sise"):
        assert piece in text, (piece, text)
    assert "limit: 'x'" in text and "steps: is required" in text


def test_a_wrong_value_names_its_key(toy: Path) -> None:
    for override in ("steps=1.5", "steps=null", "rate=fast", "names=null", "part.kind=c"):
        assert override.partition("=")[0] + ":" in said(toy, "steps=1", override)
    assert said(toy, "steps=1", "rate=3").startswith("rate: 3.0 is above 2"), "the schema's rule"
    assert "part.extra: no such key" in said(toy, "steps=1", "++part.extra=1")


@pytest.mark.parametrize(
    "raised, code, words",
    [
        (UserError("x: bad; mend"), 2, "error: x: bad; mend\n"),
        (Interrupted("saved", 75), 75, "saved\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "", "f"), 2, "error: f: No space left on device"),
        (None, 0, ""),
    ],
)
def test_what_the_user_sees(
    toy: Path, capsys: Any, raised: BaseException | None, code: int, words: str
) -> None:
    @entry("toy", Toy, toy)
    def main(cfg: Toy) -> None:
        if raised:
            raise raised

    found, shown = code_of(main, "steps=1"), capsys.readouterr().err
    assert found == code and shown.startswith(words) and "Traceback" not in shown


def rows_of(shown: str) -> list[str]:
    """The lines of a table of keys, with two spaces between a key and its words."""
    return [re.sub("  +", "  ", line.strip()) for line in shown.splitlines()]


def test_help_lists_keys_with_their_docs(toy: Path, capsys: Any) -> None:
    code = code_of(entry("toy", Toy, toy)(lambda cfg: None), "--help")
    shown = capsys.readouterr().out
    assert code == 0 and re.search("  part.size=2 +how large", shown)
    assert re.search("part= +small", shown) and shown.index("Required") < shown.index("Groups")
    # as one would type them, and as the command would run: the file's value, not the schema's
    for line in ("rate=0.5", "how fast"), ("steps", "how many"), ("limit=null", "may be absent"):
        assert line in [tuple(shown.split("  ", 1)) for shown in rows_of(shown)]


def test_hydra_flags_still_work_and_leave_nothing_behind(
    toy: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    main = entry("toy", Toy, toy)(lambda cfg: seen.append(cfg.steps))
    assert code_of(main, "-m", "steps=1,2") == 0
    assert seen == [1, 2] and list(work.iterdir()) == []
    assert "--multirun" in said(toy, "steps=1,2")
