"""scripts/certify.py url=...: a sound server passes, six seeded defects are rejected, and a
server that misbehaves is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decode.models.load import TargetConfig, load_target
from scripts.certify import server
from tests.speculating_server import serving

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 260}
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(kind="tiny", **SHAPE), "float32", "cpu")


@pytest.fixture(scope="module")
def draft():
    return load_target(TargetConfig(kind="tiny", **{**SHAPE, "layers": 1}), "float32", "cpu")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in ("go", "hay", "oats")))
    return path


def certify(url: str, out: Path, prompts: Path, *args: str) -> tuple[int, dict]:
    shape = [f"target.{k}={v}" for k, v in SHAPE.items()]
    keys = [
        "target=tiny",
        *shape,
        f"url={url}",
        f"out={out}",
        f"prompts={prompts}",
        f"temperature={TEMPERATURE}",
        "greedy_prompts=2",
        "max_new_tokens=32",
        "quiet=true",
        "device=cpu",
        "members=1",
    ]
    with pytest.raises(SystemExit) as stop:
        server([*keys, *args])
    paper = out / "certificate.json"
    return int(stop.value.code or 0), json.loads(paper.read_text()) if paper.exists() else {}


def test_a_sound_server_passes_and_its_controls_fail(target, draft, prompts, tmp_path) -> None:
    with serving(target, draft) as url:
        code, paper = certify(url, tmp_path / "out", prompts, "tokens=1500", "detect=0.9")
    assert all(layer["passed"] for layer in paper["layers"]), paper["reasons"]
    assert code == {"lossless": 0, "undecided": 3}[paper["verdict"]]
    assert paper["server"]["drafted"] > 300 and paper["untested"]
    assert sum(c["rejected"] for c in paper["negative_controls"]) >= 2
