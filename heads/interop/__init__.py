"""Heads in other programs' formats: LAYOUTS is the only table where formats meet their files.

config, tensors = find_layout("vllm", head).write(head, target, facts, torch.float32)
head = detect(foreign, "auto").read(foreign, target)
"""

from __future__ import annotations

import re

from outrider.conf.errors import UserError
from outrider.heads.base import Head
from outrider.heads.interop.block import (
    DFlashSglang,
    DFlashSpeculators,
    DFlashVllm,
    DSparkDeepSpec,
    DSparkSglang,
    DSparkSpeculators,
)
from outrider.heads.interop.eagle1 import Eagle1Original, Eagle1Sglang, Eagle1Vllm
from outrider.heads.interop.eagle3 import Eagle3Original, Eagle3Sglang, Eagle3Vllm
from outrider.heads.interop.layout import Facts, HeadLayout
from outrider.heads.interop.medusa import MedusaOriginal, MedusaVllm
from outrider.heads.interop.reading import MANIFEST, Foreign, exported, read_folder
from outrider.heads.interop.speculators import Speculators
from outrider.heads.registry import FORMATS

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "MANIFEST",
    "Facts",
    "Foreign",
    "HeadLayout",
    "detect",
    "exported",
    "find_layout",
    "read_folder",
]

LAYOUTS: dict[tuple[str, str], HeadLayout] = {
    (layout.format, layout.kind): layout
    for layout in (
        MedusaVllm(),
        MedusaOriginal(),
        Eagle1Vllm(),
        Eagle1Sglang(),
        Eagle1Original(),
        Eagle3Vllm(),
        Eagle3Sglang(),
        Eagle3Original(),
        Speculators(),
        DFlashVllm(),
        DFlashSglang(),
        DFlashSpeculators(),
        DSparkDeepSpec(),
        DSparkSglang(),
        DSparkSpeculators(),
    )
}
# speculators_model_type -> kind of head
SPECULATORS = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dspark": "dspark",
}
UNSERVED = {
    "hydra_heads": "no engine serves Hydra heads (each reads the tokens drafted before "
    "it); the nearest that is served: head=eagle3",
    "small_lm": "a separate draft is an ordinary model: export it with "
    "format=transformers, which vLLM and SGLang serve",
}


def find_layout(format: str, head: Head) -> HeadLayout:
    """The layout of this kind of head in a format. Raises UserError with what works instead."""
    if head.kind in UNSERVED:
        raise UserError(f"format={format}: {UNSERVED[head.kind]}")
    found = LAYOUTS.get((format, head.kind))
    if found is not None:
        return found
    works = [layout for (_, kind), layout in LAYOUTS.items() if kind == head.kind]
    if not works:
        raise UserError(
            f"format={format}: no engine knows {head.kind} heads; decode with it here (evaluate, "
            "serve)"
        )
    if format == "transformers":
        reason = (
            f"only separate draft models are plain transformers folders, this is a {head.kind} head"
        )
    else:
        reason = f"it has no layout for {head.kind} heads"
    now = [layout.format for layout in works if layout.engine.loads(head.kind)]
    was = [
        f"; format={layout.format} is for {layout.engine.versions(head.kind)}"
        for layout in works
        if layout.engine.gone(head.kind)
    ]
    raise UserError(
        f"format={format}: {reason}; the nearest that is served: format={' or '.join(now)}"
        + "".join(was)
    )


def detect(foreign: Foreign, format: str) -> HeadLayout:
    """The layout of a folder; `format` other than "auto" must agree with what it holds. Raises
    UserError otherwise.
    """
    kind, natural = _kind(foreign)
    chosen = natural if format == "auto" else format
    if (chosen, kind) not in LAYOUTS:
        works = [f for f, k in LAYOUTS if k == kind]
        raise UserError(
            f"format={format}: {foreign.folder} holds a {kind} head, and {format} has no layout "
            f"for it; use format={' or '.join(works)}, or auto"
        )
    if format != "auto" and format != natural and "speculators" in (format, natural):
        raise UserError(
            f"format={format}: {foreign.folder} is in the format {natural}; use "
            f"format={natural}, or auto"
        )
    if kind == "medusa" and chosen != natural and format != "auto":
        raise UserError(
            f"format={format}: the names in {foreign.folder} are those of format={natural}; use "
            "that, or auto"
        )
    return LAYOUTS[chosen, kind]


def _kind(foreign: Foreign) -> tuple[str, str]:
    """(kind of head, format) by what stands in the folder."""
    names, config = foreign.tensors, foreign.config
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
    if "hidden_norm.weight" in {n.removeprefix("model.") for n in names}:
        dspark = any("markov_head." in n for n in names)
        return ("dspark", "deepspec") if dspark else ("dflash", "vllm")
    bare = {n.removeprefix("medusa_heads.") for n in names}
    if any(n.startswith("blocks.") for n in bare):
        return "medusa", "vllm"
    if any(re.match(r"\d+\.\d+\.", n) for n in bare):
        return "medusa", "medusa"
    if "fc.weight" in names or "model.fc.weight" in names:
        three = any(".hidden_norm." in n or "midlayer." in n for n in names) or "d2t" in names
        if three:
            return "eagle3", "eagle" if arch == "LlamaForCausalLM" else _ours(foreign, "vllm")
        return "eagle1", "sglang" if arch == "LlamaForCausalLMEagle" else _ours(foreign, "eagle")
    if (
        any(n.endswith(("embed_tokens.weight", "wte.weight")) for n in names)
        and "model_type" in config
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


def _ours(foreign: Foreign, default: str) -> str:
    """The format our manifest names, else `default`."""
    said = (foreign.manifest or {}).get("engine_format")
    return said if said in FORMATS else default
