"""Heads of every trainer by one scorer: on held-out rows teacher-forced, on unseen prompts
decoded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.decode import stats
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.heads import load_head
from outrider.heads.base import Batch, Head
from outrider.heads.interop import detect
from outrider.heads.interop.reading import read_folder
from outrider.heads.names import DraftSpec
from outrider.scripts.common.prompts import Prompt, question_ids
from outrider.train.stored.features import CachedTarget, FeatureStore
from outrider.train.texts.batches import JoinedRows, held_out_batches

SHAPES = {
    "chain": DraftSpec(shape="chain", depth=3),
    "tree": DraftSpec(shape="tree", nodes=16),
}
HELD_BATCH = 4  # rows


def loaded(folder: Path, target: Target) -> Head:
    """A head that was trained here, or a peer's checkpoint."""
    if (folder / "head.json").is_file():
        return load_head(folder, target).eval()
    foreign = read_folder(folder)
    return detect(foreign, "auto").read(foreign, target).eval()


@dataclass
class Scorer:
    """What heads are scored on. rows: their held-out ones are, features from `store`. prompts:
    unseen ones, answers of at most `tokens` at T = 0."""

    target: Target
    rows: JoinedRows
    store: FeatureStore
    prompts: Sequence[Prompt]
    tokens: int
    held: int

    def batches(self) -> Iterator[tuple[Batch, CachedTarget]]:
        """Held-out rows with their stored features."""
        for batch in held_out_batches(self.rows, self.held, HELD_BATCH):
            yield batch, CachedTarget(self.target, self.store, batch)

    @torch.no_grad()
    def held_out(self, head: Head) -> dict[str, list[float]]:
        """Of each step of the training-time test: cross-entropy with the target's distribution over
        the draft vocabulary, and the share of places where the best token is the data's. Once as
        this repository trains (the data's token lies in the draft vocabulary), once over all."""
        found: dict[str, list[float]] = {}
        kept = head.cfg
        for mask in ("token", "all"):
            head.cfg = dataclasses.replace(kept, loss=dataclasses.replace(kept.loss, mask=mask))
            sums: dict[str, tuple[float, float]] = {}
            for batch, target in self.batches():
                for key, (total, count) in head(batch, target).stats.items():
                    so_far = sums.get(key, (0.0, 0.0))
                    sums[key] = so_far[0] + float(total), so_far[1] + float(count)
            for name in ("loss", "top1"):
                steps = sorted(k for k in sums if k.startswith(f"{name}_"))
                values = [sums[k][0] / sums[k][1] if sums[k][1] else math.nan for k in steps]
                found[f"{name}_{mask}"] = [round(v, 5) for v in values]
        head.cfg = kept
        return found

    def decoded(self, head: Head, shape: str) -> list[list[int]]:
        """Accepted tokens, the bonus token counted, of every clean cycle of every prompt."""
        if shape == "tree":
            head.calibrate(self.batches_as_read(), self.target)
        drafter = head.drafter(self.target, SHAPES[shape])
        requests = [
            Request(question_ids(self.target.tokenizer, prompt.turns[0]), self.tokens, id=i)
            for i, prompt in enumerate(self.prompts)
        ]
        run = generate(
            self.target, drafter, requests, Sampling(temperature=0.0), batch_size=8, seed=0
        )
        return [[cycle.accepted + 1 for cycle in stats.split(a).clean] for a in run.generations]

    def batches_as_read(self) -> Iterator[Batch]:
        """Held-out rows, which calibration reads with the target itself."""
        return held_out_batches(self.rows, 8, HELD_BATCH)
