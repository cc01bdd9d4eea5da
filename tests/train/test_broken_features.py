"""Folders of features that are not what a run needs: one line each, and nothing is learned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.conf.errors import UserError
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.target import Target
from outrider.heads.registry import head_class
from outrider.train.loop import fit
from tests.helpers.targets import saved
from tests.helpers.training import chats, run_config, tiny_target
from tests.train.test_features import SHAPE, own_memory, written

__all__ = ["own_memory"]  # a fixture
LAST = f"tap.{SHAPE['layers']}"
Damage = Callable[[Path], object]


def learn(data: Path, out: Path, features: Path, *more: str) -> None:
    path = features.with_name("target")
    keys = ("target.kind=local", f"target.path={path}", f"data.features={features}", "steps=2")
    cfg = run_config(data, out, *keys, *more)
    fit(cfg, head_class(cfg.head.kind))


def manifest(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        card = json.loads(path.read_text())
        path.write_text(json.dumps({**card, **{k: v(card) for k, v in changes.items()}}))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], files: str = "*01*") -> Damage:
    def damage(folder: Path) -> None:
        for path in folder.glob(f"shard-{files}.safetensors"):
            held = load_file(path)
            held |= change(held) or {}
            save_file({k: v.contiguous() for k, v in held.items()}, path)

    return damage


def content(change: Callable[[bytes], bytes], name: str = "shard-00001.safetensors") -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def last(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda held: {LAST: change(held[LAST])}, "*")


def raw(folder: Path) -> None:
    """As vLLM writes it, unread."""
    shutil.rmtree(folder)
    folder.mkdir()
    states = {"hidden_states": torch.zeros(9, 2, 32), "token_ids": torch.arange(9)}
    save_file(states, folder / "cmpl-0.safetensors")


DAMAGES: dict[str, Damage] = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "half a manifest": content(lambda all: all[:99], "manifest.json"),
    "a manifest that is none": content(lambda _: b"[]", "manifest.json"),
    "an old format": manifest(identity=lambda card: {**card["identity"], "format": 1}),
    "other rows": manifest(bounds=lambda card: card["bounds"][:-1]),
    "other widths": manifest(width=lambda card: 48),
    "other layers": manifest(taps=lambda card: card["taps"][:-1]),
    "another number format": manifest(stored=lambda card: "float16"),
    "a file less": lambda folder: (folder / "shard-00001.safetensors").unlink(),
    "a truncated file": content(lambda all: all[:-100]),
    "an empty file": content(lambda _: b""),
    "no safetensors": content(lambda all: all[::-1]),
    "the file of other rows": lambda folder: shutil.copy(
        folder / "shard-00000.safetensors", folder / "shard-00003.safetensors"
    ),
    "a half-written row": tensors(lambda held: {k: v[:-1] for k, v in held.items()}),
    "float16": tensors(lambda held: {k: v.half() for k, v in held.items()}),
    "a layer less": tensors(lambda held: held.pop(LAST) is None),
    "captured and not read": raw,
    "a token late": last(lambda states: states.roll(1, 0)),
    "a token early": last(lambda states: states.roll(-1, 0)),
    "no final norm": last(lambda states: states / 1000),
    "another layer last": last(lambda states: states[torch.randperm(len(states))]),
}
RUNS = {
    "other lengths": ("data.max_length=52",),
    "another dtype": ("dtype=float64",),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One on disk whose LM head tells tokens apart, as a trained one's does."""
    folder, made = tmp_path_factory.mktemp("t") / "target", tiny_target(**SHAPE, init_std=1.0)
    made.body.norm.weight.data[0] *= 1.01
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return load_target(TargetConfig(kind="local", path=str(folder)), "float32", "cpu")


@pytest.mark.parametrize(
    "name", [*DAMAGES, *RUNS, "other data", "another target", "no tokenizer", ""]
)
def test_a_broken_folder_is_one_line(name: str, data: Path, tmp_path: Path, target: Target) -> None:
    """ "": nothing is broken."""
    folder, place = tmp_path / "f", tmp_path / "target"
    assert target.identity is not None
    shutil.copytree(target.identity.path, place)
    writer = written(data, folder, target=target)
    rows, table = writer.rows, target.lm_head.weight.detach()
    following = torch.cat([rows.ids[1:], rows.ids[:1]]).long()
    for number in range(len(writer.bounds) - 1):
        first, end = rows.offsets[writer.bounds[number : number + 2]].tolist()
        states = {LAST: table[following[first:end]]}
        tensors(lambda _, states=states: states, f"{number:05d}")(folder)
    DAMAGES.get(name, str)(folder)
    if name == "other data":
        data = chats(tmp_path / "other.jsonl", 47)
    if name == "another target":
        tiny_target(**SHAPE, seed=5).model.save_pretrained(place)
    if name == "no tokenizer":
        for file in place.glob("*token*"):
            file.unlink()
    if not name:
        return learn(data, tmp_path / "run", folder)
    with pytest.raises(UserError) as caught:
        learn(data, tmp_path / "run", folder, *RUNS.get(name, ()))
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob("run/checkpoints/*")] and not (tmp_path / "run/head").exists()


@pytest.mark.parametrize("arch", ["gemma3", "gemma2"])
def test_right_features_of_random_weights_are_learned(
    arch: str, data: Path, tmp_path: Path
) -> None:
    """Tied ones tell the token that they read."""
    place = saved(arch, tmp_path).rename(tmp_path / "target")
    target = load_target(TargetConfig(kind="local", path=str(place)), "float32", "cpu")
    written(data, tmp_path / "f", target=target)
    learn(data, tmp_path / "run", tmp_path / "f", "data.max_length=128")
    assert (tmp_path / "run/head").is_dir()
