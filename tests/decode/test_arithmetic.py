"""dtype=auto: bfloat16, but float32 on a CPU without instructions for it."""

from __future__ import annotations

import pytest
import torch

from outrider import api
from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.models import arithmetic, load
from outrider.decode.models.config import TargetConfig
from outrider.scripts.scoring.config import EvaluateConfig
from outrider.train.config import ValidateConfig, keys_of

KEYS = ["target=tiny", "data.path=x", "out_dir=y", "steps=1"]


@pytest.fixture(params=[True, False])
def able(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU has instructions for bfloat16; there is no GPU."""
    monkeypatch.setattr(arithmetic, "bfloat16_on_cpu", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return bool(request.param)


def test_training_and_scoring_follow_the_processor(able: bool) -> None:
    wanted = "bfloat16" if able else "float32"
    assert compose("eagle", keys_of("eagle"), KEYS).dtype == wanted
    assert compose("evaluate", EvaluateConfig, ["target=tiny", "out=x"]).dtype == wanted
    assert str(api.load_target("tiny").dtype) == f"torch.{wanted}"
    for given in ("bfloat16", "float32"):
        assert compose("eagle", keys_of("eagle"), [*KEYS, f"dtype={given}"]).dtype == given


def test_a_gpu_computes_bfloat16(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dry = compose("validate", ValidateConfig, ["dry_run=true", "target=tiny", "steps=1"])
    assert dry.dtype == "bfloat16", "planned for GPUs"
    assert arithmetic.dtype_on("cuda:1") == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_cpu = "bfloat16" if able else "float32"
    assert (arithmetic.dtype_on(None), arithmetic.dtype_on("cpu")) == ("bfloat16", on_cpu)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert arithmetic.dtype_on("") == on_cpu


def test_who_asks_for_bfloat16_without_instructions_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load._say_once.cache_clear()
    monkeypatch.setattr(arithmetic, "bfloat16_on_cpu", lambda: False)
    for _ in range(2):
        with pytest.raises(UserError):
            load.load_target(TargetConfig(kind="local", path="nowhere"), "bfloat16", "cpu")
    said = capsys.readouterr().err
    assert said.count("dtype=auto") == 1
