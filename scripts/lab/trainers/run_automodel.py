"""NeMo Automodel's EAGLE-3 trainer module and draft model on a CPU. Runs inside an environment of
its own and imports nothing of this repository.

    .venv-race/bin/python scripts/lab/trainers/run_automodel.py SETTINGS.json

Its recipe reads a target that runs beside; here the module gets what the recipe gives it, made from
stored hidden states, in a loop of this file: AdamW, clipped at 1, a constant rate behind a warm-up.
SETTINGS and what is left in OUT: as in run_speculators.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHANGES = ["its trainer module and draft model; data, loop and saving are the race's"]
KEPT = 2  # saved heads


def main(place: str) -> None:
    """Train until the process is ended."""
    import numpy as np
    import torch
    from datasets import load_from_disk
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
    from safetensors.torch import load_file

    settings = json.loads(Path(place).read_text())
    out, data, size = Path(settings["out"]), Path(settings["data"]), settings["draft_vocab"]
    torch.set_num_threads(1)
    torch.manual_seed(settings["seed"])
    weights = load_file(Path(settings["target"]) / "model.safetensors")
    table = weights["model.embed_tokens.weight"].float()
    output = weights.get("lm_head.weight", table).float()
    ids = torch.from_numpy(np.load(data / f"d2t-{size}.npy", allow_pickle=False)) + torch.arange(
        size
    )
    draft = made(settings, table, ids)
    inside = torch.zeros(table.shape[0], dtype=torch.bool)
    inside[ids] = True
    module = Eagle3TrainerModule(
        draft, selected_token_ids=ids, selected_token_mask=inside, ttt_steps=settings["steps"]
    )
    trained = [p for p in module.parameters() if p.requires_grad]
    facts = {
        "program": f"nemo-automodel {version('nemo-automodel')}",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "changes": CHANGES,
        "trained_parameters": sum(p.numel() for p in trained),
    }
    (out / "facts.json").write_text(json.dumps(facts))
    optimizer = torch.optim.AdamW(trained, lr=0.0, betas=settings["betas"], weight_decay=0.0)
    rows = Rows(data, load_from_disk(str(data)), settings)
    norm = weights["model.norm.weight"].float()
    tokens = 0
    for step in range(1, 1 << 40):
        batch, count = rows.batch()
        given = inputs(batch, output[ids], norm, inside)
        for group in optimizer.param_groups:
            group["lr"] = settings["rate"] * min(1.0, step / (settings["warmup"] + 1))
        module(**given).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += count
        with (out / "curve.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "tokens": tokens}) + "\n")
        if step % settings["save_every"] == 0:
            save(draft, out / "heads", step)


def made(settings: dict[str, Any], table: Any, ids: Any) -> Any:
    """The draft model: one layer of the target's shape, EAGLE-3.1."""
    import torch
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings["target"])
    config.draft_vocab_size = settings["draft_vocab"]
    config.target_hidden_size = config.hidden_size
    config.architectures = ["LlamaEagle3DraftModel"]
    config.tie_word_embeddings = False
    config.fc_norm = config.norm_output = True
    config._attn_implementation = "eager"
    draft = LlamaEagle3DraftModel(config).float()
    source = torch.nn.Embedding(*table.shape)
    source.weight.data = table
    draft.copy_embeddings_from_target(source)
    draft.set_vocab_mapping(ids)
    draft.freeze_embeddings()
    return draft


class Rows:
    """Batches of whole rows, shuffled anew every time they have all been read."""

    def __init__(self, folder: Path, table: Any, settings: dict[str, Any]) -> None:
        self.folder, self.count = folder, settings["rows"]
        self.train = int(len(table) * settings["ratio"])
        self.masks = table.with_format(None)["loss_mask"][: self.train]
        self.random = random.Random(settings["seed"])
        self.order: list[int] = []

    def batch(self) -> tuple[list[tuple[Any, Any, Any]], int]:
        """(ids [T], hidden states [T, F, D], loss mask [T] of each row; tokens of all)."""
        import torch
        from safetensors.torch import load_file

        if len(self.order) < self.count:
            self.order = list(range(self.train))
            self.random.shuffle(self.order)
        chosen = [self.order.pop() for _ in range(self.count)]
        found = []
        for row in chosen:
            file = load_file(self.folder / "hidden_states" / f"hs_{row}.safetensors")
            mask = torch.tensor(self.masks[row], dtype=torch.float32)
            found.append((file["token_ids"], file["hidden_states"].float(), mask))
        return found, sum(len(ids) for ids, _, _ in found)


def inputs(batch: list[Any], output: Any, norm: Any, inside: Any) -> dict[str, Any]:
    """What the module is given: place t holds token t + 1, the states behind token t, and the
    target's distribution of token t + 2."""
    import torch

    rows, width = len(batch), max(len(ids) for ids, _, _ in batch)
    ids = torch.zeros(rows, width, dtype=torch.long)
    loss, there = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.long)
    states = torch.zeros(rows, width, *batch[0][1].shape[1:])
    for b, (tokens, hidden, mask) in enumerate(batch):
        size = len(tokens)
        ids[b, : size - 1] = tokens[1:]
        loss[b, : size - 2] = mask[2:]
        there[b, :size] = 1
        states[b, :size] = hidden
    last = states[:, :, -1]
    last = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5) * norm
    with torch.no_grad():
        probs = torch.softmax(torch.nn.functional.linear(last, output), -1)
        probs = torch.cat([probs[:, 1:], torch.zeros_like(probs[:, :1])], 1)
        behind = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
        supervised = (inside[behind] & loss.bool()).unsqueeze(-1)
    return {
        "input_ids": ids,
        "attention_mask": there,
        "loss_mask": loss,
        "aux_hidden_states": states[:, :, :-1].flatten(2),
        "target_probs": probs,
        "position_mask": supervised,
    }


def save(model: Any, folder: Path, step: int) -> None:
    """The head of a step, whole in its place; the oldest go."""
    part = folder / f"part-{step}"
    weights = {k: v for k, v in model.state_dict().items() if "embed_tokens" not in k}
    model.save_pretrained(part, state_dict=weights)
    part.rename(folder / f"step-{step}")
    saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    for old in saved[:-KEPT]:
        shutil.rmtree(old)


if __name__ == "__main__":
    main(sys.argv[1])
