"""Runs inside the speculators package's own environment (no import of this repository): load,
save, and the draft logits of an EAGLE-3 head.

    .venv-speculators/bin/python scripts/lab/serving/run_speculators.py FOLDER SAVED
    [INPUTS.safetensors ANSWER.safetensors]

SAVED: the folder that the package writes back. INPUTS: features [1, T, F * D] float32 and ids
[1, T] int64, the token behind each feature. ANSWER: logits.{step} [T, Vd] of three
teacher-forced steps.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(folder: str, saved: str, inputs: str = "", answer: str = "") -> None:
    """Load the folder as the package does, write it again, run its forward pass."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    model.save_pretrained(saved)
    if inputs:
        steps(model, inputs, answer)


def steps(model: Any, inputs: str, answer: str) -> None:
    """Draft logits of three teacher-forced steps."""
    import torch
    from safetensors.torch import load_file, save_file

    data = load_file(inputs)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(
        lambda module, given, out: seen.append(out.detach()[0].clone())
    )
    with torch.no_grad():
        ids = data["ids"]
        model(
            hidden_states=data["features"],
            input_ids=ids,
            document_ids=torch.zeros_like(ids),
            ttt_steps=3,
        )
    save_file({f"logits.{i}": rows.float().contiguous() for i, rows in enumerate(seen)}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:5])
