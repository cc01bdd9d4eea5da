"""A head written in a format, and read again before it counts."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.conf.disk import check_space, size
from outrider.decode.models.load import torch_dtype
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.interop import LAYOUTS, gguf_write
from outrider.heads.small_lm.head import SmallLM
from outrider.scripts.common import files
from outrider.scripts.exporting import loaders
from outrider.scripts.exporting.self_check import ExportCheck, check_head, check_model, rounded

DRAFT = "draft.gguf"
WEIGHTS = "model.safetensors"
ROOM = 1.02  # of what the weights take: card, manifest, contract


def write_head(
    stage: Path,
    format: str,
    head: Head,
    target: Target,
    name: str,
    prompts: Sequence[Tensor],
    dtype: str,
    tokenizer_from: str = "",
) -> tuple[Head, ExportCheck]:
    """Write a head that format takes (interop.refusals) into `stage`, and read it again; the
    head with the exported numbers, and the check. name: by which an engine loads the target.
    Raises UserError where the file would draft anything else than that head, and where the disk
    has no room for it."""
    if format == "gguf":
        words = gguf_write.tokenizer_keys(Path(tokenizer_from).expanduser(), target.vocab_size)
        gguf_write.write(stage / DRAFT, gguf_write.head_model(head, target, words), dtype)
        twin = rounded(head, lambda w: gguf_write.rounded(w.float().cpu(), dtype).to(w.device))
        file = loaders.gguf(stage / DRAFT, target.embedding_weight)
        return twin, check_head(file, twin, target, prompts)
    kind = torch_dtype(dtype)
    if isinstance(head, SmallLM):
        return head, _write_plain(stage, head, prompts, kind)
    config, tensors = LAYOUTS[format, head.kind].write(head, target, name, kind)
    print(_weight(tensors, head, target, dtype), flush=True)
    fix = f"set {fewer}" if (fewer := smaller(head, dtype)) else "give another folder"
    check_space("out", stage.parent, ROOM * sum(t.nbytes for t in tensors.values()), fix)
    files.write_json(stage / "config.json", config)
    save(tensors, stage / WEIGHTS)
    twin = rounded(head, lambda weight: weight.to(kind).float())
    rows = target.embedding_weight, target.lm_head_weight
    file = loaders.folder(stage, format, *rows, target.num_layers)
    return twin, check_head(file, twin, target, prompts)


def _write_plain(
    stage: Path, head: SmallLM, prompts: Sequence[Tensor], dtype: torch.dtype
) -> ExportCheck:
    """Return a separate draft as an ordinary transformers folder."""
    head.dtype, kept = dtype, head.dtype
    with full_disk(stage / WEIGHTS):
        head.write(stage, finished=True)
    head.dtype = kept
    twin = head.plain().cpu()
    for weight in twin.parameters():
        weight.data = weight.data.to(dtype).float()
    read: Any = AutoModelForCausalLM.from_pretrained(stage, dtype=torch.float32)
    return check_model(lambda ids: read.eval()(ids[None]).logits[0, -1], twin, prompts)


@contextlib.contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Raise an OSError for one that safetensors hides in its words."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that everybody may read, with the metadata that transformers asks
    for. Raises OSError when the disk refuses."""
    with full_disk(path):
        save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def smaller(head: Head, dtype: str) -> str:
    """Return keys that make the export of a head smaller, with "or" between them."""
    keys = ["dtype=bfloat16"] if dtype == "float32" else []
    if head.kind == "medusa" and head.cfg.heads > 1:
        keys.append(f"heads={head.cfg.heads - 1} or fewer")
    return " or ".join(keys)


def _weight(tensors: dict[str, Tensor], head: Head, target: Target, dtype: str) -> str:
    """Return what a file weighs, beside the target: every Medusa head projects onto the
    whole vocabulary, also one that was trained on a part of it."""
    whole = sum(tensor.nbytes for tensor in tensors.values())
    numbers = sum(tensor.numel() for tensor in tensors.values())
    share = numbers / sum(p.numel() for p in target.model.parameters())
    fix = smaller(head, dtype)
    return (
        f"weights: {size(whole)} in {dtype}, {share:.2f} times the target's own numbers, which the "
        f"engine keeps in memory{fix and f'; smaller: {fix}'}"
    )
