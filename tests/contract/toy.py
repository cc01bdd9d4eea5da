"""A head that turns the last feature before each projection: what a new head costs."""

from dataclasses import dataclass

import torch

from heads.parallel.base import ParallelConfig, ParallelHead
from heads.parallel.drafter import AtOnce


@dataclass(frozen=True)
class ToyConfig(ParallelConfig):
    kind: str = "toy"


@dataclass(kw_only=True)
class ToySaved(ParallelHead.Saved):
    config: ToyConfig


class ToyDrafter(AtOnce):
    def logits(self, depth):
        return self.feats @ self.proj[:depth].transpose(1, 2)


class Toy(ParallelHead):
    kind, Config, Saved, Drafts = "toy", ToyConfig, ToySaved, ToyDrafter

    def make(self, device):
        turn = torch.eye(self.width, device=device).repeat(self.cfg.heads, 1, 1)
        self.turn = torch.nn.Parameter(turn)

    def projection(self, target):
        return self.proj @ self.turn

    def states(self, batch, target, feats, reads):
        return feats[reads]
