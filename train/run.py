"""What a training run works with, from its first step to its last."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.batch import Batch
from outrider.heads.parity import PassLimits
from outrider.train.checkpoint import Saver, State
from outrider.train.compiled import Compiled
from outrider.train.config import TrainConfig, over, planned_steps
from outrider.train.data.batches import BatchPlan, JoinedRows
from outrider.train.data.passes import Limits, Made, ahead
from outrider.train.features import CachedTarget, FeatureStore
from outrider.train.log import Log
from outrider.train.measure import Flops
from outrider.train.metrics import Clock, Shared, Sums, exchange
from outrider.train.signals import Stop


@dataclass
class Run:
    """A run between its first step and its last. What of it decides the next step: state,
    plan, rows, head, optimizer; everything else watches, keeps or reports.

    head: what is trained. model: the head as it is called, wrapped in DDP on several ranks.
    store: features that are read in place of the target's pass. state: the state of the run.
    compiled: what of its passes is.
    ready: the rows of the steps before this one are there (train.following); 0: not asked yet.
    """

    cfg: TrainConfig
    accelerator: Accelerator
    stop: Stop
    target: Target
    rows: JoinedRows
    plan: BatchPlan
    head: Head
    model: nn.Module
    store: FeatureStore | None
    optimizer: torch.optim.Optimizer
    state: State
    log: Log
    saver: Saver
    clock: Clock
    flops: Flops
    profile: torch.profiler.profile | None
    compiled: Compiled
    ready: int = 0

    @functools.cached_property
    def feed(self) -> Generator[Made, None, None]:
        """The batches of this rank, from the next step to the one before `ready`."""
        return ahead(self.make, self.passes, range(self.state.step, self.ready or sys.maxsize))

    def save(self, wait: bool) -> None:
        """Save this step, unless that is done. wait: until it is on disk."""
        if self.state.step:
            with self.clock.part("save"):
                self.saver.save(self.state, self.head, self.optimizer, self.target.identity, wait)

    def passes(self, step: int) -> list[list[int]]:
        """Return the rows of this rank's passes of a step."""
        cfg = self.cfg
        limits = Limits(cfg.micro_batch, cfg.micro_tokens, cfg.shard_target)
        return self.plan.shares(step, self.world, limits)[self.rank]

    def make(self, step: int, rows: Sequence[int]) -> tuple[Batch, Any]:
        """Return what a pass over some rows needs of the host, where a GPU copies it
        without a wait."""
        batch = self.rows.batch(rows)
        batch = dataclasses.replace(batch, plan=self.head.plan(batch, step))
        target = CachedTarget(self.target, self.store, batch) if self.store else self.target
        return batch.pinned() if self.device.type == "cuda" else batch, target

    def exchange(self, sums: Sums) -> Shared:
        """Add up what the ranks have found in a step: one exchange, one wait for the
        device."""
        spent = self.state.seen.get("train_seconds", 0.0)
        signal = self.stop.requested
        return exchange(sums, self.gradients, signal, spent, self.accelerator, self.clock)

    @property
    def out(self) -> Path:
        """The run folder."""
        return Path(self.cfg.out_dir)

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes and speaks."""
        return bool(self.accelerator.is_main_process)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return int(self.accelerator.num_processes)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def planned(self) -> int:
        """The steps of the whole run; with `minutes`, as many as its pace so far leads to."""
        state, cfg = self.state, self.cfg
        return planned_steps(state.step - 1, state.spent, cfg.steps, cfg.minutes)

    @property
    def last(self) -> bool:
        """Whether all steps are done, or no further one fits into `minutes`."""
        state, cfg = self.state, self.cfg
        return state.step >= cfg.steps or over(state.step - 1, state.spent, cfg.minutes)

    @property
    def room(self) -> PassLimits:
        """What a pass of calibration or of the parity gate may take: no more than one of
        training, and eight rows at most."""
        rows = min(8, self.cfg.micro_batch or max(1, self.cfg.batch_size // self.world))
        return PassLimits(rows, self.cfg.micro_tokens or rows * self.cfg.data.max_length)

    @functools.cached_property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [p for p in self.head.parameters() if p.requires_grad]

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the trained parameters that have one."""
        return [p.grad for p in self.trained if p.grad is not None]

    def due(self, every: int) -> bool:
        """Return whether this step is a multiple of `every` (0 = never), or the last."""
        return self.last or bool(every and self.state.step % every == 0)

    def close(self) -> None:
        """Wait for the save in flight, end the feed, the trace and the trackers."""
        self.feed.close()
        if self.profile is not None:
            self.profile.stop()
        self.saver.close()
        self.log.trackers.finish()
