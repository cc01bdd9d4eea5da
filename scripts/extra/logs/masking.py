"""Secrets and personal data out of chats, each replaced by a stand-in such as [EMAIL_1].

Kept libraries know most of them: detect-secrets the tokens of services, phonenumbers the
telephone numbers. A few own rules follow for forms that neither knows, and a function of the
user's. A rule finds spans of a text; what overlaps is masked as one. What was found anywhere in a
log is masked wherever it stands in it. Only what has a form is found: no rule reads prose, and
nobody looks for names of persons, addresses or dates.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.files import sha256
from outrider.scripts.synthesis.config import REGIONS

Span = tuple[int, int]
HEAD = 5  # characters by which a found value is looked up; shorter ones stay within their chat
UNMASKED_KEYS = ("role", "type")


@dataclass(frozen=True)
class Rule:
    """One way to find something. stand_in: the word of its stand-ins. find: spans in a text.
    source: the library, "own" or "hook"."""

    name: str
    stand_in: str
    find: Callable[[str], Iterable[Span]]
    source: str = "own"


# -- kept libraries


def _library() -> list[Rule]:
    """The detectors of detect-secrets that look for a form. Left out: its keyword and entropy
    detectors, which are made for code with quoted values and find much in prose, and the
    detector of private keys, which finds a key's first line alone."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.plugins.base import RegexBasedDetector
    except ImportError:
        raise UserError(
            "mask: the package detect-secrets is missing; pip install 'outrider[logs]', or "
            "mask=false to keep secrets"
        ) from None
    known: dict[str, Any] = get_mapping_from_secret_type_to_class()
    rules = []
    for name, kind in sorted(known.items()):
        detector = kind()
        if isinstance(detector, RegexBasedDetector) and name != "Private Key":
            word = "IP" if name.startswith("Public IP") else "SECRET"
            find = functools.partial(_detected, detector)
            rules.append(Rule(name, word, find, "detect-secrets"))
    return rules


def _detected(detector: Any, text: str) -> Iterator[Span]:
    for value in set(detector.analyze_string(text)):
        if isinstance(value, str) and len(value) >= HEAD:
            yield from _places(text, value)


def _places(text: str, value: str) -> Iterator[Span]:
    at = text.find(value)
    while at >= 0:
        yield at, at + len(value)
        at = text.find(value, at + len(value))


def _phones(regions: Sequence[str], text: str) -> Iterator[Span]:
    """Numbers that are valid in a region, by the data of libphonenumber."""
    if sum(c.isdigit() for c in text) < 7:
        return
    import phonenumbers

    for region in regions:
        for match in phonenumbers.PhoneNumberMatcher(text, region):
            # Eight bare digits are an order as well, and a decimal number is none.
            if not re.fullmatch(r"\d+(?:\.\d+)?", match.raw_string):
                yield match.start, match.end


# -- own rules


def _pattern(regex: str, flags: int = 0) -> Callable[[str], Iterator[Span]]:
    """Spans of group 1, or of the whole match where there is none."""
    compiled = re.compile(regex, flags)
    return lambda text: (m.span(min(compiled.groups, 1)) for m in compiled.finditer(text))


def _kept(regex: str, test: Callable[[str], bool], flags: int = 0) -> Callable[[str], Any]:
    """As _pattern, for those that pass a test."""
    spans = _pattern(regex, flags)
    return lambda text: (s for s in spans(text) if test(text[s[0] : s[1]]))


def luhn(text: str) -> bool:
    """The check digit of payment cards (ISO/IEC 7812)."""
    digits = [int(c) for c in text if c.isdigit()]
    doubled = [d * 2 - 9 * (d > 4) for d in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def iban(text: str) -> bool:
    """The check digits of ISO 13616."""
    text = re.sub(r"\W", "", text).upper()
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _mixed(value: str) -> bool:
    """Letters and digits: a plain word behind `password:` is mostly prose or code."""
    return bool(re.search(r"\d", value) and re.search(r"[^\W\d]", value))


OWN = [
    Rule(
        "private key, from its first to its last line",
        "PRIVATE_KEY",
        _pattern(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[\s\S]*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\]*)"
        ),
    ),
    Rule(
        "tokens of Anthropic, OpenAI, GitHub, GitLab, Hugging Face, Google, Slack, Stripe",
        "SECRET",
        _pattern(
            r"(?<![A-Za-z0-9])(sk-ant-[\w-]{20,}|sk-(?:proj-|svcacct-)?[\w-]{20,}|"
            r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|"
            r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[a-z]-[\w-]{10,}|[rs]k_(?:live|test)_\w{10,})"
        ),
    ),
    Rule(
        "letters with digits assigned to a name such as password, token or api_key",
        "SECRET",
        _kept(
            r"\b(?:pass(?:word|wd|phrase)|pwd|secret|token|(?:api|access|auth|secret)[-_ ]?key)"
            r"[\"\'\]]{0,2}\s*(?::=|=>|[=:])\s*[\"\'`]?([^\s\"\'`,;()<>{}\[\]$]{6,}+)(?![(\[])",
            _mixed,
            re.IGNORECASE,
        ),
    ),
    Rule(
        "e-mail address",
        "EMAIL",
        _pattern(r"(?<!\w)[\w+%][\w.+%'-]{0,63}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[^\W\d_]{2,}"),
    ),
    Rule(
        "payment card, by its check digit",
        "CARD",
        _kept(
            r"(?<![\w.-])((?:[3-6]|2131|1800|2[2-7])\d*(?:[ -]?\d){10,18})(?![\w-])",
            # Twelve digits are a card only where they stand in groups.
            lambda t: 12 + t.isdigit() <= sum(map(str.isdigit, t)) <= 19 and luhn(t),
        ),
    ),
    Rule(
        "IBAN, by its check digits",
        "IBAN",
        _kept(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{2,4}){2,8}(?: ?[A-Z0-9]{1,3})?\b", iban),
    ),
]


