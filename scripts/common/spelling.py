"""Keys of a command that another command starts, as Hydra reads them: a path may hold a space, a
comma, a letter of any alphabet."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

from outrider.decode.models.config import TargetConfig

PLAIN = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z0-9_./:+-]+")  # needs no quotes


def spelled(text: str) -> str:
    """A text as the value of a key or an item of a list; in quotes where it needs them."""
    if PLAIN.fullmatch(text):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # text to OmegaConf, no interpolation
    # Within quotes Hydra escapes a quote alone, and the backslashes right before one.
    text = re.sub(r'(\\*)"', r'\1\1\\"', text)
    return '"' + re.sub(r"(\\+)$", r"\1\1", text) + '"'


def target_keys(cfg: TargetConfig) -> list[str]:
    """The keys that name a target: its kind, and what differs from that kind's defaults."""
    plain, found = asdict(TargetConfig(kind=cfg.kind)), [f"target={cfg.kind}"]
    for key, value in asdict(cfg).items():
        if value != plain[key]:
            message = spelled(value) if isinstance(value, str) else json.dumps(value)
            found.append(f"target.{key}={message}")
    return found
