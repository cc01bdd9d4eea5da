"""Stored features: the same loss as online, byte-identical repair, and every stale or damaged
cache refused by name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.target import Target
from outrider.heads.checkpoint import read_card
from outrider.heads.registry import head_class
from outrider.scripts import cache_features
from outrider.train import features
from outrider.train.config import TrainConfig
from outrider.train.data.batches import JoinedRows, grouped
from outrider.train.data.config import CacheConfig
from outrider.train.data.load import load_rows
from outrider.train.features import CachedTarget, FeatureStore, FeatureWriter
from outrider.train.loop import fit
from tests.helpers.faults import launcher, wait
from tests.helpers.training import TINY, run_config, tiny_target

SHAPE = {**TINY, "layers": 4}


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def command(data: Path, out: Path, *more: str) -> list[str]:
    return [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in SHAPE.items()),
        f"data.path={data}",
        "data.cache=false",
        "data.held_out=0.1",
        f"out={out}",
        "dtype=float32",
        "device=cpu",
        "batch_tokens=400",
        *more,
    ]


def written(
    data: Path,
    out: Path,
    *more: str,
    dtype: torch.dtype = torch.float32,
    per_shard: int = 12,
    target: Target | None = None,
) -> FeatureWriter:
    """A finished cache of 4 files, in any dtype."""
    cfg = compose("cache_features", CacheConfig, command(data, out, *more))
    target = target or tiny_target(**SHAPE)
    target.model.to(dtype)
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    writer = FeatureWriter(cfg, target, rows)
    writer.bounds = [*range(0, rows.lines.numel(), per_shard), rows.lines.numel()]
    writer.plan["bounds"] = writer.bounds
    writer.prepare()
    writer.begin()
    for number in writer.missing:
        list(writer.shard(number, writer.computed([number])))
    return writer


def opened(
    writer: FeatureWriter,
    taps: Any = None,
    rows: JoinedRows | None = None,
) -> FeatureStore:
    rows = rows or writer.rows
    identity = features.identity_of(writer.target, rows, writer.cfg.dtype)
    return FeatureStore(writer.folder, identity, taps or writer.taps, rows)


VARIANTS: dict[str, dict[str, Any]] = {
    "medusa-soft": {"loss": "soft"},
    "hydra-prefix": {"prefix_layers": 1},
    "eagle1-hass": {"noise": 0.2, "steps": 3, "top_k": 5},
    "eagle3": {"steps": 3},
    "dflash": {},
    "dspark": {"markov_rank": 4, "confidence": 1.0},
}


def head_for(name: str, target: Target, counts: torch.Tensor):
    kind = {
        "medusa-soft": "medusa",
        "hydra-prefix": "hydra_heads",
        "eagle1-hass": "eagle1",
    }.get(name, name)
    cls: Any = head_class(kind)
    cfg = cls.Config(kind=kind, draft_vocab=0)
    distribution = replace(cfg.loss, hard=0.0, soft=1.0)
    cfg = replace(
        cfg, **{k: distribution if k == "loss" else v for k, v in VARIANTS.get(name, {}).items()}
    )
    torch.manual_seed(0)
    return cls.for_target(target, cfg, counts).to(target.dtype)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_cached_loss_and_gradient_equal_online(name: str, data: Path, tmp_path: Path) -> None:
    writer = written(
        data, tmp_path / "f", "heads=[medusa,eagle1,eagle3,hydra_heads]", dtype=torch.float64
    )
    assert writer.taps == (1, 2, 4)
    store, rows = opened(writer), writer.rows
    target = writer.target
    head = head_for(name, target, rows.counts(target.vocab_size)).train()
    batch = rows.batch([3, 11, 30, 47])
    found = []
    for source in (target, CachedTarget(target, store, batch)):
        out = head(batch, source)
        out.sum.backward()
        learning = [p for p in head.parameters() if p.requires_grad]
        found.append((out.sum.detach(), [p.grad.clone() for p in learning]))
        head.zero_grad()
    # the file is float32: what remains is its rounding
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_stored_is_what_the_target_gave_bit_for_bit(data: Path, tmp_path: Path) -> None:
    writer = written(data, tmp_path / "f")
    store, rows = opened(writer), writer.rows
    for number in range(len(writer.bounds) - 1):
        order = torch.arange(writer.bounds[number], writer.bounds[number + 1])
        for part in grouped(order, rows.lengths, 0, writer.cfg.batch_tokens):
            batch = rows.batch(part)
            found = writer.target.features(batch.ids, batch.mask, writer.taps)
            read = CachedTarget(writer.target, store, batch).features(
                batch.ids, batch.mask, writer.taps
            )
            assert torch.equal(found * batch.mask[:, :, None, None], read)
    assert torch.equal(opened(writer, [4]).row(5)[:, 0], opened(writer, [1, 4]).row(5)[:, 1])


def run(data: Path, out: Path, *more: str) -> dict[str, Any]:
    """Losses of a run by step."""
    keys = [f"target.{k}={v}" for k, v in SHAPE.items()]
    cfg: TrainConfig = run_config(data, out, *keys, "log_every=1", "data.held_out=0.1", *more)
    fit(cfg, head_class(cfg.head.kind))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_run_reads_the_cache_and_may_change_to_it_in_the_middle(
    data: Path, tmp_path: Path, capsys
) -> None:
    written(data, tmp_path / "f")
    online = run(data, tmp_path / "online")
    cached = run(data, tmp_path / "cached", f"data.features={tmp_path / 'f'}")
    assert list(online) == list(cached) and "features: " in capsys.readouterr().err
    for step, loss in online.items():
        assert loss == pytest.approx(cached[step], rel=1e-5)
    shutil.rmtree(tmp_path / "online/checkpoints/step-6")
    shutil.rmtree(tmp_path / "online/head")
    again = run(data, tmp_path / "online", f"data.features={tmp_path / 'f'}")
    assert again[6] == pytest.approx(online[6], rel=1e-5)
    assert "data.features:  -> " in capsys.readouterr().err
    assert read_card(tmp_path / "online/head")["extra"]["step"] == 6


def test_a_coarser_store_is_another_meaning(data: Path, tmp_path: Path) -> None:
    written(data, tmp_path / "f", "store=bfloat16")
    run(data, tmp_path / "run", "steps=2")
    with pytest.raises(UserError, match="features: not set in the checkpoint, stored in bfloat16"):
        run(data, tmp_path / "run", "steps=2", f"data.features={tmp_path / 'f'}")


def test_evaluation_keeps_the_layers(data: Path, tmp_path: Path) -> None:
    written(data, tmp_path / "f")
    out = tmp_path / "run"
    small = ("steps=2", "eval.every=2", "eval.prompts=2", "eval.max_new_tokens=4")
    run(data, out, f"data.features={tmp_path / 'f'}", *small)
    assert read_card(out / "head")["head"]["calibration"]


def test_what_does_not_change_features_may_differ_and_what_does_may_not(
    data: Path, tmp_path: Path
) -> None:
    """tests/train/test_broken_features.py has other targets, data and layers."""
    writer = written(data, tmp_path / "f", "heads=[medusa]")
    for dtype in ("bfloat16", features.computed_in("float32", "bnb-nf4")):
        identity = features.identity_of(writer.target, writer.rows, dtype)
        with pytest.raises(UserError, match=f"dtype float32 is not {dtype}"):
            FeatureStore(writer.folder, identity, (4,), writer.rows)
    target = writer.target
    keys = replace(writer.cfg.data, held_out=0.3)
    assert opened(writer, rows=load_rows(keys, target.tokenizer, target.eos_ids, 260, 1024))


def test_a_damaged_file_can_be_written_again(data: Path, tmp_path: Path) -> None:
    writer = written(data, tmp_path / "f")
    before = {p.name: p.read_bytes() for p in (tmp_path / "f").iterdir()}
    (tmp_path / "f/shard-00002.safetensors").unlink()
    with pytest.raises(UserError, match="shard-00002.safetensors: is missing; .*cache_features"):
        opened(writer)
    writer = written(data, tmp_path / "f")
    assert {p.name: p.read_bytes() for p in (tmp_path / "f").iterdir()} == before
    assert opened(writer)


def cache(data: Path, out: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cache_features.main(command(data, out, "shard_mb=1", *more))
    return int(caught.value.code or 0)


@pytest.mark.parametrize(("ranks", "size", "least"), [(1, 2048, 2), (8, 256, 2), (3, 1024, 3)])
def test_room_for_less_than_a_file_of_each_process_is_refused(
    ranks: int, size: int, least: int, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    state = SimpleNamespace(process_index=0, num_processes=ranks)
    monkeypatch.setattr(cache_features, "PartialState", lambda **_: state)
    assert cache(data, tmp_path / "f", "room_gb=1", f"shard_mb={size}") == 2
    said = capsys.readouterr().err
    assert f"room_gb={least}" in said and f"shard_mb={size}" in said and said.count("\n") == 1
    assert not (tmp_path / "f").exists()


def test_a_signal_keeps_the_whole_files_and_the_same_command_continues(
    data, tmp_path, monkeypatch
) -> None:
    whole, out, real = written(data, tmp_path / "whole"), tmp_path / "f", Target.features
    calls = 0

    def interrupt(self, *args):
        nonlocal calls
        calls += 1
        if calls == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    bounds = features.bounds_of
    monkeypatch.setattr(features, "bounds_of", lambda rows, *_: whole.bounds)
    monkeypatch.setattr(Target, "features", interrupt)
    assert cache(data, out) == 75
    monkeypatch.setattr(Target, "features", real)
    there = {p.name for p in out.iterdir()}
    assert "shard-00000.safetensors" in there and "shard-00003.safetensors" not in there
    assert not [n for n in there if n.startswith(".tmp")]
    assert cache(data, out) == 0
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert bounds is not features.bounds_of


def test_features_that_are_not_finite_name_their_row(
    data: Path, tmp_path: Path, monkeypatch
) -> None:
    real = Target.features

    def poison(self, ids, mask, taps):
        found = real(self, ids, mask, taps)
        found[ids[:, 20] == ids[0, 20], 3] = float("nan")
        return found

    monkeypatch.setattr(Target, "features", poison)
    with pytest.raises(UserError, match=r"data\.jsonl:\d+: features are not finite"):
        written(data, tmp_path / "f")
    assert not list((tmp_path / "f").glob("shard*"))


@pytest.mark.slow
def test_two_processes_write_the_same_files_as_one(data: Path, tmp_path: Path) -> None:
    for world in (1, 2):

        def action(out: Path = tmp_path / str(world)) -> int:
            return cache(data, out, "batch_tokens=300")

        assert wait(launcher(action, 0, tmp_path / f"said{world}", world)) == 0
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("1", "2"))
    assert one == two and "manifest.json" in one
