"""The rules of masking: each finds spans in a text."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.conf.errors import UserError
from outrider.scripts.common.files import sha256
from outrider.scripts.extra.masking.needed import Needs, needed
from outrider.scripts.synthesis.config import REGIONS

Span = tuple[int, int]
ANY: Needs = ((),)  # of what any text may hold
HEAD = 5  # characters by which a found value is looked up; shorter ones stay within their chat


@dataclass(frozen=True)
class Rule:
    """One way to find something. stand_in: the word of its stand-ins. find: spans in a text.
    source: the library, "own" or "hook". needs: what a text must hold to be searched."""

    name: str
    stand_in: str
    find: Callable[[str], Iterable[Span]]
    source: str = "own"
    needs: Needs = ANY


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
            plain = kind.analyze_string is RegexBasedDetector.analyze_string
            needs = needed(*detector.denylist) if plain else ANY
            rules.append(Rule(name, word, find, "detect-secrets", needs))
    return rules


def _detected(detector: Any, text: str) -> Iterator[Span]:
    for value in set(detector.analyze_string(text)):
        if isinstance(value, str) and len(value) >= HEAD:
            yield from places(text, value)


def places(text: str, value: str) -> Iterator[Span]:
    """Every place of a value in a text."""
    at = text.find(value)
    while at >= 0:
        yield at, at + len(value)
        at = text.find(value, at + len(value))


@functools.cache
def _candidates() -> re.Pattern[str]:
    """Where phonenumbers looks closer. Should another version keep that elsewhere, every line
    with a digit is looked at."""
    from phonenumbers import phonenumbermatcher

    return getattr(phonenumbermatcher, "_PATTERN", None) or ANY_LINE


ANY_LINE = re.compile(r".*\d.*")
BARE = re.compile(r"\d+(?:\.\d+)?")


def _phones(regions: tuple[str, ...], text: str) -> Iterator[Span]:
    """Numbers that are valid in a region, by the data of libphonenumber.

    Its matcher looks at the lines alone in which it could find one: most numbers are bare, and
    dates come again and again. No candidate crosses the end of a line."""
    from phonenumbers import PhoneNumberMatcher

    lines = _hopeful(regions, text)
    if not lines or sum(c.isdigit() for c in text) < 7:
        return
    for start, end in lines:
        for region in regions:
            for match in PhoneNumberMatcher(text[start:end], region):
                # Eight bare digits are an order as well, and a decimal number is none.
                if not BARE.fullmatch(match.raw_string):
                    yield start + match.start, start + match.end


def _hopeful(regions: tuple[str, ...], text: str) -> list[Span]:
    """The lines of a text with a candidate that may hold a number."""
    lines: list[Span] = []
    for found in _candidates().finditer(text):
        if lines and found.start() < lines[-1][1]:
            continue
        candidate = found.group()
        if len(candidate) <= 20 and BARE.fullmatch(candidate):
            continue  # what lies within is bare as well
        odd = len(candidate) > 60 or ("/" in candidate and "x" in candidate.lower())
        if odd or _holds(regions, candidate):
            end = text.find("\n", found.end())
            lines.append((text.rfind("\n", 0, found.start()) + 1, len(text) if end < 0 else end))
    return lines


@functools.lru_cache(1 << 16)
def _holds(regions: tuple[str, ...], candidate: str) -> bool:
    """Whether a candidate alone holds a number: what stands around it can only speak against
    one."""
    from phonenumbers import PhoneNumberMatcher

    return any(PhoneNumberMatcher(candidate, region).has_next() for region in regions)


# -- own rules


def _own(
    name: str, stand_in: str, regex: str, flags: int = 0, test: Callable[[str], bool] | None = None
) -> Rule:
    """A rule for group 1 of a pattern, or for the whole match where there is none. test: what
    a span has to pass."""
    compiled = re.compile(regex, flags)

    def find(text: str) -> Iterator[Span]:
        spans = (m.span(min(compiled.groups, 1)) for m in compiled.finditer(text))
        return (s for s in spans if test is None or test(text[s[0] : s[1]]))

    return Rule(name, stand_in, find, "own", needed(compiled))


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
    _own(
        "private key, from its first to its last line",
        "PRIVATE_KEY",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[\s\S]*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\]*)",
    ),
    _own(
        "tokens of Anthropic, OpenAI, GitHub, GitLab, Hugging Face, Google, Slack, Stripe",
        "SECRET",
        r"(?<![A-Za-z0-9])(sk-ant-[\w-]{20,}|sk-(?:proj-|svcacct-)?[\w-]{20,}|"
        r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|"
        r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[a-z]-[\w-]{10,}|[rs]k_(?:live|test)_\w{10,})",
    ),
    _own(
        "letters with digits assigned to a name such as password, token or api_key",
        "SECRET",
        r"\b(?:pass(?:word|wd|phrase)|pwd|secret|token|(?:api|access|auth|secret)[-_ ]?key)"
        r"[\"\'\]]{0,2}\s*(?::=|=>|[=:])\s*[\"\'`]?([^\s\"\'`,;()<>{}\[\]$]{6,}+)(?![(\[])",
        re.IGNORECASE,
        _mixed,
    ),
    _own(
        "e-mail address",
        "EMAIL",
        r"(?<!\w)[\w+%][\w.+%'-]{0,63}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[^\W\d_]{2,}",
    ),
    _own(
        "payment card, by its check digit",
        "CARD",
        r"(?<![\w.-])((?:[3-6]|2131|1800|2[2-7])\d*(?:[ -]?\d){10,18})(?![\w-])",
        # Twelve digits are a card only where they stand in groups.
        test=lambda t: 12 + t.isdigit() <= sum(map(str.isdigit, t)) <= 19 and luhn(t),
    ),
    _own(
        "IBAN, by its check digits",
        "IBAN",
        r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{2,4}){2,8}(?: ?[A-Z0-9]{1,3})?\b",
        test=iban,
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
    """`module:function` as a rule: function(text) gives (start, end) of what is to be masked,
    in characters. Raises UserError for what cannot be imported; the rule raises it for spans
    that are none."""
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
    Raises UserError without the packages of outrider[logs], for an unknown region, and as
    `hook` does."""
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
