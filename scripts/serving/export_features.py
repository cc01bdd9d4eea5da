"""Write stored features in the form of another trainer: scripts/export.py is the command, this is
the work.

    python scripts/export.py target=smollm2 features=runs/features data.path=FILE \\
        out=exports/features

`features` is what scripts/cache_features.py wrote, `data` what it read. OUT is what
`--data-path` of speculators' training program names (vllm-project/speculators 0.9): the rows
(Arrow: input_ids, loss_mask, seq_len), a file of hidden states for each in hidden_states/, and
the draft vocabulary. Held-out rows come last: the share that ends before them is printed, for
`--train-data-ratio`. Nothing is run, neither target nor server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from outrider.conf.errors import UserError, resumable
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.target import Target
from outrider.heads import vocab
from outrider.heads.eagle.init import final_norm
from outrider.heads.given import vocabulary_in
from outrider.heads.interop import MANIFEST
from outrider.scripts.common import files
from outrider.scripts.common.progress import Steps, by_name, columns
from outrider.scripts.serving.config import ExportFeaturesConfig
from outrider.scripts.serving.stage import check_room, free_place, writing
from outrider.train.resolve import fitting
from outrider.train.stored.features import FeatureStore, identity_of, read_manifest
from outrider.train.texts.batches import JoinedRows, load_rows

STATES = "hidden_states"
SMALLEST = 1e-3  # weight of a norm that is divided by


@entry("export_features", ExportFeaturesConfig)
@resumable()
def main(cfg: ExportFeaturesConfig) -> int:
    """Write, move into place."""
    out = free_place(Path(cfg.out).expanduser(), cfg.overwrite)
    target = load_target(cfg.target, "float32", "cpu")
    rows = load_rows(
        cfg.data, target.tokenizer, target.eos_ids, target.vocab_size, target.context_length
    )
    store = opened(cfg, target, rows)
    ids = draft_tokens(cfg, target, rows)
    size = rows.ids.numel() * store.bytes_per_token(store.taps)
    check_room(out, size, "")
    with writing(out) as stage:
        order = [*(~rows.held).nonzero()[:, 0].tolist(), *rows.held.nonzero()[:, 0].tolist()]
        write_states(stage / STATES, store, rows, order, divisor(target))
        write_rows(stage, rows, order)
        np.save(stage / f"d2t-{ids.numel()}.npy", vocab.to_d2t(ids).numpy())
        np.save(stage / f"t2d-{ids.numel()}.npy", vocab.to_t2d(ids, target.vocab_size).numpy())
        about = {
            "engine_format": "speculators features",
            "target": target.identity.to_json() if target.identity is not None else None,
            "features": store.identity,
            "taps": list(store.taps),
            "rows": len(order),
            "held_out": int(rows.held.sum()),
            "draft_vocab": ids.numel(),
        }
        files.write_json(stage / MANIFEST, about)
    print(f"{out}: {len(order):,} rows, {rows.ids.numel():,} tokens, {int(rows.held.sum()):,} held")
    print("train on them with speculators 0.9.0:")
    print(
        f"  --data-path {out} --train-data-ratio {ratio(rows):.6f} --draft-vocab-size "
        f"{ids.numel()} --target-layer-ids {' '.join(map(str, store.taps[:-1]))} "
        "--on-missing raise"
    )
    return 0


def opened(cfg: ExportFeaturesConfig, target: Target, rows: JoinedRows) -> FeatureStore:
    """The store, checked against target and data. Raises UserError for one that does not fit, and
    for one without three states and the last, which are what EAGLE-3 reads."""
    folder = Path(cfg.features).expanduser()
    card, _ = read_manifest(folder)
    if card.get("law_top_k"):
        raise UserError(
            f"features: {folder} holds the target's most probable tokens in place of its last "
            "hidden state, which speculators reads; write it with distribution_top_k=0"
        )
    computed = str(card["identity"].get("dtype"))
    store = FeatureStore.open(folder, identity_of(target, rows, computed), card["taps"], rows)
    if store.taps[-1] != target.num_layers or len(store.taps) < 2:
        raise UserError(
            f"features: {folder} holds the hidden states {list(store.taps)}, and speculators reads "
            f"some and the last one, {target.num_layers}; write them with heads=[eagle3]"
        )
    return store


def draft_tokens(cfg: ExportFeaturesConfig, target: Target, rows: JoinedRows) -> Tensor:
    """The draft vocabulary [Vd], ascending: the one that training here would take."""
    if cfg.draft_vocab_from:
        return vocabulary_in(cfg.draft_vocab_from, target.vocab_size)
    counts = rows.counts(target.vocab_size)
    size, note = fitting(cfg.draft_vocab, counts)
    if note:
        print(note)
    return vocab.choose(counts, size, "draft_vocab")


def divisor(target: Target) -> Tensor:
    """The weight [D] of the target's last norm. The last state is stored behind that norm, and
    speculators norms it: divided by the weight it comes out again, for RMSNorm does not see a
    row's scale. Raises UserError where a weight is too near 0 to be divided by."""
    weight = final_norm(target)
    if weight is None:
        raise UserError(
            "target: its last norm is not found by name, and stored states are divided by its "
            "weight; speculators' own hidden states must be taken for this target"
        )
    weight = weight.cpu()
    least = float(weight.abs().min())
    if least < SMALLEST:
        raise UserError(
            f"target: its last norm has a weight of {least:.1e}, and stored states are divided by "
            "it; speculators' own hidden states must be taken for this target"
        )
    return weight


def write_states(
    folder: Path, store: FeatureStore, rows: JoinedRows, order: list[int], norm: Tensor
) -> None:
    """A file for each row: token_ids [T] int64, hidden_states [T, F, D] in the stored dtype."""
    folder.mkdir()
    with Steps(*columns(44)) as bar:
        on_progress = by_name(bar)
        for place, row in enumerate(order):
            states = store.row(row, store.taps)
            states[:, -1] = (states[:, -1].float() / norm).to(states.dtype)
            tokens = rows.ids[int(rows.offsets[row]) : int(rows.offsets[row + 1])].long()
            path = folder / f"hs_{place}.safetensors"
            save_file({"token_ids": tokens, "hidden_states": states.contiguous()}, path)
            on_progress(place + 1, len(order), "rows")


def write_rows(folder: Path, rows: JoinedRows, order: list[int]) -> None:
    """The rows as a data set of Hugging Face's library."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # a moment's work, after a bar of our own
    columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for row in order:
        part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        columns["input_ids"].append(rows.ids[part].tolist())
        columns["loss_mask"].append(rows.loss[part].long().tolist())
        columns["seq_len"].append(part.stop - part.start)
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)


def ratio(rows: JoinedRows) -> float:
    """The share of rows before the first held-out one: int(rows * share) is their number."""
    every = rows.held.numel()
    return (every - int(rows.held.sum()) + 0.5) / every if rows.held.any() else 1.0


if __name__ == "__main__":
    main()
