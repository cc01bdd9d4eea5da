"""Logs with secrets planted in them, from the formats of planted.json.

    python tests/helpers/planted.py docs/results/masking.json

masks 5,000 lines that hold 500 secrets and writes what was missed, by kind, and what was
changed without need.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

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


def exchange(n: int, line: Line, form: int) -> dict[str, Any]:
    """A line of a log that holds an exchange, in one of four forms. Its category is n."""
    # Two lines may ask the same; what makes them differ is no part of the formats.
    asked = [
        {"role": "system", "content": f"case {n}"},
        {"role": "user", "content": line.question},
    ]
    answer = {"role": "assistant", "content": line.answer}
    request = {"model": "tiny", "messages": asked, "metadata": {"category": f"n{n}"}}
    choice = {"index": 0, "message": answer, "finish_reason": "stop"}
    reply = {"object": "chat.completion", "model": "tiny", "choices": [choice]}
    at = 1_750_000_000 + 7 * n
    if form == 0:  # LiteLLM
        return {**request, "startTime": at + 0.5, "response": reply}
    if form == 1:  # llama.cpp: JSON within JSON
        return {"timestamp": at, "request": json.dumps(request), "response": json.dumps(reply)}
    if form == 2:  # a proxy that keeps the events of a stream
        half = len(line.answer) // 2
        parts = [{"content": line.answer[:half]}, {"content": line.answer[half:]}, {}]
        chunks = [
            {"choices": [{"index": 0, "delta": d, "finish_reason": None if d else "stop"}]}
            for d in parts
        ]
        text = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
        return {"time": at, "request": {"body": request}, "response": text}
    return {  # a batch, request and answer in one line
        "custom_id": f"r{n}",
        "body": request,
        "response": {"status_code": 200, "body": {**reply, "created": at}},
        "error": None,
    }


def remains(secret: str, text: str) -> bool:
    """Whether eight characters of a secret in a row (all of a shorter one) are in a text."""
    size = min(8, len(secret))
    return any(secret[i : i + size] in text for i in range(len(secret) - size + 1))


def measured(folder: Path, secrets: int, lines: int, seed: int) -> dict[str, Any]:
    """Mask a drawn log and count what remains and what was changed."""
    from decode.models.load import TargetConfig, load_tokenizer
    from scripts.extra.logs import LogOptions, prepare

    drawn_lines = drawn(secrets, lines, seed)
    log, out = folder / "log.jsonl", folder / "out"
    rows = (json.dumps(exchange(n, line, n % 4)) for n, line in enumerate(drawn_lines))
    log.write_text("".join(f"{row}\n" for row in rows))
    target = TargetConfig(kind="tiny")
    start = time.process_time()
    report = prepare([log], out, target, load_tokenizer(target), LogOptions())
    seconds = time.process_time() - start
    texts: dict[int, list[str]] = {}
    for path in (report.train, report.later):
        for row in path.read_text().splitlines():
            value = json.loads(row)
            texts[int(value["category"][1:])] = [m["content"] for m in value["messages"][1:]]
    missed: Counter[str] = Counter()
    kept: set[int] = set()
    changed: Counter[str] = Counter()
    for n, line in enumerate(drawn_lines):
        if line.secret and remains(line.secret, "\n".join(texts[n])):
            missed[line.kind] += 1
            kept.add(n)
        elif not line.secret and texts[n] != [line.question, line.answer]:
            changed[line.question[:80]] += 1
    every = "\n".join(p.read_text() for p in sorted(out.rglob("*")) if p.is_file())
    every += "\n".join(report.lines())
    leaked = [
        line.kind
        for n, line in enumerate(drawn_lines)
        if line.secret and line.secret in every and n not in kept
    ]
    return {
        "seed": seed,
        "lines": lines,
        "secrets": secrets,
        "rows": len(texts),
        "missed": sum(missed.values()),
        "missed_share": sum(missed.values()) / max(secrets, 1),
        "missed_by_kind": dict(missed),
        "clean_changed": sum(changed.values()),
        "clean_changed_share": sum(changed.values()) / max(lines - secrets, 1),
        "changed": list(changed)[:20],
        "found_but_in_a_file_or_message": leaked,
        "cpu_seconds": round(seconds, 1),
    }


def main(out: str) -> None:
    """Measure at full size, two draws, and write the JSON."""
    from scripts.common import files
    from scripts.extra.logs.masking import rules

    found = []
    for seed in (0, 7):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measured(Path(folder), 500, 5000, seed))
    formats = json.loads(FORMATS.read_text(encoding="utf-8"))
    value = {
        "about": "500 secrets drawn with faker in 5,000 lines of a log, masked by "
        "scripts/synthesize.py logs=; the formats (tests/helpers/planted.json) were written before the "
        "rules, which were then tried on draws of other seeds (1 and 2)",
        "command": files.command(),
        "environment": files.environment(),
        "formats": {"sha256": files.sha256(FORMATS), "kinds": list(formats["kinds"])},
        "rules": [{"name": r.name, "source": r.source} for r in rules()],
        "runs": found,
    }
    files.write_json(Path(out), value)
    for one in found:
        print({k: v for k, v in one.items() if k != "changed"})


if __name__ == "__main__":
    main(sys.argv[1])
