"""The card of a published head (README.md): what it is for, what was measured and how, how it
is decoded with, and nothing that nobody has tried."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from outrider.heads.hub import LIBRARY
from outrider.scripts.exporting.card import NAMES, trained_depth
from outrider.scripts.publishing.form import Form
from outrider.scripts.publishing.measured import Measured
from outrider.scripts.reports.rendering import render

TASK = "text-generation"


@dataclass(frozen=True)
class Published:
    """What its owner says of a head. repository: OWNER/NAME. base_model: the target's
    repository, "" where it has none. license: the hub's name of it. measured: None where
    nobody measured. data: what the run says of its data."""

    repository: str
    license: str
    base_model: str = ""
    datasets: tuple[str, ...] = ()
    measured: Measured | None = None
    data: str = ""
    training: dict[str, Any] = field(default_factory=dict)


def page(form: Form, about: Published) -> str:
    """README.md: metadata as the hub reads it, then text."""
    saved = form.card.get("head", {}).get("config", {})
    depth = trained_depth(saved) or int(form.manifest.get("draft_tokens") or 0)
    what = NAMES.get(form.kind, f"a {form.kind} head")
    return render(
        "published.md",
        metadata=yaml.safe_dump(metadata(form, about), sort_keys=False, allow_unicode=True),
        title=f"{what[0].upper()}{what[1:]} for {about.base_model or form.target.get('name')}",
        what=what,
        about=about,
        form=form,
        depth=depth,
        serve=form.manifest.get("serve") or [],
        hashes={k.replace("_", " "): v for k, v in form.target.items() if k.endswith("sha256")},
        check=form.manifest.get("check") or {},
        steps=form.card.get("extra", {}).get("step"),
    )


def metadata(form: Form, about: Published) -> dict[str, Any]:
    """What stands in front of the card, as the hub's search reads it."""
    found: dict[str, Any] = {"license": about.license, "library_name": LIBRARY}
    found["pipeline_tag"] = TASK
    if about.base_model:
        found["base_model"] = about.base_model
    if about.datasets:
        found["datasets"] = list(about.datasets)
    engine = form.manifest.get("engine_format")
    found["tags"] = ["speculative-decoding", form.kind, *([str(engine)] if engine else [])]
    if about.measured is not None:
        found["model-index"] = [_index(about, about.measured)]
    return found


def _index(about: Published, measured: Measured) -> dict[str, Any]:
    """The accepted length, as the hub lists results."""
    row = measured.first
    metric = {
        "type": "accepted_length",
        "name": f"accepted length, {row.shape} [{row.low:.2f}, {row.high:.2f}]",
        "value": round(row.mean, 3),
    }
    prompts = {"name": measured.prompts, "type": re.sub(r"[^\w.-]", "-", measured.prompts)}
    result = {
        "task": {"type": TASK},
        "dataset": prompts,
        "metrics": [metric],
    }
    return {"name": about.repository.partition("/")[2], "results": [result]}
