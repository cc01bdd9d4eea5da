"""Heads in other programs' formats: LAYOUTS says which kind of head goes into which format,
and READERS which kind of folder becomes a head again.

config, tensors = LAYOUTS["vllm", "eagle3"].write(head, target, name, torch.float32)
head, format = read_head(read_folder(folder), target)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.interop import engines, gguf_write
from outrider.heads.interop.block import Block, read_block
from outrider.heads.interop.eagle import Eagle1, Eagle3, read_eagle1, read_eagle3
from outrider.heads.interop.layout import Layout, architecture
from outrider.heads.interop.medusa import Medusa, read_medusa
from outrider.heads.interop.reading import MANIFEST, Foreign, exported, read_folder
from outrider.heads.registry import FORMATS

__all__ = [
    "ENGINE",
    "FORMATS",
    "LAYOUTS",
    "MANIFEST",
    "Foreign",
    "architecture",
    "exported",
    "formats",
    "read_folder",
    "read_head",
    "refusals",
]

ENGINE = {
    "vllm": engines.VLLM,
    "speculators": engines.SPECULATORS,
    "sglang": engines.SGLANG,
    "deepspec": engines.VLLM,
    "transformers": engines.VLLM,
    "gguf": engines.LLAMACPP,
}
LAYOUTS: dict[tuple[str, str], Layout[Any]] = {
    (format, kind): layout(format, kind, ENGINE[format])
    for layout, kind, known in (
        (Medusa, "medusa", ("vllm",)),
        (Eagle1, "eagle1", ("vllm", "sglang")),
        (Eagle3, "eagle3", ("vllm", "speculators", "sglang")),
        (Block, "dflash", ("vllm", "speculators", "sglang")),
        (Block, "dspark", ("speculators", "sglang", "deepspec")),
    )
    for format in known
}
# Formats without a layout of their own -> the kinds of heads that they take
WHOLE = {"gguf": ("eagle3", "dflash", "dspark"), "transformers": ("small_lm",)}
UNSERVED = {
    "hydra_heads": "no engine serves Hydra heads (each reads the tokens drafted before it); the "
    "nearest that is served: head=eagle3",
    "small_lm": "a separate draft is an ordinary model: export it with format=transformers, which "
    "vLLM and SGLang serve and llama.cpp's own converter reads",
}
READERS: dict[str, Callable[[Foreign, Target], Head]] = {
    "medusa": read_medusa,
    "eagle1": read_eagle1,
    "eagle3": read_eagle3,
    "dflash": functools.partial(read_block, kind="dflash"),
    "dspark": functools.partial(read_block, kind="dspark"),
}
# speculators_model_type -> kind of head
SPECULATORS = {"eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}


def formats(kind: str) -> list[str]:
    """Return the formats that have a place for heads of a kind."""
    return [f for f in FORMATS if (f, kind) in LAYOUTS or kind in WHOLE.get(f, ())]


def refusals(format: str, head: Head, target: Target, name: str) -> list[str]:
    """Return why `head` cannot go into a format for this target, each with its key and the
    nearest thing that works; [] where it can. name: by which the engine loads the target."""
    if layout := LAYOUTS.get((format, head.kind)):
        return layout.refusals(head, target, name)
    if format in WHOLE and head.kind in WHOLE[format]:
        return gguf_write.refusals(head, target) if format == "gguf" else []
    if head.kind in UNSERVED:
        return [UNSERVED[head.kind]]
    known = formats(head.kind)
    if not known:
        return [f"no engine knows {head.kind} heads; decode with it here (evaluate, serve)"]
    named = [
        f"format={f}"
        if ENGINE[f].loads(head.kind)
        else f"format={f}, for {ENGINE[f].versions(head.kind)}"
        for f in known
    ]
    return [f"it has no place for {head.kind} heads; choose {' or '.join(named)}"]


def read_head(foreign: Foreign, target: Target) -> tuple[Head, str]:
    """Return a folder's head and its format. Raises UserError that lists all that does not fit."""
    kind, format = detect(foreign)
    return READERS[kind](foreign, target), format


def detect(foreign: Foreign) -> tuple[str, str]:
    """(kind of head, format) by what a folder holds. Raises UserError where it is none."""
    config = foreign.config
    names = {n.removeprefix("model.").removeprefix("medusa_heads.") for n in foreign.tensors}
    named = config.get("architectures")
    arch = " ".join(map(str, named)) if isinstance(named, list) else ""
    if "speculators_model_type" in config:
        said = config["speculators_model_type"]
        if not isinstance(said, str) or said not in SPECULATORS:
            raise UserError(
                f"{foreign.folder / 'config.json'}: speculators_model_type is {said!r:.80}; "
                f"{', '.join(SPECULATORS)} are read"
            )
        return SPECULATORS[said], "speculators"
    if "hidden_norm.weight" in names:
        dspark = any(n.startswith("markov_head.") for n in names)
        return ("dspark", "deepspec") if dspark else ("dflash", "vllm")
    if any(n.startswith("blocks.") for n in names):
        return "medusa", "vllm"
    if any(re.match(r"\d+\.\d+\.", n) for n in names):
        return "medusa", "medusa"
    ours = (foreign.manifest or {}).get("engine_format")
    ours = ours if ours in FORMATS else None
    if "fc.weight" in names:
        if "d2t" in names or any(".hidden_norm." in n or "midlayer." in n for n in names):
            return "eagle3", "eagle" if arch == "LlamaForCausalLM" else ours or "vllm"
        return "eagle1", "sglang" if arch == "LlamaForCausalLMEagle" else ours or "eagle"
    if "model_type" in config and any(
        n.endswith(("embed_tokens.weight", "wte.weight")) for n in names
    ):
        raise UserError(
            f"{foreign.folder}: a whole language model, not a head; it needs no import: name the "
            "folder as a drafter"
        )
    shown = ", ".join(sorted(names)[:4])
    raise UserError(
        f"{foreign.folder}: no known head ({shown}, ..); Medusa, EAGLE-1, EAGLE-3, "
        "DFlash, DSpark and speculators are read"
    )
