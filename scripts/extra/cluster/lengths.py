"""How long the rows of the data are: those of data.path where it is there, else assumed."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from outrider.decode.models.facts import context_length, eos_ids
from outrider.decode.models.load import TargetConfig, load_tokenizer, source_folder
from outrider.scripts.extra.cluster.config import DryRunConfig
from outrider.scripts.extra.cluster.models import Model
from outrider.train.texts.batches import BatchPlan, JoinedRows, load_rows

LEAST = 16  # tokens of an assumed row
MOST_STEPS, FEWEST_STEPS, DRAWN = 64, 4, 4096  # steps that are looked at, and rows of all of them


@dataclass(frozen=True)
class Lengths:
    """How long rows are.

    known: rows that were read, None: they are assumed, log-normal of the mean `mean` and the
    spread `sigma`. longest: tokens at which they are cut.
    """

    known: JoinedRows | None
    longest: int
    mean: float
    sigma: float

    @property
    def source(self) -> str:
        """Where they are from, for the reader."""
        if self.known is not None:
            return f"those of {self.known.name}, {self.mean:,.0f} tokens on average"
        shape = f"log-normal of mean {self.mean:,.0f} and sigma {self.sigma:g}"
        return f"{shape}, cut at {self.longest:,} (assumed)"

    @functools.cached_property
    def tokens(self) -> float:
        """Of a row on average, cut."""
        if self.known is None:
            return statistics.mean(self.quantiles(DRAWN))
        return float(self.known.lengths[~self.known.held].double().mean())

    def quantiles(self, count: int) -> list[int]:
        """Lengths of so many assumed rows, spread evenly over their distribution: chance has
        no part in them."""
        place = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        deviate = self.sigma * torch.special.ndtri(place) - self.sigma**2 / 2
        lengths = (self.mean * deviate.exp()).round().long()
        return lengths.clamp(min(LEAST, self.longest), self.longest).tolist()

    def cut(self, longest: int) -> Lengths:
        """The same with rows that are cut at fewer tokens."""
        if self.known is None or longest >= self.longest:
            return replace(self, longest=longest)
        offsets = torch.tensor([0, *self.known.lengths.clamp(max=longest).tolist()]).cumsum(0)
        return replace(self, longest=longest, known=replace(self.known, offsets=offsets))

    def per_epoch(self, cfg: DryRunConfig) -> int:
        """Batches of an epoch."""
        if self.known is None:
            return cfg.rows // cfg.batch_size
        return BatchPlan(self.known, cfg.batch_size, 1, cfg.seed, cfg.data.skip).per_epoch

    def plan(self, cfg: DryRunConfig, batch_size: int) -> tuple[BatchPlan, int]:
        """Batches of so many rows, and how many of them to look at. Raises UserError where
        there are too few rows."""
        window = cfg.data.window
        steps = min(MOST_STEPS, max(FEWEST_STEPS, DRAWN // batch_size))
        if self.known is not None:
            plan = BatchPlan(self.known, batch_size, window, cfg.seed, cfg.data.skip)
            return plan, min(steps, plan.per_epoch)
        rows = blank(self.quantiles(batch_size * window * -(-steps // window)))
        return BatchPlan(rows, batch_size, window, cfg.seed), steps


def lengths_of(cfg: DryRunConfig, model: Model) -> tuple[Lengths, DryRunConfig]:
    """Of the data of a run; and its keys, where they were read with those that say what is
    known of them. Raises UserError for data or a tokenizer that the run would refuse."""
    context = context_length(model.text)
    longest = min(cfg.data.max_length, context)
    paths = [Path(path).expanduser() for path in cfg.data.paths if path]
    if not paths or not all(path.exists() for path in paths):
        return Lengths(None, longest, cfg.row_tokens, cfg.row_sigma), cfg
    tokenizer = load_tokenizer(cfg.target)
    stops = SimpleNamespace(generation_config=_generation(cfg.target), config=model.text)
    size = int(model.text.vocab_size)
    rows = load_rows(cfg.data, tokenizer, eos_ids(stops, tokenizer), size, context)
    train = BatchPlan(rows, cfg.batch_size, cfg.data.window, cfg.seed, cfg.data.skip).train
    logs = rows.lengths[train].double().log()
    message = replace(
        cfg,
        rows=logs.numel(),
        row_tokens=round(float(logs.exp().mean())),
        row_sigma=float(logs.std(correction=0)),
        supervised=rows.supervised / rows.ids.numel(),
        answers=cfg.answers or 0,
    )
    return Lengths(rows, longest, message.row_tokens, message.row_sigma), message


def _generation(cfg: TargetConfig) -> Any:
    """A target's generation config, None where it has none of its own."""
    if cfg.kind == "tiny":
        return None
    try:
        return GenerationConfig.from_pretrained(source_folder(cfg, weights=False))
    except OSError:
        return None


def blank(lengths: Sequence[int], supervised: float = 0.0) -> JoinedRows:
    """Rows of ones of these lengths, the last part of each supervised; 0: no token is there."""
    size, offsets = torch.tensor(lengths), torch.tensor([0, *lengths]).cumsum(0)
    lines, no = torch.arange(len(lengths)), torch.zeros(len(lengths), dtype=torch.bool)
    ids = torch.ones(int(offsets[-1]) if supervised else 1, dtype=torch.int32)
    loss = torch.zeros_like(ids, dtype=torch.bool)
    if supervised:
        begin = offsets[:-1] + (size.double() * (1 - supervised)).long()
        loss = torch.arange(len(ids)) >= begin.repeat_interleave(size)
    return JoinedRows("assumed rows", ids, loss, offsets, lines, no, [])
