"""Secrets and personal data out of chats, each replaced by a stand-in such as [EMAIL_1].

Kept libraries know most of them: detect-secrets the tokens of services, phonenumbers the
telephone numbers. Own rules follow for what they do not know. A rule finds spans of a text;
what overlaps is masked as one. What was found anywhere in a log is masked wherever it stands
in it. Names of persons are found only where a person is introduced or addressed: no rule reads
prose.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.errors import UserError
from scripts.synthesis.config import REGIONS

Span = tuple[int, int]
HEAD = 5  # characters by which a found value is looked up; shorter ones stay within their chat
UNMASKED_KEYS = ("role", "type")


@dataclass(frozen=True)
class Rule:
    """One way to find something. stand_in: the word of its stand-ins. find: spans in a text.
    source: the library, or "own"."""

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


WHOLE = "(?:)"  # begins a pattern whose groups are for its own use


def _pattern(regex: str, flags: int = 0) -> Callable[[str], Iterator[Span]]:
    """Spans of group 1, or of the whole match where there is none."""
    compiled = re.compile(regex, flags)
    group = 1 if compiled.groups and not regex.startswith(WHOLE) else 0
    return lambda text: (m.span(group) for m in compiled.finditer(text))


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


def _ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    example = address in ipaddress.IPv6Network("2001:db8::/32")
    return not (address.is_loopback or address.is_unspecified or example)


NO_VALUE = re.compile(
    r"(?i)[*x.•]+|<.*|\$.*|\{.*|%.*|.*\(.*\)?|.*(your|example|changeme|placeholder|redacted).*|"
    r"(os|process|self|cfg|config|settings|env|args|request|req|data|user|form)\..*|"
    r"none|null|nil|true|false|undefined|str|string|int|required|optional|bearer|basic|"
    r"\[[A-Z]+_\d+\].*"
)


def _password(value: str) -> bool:
    """Whether what stands behind `password:` is one: no call, no placeholder, no plain word."""
    word = value.strip("\"'`")
    quoted = len(word) < len(value)
    if len(word) < 6 or " " in word:
        return False
    mixed = (
        bool(re.search(r"[a-z]", word))
        + bool(re.search(r"[A-Z]", word))
        + 2 * bool(re.search(r"\d", word))
        + bool(re.search(r"[^\w\s]", word))
    )
    if re.search(r"\d", word) and re.search(r"[a-z]", word) and re.search(r"[A-Z]", word):
        return not re.match(r"[<${]", word)
    return (quoted or mixed >= 3) and not NO_VALUE.fullmatch(word)


def _random(value: str) -> bool:
    """Whether a long run of letters and digits was drawn: all three kinds, changing often."""
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in value if c.isalnum()]
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    return len(set(kinds)) == 3 and kinds.count("d") >= 3 and changes >= len(kinds) / 3


SECRET_NAMES = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|token|credentials?|api[-_ ]?key|"
    r"access[-_ ]?key|account[-_ ]?key|auth[-_ ]?key|private[-_ ]?key|secret[-_ ]?key)"
)
VALUE = r"(\"[^\"\n]{6,}\"|'[^'\n]{6,}'|`[^`\n]{6,}`|[^\s\"'`,;]{6,}(?<![.:)\]}]))"
WORD = r"(?:[A-Z][a-zà-öø-ÿ]+|[A-Z]['’][A-Z][a-z]+|Ma?c[A-Z][a-z]+|[A-Z][a-z]+-[A-Z][a-z]+)"
PERSON = rf"({WORD}(?: [A-Z]\.)?(?: {WORD}){{1,2}})"
ROLES = re.compile(
    r"\b(Sir|Madam|Hiring|Manager|Team|Customer|Committee|Support|Service|Sales|Human|Resources|"
    r"Recruit\w*|Department|Board|Members?|Friends?|Colleagues?|All|Everyone|Editor|Santa|Diary|"
    r"Valued|Parents?|Students?|Neighbou?rs?|The|My|Your|Product|File|Company|Full|First|Last)\b"
)
MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
DATE = (
    rf"(\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}|"
    rf"{MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {MONTH} \d{{4}})"
)
# Kinds of streets as they end an address in the United States and Britain.
STREETS = (
    "Alley|Avenue|Ave|Bend|Bluffs?|Boulevard|Blvd|Bridge|Brooks?|Burgs?|Bypass|Camp|Canyon|Cape|"
    "Causeway|Centers?|Circles?|Cliffs?|Close|Club|Common|Corners?|Course|Courts?|Ct|Coves?|Creek|"
    "Crescent|Crest|Crossing|Crossroad|Curve|Dale|Dam|Divide|Drives?|Dr|Estates?|Expressway|"
    "Extensions?|Falls?|Ferry|Fields?|Flats?|Fords?|Forest|Forges?|Forks?|Fort|Freeway|Gardens?|"
    "Gateway|Glens?|Greens?|Groves?|Harbors?|Haven|Heights|Highway|Hills?|Hollow|Inlet|Islands?|"
    "Isle|Junctions?|Keys?|Knolls?|Lakes?|Landing|Lanes?|Ln|Lights?|Loaf|Locks?|Lodge|Loop|Mall|"
    "Manors?|Meadows?|Mews|Mills?|Mission|Motorway|Mount|Mountains?|Neck|Orchard|Oval|Overpass|"
    "Parks?|Parkways?|Pass|Passage|Path|Pike|Pines?|Place|Plains?|Plaza|Points?|Ports?|Prairie|"
    "Radial|Ramp|Ranch|Rapids?|Rest|Ridges?|River|Roads?|Rd|Route|Row|Rue|Run|Shoals?|Shores?|"
    "Skyway|Springs?|Spurs?|Squares?|Station|Stravenue|Stream|Streets?|St|Summit|Terrace|"
    "Throughway|Trace|Track|Trafficway|Trail|Tunnel|Turnpike|Underpass|Unions?|Valleys?|Viaduct|"
    "Views?|Villages?|Ville|Vista|Walks?|Wall|Ways?|Wells?"
)
NUMBER = r"\+?\(?\d[\d \-./()]{5,18}\d(?:\s?(?:x|ext\.?)\s?\d{1,6})?"


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
            r"AIza[\w-]{30,}|ya29\.[\w-]{20,}|xox[a-z]-[\w-]{10,}|[rs]k_(?:live|test)_\w{10,}|"
            r"https://hooks\.slack\.com/services/[\w/]{20,})"
        ),
    ),
    Rule("AWS access key id", "SECRET", _pattern(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    Rule("JSON web token", "SECRET", _pattern(r"\beyJ[\w-]{5,}={0,2}\.[\w-]{5,}={0,2}\.[\w-]*")),
    Rule(
        "token behind Bearer or Basic",
        "SECRET",
        _pattern(r"\b(?:bearer|basic)\s+([\w.~+/=-]{16,})", re.IGNORECASE),
    ),
    Rule(
        "password in an address",
        "SECRET",
        _pattern(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s:/@]*:([^\s@/]{3,})@", re.IGNORECASE),
    ),
    Rule(
        "value assigned to a name such as password, token or api_key",
        "SECRET",
        _kept(
            SECRET_NAMES + r"[\w-]{0,64}[\"'\]]{0,2}\s*(?::=|=>|[=:])\s*" + VALUE,
            _password,
            re.IGNORECASE,
        ),
    ),
    Rule(
        "password told in a sentence",
        "SECRET",
        _kept(
            r"\b(?:password|passphrase|passcode|token|secret|key)\s+(?:is|was|to|now)\s+" + VALUE,
            _password,
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
    Rule(
        "social security number of the United States",
        "SSN",
        _pattern(r"(?<![\w-])(?!000|666)[0-8]\d\d-(?!00)\d\d-(?!0000)\d{4}(?![\w-])"),
    ),
    Rule(
        "IPv6 address, unless of this machine or of documentation",
        "IP",
        _kept(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4}(?![\w:.]*:)", _ipv6),
    ),
    Rule(
        "MAC address",
        "MAC",
        _pattern(
            WHOLE + r"(?<![\w:-])[0-9A-Fa-f]{2}([:-])[0-9A-Fa-f]{2}"
            r"(?:\1[0-9A-Fa-f]{2}){4}(?![\w:-])"
        ),
    ),
    Rule(
        "telephone number behind a word such as call, phone or tel.",
        "PHONE",
        _kept(
            r"\b(?:phone|tel|telephone|mobile|cell|fax|whatsapp|call|text|ring)\b[^\n\d+(]{0,25}"
            rf"({NUMBER})",
            lambda t: 7 <= sum(c.isdigit() for c in t) <= 22,
            re.IGNORECASE,
        ),
    ),
    Rule(
        "telephone number as it is written with +, brackets, dots or dashes",
        "PHONE",
        _pattern(
            r"(?<![\w.-])((?:\+|00)\d{1,3}[ -.]?(?:\(0?\d+\)|\d)[\d .-]{5,14}\d(?:x\d+)?|"
            r"(?:\+?1[-. ])?\(\d{3}\) ?\d{3}[-. ]\d{4}(?:x\d+)?|"
            r"(?:\+?1[-. ])?\d{3}([-.])\d{3}\2\d{4}(?:x\d+)?)(?![\w-])"
        ),
    ),
    Rule(
        "date of birth",
        "BIRTH_DATE",
        _pattern(
            r"\b(?:born|birth|birth[-_ ]?date|birthday|dob)\b[^\n\d]{0,20}?" + DATE, re.IGNORECASE
        ),
    ),
    Rule(
        "number of a passport, licence or identity card",
        "ID",
        _kept(
            r"\b(?:passport|licen[cs]e|identity card|id card|national id|tax id)\b"
            r"[^\n\d]{0,20}?\b([A-Z]{0,3}\d[A-Z0-9]{5,11})\b",
            lambda t: any(c.isdigit() for c in t),
            re.IGNORECASE,
        ),
    ),
    Rule(
        "person who is introduced, addressed or signs",
        "PERSON",
        _kept(
            r"(?:\b[Mm]y name is |\bName: ?|\b[Dd]ear (?:Mr\.? |Mrs\.? |Ms\.? |Dr\.? )?|"
            r"\b(?:[Rr]egards|[Ss]incerely|[Yy]ours|[Ww]ishes|[Cc]heers),?\s*\n)" + PERSON,
            lambda t: not ROLES.search(t),
        ),
    ),
    Rule(
        "street and number behind a word such as address or live at",
        "ADDRESS",
        _pattern(
            r"(?i:\b(?:address|lives? at|living at|resides? at|ship(?:ped)? (?:it )?to|"
            r"deliver(?:ed)? (?:it )?to)\b):? ?"
            rf"(\d{{1,6}} {WORD}(?: {WORD}){{0,3}}(?:,? (?:Apt|Suite|Unit)\.? #?\w+)?)"
        ),
    ),
    Rule(
        "street and number, by the kind of street",
        "ADDRESS",
        _pattern(
            rf"\b\d{{1,6}} (?:{WORD} ){{1,3}}(?:{STREETS})\b\.?"
            r"(?:,? (?:Apt|Suite|Unit|Flat|Apartment)\.? #?\w+)?"
        ),
    ),
    Rule(
        "long run of letters and digits that was drawn",
        "SECRET",
        _kept(r"(?<![\w/+-])[A-Za-z0-9_+/-]{24,}={0,2}(?![\w/+-])", _random),
    ),
]


def rules(regions: Sequence[str] = REGIONS) -> list[Rule]:
    """All rules in the order in which they are asked. Raises UserError without the packages of
    outrider[logs], and for an unknown region."""
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
    return [*found, number, *OWN]


def told() -> str:
    """The rules for `--help`."""
    own = "".join(f"\n  {rule.name}" for rule in OWN)
    return (
        "What mask=true replaces: what detect-secrets knows by its form, telephone numbers that\n"
        f"phonenumbers finds valid in one of regions, and by own rules:{own}"
    )


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
