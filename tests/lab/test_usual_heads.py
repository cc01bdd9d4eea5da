"""What the runs of engines serve where nobody names a drafter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import UserError
from outrider.scripts.lab import engines
from outrider.scripts.lab.serving import shared
from tests.helpers.commands import code_of

USUAL = [
    (engines.llamacpp.main, [], ["runs/demo/eagle3"]),
    (engines.vllm.main, ["speculators=README.md"], ["runs/demo/eagle3"]),
    (engines.sampled.main, [], ["none", "runs/demo/eagle3"]),
    (engines.race.main, [], ["none", "runs/demo/eagle3"]),
]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `make demo` has just run, and what an engine's run goes on to load."""
    monkeypatch.chdir(tmp_path)
    for name in ("hydra_heads", "eagle3"):
        (tmp_path / "runs/demo" / name / "head").mkdir(parents=True)
        (tmp_path / "runs/demo" / name / "head/head.json").write_text("{}")
    monkeypatch.setattr(shared, "environment", lambda *_: Path("python"))
    monkeypatch.setattr(shared, "load_target", lambda *_: pytest.fail("loads"))
    return tmp_path


@pytest.mark.parametrize("main, keys, served", USUAL)
def test_the_demo_is_served_where_nothing_else_is(
    main: Any,
    keys: list[str],
    served: list[str],
    demo: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[str] = []

    def load(*_: Any) -> Any:
        raise UserError("; ".join(seen))

    real = shared.served

    def noted(cfg: Any) -> list[str]:
        seen[:] = real(cfg)
        return seen

    monkeypatch.setattr(shared, "served", noted)
    monkeypatch.setattr(shared, "load_target", load)
    assert code_of(main, *keys) == 2 and seen == served
    said = capsys.readouterr().err
    assert "is not there; runs/demo/eagle3 takes its place" in said


def test_own_heads_come_first_and_named_ones_alone(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def chosen(*names: str) -> list[str]:
        return shared.served(engines.llamacpp.LlamaCppConfig(drafters=[*names]))

    assert chosen() == ["runs/demo/eagle3"]
    assert capsys.readouterr().err.splitlines() == [
        "note: runs/eagle3_portable is not there; runs/demo/eagle3 takes its place",
        "note: runs/draft is not there and left out",
    ]
    for name in ("eagle3_portable", "draft"):
        (demo / "runs" / name / "head").mkdir(parents=True)
        (demo / "runs" / name / "head/head.json").write_text("{}")
    assert chosen() == ["runs/eagle3_portable", "runs/draft"]
    assert chosen("runs/gone") == ["runs/gone"], "what is named is named as missing"
    assert capsys.readouterr().err == ""
    shutil.rmtree(demo / "runs")
    with pytest.raises(UserError, match="run `make demo`, or name a run folder"):
        chosen()
