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
from outrider.heads.registry import head_class
from outrider.train.loop import fit
from tests.helpers.training import chats, run_config
from tests.train.test_features import SHAPE, own_memory, written

__all__ = ["own_memory"]  # a fixture
LAST = f"tap.{SHAPE['layers']}"
Damage = Callable[[Path], object]


def learn(data: Path, out: Path, features: Path, *more: str) -> None:
    keys = [f"target.{k}={v}" for k, v in {**SHAPE, "init_std": 1.0}.items()]
    cfg = run_config(data, out, *keys, "steps=2", f"data.features={features}", *more)
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
    "another target": ("target.seed=5",),
    "other lengths": ("data.max_length=52",),
    "another dtype": ("dtype=float64",),
}


@pytest.mark.parametrize("name", [*DAMAGES, *RUNS, "other data", "no tokenizer", ""])
def test_a_broken_folder_is_one_line(name: str, data: Path, tmp_path: Path) -> None:
    """A target whose LM head tells tokens, as a trained one's does; "": nothing is broken."""
    folder, more = tmp_path / "f", RUNS.get(name, ())
    writer = written(data, folder, "target.init_std=1.0", init_std=1.0)
    rows, table = writer.rows, writer.target.lm_head.weight.detach()
    following = torch.cat([rows.ids[1:], rows.ids[:1]]).long()
    for number in range(len(writer.bounds) - 1):
        first, end = rows.offsets[writer.bounds[number : number + 2]].tolist()
        tensors(lambda held: {LAST: table[following[first:end]]}, f"{number:05d}")(folder)  # noqa: B023
    DAMAGES.get(name, str)(folder)
    if name == "other data":
        data = chats(tmp_path / "other.jsonl", 47)
    if name == "no tokenizer":
        writer.target.model.save_pretrained(tmp_path / "bare")
        more = ("target.kind=local", f"target.path={tmp_path / 'bare'}")
    if not name:
        return learn(data, tmp_path / "run", folder)
    with pytest.raises(UserError) as caught:
        learn(data, tmp_path / "run", folder, *more)
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.glob("run/checkpoints/*")] and not (tmp_path / "run/head").exists()
