"""A separate draft model as a plain transformers folder: copied file by file, then loaded
again and compared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.drafters import Drafter
from outrider.decode.models.load import torch_dtype
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.names import DraftSpec

KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file that everybody may read, with the metadata that transformers asks
    for. Raises OSError when the disk refuses.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it hides the number in its words
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    path.chmod(0o644)


@torch.inference_mode()
def write(
    source: Path,
    stage: Path,
    head: Head,
    target: Target,
    prompts: Sequence[Tensor],
    dtype: str | None,
) -> dict[str, Any]:
    """Copy the folder, reload it through transformers and compare greedy drafts with the
    head's own drafter.

    Returns what the manifest says of the check. Raises UserError when they differ by more than
    rounding.
    """
    from transformers import AutoModelForCausalLM

    stored = _copy(source, stage, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        stage, dtype=torch.float32, use_safetensors=True
    )
    model = model.to(target.device).eval()
    drafter = head.drafter(target, DraftSpec(shape="chain"))
    equal = 0
    for number, prompt in enumerate(prompts, 1):
        ids = prompt.to(target.device)
        wanted = _drafted(drafter, ids)
        equal += _agreed(model, head.ids(), ids, wanted, stored, f"prompt {number}")
    if not equal:
        raise UserError(
            "export: no draft token of the export equals the drafter's; nothing was written"
        )
    return {
        "prompts": len(prompts),
        "draft_tokens_equal": equal,
        "largest_logit_difference": None,
        "dtype": stored,
    }


def _copy(source: Path, stage: Path, dtype: str | None) -> str:
    """Copy a model folder, its weights in `dtype` (None: as they are); the dtype that is then
    stored. Raises UserError where there is no such folder."""
    for name in (*KEPT, "model.safetensors.index.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, stage / name)
    weights = sorted(source.glob("model*.safetensors"))
    if not weights or not (stage / "config.json").is_file():
        raise UserError(
            f"drafter: {source} is no transformers folder (config.json, "
            "model.safetensors); train it again"
        )
    for file in weights:
        tensors = load_file(file)
        if dtype is not None:
            tensors = {
                k: v.to(torch_dtype(dtype)) if v.is_floating_point() else v
                for k, v in tensors.items()
            }
        save(tensors, stage / file.name)
    config = json.loads((stage / "config.json").read_text())
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        (stage / "config.json").write_text(json.dumps({**config, key: dtype}, indent=1) + "\n")
    return dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _drafted(drafter: Drafter, prompt: Tensor) -> list[int]:
    """The chain that the drafter proposes behind a prompt [n], greedily."""
    drafter.reset(1, len(prompt) + 2)
    drafter.begin([prompt[:-1]], Sampling())
    drafter.observe(prompt[None, 1:], None, torch.tensor([len(prompt) - 1]), slice(0, 1))
    zero = torch.zeros(1, dtype=torch.int64, device=prompt.device)
    budget = torch.tensor([drafter.max_depth])
    tree = drafter.propose(budget, Sampling(), Rng(0, zero, zero))
    return tree.tokens[0].tolist()


def _agreed(
    model: Any, ids: Tensor | None, prompt: Tensor, wanted: list[int], stored: str, where: str
) -> int:
    """How many of the drafter's tokens the exported model drafts too, before the first that
    differs by rounding. ids: the draft vocabulary. Raises UserError for one that differs by
    more."""
    tokens = prompt.tolist()
    for depth, token in enumerate(wanted):
        row = model(torch.tensor([tokens], device=prompt.device)).logits[0, -1]
        row = row if ids is None else row[ids]
        best = row.topk(2)
        mine = int(best.indices[0]) if ids is None else int(ids[best.indices[0]])
        slack = 1e-3 * float(best.values[0].abs()) * (1 if stored == "float32" else 50)
        if mine != token and float(best.values[0] - best.values[1]) > slack:
            raise UserError(
                f"export: {where}, draft token {depth + 1}: the export drafts {mine}, the "
                f"drafter {token}; nothing was written"
            )
        if mine != token:
            return depth
        tokens.append(token)
    return len(wanted)
