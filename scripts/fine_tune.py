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

import json
import math
import re
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from conf.errors import UserError
from conf.jsonl import parse_line, read_lines
from conf.rules import AboveZero, NotEmpty, OneOrMore, Seed, ZeroOrMore
from conf.schema import entry
from decode.models.load import TargetConfig, load_target
from decode.models.quantize import NONE
from decode.target import Target
from heads.checkpoint import staged
from scripts.common import files
from train.config import DataConfig
from train.texts.batches import Rows, load_rows

SENTENCE = re.compile(r"([.!?:\n])(?=\s|$)")
UNSUPERVISED = -100  # transformers' label of a token that is not taught
NUMPY_SEEDS = 1 << 32  # Trainer seeds numpy too, which takes no larger ones


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
    # cpu, cuda, or empty for what is there
    device: Literal["", "cpu", "cuda"] = ""
    # no progress bar
    quiet: bool = False

    def validate(self) -> list[str]:
        """Problems as "key: value; rule; fix"."""
        if self.target.quantize == NONE:
            return []
        return [
            f"target.quantize: {self.target.quantize}; a merged update needs whole weights; set "
            "target.quantize=none, and quantise the folder that comes out"
        ]


@entry("fine_tune", FineTuneConfig)
def main(cfg: FineTuneConfig) -> int:
    """Train, merge, write the folder."""
    out = Path(cfg.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out: {out} exists; give another folder")
    files.check_out(out.with_name(f".tmp-{out.name}"))  # OUT itself comes whole or not at all
    target = load_target(cfg.target, "float32", cfg.device or None)
    with tempfile.TemporaryDirectory() as scratch:
        rows = chats_of(cfg, target, Path(scratch))
        eos = target.eos_ids
        merged, loss = trained(cfg, target.model, rows, eos[0] if eos else 0, scratch)
    with staged(out) as stage:
        merged.save_pretrained(stage)
        target.tokenizer.save_pretrained(stage)
    print(f"{out}: {cfg.steps} steps on {len(rows.lengths):,} chats, loss {loss:.3f}")
    return 0


def chats_of(cfg: FineTuneConfig, target: Target, scratch: Path) -> Rows:
    """The chats as tokens; those that cannot be used are counted on standard error. Raises
    UserError where none can, in words of this command's keys."""
    given = Path(cfg.chats).expanduser()
    if not given.is_file():
        raise UserError(f"chats: no such file {given}; give a JSONL file of chats")
    read = shortened(given, cfg.sentences, scratch)
    data = DataConfig(
        path=str(read),
        max_length=cfg.max_length,
        held_out=0.0,
        cache=False,
        max_bad_fraction=1.0,
    )
    eos, context = target.eos_ids, target.context_length
    try:
        rows = load_rows(data, target.tokenizer, eos, target.vocab_size, context)
    except UserError as error:
        raise UserError(in_own_words(str(error), read, given)) from None
    if rows.bad:
        why = in_own_words(rows.reasons(), read, given)
        print(f"chats: {len(rows.bad):,} left out ({why})", file=sys.stderr)
    return rows


def in_own_words(text: str, read: Path, given: Path) -> str:
    """A message about training data, by what it is called here."""
    told = text.replace(str(read), str(given)).replace("data.path", "chats")
    return told.replace("data.max_length", "max_length")


def shortened(chats: Path, sentences: int, scratch: Path) -> Path:
    """The file, or one with only the first sentences of every answer. Raises UserError for a
    line that is no chat."""
    if not sentences:
        return chats
    lines: list[str] = []
    for number, line in read_lines(chats, "chats"):
        lines += [""] * (number - 1 - len(lines))  # blank ones, so that numbers stay
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
        lines.append(json.dumps(row | {"messages": messages}))
    files.write_text(scratch / chats.name, "".join(f"{line}\n" for line in lines))
    return scratch / chats.name


def brief(text: str, sentences: int) -> str:
    """The first sentences of a text."""
    ends = [found.end(1) for found in SENTENCE.finditer(text)]
    return text if len(ends) < sentences else text[: ends[sentences - 1]]


def trained(
    cfg: FineTuneConfig, model: Any, rows: Rows, pad: int, scratch: str
) -> tuple[Any, float]:
    """(the model with its LoRA merged, mean loss of the last steps). Raises UserError when it
    learns nothing but NaN."""
    from peft import LoraConfig, get_peft_model
    from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    if cfg.quiet:
        logging.disable_progress_bar()
    seed = cfg.seed % NUMPY_SEEDS
    set_seed(seed)  # the LoRA is drawn before Trainer does so itself
    model.requires_grad_(True)
    lora = LoraConfig(r=cfg.rank, lora_alpha=cfg.alpha, target_modules="all-linear")
    tuned = get_peft_model(model, lora)

    how = TrainingArguments(
        output_dir=scratch,
        max_steps=cfg.steps,
        per_device_train_batch_size=cfg.batch_size,
        learning_rate=cfg.lr,
        lr_scheduler_type="linear",
        seed=seed,
        save_strategy="no",
        logging_steps=max(cfg.steps // 10, 1),
        logging_nan_inf_filter=False,  # it would print a loss where there is none
        report_to=[],
        use_cpu=next(model.parameters()).device.type == "cpu",
        disable_tqdm=cfg.quiet,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    how._n_gpu = min(how.n_gpu, 1)  # of several GPUs each would take batch_size chats
    trainer = Trainer(tuned, how, data_collator=partial(batch, pad), train_dataset=examples(rows))
    trainer.remove_callback(PrinterCallback)  # which takes the bar's place, and is no quieter
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    merged = tuned.merge_and_unload()
    finite = all(bool(p.isfinite().all()) for p in merged.parameters())
    if not finite or not math.isfinite(losses[-1]):
        raise UserError(
            f"lr: {cfg.lr:g}; training ended with loss {losses[-1]:.3g} and weights that are "
            f"{'finite' if finite else 'no numbers'}; lower it"
        )
    return merged, losses[-1]


def batch(pad: int, some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Examples side by side, the shorter ones padded behind."""

    def padded(parts: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, True, padding_value=fill)

    ids = [one["input_ids"] for one in some]
    return {
        "input_ids": padded(ids, pad),
        "attention_mask": padded([torch.ones_like(one) for one in ids], 0),
        "labels": padded([one["labels"] for one in some], UNSUPERVISED),
    }


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
