"""Stored features in the form of speculators: the same numbers, held-out rows last, and stores that
it cannot read refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from outrider.conf.errors import UserError
from outrider.conf.schema import compose
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.scripts.serving import export_features
from outrider.scripts.serving.config import ExportFeaturesConfig
from outrider.scripts.serving.export_features import divisor, opened, ratio
from outrider.train import cache_features
from outrider.train.texts.batches import JoinedRows, load_rows
from tests.helpers.training import TINY, chats, tiny_target

SHAPE = {**TINY, "layers": 4}


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def target_keys(data: Path, *more: str) -> list[str]:
    where = [f"data.path={data}", "data.cache=false", "data.held_out=0.1"]
    return ["target=tiny", *(f"target.{k}={v}" for k, v in SHAPE.items()), *where, *more]


def stored(tmp_path: Path, *more: str) -> tuple[Path, Path]:
    """(data, features of them)."""
    data, out = chats(tmp_path / "data.jsonl"), tmp_path / "features"
    words = target_keys(data, f"out={out}", "dtype=float32", "device=cpu", "heads=[eagle3]", *more)
    with pytest.raises(SystemExit) as end:
        cache_features.main(words)
    assert end.value.code == 0
    return data, out


def exported(data: Path, features: Path, out: Path, *more: str) -> None:
    with pytest.raises(SystemExit) as end:
        export_features.main(target_keys(data, f"features={features}", f"out={out}", *more))
    assert end.value.code == 0


def rows_of(target: Target, cfg: ExportFeaturesConfig) -> JoinedRows:
    return load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )


def test_every_row_is_there_and_the_last_state_comes_out_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, features = stored(tmp_path)
    out = tmp_path / "out"
    exported(data, features, out, "draft_vocab=16")
    said = capsys.readouterr().out
    words = target_keys(data, f"features={features}", f"out={out}")
    cfg = compose("export_features", ExportFeaturesConfig, words)
    target = tiny_target(**SHAPE)
    rows = rows_of(target, cfg)
    store = opened(cfg, target, rows)
    order = [*(~rows.held).nonzero()[:, 0].tolist(), *rows.held.nonzero()[:, 0].tolist()]
    table = load_from_disk(str(out))
    assert len(table) == len(order) and rows.held.any()
    weight = divisor(target)
    for place, row in enumerate(order):
        part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        found = load_file(out / "hidden_states" / f"hs_{place}.safetensors")
        assert (
            found["token_ids"].tolist() == rows.ids[part].tolist() == [*table[place]["input_ids"]]
        )
        assert [*table[place]["loss_mask"]] == rows.loss[part].long().tolist()
        assert int(table[place]["seq_len"]) == part.stop - part.start
        states = store.row(row, store.taps)
        assert torch.equal(found["hidden_states"][:, :-1], states[:, :-1])
        last = found["hidden_states"][:, -1].float()
        normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(normed, states[:, -1].float(), rtol=2e-4, atol=2e-4)
    weight = torch.linspace(0.5, 2.0, target.hidden_size)
    export_features.write_states(tmp_path / "again", store, rows, order[:1], weight)
    last = load_file(tmp_path / "again" / "hs_0.safetensors")["hidden_states"][:, -1]
    torch.testing.assert_close(last * weight, store.row(order[0], store.taps)[:, -1])
    train = int((~rows.held).sum())
    assert int(len(order) * ratio(rows)) == train and f"{ratio(rows):.6f}" in said
    assert int(len(order) * float(f"{ratio(rows):.6f}")) == train
    d2t = torch.from_numpy(np.load(out / "d2t-16.npy"))
    t2d = torch.from_numpy(np.load(out / "t2d-16.npy"))
    ids = vocab.choose(rows.counts(target.vocab_size), 16)
    assert torch.equal(vocab.from_d2t(d2t), ids) and torch.equal(t2d.nonzero()[:, 0], ids)


def test_what_it_cannot_read_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    data, features = stored(tmp_path, "distribution_top_k=4")
    out = tmp_path / "out"
    words = target_keys(data, f"features={features}", f"out={out}")
    cfg = compose("export_features", ExportFeaturesConfig, words)
    target = tiny_target(**SHAPE)
    with pytest.raises(UserError, match="features: .* distribution_top_k=0"):
        opened(cfg, target, rows_of(target, cfg))
    with pytest.raises(SystemExit) as end:
        export_features.main(words)
    assert end.value.code == 2 and not out.exists()


def test_what_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    words = target_keys(chats(tmp_path / "data.jsonl"), "features=nowhere", "out=out")
    cfg = compose("export_features", ExportFeaturesConfig, words)
    assert cfg.absent() == [
        "features: no such folder nowhere; scripts/cache_features.py writes one"
    ]


def test_a_norm_that_cannot_be_divided_by(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(**SHAPE)
    with torch.no_grad():
        target.model.model.norm.weight[3] = 0
    with pytest.raises(UserError, match="target: its last norm has a weight of 0"):
        divisor(target)
