"""Masking: what spares a search loses nothing, the number of processes and a kill change nothing."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.scripts.extra.masking import across, masker, rules
from outrider.scripts.extra.masking.across import HowMasked, Kept
from outrider.scripts.extra.masking.masker import hits
from outrider.scripts.extra.masking.needed import folded, may_match, needed
from outrider.scripts.synthesis.config import REGIONS
from outrider.train.texts import workers
from tests.helpers.traffic import prose, secret

RULES = rules.rules()


def patterns() -> dict[str, re.Pattern[str]]:
    """The patterns behind the rules that are searched for where their needs are met."""
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    from detect_secrets.plugins.base import RegexBasedDetector

    found = {}
    for name, kind in get_mapping_from_secret_type_to_class().items():
        detector = kind()
        if isinstance(detector, RegexBasedDetector):
            found |= {f"{name} {i}": p for i, p in enumerate(detector.denylist)}
    for rule in RULES:
        if rule.source == "own":
            closed = dict(zip(rule.find.__code__.co_freevars, rule.find.__closure__, strict=True))
            found[rule.name] = closed["compiled"].cell_contents
    return found


PATTERNS = patterns()


def met(pattern: re.Pattern[str], text: str) -> bool:
    return may_match(needed(pattern), folded(text))


def test_signs_that_are_letters_to_a_pattern_that_ignores_case() -> None:
    """All of Unicode: what `re` takes for an ASCII letter becomes that letter."""
    any_ascii = re.compile(r"[\x00-\x7f]", re.IGNORECASE)
    alike = [c for c in map(chr, range(128, sys.maxunicode + 1)) if any_ascii.fullmatch(c)]
    assert len(alike) == 4
    for sign in alike:
        same = [a for a in map(chr, range(128)) if re.fullmatch(re.escape(a), sign, re.IGNORECASE)]
        assert same and {a.lower() for a in same} == {folded(sign)}


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"ab(?:cd|ef)+g", "xabefg"),
        (r"(?i:SECRET)_?key", "\u017fecret_key"),
        (r"(?:foo)?bar", "bar"),
        (r"(?:foo|)bar|baz", "baz"),
        (r"(?=look)\w+", "look"),
        (r"x{2,}y{0,3}z", "xxz"),
        (r"(?x) a b  # said\n c", "abc"),
        (r"[ab]c|dd", "bc"),
        (r"(?<!no)way", "way"),
        (r"(a)?(?(1)bcd|efg)", "efg"),
        (r"(?>ab)c", "abc"),
        (r"(one) \1", "one one"),
    ],
)
def test_forms_of_patterns(regex: str, text: str) -> None:
    pattern = re.compile(regex)
    assert pattern.search(text) and met(pattern, text)


def test_needs_are_of_use() -> None:
    """Most rules are not searched for in a plain sentence."""
    text = folded("The server was slow on Monday, so we bought a second one. Thank you!")
    assert sum(may_match(rule.needs, text) for rule in RULES) < 10
    assert not met(re.compile("secret[-_]key=(?:a|b)"), "secret-keys")
    assert met(re.compile("secret[-_]key=(?:a|b)"), "secret-key=b")


@pytest.mark.parametrize("name", PATTERNS)
def test_whatever_a_pattern_matches_meets_its_needs(name: str) -> None:
    """Texts that are made from the pattern, in the other case too where it takes that."""
    pattern = PATTERNS[name]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.from_regex(pattern))
    def tried(text: str) -> None:
        for one in (text, text.swapcase(), text.upper(), text.replace("k", "\u212a")):
            assert not pattern.search(one) or met(pattern, one)

    tried()


# -- telephone numbers


def phones_plainly(text: str) -> set[tuple[int, int]]:
    """As phonenumbers finds them, in the whole text."""
    from phonenumbers import PhoneNumberMatcher

    if sum(c.isdigit() for c in text) < 7:
        return set()
    return {
        (match.start, match.end)
        for region in REGIONS
        for match in PhoneNumberMatcher(text, region)
        if not rules.BARE.fullmatch(match.raw_string)
    }


def phones(text: str) -> set[tuple[int, int]]:
    return set(rules._phones(REGIONS, text))


SIGNS = "0123456789" * 6 + " -./()+x[]~\n\n,:#%ae\u00a0\u2010\uff11\u0663\u4e00" + "ext. ;ext="
NUMBERS = (
    "+49 30 901820",
    "(650) 253-0000",
    "020 7946 0958 ext. 12",
    "01 42 68 53 00/332-445-1234",
    "650.253.0000x22",
    "1234567.89",
    "2024-01-02 10:33",
    "030 / x 901820-12",
)


@pytest.mark.parametrize("seed", range(4))
def test_a_look_at_the_lines_in_question_finds_the_same_numbers(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(250):
        text = "".join(rng.choice(SIGNS) for _ in range(rng.randint(0, 60)))
        for _ in range(rng.randint(0, 3)):
            number = list(rng.choice(NUMBERS))
            if rng.random() < 0.4:
                number[rng.randrange(len(number))] = rng.choice(SIGNS)
            at = rng.randint(0, len(text))
            text = text[:at] + "".join(number) + text[at:]
        assert phones(text) == phones_plainly(text), text
        found += len(phones(text))
    assert found > 50


def test_the_same_numbers_in_prose() -> None:
    rng = random.Random(7)
    for _ in range(30):
        text = prose(rng, 600) + secret(rng) + prose(rng, 100)
        assert phones(text) == phones_plainly(text)
    for text in ("1" * 500, "1 " * 300, "12.34." * 60, "+" * 50, "1-" * 500, "\n" * 100):
        assert phones(text) == phones_plainly(text)


def test_another_version_of_the_library_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it keeps its candidates elsewhere, every line with a digit is looked at."""
    monkeypatch.setattr(rules, "_candidates", lambda: rules.ANY_LINE)
    rng = random.Random(3)
    for _ in range(40):
        text = f"{prose(rng, 60)}\n{rng.choice(NUMBERS)}\n{secret(rng)} {rng.randint(1, 10**9)}"
        assert phones(text) == phones_plainly(text)


