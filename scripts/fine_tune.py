"""Fine-tune a target on chats with a LoRA and merge it: a relative to try a head on.

    python scripts/fine_tune.py target=smollm2 chats=chats.jsonl sentences=1 out=runs/terse
    python scripts/evaluate.py target=local target.path=runs/terse target.allow_other=true \\
        'drafters=[none,runs/eagle3]' out=reports/terse

peft puts the LoRA on every linear layer, transformers' Trainer trains it on the assistants'
words, and OUT is a folder as save_pretrained writes it. With `sentences` it learns to answer as
briefly as that, so that the model's own chats are enough to move it. Your own fine-tuned model
serves as well; this one is for measuring what a head loses when its target moves, and what
scripts/fit.py brings back.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from conf.errors import UserError
from conf.jsonl import parse_line
from conf.rules import AboveZero, NotEmpty, OneOrMore, Seed, ZeroOrMore
from conf.schema import entry
from decode.models.load import TargetConfig, load_target
from heads.checkpoint import staged
from scripts.common import files
from train.config import DataConfig
from train.texts.batches import Rows, load_rows

SENTENCE = re.compile(r"([.!?:\n])(?=\s|$)")
UNSUPERVISED = -100  # transformers' label of a token that is not taught


@dataclass
class FineTuneConfig:
    """Keys of scripts/fine_tune.py."""

    # JSONL of chats
    chats: NotEmpty
    # folder of the merged model
    out: NotEmpty
    # teach this many sentences of every answer; 0 = all
    sentences: ZeroOrMore = 0
    # the model that is fine-tuned
    target: TargetConfig = field(default_factory=TargetConfig)
    # rank of the LoRA
    rank: OneOrMore = 16
    # the update counts alpha / rank
    alpha: OneOrMore = 32
    # optimizer steps
    steps: OneOrMore = 100
    # chats of a step
    batch_size: OneOrMore = 8
    # peak learning rate, from which it falls in a straight line
    lr: AboveZero = 5e-4
    # longer chats are cut here, tokens
    max_length: Annotated[int, Ge(8)] = 320
    # of every random number
    seed: Seed = 0
    # no progress bar
    quiet: bool = False


@entry("fine_tune", FineTuneConfig)
def main(cfg: FineTuneConfig) -> int:
    """Train, merge, write the folder."""
    out = Path(cfg.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists; give another folder")
    files.check_out(out)
    target = load_target(cfg.target, "float32")
    with tempfile.TemporaryDirectory() as scratch:
        chats = shortened(Path(cfg.chats), cfg.sentences, Path(scratch))
        data = DataConfig(path=str(chats), max_length=cfg.max_length, held_out=0.0, cache=False)
        eos, context = target.eos_ids, target.context_length
        rows = load_rows(data, target.tokenizer, eos, target.vocab_size, context)
        merged, loss = trained(cfg, target.model, rows, eos[0] if eos else 0, scratch)
    with staged(out) as stage:
        merged.save_pretrained(stage)
        target.tokenizer.save_pretrained(stage)
    print(f"{out}: {cfg.steps} steps on {len(rows.lengths):,} chats, loss {loss:.3f}")
    return 0


def shortened(chats: Path, sentences: int, scratch: Path) -> Path:
    """The file, or one with only the first sentences of every answer. Raises UserError for a
    line that is no chat."""
    if not sentences or not chats.is_file():
        return chats
    lines = []
    for number, line in enumerate(chats.read_bytes().splitlines(), 1):
        try:
            row = parse_line(line)
            messages = [
                one | {"content": brief(one["content"], sentences)}
                if one["role"] == "assistant"
                else one
                for one in row["messages"]
            ]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"chats: {chats}:{number} is no chat; sentences= wants {{messages: [...]}}"
            ) from None
        lines.append(row | {"messages": messages})
    files.write_jsonl(scratch / chats.name, lines)
    return scratch / chats.name


def brief(text: str, sentences: int) -> str:
    """The first sentences of a text."""
    ends = [found.end(1) for found in SENTENCE.finditer(text)]
    return text if len(ends) < sentences else text[: ends[sentences - 1]]


def trained(
    cfg: FineTuneConfig, model: Any, rows: Rows, pad: int, scratch: str
) -> tuple[Any, float]:
    """(the model with its LoRA merged, mean loss of the last steps)."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    model.requires_grad_(True)
    lora = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, target_modules="all-linear")
    tuned = get_peft_model(model, lora)

    def batch(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        def padded(name: str, fill: int) -> torch.Tensor:
            parts = [one[name] for one in some]
            return torch.nn.utils.rnn.pad_sequence(parts, True, padding_value=fill)

        ids = padded("input_ids", pad)
        seen = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(one["input_ids"]) for one in some], True
        )
        return {
            "input_ids": ids,
            "attention_mask": seen,
            "labels": padded("labels", UNSUPERVISED),
        }

    how = TrainingArguments(
        output_dir=scratch,
        max_steps=cfg.steps,
        per_device_train_batch_size=cfg.batch_size,
        learning_rate=cfg.lr,
        lr_scheduler_type="linear",
        seed=cfg.seed,
        save_strategy="no",
        logging_steps=max(cfg.steps // 10, 1),
        report_to=[],
        disable_tqdm=cfg.quiet,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    trainer = Trainer(tuned, how, data_collator=batch, train_dataset=examples(rows))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return tuned.merge_and_unload(), losses[-1]


def examples(rows: Rows) -> list[dict[str, torch.Tensor]]:
    """Every row as Trainer wants it: labels are the supervised tokens alone."""
    found = []
    for start, end in zip(rows.offsets.tolist(), rows.offsets.tolist()[1:], strict=False):
        ids = rows.ids[start:end].to(torch.int64)
        labels = torch.where(rows.loss[start:end], ids, UNSUPERVISED)
        found.append({"input_ids": ids, "labels": labels})
    return found


if __name__ == "__main__":
    main()
