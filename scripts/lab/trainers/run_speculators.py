"""speculators' own training program on a CPU: its command line, loader, trainer, losses. Runs
inside an environment of its own and imports nothing of this repository.

    .venv-race/bin/python scripts/lab/trainers/run_speculators.py SETTINGS.json

What is changed is the device, for the program knows GPUs alone, and that the LM head is trained,
as all entries of the race train it: CHANGES says each. SETTINGS: see scripts/lab/trainers/entries.
Appends {"step", "tokens"} of every step to OUT/curve.jsonl, saves OUT/heads/step-N every so many
steps, and writes OUT/facts.json. With "validate", a list of folders, it trains nothing: each
head's figures by its own validation go to OUT/validated.json; with "profile" it trains a few
steps, and the share of their CPU time that attention takes goes to OUT/profile.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHANGES = [
    "trainer.get_local_rank gives cpu, Trainer.device_type is cpu",
    "torch.accelerator.synchronize does nothing",
    "LM head trained (it is frozen by default)",
    "betas of AdamW as in the other entries",
]
KEPT = 2  # saved heads
PROFILED = 2, 6  # first step that is measured, and the one after the last


def main(place: str) -> None:
    """Train until the process is ended."""
    import torch
    from speculators.train import optimizers, trainer
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    settings = json.loads(Path(place).read_text())
    torch.set_num_threads(1)
    torch.accelerator.synchronize = lambda *args, **keys: None
    trainer.get_local_rank = lambda: "cpu"
    out = Path(settings["out"])
    on_cpu(trainer.Trainer, out, settings["save_every"])
    if "validate" in settings:
        only_validate(trainer.Trainer, [Path(folder) for folder in settings["validate"]], out)
    elif settings.get("profile"):
        only_profile(trainer.Trainer, out)
    adamw = torch.optim.AdamW
    betas = {"betas": tuple(settings["betas"])}
    optimizers.torch.optim.AdamW = lambda *args, **keys: adamw(*args, **{**keys, **betas})
    train(TrainConfig.resolve(words(settings)))


def words(settings: dict[str, Any]) -> list[str]:
    """The program's command line."""
    data, size = settings["data"], settings["draft_vocab"]
    given = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": settings["target"],
        "data-path": data,
        "d2t-path": f"{data}/d2t-{size}.npy",
        "t2d-path": f"{data}/t2d-{size}.npy",
        "draft-vocab-size": size,
        "train-data-ratio": settings["ratio"],
        "num-layers": 1,
        "draft-arch": "llama",
        "full-attention-indices": 0,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "loss-fn": "kl_div",
        "ttt-steps": settings["steps"],
        "ttt-step-loss-decay": settings["step_decay"],
        "total-seq-len": settings["tokens"],
        "hidden-states-dtype": settings["dtype"],
        "num-workers": 0,
        "on-missing": "raise",
        "optimizer": "adamw",
        "lr": settings["rate"],
        "weight-decay": 0,
        "scheduler-type": "cosine",
        "scheduler-total-steps": 1_000_000,
        "scheduler-warmup-steps": settings["warmup"],
        "epochs": 10_000,
        "log-freq": 1,
        "checkpoint-freq": 10_000,
        "save-path": f"{settings['out']}/program",
        "logger": "",
        "seed": settings["seed"],
    }
    flags = ["no-norm-before-fc", "fc-norm", "norm-output", "no-norm-before-residual"]
    pairs = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    return [*pairs, *(f"--{flag}" for flag in flags), "--no-resume-from-checkpoint"]


def on_cpu(kind: Any, out: Path, save_every: int) -> None:
    """Let the trainer `kind` run on a CPU, train its LM head, and say how far it is."""
    set_up, model, epoch = kind.setup_trainer, kind.setup_model, kind.train_epoch

    def setup_trainer(self: Any) -> None:
        self.device_type = "cpu"
        set_up(self)

    def setup_model(self: Any) -> None:
        model(self)
        self.model.lm_head.weight.requires_grad_(True)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        facts = {
            "program": f"speculators {version('speculators')}",
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "changes": CHANGES,
            "trained_parameters": trained,
        }
        (out / "facts.json").write_text(json.dumps(facts))

    def train_epoch(self: Any, number: int, **keys: Any) -> Any:
        seen = self.model.forward
        tokens = getattr(self, "race_tokens", 0)

        def forward(*args: Any, **batch: Any) -> Any:
            self.race_tokens += int((batch["document_ids"] != -1).sum())
            return seen(*args, **batch)

        self.race_tokens = tokens
        self.model.forward = forward

        def after() -> None:
            step = self.global_step
            with (out / "curve.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "tokens": self.race_tokens}) + "\n")
            if step % save_every == 0:
                save(self.model, out / "heads", step)

        try:
            return epoch(self, number, step_callback=after)
        finally:
            self.model.forward = seen

    kind.setup_trainer, kind.setup_model, kind.train_epoch = setup_trainer, setup_model, train_epoch


def only_validate(kind: Any, folders: list[Path], out: Path) -> None:
    """Let the trainer `kind` validate these heads in place of training."""
    from safetensors.torch import load_file

    def run_training(self: Any) -> None:
        found = []
        for folder in folders:
            weights = load_file(folder / "model.safetensors")
            missing, extra = self.model.load_state_dict(weights, strict=False)
            frozen = {name for name in missing if "verifier" in name or "embed" in name}
            if extra or set(missing) - frozen:
                raise SystemExit(f"{folder}: lacks {missing}, has {extra}")
            found.append(self.val_epoch(0))
        (out / "validated.json").write_text(json.dumps(found))

    kind.run_training = run_training


def only_profile(kind: Any, out: Path) -> None:
    """Let the trainer `kind` end after a few steps, of which the last ones are measured."""
    from torch.profiler import ProfilerActivity, profile

    epoch, profiler = kind.train_epoch, profile(activities=[ProfilerActivity.CPU])

    def train_epoch(self: Any, number: int, **keys: Any) -> Any:
        forward = self.model.forward

        def measured(*args: Any, **batch: Any) -> Any:
            if self.global_step == PROFILED[0]:
                profiler.start()
            if self.global_step == PROFILED[1]:
                profiler.stop()
                found = {e.key: e.self_cpu_time_total for e in profiler.key_averages()}
                total = sum(found.values())
                attention = sum(time for key, time in found.items() if "attention" in key)
                top = sorted(found, key=lambda key: -found[key])[:10]
                paper = {
                    "attention": attention / total,
                    "steps": PROFILED[1] - PROFILED[0],
                    "largest": {key: found[key] / total for key in top},
                }
                (out / "profile.json").write_text(json.dumps(paper))
                raise SystemExit(0)
            return forward(*args, **batch)

        self.model.forward = measured
        return epoch(self, number, **keys)

    kind.train_epoch = train_epoch


def save(model: Any, folder: Path, step: int) -> None:
    """The head of a step, whole in its place; the oldest go."""
    part = folder / f"part-{step}"
    model.save_pretrained(part)
    part.rename(folder / f"step-{step}")
    saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    for old in saved[:-KEPT]:
        shutil.rmtree(old)


if __name__ == "__main__":
    main(sys.argv[1])
