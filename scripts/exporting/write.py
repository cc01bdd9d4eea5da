"""A head written in a format, and read again before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider.conf.disk import check_space, size
from outrider.conf.errors import UserError, first_line
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
    whole = sum(tensor.nbytes for tensor in tensors.values())
    print(f"weights: {size(whole)} in {dtype}", flush=True)
    fix = "set dtype=bfloat16" if dtype == "float32" else "give another folder"
    check_space("out", stage.parent, ROOM * whole, fix)
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
    head.write(stage, finished=True)
    head.dtype = kept
    twin = head.plain().cpu()
    for weight in twin.parameters():
        weight.data = weight.data.to(dtype).float()
    read: Any = AutoModelForCausalLM.from_pretrained(stage, dtype=torch.float32)
    return check_model(lambda ids: read.eval()(ids[None]).logits[0, -1], twin, prompts)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that everybody may read, with the metadata that transformers asks
    for. Raises UserError when the disk refuses."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"out: {path}: {first_line(error)}; give another folder") from None
    path.chmod(0o644)
