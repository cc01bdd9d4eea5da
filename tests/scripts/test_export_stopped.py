"""An export that is stopped leaves nothing beside its place, and one that would not fit is not
begun."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import outrider.scripts.exporting.draft
from outrider.conf.disk import size
from outrider.heads.interop import LAYOUTS, Facts
from outrider.scripts.exporting import notices
from outrider.scripts.exporting.stage import MARK, sweep, writing
from tests.helpers.interop import PAIRS, deep_target, random_head
from tests.scripts.test_export import prompts, run, saved  # noqa: F401


@pytest.fixture(scope="module")
def target() -> Any:
    return deep_target()


def interrupted(tensors: dict, path: Path) -> None:
    path.write_bytes(b"half")
    raise KeyboardInterrupt


def terminated(tensors: dict, path: Path) -> None:
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGTERM)


def full(tensors: dict, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    "stop, name, code, said",
    [
        (interrupted, "save", 130, "interrupted"),
        (terminated, "save", 75, "interrupted"),
        (full, "save_file", 2, "No space left on device; free some space"),
    ],
)
def test_a_stopped_export_leaves_nothing(
    target: Any,
    prompts: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stop: Callable[..., None],
    name: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(outrider.scripts.exporting.draft, name, stop)
    source, out = saved(tmp_path, target, "medusa"), tmp_path / "out"
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={out}") == code
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def killed(out: Path, when: Callable[[Path], None]) -> None:
    """An export of ours that kill -9 ends while it writes."""
    child = os.fork()
    if not child:
        with writing(out) as stage:
            when(stage)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    os.waitpid(child, 0)


def test_what_a_killed_export_left_goes_with_the_next_start(tmp_path: Path) -> None:
    (tmp_path / ".tmp-mine").mkdir()  # somebody else's
    for name in ("first", "second"):
        killed(tmp_path / name, lambda stage: (stage / "weights").touch())
    assert (tmp_path / ".tmp-first" / "weights").exists()
    with writing(tmp_path / "third") as stage:
        sweep(tmp_path)
        assert stage.exists(), "a living process writes it"
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-mine", "third"}
    assert not [*(tmp_path / "third").iterdir()]


def test_a_predecessor_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    killed(out, lambda stage: os.rename(out, tmp_path / ".old-out"))
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "old").exists()
    (out / MARK).touch()  # killed behind the last rename
    sweep(tmp_path)
    assert [path.name for path in out.iterdir()] == ["old"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format, kind", PAIRS)
def test_the_size_that_is_told_is_that_of_the_tensors(
    target: Any, format: str, kind: str, dtype: torch.dtype
) -> None:
    shared = {"share_lm_head": True, "draft_vocab": 0}
    block = kind in ("dflash", "dspark") and format == "sglang"
    head = random_head(target, kind, **(shared if block else {}))
    layout, facts = LAYOUTS[format, kind], Facts.of(target, "/a")
    _, tensors = layout.write(head, target, facts, dtype)
    assert layout.nbytes(head, facts, dtype) == sum(t.nbytes for t in tensors.values())


def test_medusa_says_what_it_weighs_before_it_writes(
    target: Any,
    prompts: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, out = saved(tmp_path, target, "medusa", draft_vocab=64), tmp_path / "out"
    full_disk = SimpleNamespace(f_bavail=10, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: full_disk)
    assert run(prompts, f"drafter={source}", "format=vllm", f"out={out}") == 2
    found = capsys.readouterr()
    assert "vLLM 0.33.0, the newest on" in found.out and "version that does is 0.32.0" in found.out
    assert "weights: 113 kB in float32 (3 heads x 260 tokens x 32)" in found.out
    assert "(37.8 kB over the 64 tokens trained)" in found.out
    assert "set dtype=bfloat16 or heads=2 or fewer" in found.err and not out.exists()


def test_four_heads_over_262144_tokens_are_2_7_gigabytes() -> None:
    """Gemma 3 270M, computed from shapes alone."""
    facts = Facts("google/gemma-3-270m-it", "Gemma3ForCausalLM", 640, 262_144, 18, 32_768, 2)
    cfg = SimpleNamespace(heads=4, blocks=1, draft_vocab=8192, share_lm_head=False)
    head: Any = SimpleNamespace(kind="medusa", cfg=cfg)
    layout = LAYOUTS["vllm", "medusa"]
    assert size(layout.nbytes(head, facts, torch.float32)) == "2.7 GB"
    assert size(layout.nbytes(head, facts, torch.bfloat16)) == "1.3 GB"
    weights = torch.empty(268_098_176, device="meta")
    target: Any = SimpleNamespace(model=SimpleNamespace(parameters=lambda: [weights]))
    _, line = notices.before(layout, head, target, facts, torch.float32)
    assert line.startswith("weights: 2.7 GB in float32") and "2.51 times the target's own" in line
