"""What works on a tiny target of each architecture: heads learn, pass the parity gate and go on bit
for bit after a signal; chains and trees of the head are decoded to the answers of transformers'
generate; engines load an EAGLE-3 head on its class. tests/targets.json keeps it and docs/targets.md
shows it.

    python -m tests.helpers.targets [ARCHITECTURE ..]     try these, or all, and write both
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.schema import compose
from outrider.decode.engine import Request
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.target import Target
from outrider.heads.checkpoint import load_head
from outrider.heads.interop.engines import LLAMACPP, SGLANG, VLLM
from outrider.heads.names import DraftSpec
from outrider.heads.registry import head_class
from outrider.scripts.common.files import ROOT
from outrider.train.config import ENTRIES, keys_of
from outrider.train.loop import fit
from tests.helpers.archs import ARCHS, HYBRID, SEEING, build
from tests.helpers.decoding import texts
from tests.helpers.training import chats, sigterm_at_update

TABLE, PAGE = ROOT / "tests/targets.json", ROOT / "docs/targets.md"
EVERY = {**ARCHS, **SEEING}
VOCAB, STEPS, TOKENS = 260, 20, 24
HEADS = {"eagle3": ("head.taps=[0,1,1]",), "medusa": ("head.heads=3",)}
SHAPES = {"chain": DraftSpec(shape="chain", depth=3), "tree": DraftSpec(shape="tree", nodes=7)}
ENGINES = {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": LLAMACPP}
PROMPTS = [[*range(5, 15)], [*range(40, 43)], [7, 8, 9] * 4]


def saved(arch: str, place: Path) -> Path:
    """The folder of a tiny target."""
    padded = {"unpadded_vocab_size": VOCAB} if "unpadded_vocab_size" in EVERY[arch] else {}
    build(arch, vocab_size=VOCAB, **padded).save_pretrained(place / arch)
    byte_tokenizer(VOCAB).save_pretrained(place / arch)
    return place / arch


def trained(
    kind: str, folder: Path, out: Path, interrupted: bool = False, more: tuple[str, ...] = ()
) -> bytes:
    """The weights of a head after STEPS, of which the parity gate passed. more: keys."""
    script = ENTRIES[kind]
    keys = [f"head={kind}", "target=local", f"target.path={folder}", "data.cache=false"]
    keys += [f"data.path={chats(out.parent / 'chats.jsonl', 24)}", f"out_dir={out}"]
    keys += [f"steps={STEPS}", "batch_size=4", "dtype=float32", "device=cpu", "eval.every=0"]
    keys += ["head.draft_vocab=0", "data.held_out=0.1", "eval.parity=2", *HEADS[kind], *more]
    cfg = compose(script, keys_of(script), keys)
    if interrupted:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
            sigterm_at_update(patch, STEPS // 2)
            fit(cfg, head_class(kind))
    fit(cfg, head_class(kind))
    return (out / "head/head.safetensors").read_bytes()


def decoded(target: Target, run: Path, shape: str) -> bool:
    """Whether drafts of this shape lead to the answers of transformers' generate."""
    with target.as_loaded() as model:
        how: Any = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
        wanted = [model.generate(torch.tensor([ids]), **how)[0, len(ids) :] for ids in PROMPTS]
    drafter = load_head(run, target).drafter(target, SHAPES[shape])
    asked = [Request(ids, TOKENS) for ids in PROMPTS]
    found = texts(target, drafter, asked, batch_size=3, eos_ids=())
    return found == [ids.tolist() for ids in wanted]


def tried(arch: str, place: Path) -> tuple[dict[str, Any], set[str]]:
    """What the table says of an architecture, and in which words something was refused."""
    folder, refused = saved(arch, place), set[str]()
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    run = place / f"{arch}-eagle3/head"

    def works(what: Callable[[], bool]) -> bool:
        try:
            return what()
        except UserError as error:
            refused.add(str(error))
            return False

    def learns(kind: str) -> bool:
        whole, cut = (place / f"{arch}-{kind}{end}" for end in ("", "-cut"))
        return trained(kind, folder, whole) == trained(kind, folder, cut, True)

    def drafts(shape: str) -> bool:
        target = load_target(TargetConfig(kind="local", path=str(folder)))
        return decoded(target, run, shape)

    marks = {kind: works(functools.partial(learns, kind)) for kind in HEADS}
    marks |= {s: run.is_dir() and works(functools.partial(drafts, s)) for s in SHAPES}
    engines = [title for title, e in ENGINES.items() if name in e.targets["eagle3"]]
    return {"class": name, **marks, "engines": engines}, refused


def page(table: dict[str, dict[str, Any]]) -> str:
    """The page of the table."""
    lines = [
        "# Targets that were tried",
        "",
        "Architectures of transformers that were built tiny, trained on, decoded and compared with",
        "`generate` by `python -m tests.helpers.targets`, which writes this page. *Training*: an",
        f"EAGLE-3 head and Medusa heads learn {STEPS} steps, pass the parity gate, and go on bit for",
        "bit after a signal. *Engines*: those that load an EAGLE-3 head on the class, by",
        "[engines.yaml](../heads/interop/engines.yaml). A dash: refused, in one line.",
    ]
    kinds = {
        "Attention alone, or state alone": [
            a for a in table if a not in HYBRID and a not in SEEING
        ],
        "Recurrent or convolution state beside attention": [a for a in table if a in HYBRID],
        "The language model of a vision-language checkpoint": [a for a in table if a in SEEING],
    }
    for title, archs in kinds.items():
        lines += ["", f"## {title}", "", "| class | training | chain | tree | engines |"]
        lines += ["|---|---|---|---|---|"]
        for one in sorted((table[arch] for arch in archs), key=lambda one: one["class"]):
            works = (all(one[kind] for kind in HEADS), *(one[shape] for shape in SHAPES))
            marks = " | ".join("yes" if ok else "–" for ok in works)
            lines += [f"| {one['class']} | {marks} | {', '.join(one['engines'])} |"]
    return "\n".join(lines) + "\n"


def main(archs: list[str]) -> None:
    table = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for arch in archs or EVERY:
        quiet = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as place,
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            table[arch], refused = tried(arch, Path(place))
        print(arch, table[arch], *refused, flush=True)
        rows = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    PAGE.write_text(page(table))


if __name__ == "__main__":
    main(sys.argv[1:])
