"""Logs with secrets planted in them, from the formats of planted.json.

    python tests/planted.py docs/results/masking.json

masks 5,000 lines that hold 500 secrets and writes what was missed, by kind, and what was
changed without need.
"""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = Path(__file__).with_name("planted.json")
WORDS = [
    "river",
    "market",
    "engine",
    "teacher",
    "garden",
    "signal",
    "window",
    "bridge",
    "harvest",
    "melody",
]


@dataclass(frozen=True)
class Line:
    """One exchange. secret: "" of a clean line."""

    question: str
    answer: str
    kind: str = ""
    secret: str = ""


def drawn(secrets: int, lines: int, seed: int = 0) -> list[Line]:
    """`lines` exchanges of which `secrets` hold one each, all kinds equally often."""
    formats = json.loads(FORMATS.read_text(encoding="utf-8"))
    kinds = list(formats["kinds"].items())
    draw = Draw(seed)
    made = []
    for n in range(secrets):
        kind, spec = kinds[n % len(kinds)]
        secret = draw.secret(draw.random.choice(spec["draw"]))
        place = draw.random.choice(spec["in"])
        question = place.replace("{}", secret)
        # A third of the answers say it again, as models do.
        echo = f"You wrote {secret}; let us see." if n % 3 == 0 else draw.clean("{sentence}")
        made.append(Line(question, echo, kind, secret))
    for n in range(lines - secrets):
        pattern = formats["clean"][n % len(formats["clean"])]
        made.append(Line(draw.clean(pattern), draw.clean("{paragraph}")))
    draw.random.shuffle(made)
    return made


class Draw:
    """faker, seeded."""

    def __init__(self, seed: int) -> None:
        from faker import Faker

        self.random = random.Random(seed)
        self.locales = {}
        for name in ("en_US", "en_GB", "de_DE", "fr_FR"):
            self.locales[name] = Faker(name)
            self.locales[name].seed_instance(seed)
        self.fake = self.locales["en_US"]

    def secret(self, spec: dict[str, Any]) -> str:
        """One value of a format."""
        if "jwt" in spec:
            return self._jwt()
        if "pem" in spec:
            return self._pem(spec["pem"])
        if "text" in spec:
            return self._pattern(spec["text"], spec["letters"])
        keys = {k: v for k, v in spec.items() if k not in ("call", "locale", "group", "then")}
        fake = self.locales[spec.get("locale", "en_US")]
        if spec["call"] == "date_of_birth":
            return fake.date_of_birth().strftime(spec["pattern"])
        value = str(getattr(fake, spec["call"])(**keys))
        if "then" in spec:
            value += " " + str(getattr(fake, spec["then"])())
        if "group" in spec:
            size = spec["group"]
            value = " ".join(value[i : i + size] for i in range(0, len(value), size))
        return value

    def clean(self, pattern: str) -> str:
        """A sentence without a secret; every place is drawn anew."""
        r, fake = self.random, self.fake
        places = {
            "word": lambda: r.choice(WORDS),
            "int": lambda: str(r.randint(2, 99)),
            "big": lambda: str(r.randint(10_000, 99_999_999)),
            "byte": lambda: str(r.randint(0, 255)),
            "port": lambda: str(r.randint(1024, 65_535)),
            "year": lambda: str(r.randint(1900, 2030)),
            "date": lambda: fake.date(),
            "iso": lambda: fake.date_time().isoformat(),
            "version": lambda: f"{r.randint(0, 9)}.{r.randint(0, 30)}.{r.randint(0, 9)}",
            "sha": lambda: fake.sha1(),
            "sha256": lambda: fake.sha256(),
            "uuid": lambda: str(fake.uuid4()),
            "hex6": lambda: f"{r.randint(0, 0xFFFFFF):06x}",
            "sentence": lambda: fake.sentence(nb_words=10),
            "paragraph": lambda: fake.paragraph(nb_sentences=5),
        }
        for name, make in places.items():
            while f"{{{name}}}" in pattern:
                pattern = pattern.replace(f"{{{name}}}", make(), 1)
        return pattern

    def _pattern(self, text: str, letters: str) -> str:
        either = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
        sets = {"?": letters, "#": "0123456789", "%": "123456789", "!": either}
        return "".join(self.random.choice(sets[c]) if c in sets else c for c in text)

    def _bytes(self, count: int) -> bytes:
        return self.random.randbytes(count)

    def _jwt(self) -> str:
        parts = [
            json.dumps({"alg": "HS256", "typ": "JWT"}).encode(),
            json.dumps({"sub": self.fake.uuid4(), "iat": 1_700_000_000}).encode(),
            self._bytes(32),
        ]
        return ".".join(base64.urlsafe_b64encode(p).decode().rstrip("=") for p in parts)

    def _pem(self, name: str) -> str:
        body = base64.b64encode(self._bytes(400)).decode()
        rows = [body[i : i + 64] for i in range(0, len(body), 64)]
        return "\n".join([f"-----BEGIN {name}-----", *rows, f"-----END {name}-----"])