# -- a rule of the user's


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name.partition(":")[0])
    except ImportError as error:
        raise UserError(
            f"mask: {name}: {error}; give module:function, the module on PYTHONPATH"
        ) from None


def source(name: str) -> str:
    """sha256 of the file of `module:function`: another version masks other things. Raises
    UserError for what cannot be imported."""
    file = _module(name).__file__
    return sha256(Path(file)) if file else ""


def hook(name: str) -> Rule:
    """`module:function` as a rule: function(text) gives (start, end) of what is to be masked, in
    characters. Raises UserError for what cannot be imported; the rule raises it for spans that
    are none."""
    find = getattr(_module(name), name.partition(":")[2], None)
    if not callable(find):
        raise UserError(f"mask: {name} is no function; give one of (text) -> [(start, end), ..]")

    def spans(text: str) -> Iterator[Span]:
        for found in find(text):
            start, end = found if isinstance(found, tuple | list) and len(found) == 2 else (-1, -1)
            if not (type(start) is type(end) is int and 0 <= start <= end <= len(text)):
                raise UserError(
                    f"mask: {name} gave {str(found)[:60]} for a text of {len(text)} characters; "
                    "each item is (start, end) within the text"
                )
            yield start, end

    return Rule(name, "MASKED", spans, "hook")


def rules(regions: Sequence[str] = REGIONS, own: str = "") -> list[Rule]:
    """All rules in the order in which they are asked. own: a further one, `module:function`.
    Raises UserError without the packages of outrider[logs], for an unknown region, and as `hook`
    does."""
    found = _library()
    try:
        import phonenumbers
    except ImportError:
        raise UserError(
            "mask: the package phonenumbers is missing; pip install 'outrider[logs]', or "
            "mask=false to keep secrets"
        ) from None
    if unknown := [r for r in regions if r not in phonenumbers.SUPPORTED_REGIONS]:
        raise UserError(
            f"regions: {unknown[0]!r} is none of phonenumbers; give country codes such as [US,DE]"
        )
    number = Rule(
        "telephone number that is valid in one of regions",
        "PHONE",
        functools.partial(_phones, tuple(regions)),
        "phonenumbers",
    )
    return [*found, number, *OWN, *([hook(own)] if own else [])]


# -- masking


@dataclass
class Masker:
    """Finds first (`look` at every text of the log), masks then (`chat`), so that what was
    found once is masked everywhere.

    found: value -> word of its stand-in. counts: how many places each rule masked in the texts
    that were looked at."""

    rules: Sequence[Rule]
    found: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _sizes: dict[str, list[int]] = field(default_factory=dict)  # by a value's first characters

    def look(self, value: Any) -> None:
        """Remember what is found in every text of a message, a list or an object."""
        for text in _texts(value):
            hits = [(a, b, i) for i, r in enumerate(self.rules) for a, b in r.find(text) if a < b]
            merged: list[tuple[int, int, int]] = []
            for start, end, i in sorted(hits):
                self._remember(text[start:end].strip("\"'`"), self.rules[i].stand_in)
                if merged and start < merged[-1][1]:  # finds that overlap are one as well
                    a, b, j = merged[-1]
                    merged[-1] = (a, max(b, end), min(i, j))
                else:
                    merged.append((start, end, i))
            for start, end, i in merged:
                self.counts[self.rules[i].name] += 1
                self._remember(text[start:end].strip("\"'`"), self.rules[i].stand_in)

    def _remember(self, value: str, stand_in: str) -> None:
        if len(value) >= HEAD and value not in self.found:
            self.found[value] = stand_in
            sizes = self._sizes.setdefault(value[:HEAD], [])
            if len(value) not in sizes:
                sizes.append(len(value))
                sizes.sort(reverse=True)

    def known(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Where values that were found anywhere stand in a text: start, end, stand-in."""
        at = 0
        while at <= len(text) - HEAD:
            for size in self._sizes.get(text[at : at + HEAD], ()):
                value = text[at : at + size]
                if value in self.found and _stands(text, value, at):
                    yield at, at + size, self.found[value]
                    at += size
                    break
            else:
                at += 1

    def chat(self) -> Chat:
        """Stand-ins for one chat: the same value gets the same one."""
        return Chat(self)


@dataclass
class Chat:
    """One chat's stand-ins."""

    masker: Masker
    names: dict[str, str] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)

    def mask(self, value: Any) -> Any:
        """The value with every text in it masked."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.mask(v) for v in value]
        if isinstance(value, dict):
            return {
                self._text(str(k)): v if k in UNMASKED_KEYS else self.mask(v)
                for k, v in value.items()
            }
        return value

    def _text(self, text: str) -> str:
        # Long values first found whole; what a rule found beyond them lies in `found` as well.
        out, at = [], 0
        for start, end, word in self.masker.known(text):
            out += [text[at:start], self._stand_in(text[start:end], word)]
            at = end
        return "".join([*out, text[at:]])

    def _stand_in(self, value: str, word: str) -> str:
        if value not in self.names:
            self.numbers[word] += 1
            self.names[value] = f"[{word}_{self.numbers[word]}]"
        return self.names[value]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            if key not in UNMASKED_KEYS:
                yield from _texts(one)


def _stands(text: str, value: str, at: int) -> bool:
    """Whether a value stands at a place: not inside a longer word, unless it is long itself."""
    end = at + len(value)
    if len(value) >= 12:
        return True
    before = at and text[at - 1].isalnum() and value[0].isalnum()
    after = end < len(text) and text[end].isalnum() and value[-1].isalnum()
    return not before and not after
