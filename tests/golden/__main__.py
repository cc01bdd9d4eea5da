"""Write what is missing of the golden files, or the tokens anew where that is what a change is
about:

python -m tests.golden             # tokens.json from the committed folders
python -m tests.golden smollm2     # smollm2.json, minutes
python -m tests.golden losses      # losses.json: steps 1 to 20 of every kind in float64
python -m tests.golden folders     # target/, data.jsonl, heads/*, run/: only what is not there
                                   yet
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from outrider.conf.schema import compose
from outrider.decode.models.tiny import byte_tokenizer, tiny_model
from outrider.heads.registry import head_class
from outrider.train.config import keys_of
from outrider.train.loop import fit
from tests.golden import cases
from tests.helpers.training import chats

SMALL = ["head.draft_vocab=20", "optim.lr=0.01", "optim.warmup=0"]
TRAINED_MASK = "head.mask_token=-1"  # as the golden files have it
RUNS: dict[str, tuple[str, list[str]]] = {
    "medusa": ("medusa", ["head.heads=2", "head.nodes=6", *SMALL]),
    "markov": ("medusa", ["head.heads=2", "head.nodes=6", "head.markov_rank=4", *SMALL]),
    "hydra_heads": (
        "hydra_heads",
        ["head.heads=2", "head.nodes=6", "head.prefix_layers=1", *SMALL],
    ),
    "eagle1": (
        "eagle",
        ["head=eagle1", "head.depth=3", "head.nodes=6", "head.draft_vocab=0", *SMALL[1:]],
    ),
    "eagle3": ("eagle", ["head=eagle3", "head.depth=3", "head.nodes=6", *SMALL]),
    "p_eagle": ("eagle", ["head=p_eagle", "head.nodes=6", TRAINED_MASK, *SMALL]),
    "small_lm": (
        "draft",
        ["head.from_target_layers=1", "head.depth=3", "head.nodes=6", "optim.lr=0.01"],
    ),
    "dflash": ("block", ["head.block=4", "head.layers=1", "head.nodes=6", TRAINED_MASK, *SMALL]),
    "dspark": (
        "block",
        ["head=dspark", "head.block=3", "head.markov_rank=4", "head.nodes=6", TRAINED_MASK, *SMALL],
    ),
}


def config(kind: str, out: Path, *more: str) -> Any:
    """The configuration of a golden run; `tests/test_golden.py` resumes with the same one."""
    name, own = RUNS[kind]
    target, data = (
        os.path.relpath(place) for place in (cases.TARGET, cases.DATA)
    )  # no folder of whoever made them
    keys = [
        "target=local",
        f"target.path={target}",
        f"data.path={data}",
        f"out_dir={out}",
        "data.held_out=0.2",
        "data.window=16",
        "data.cache=false",
        "steps=60",
        "batch_size=8",
        "dtype=float32",
        "device=cpu",
        "eval.every=60",
        "eval.prompts=2",
        "eval.max_new_tokens=8",
        "eval.parity=0",
        "save_every=0",
    ]
    return compose(name, keys_of(name), [*keys, *own, *more])


def losses(kind: str, out: Path) -> list[float]:
    """The losses of steps 1 to 20 of a run in float64, to six decimals."""
    keys = ["dtype=float64", "steps=20", "log_every=1", "eval.every=0"]
    fit(config(kind, out, *keys))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def make_target() -> None:
    """A tiny model that has read the data for a while: its distribution has preferences that
    heads can learn.
    """
    chats(cases.DATA, 24)
    model = tiny_model(
        layers=2, hidden=16, heads=2, kv_heads=1, vocab=260, max_position_embeddings=256
    )
    tokenizer = byte_tokenizer()
    rows = [json.loads(line)["messages"] for line in cases.DATA.read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, tokenize=True, return_dict=False) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        for ids in texts:
            optimizer.zero_grad()
            model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
            optimizer.step()
    model.eval().save_pretrained(cases.TARGET)
    tokenizer.save_pretrained(cases.TARGET)


def make_folders() -> None:
    """Whatever is not there."""
    torch.set_num_threads(1)
    if not cases.TARGET.exists():
        make_target()
    for kind in cases.KINDS:
        if not (cases.HEADS_FOLDER / kind).exists():
            out = Path("runs/golden") / kind
            fit(config(kind, out), head_class("medusa" if kind == "markov" else kind))
            shutil.copytree(out / "head", cases.HEADS_FOLDER / kind)
    if not cases.RUN.exists():
        out, step = Path("runs/golden/run"), "checkpoints/step-2"
        fit(config("eagle3", out, "steps=3", "save_every=2", "eval.every=1"), head_class("eagle3"))
        shutil.copytree(out / step, cases.RUN / step)


def main(what: str) -> None:
    """See the file's first lines."""
    if what == "folders":
        make_folders()
    elif what == "smollm2":
        cases.SMOLLM2.write_text(cases.text_of(cases.smollm2()))
    elif what == "losses":
        with tempfile.TemporaryDirectory() as out:
            found = {kind: losses(kind, Path(out) / kind) for kind in RUNS}
        cases.LOSSES.write_text(cases.lines_of(found))
    else:
        cases.TOKENS.write_text(cases.text_of(cases.golden()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tokens")
