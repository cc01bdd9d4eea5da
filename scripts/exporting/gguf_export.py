"""What `format=gguf` writes: a head, a separate draft or the target itself as one GGUF file,
read again by scripts/exporting/reader.py before it counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.block.head import BlockHead
from outrider.heads.interop import gguf_write
from outrider.heads.interop.gguf_block import block_model
from outrider.heads.interop.gguf_write import GgufModel
from outrider.scripts.common import files
from outrider.scripts.exporting.loaders import gguf
from outrider.scripts.exporting.self_check import TOLERANCE, ExportCheck, check_drafts, rounded
from outrider.scripts.exporting.stage import visible
from outrider.scripts.reports.rendering import render

DRAFT, TARGET = "draft.gguf", "target.gguf"


@dataclass(frozen=True)
class Kind:
    """How the numbers are stored. dtype: float32, bfloat16, float16 or q8_0. tokenizer_from: a
    GGUF file whose tokenizer is taken, None to make it from the target's."""

    dtype: str
    tokenizer_from: Path | None = None


def write_head(
    stage: Path, head: Head, target: Target, prompts: Sequence[Tensor], kind: Kind
) -> tuple[Any, ExportCheck]:
    """An EAGLE-3 or block head: the head with its numbers rounded as the file has them, and the
    check.

    Raises UserError for heads that llama.cpp cannot run, and when the file drafts anything
    else than that rounded head.
    """
    words = gguf_write.tokenizer_fields(target, kind.tokenizer_from)
    if isinstance(head, BlockHead):
        made = block_model(head, target, words)
    else:
        made = gguf_write.eagle3(head, target, words)
    gguf_write.write(stage / DRAFT, made, kind.dtype)
    twin = rounded_head(head, kind.dtype)
    served = gguf(stage / DRAFT, target.embedding_weight)
    return twin, check_drafts(served, twin, target, prompts)


def rounded_head(head: Head, dtype: str) -> Any:
    """A copy of a head (a separate draft: the head itself) with the numbers of such a file."""
    if head.kind == "small_lm":
        return head
    return rounded(head, lambda w: gguf_write.rounded(w.float().cpu(), dtype).to(w.device))


def write_draft(
    stage: Path, source: Path, head: Head, target: Target, prompts: Sequence[Tensor], kind: Kind
) -> ExportCheck:
    """A separate draft that was trained here, from its folder. Raises UserError as write_model
    does."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, use_safetensors=True
    )
    return write_model(stage / DRAFT, model, target, prompts, kind)


@torch.inference_mode()
def write_model(
    path: Path, model: Any, target: Target, prompts: Sequence[Tensor], kind: Kind
) -> ExportCheck:
    """A whole model: the target, or a separate draft with the target's tokenizer.

    Raises UserError when the file's logits behind the prompts are not the model's with its
    numbers rounded alike.
    """
    words = gguf_write.tokenizer_fields(target, kind.tokenizer_from)
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != target.vocab_size:
        raise UserError(
            f"format=gguf: the model has {rows} tokens, the target {target.vocab_size}; llama.cpp "
            "wants one vocabulary for both"
        )
    written: GgufModel = gguf_write.whole_model(model, target.vocab_size, words)
    gguf_write.write(path, written, kind.dtype)
    del written  # of a large model no more than two copies in float32 at a time
    twin = copy.deepcopy(model).float().cpu()
    changed = 0
    for weight in twin.parameters():
        kept = gguf_write.rounded(weight.data, kind.dtype)
        changed += int((kept != weight.data).sum())
        weight.data = kept
    share = changed / sum(weight.numel() for weight in twin.parameters())
    out = ExportCheck(len(prompts), 0, 0.0, 0.0, share)
    wanted = [twin(prompt.cpu()[None]).logits[0, -1].float() for prompt in prompts]
    del twin
    served = gguf(path, model.get_input_embeddings().weight)
    for number, (prompt, mine) in enumerate(zip(prompts, wanted, strict=True)):
        theirs = served.logits(prompt.cpu())
        out.error = max(out.error, float((mine - theirs).abs().max()))
        out.largest = max(out.largest, float(mine.abs().max()))
        room = TOLERANCE * max(1.0, float(mine.abs().max()))
        if not float((mine - theirs).abs().max()) <= room:
            raise UserError(
                f"export: prompt {number + 1}: the file's logits differ from the model's by "
                f"{float((mine - theirs).abs().max()):.3g} (allowed {room:.3g}); nothing was "
                "written"
            )
        out.tokens += 1
    return out


def page(name: str, drafter: str, kind: Kind, check: ExportCheck) -> str:
    """README.md of a whole model."""
    facts = {"file": name, "whole": name == TARGET, "drafter": drafter, "dtype": kind.dtype}
    return render("model.md", **facts, check=check)


def manifest(about: dict[str, Any], stage: Path) -> dict[str, Any]:
    """outrider.json of a whole model: what it is, and the sha256 of every file beside it."""
    environment = files.environment()
    return {
        "format": 1,
        **about,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": files.command(),
        "commit": environment["commit"],
        "versions": environment["versions"],
        "files": {
            p.name: {"bytes": p.stat().st_size, "sha256": files.sha256(p)} for p in visible(stage)
        },
    }
