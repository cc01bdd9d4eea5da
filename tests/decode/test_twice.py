"""Repositories that hold their weights twice, as Mistral's do, and two tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from outrider.conf.errors import UserError
from outrider.decode.models.identity import INDEX, sha256_weights, weight_files
from outrider.decode.models.load import TargetConfig, load_target, source_folder
from outrider.decode.models.tiny import byte_tokenizer, tiny_model

CONFIG = TargetConfig(kind="hub", name="somebody/model")


@pytest.fixture(params=["5GB", "100KB"], ids=["whole", "sharded"])
def repository(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    tiny_model().save_pretrained(tmp_path / "model", max_shard_size=request.param)
    return tmp_path / "model"


def test_weights_that_lie_there_twice_count_once(repository: Path) -> None:
    """In the identity that heads are bound to."""
    before = sha256_weights(repository)
    names = [file.name for file in weight_files(repository)]
    first = sorted(repository.glob("*.safetensors"))[0]
    shutil.copy(first, repository / "consolidated.safetensors")
    shutil.copy(first, repository / "consolidated-00001-of-00002.safetensors")
    assert sha256_weights(repository) == before
    assert [file.name for file in weight_files(repository)] == names
    assert len(names) > 1 or names == ["model.safetensors"]


@pytest.mark.parametrize("left", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
def test_weights_that_were_not_fetched_whole_are_message(
    repository: Path, left: bytes | None
) -> None:
    byte_tokenizer().save_pretrained(repository)
    file = sorted(repository.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if left is None else left)
    with pytest.raises(UserError, match="is cut or is none.*fetch it again") as message:
        load_target(TargetConfig(kind="local", path=str(repository)), "float32", "cpu")
    assert "\n" not in str(message.value)


def test_a_name_beyond_the_folder_is_not_followed(tmp_path: Path, repository: Path) -> None:
    shutil.copy(sorted(repository.glob("*.safetensors"))[0], tmp_path / "secret.safetensors")
    (repository / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert all(file.parent == repository for file in weight_files(repository))


def test_what_lies_there_twice_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: dict[str, Any] = {}

    def fetched(name: str, **keys: Any) -> str:
        requested.update(keys)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    source_folder(CONFIG)
    names = ["model.safetensors", "consolidated.safetensors", "original/model.safetensors"]
    kept = huggingface_hub.utils.filter_repo_objects(
        names,
        allow_patterns=requested["allow_patterns"],
        ignore_patterns=requested["ignore_patterns"],
    )
    assert [*kept] == ["model.safetensors"]
    source_folder(CONFIG, weights=False)
    few = huggingface_hub.utils.filter_repo_objects(
        [*names, "tokenizer.json"], allow_patterns=requested["allow_patterns"]
    )
    assert [*few] == ["tokenizer.json"]
