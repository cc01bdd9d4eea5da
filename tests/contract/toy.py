"""A head that turns the last feature before each projection: what a new head costs."""

from dataclasses import dataclass

import torch

from heads.parallel.base import ParallelConfig, ParallelHead
from heads.parallel.drafter import AtOnce


@dataclass
class ToyConfig(ParallelConfig):
    kind: str = "toy"


@dataclass(kw_only=True)
class ToySaved(ParallelHead.Saved):
    config: ToyConfig


class Toy(ParallelHead):
    kind, Config, Saved = "toy", ToyConfig, ToySaved

    def __init__(self, cfg, *sizes):
        super().__init__(cfg, *sizes)
        self.turn = torch.nn.Parameter(torch.eye(self.width).repeat(cfg.heads, 1, 1))

    def projection(self, target):
        return self.proj @ self.turn

    def states(self, batch, target, feats, reads):
        return feats[reads]

    def drafter(self, target, draft=None):
        return ToyDrafter(self, target, self.form(target, draft))


class ToyDrafter(AtOnce):
    def logits(self, depth):
        return self.feats @ self.proj[:depth].transpose(1, 2)