# -- all cores, and a run that was stopped


def chats(count: int, seed: int = 0) -> list[Any]:
    """Values as a log gives them: messages, tools, category."""
    rng = random.Random(seed)
    known = [secret(rng) for _ in range(8)]
    made = []
    for n in range(count):
        said = [prose(rng, 300), *([rng.choice(known)] if n % 3 else [])]
        turns = [{"role": "user", "content": " ".join(said)}]
        made.append([turns, None, ("sql", "prose")[n % 2]])
    return made


def masked(values: list[Any], how: HowMasked, kept: Kept | None = None) -> tuple[Any, ...]:
    found = across.find(values, how, kept or Kept())
    rows = list(across.mask(values, found.known, how.workers))
    return rows, found.known.found, dict(found.counts)


HOW = HowMasked(REGIONS)


def test_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "PART", 2000)
    values, one = chats(60), masker.Masker(RULES)
    for value in values:
        one.look(value)
    rows, found, counts = masked(values, HOW)
    assert found == one.known.found and counts == dict(one.counts) and len(found) >= 6
    assert rows == [one.chat().mask(value) for value in values]
    assert not any(value in json.dumps(rows) for value in found)


def test_processes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across, "PART", 4000)
    values = chats(80)
    alone = masked(values, HOW)
    monkeypatch.setattr(workers, "SECONDS", 0.0)
    assert masked(values, HowMasked(REGIONS, workers=2)) == alone


def test_a_run_that_was_stopped_looks_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(across, "PART", 2000)
    values, path = chats(60), tmp_path / "finds.jsonl"
    values += values[:7]  # parts may be alike
    whole = masked(values, HOW)
    calls: list[str] = []

    def looked(made: Any, text: str) -> Any:
        calls.append(text)
        if len(calls) == 70:
            raise KeyboardInterrupt
        return hits(made, text)

    monkeypatch.setattr(across, "hits", looked)
    with pytest.raises(KeyboardInterrupt):
        masked(values, HOW, Kept(path, "key"))
    text = path.read_text()
    assert not any(value in text for value in whole[1]), "places alone, no value"
    path.write_text(text[:-9])  # as if killed while it was written
    assert masked(values, HOW, Kept(path, "key")) == whole
    first = len(calls)
    assert masked(values, HOW, Kept(path, "key")) == whole and len(calls) == first
    masked(values, HOW, Kept(path, "another key"))
    assert len(calls) > first
