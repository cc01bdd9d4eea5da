"""What every draft head is: a module that hangs on a frozen target, whose forward *is* its
training loss.

A new head is one folder, with a subclass of Head and a YAML (docs/new-head.md).

Shape letters: B rows, T positions, D width of the target's features, A anchors, P nodes of
a level, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import grow
from outrider.decode.drafters import Drafter
from outrider.decode.grow import Form, Nodes
from outrider.decode.rng import Rng
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.tree import DraftTree, TreeShape
from outrider.heads import shapes, vocab
from outrider.heads.batch import Batch, LossOut, moved
from outrider.heads.config import HeadConfig as HeadConfig
from outrider.heads.names import DraftSpec
from outrider.heads.saved import Stored

__all__ = ["Batch", "Drafting", "Head", "HeadConfig", "LossOut"]


TAPS = "hidden_states[k] of transformers; num_layers = output after the final norm"


class Head(Stored):
    """A draft head. Subclasses set `kind`, `Config`, `Saved` (what head.json says) and
    `Drafts`, the class of its drafters, and define for_target, restored and forward.

    taps: which target features it reads; tap k means hidden_states[k] of transformers: 0 =
        embeddings, num_layers = output after the final norm.
    rate_narrows: whether its learning rate goes down with the width of the target.
    step: of the run, 0-based."""

    kind: ClassVar[str] = ""
    Config: ClassVar[type[HeadConfig]] = HeadConfig
    Drafts: ClassVar[type[Any]]
    rate_narrows: ClassVar[bool] = True
    taps: tuple[int, ...] = ()
    step = 0
    d2t: Tensor | None

    def __init__(self, cfg: Any) -> None:
        """cfg: its keys. Beside them a head has d2t, the draft vocabulary as [Vd] int64
        offsets (heads/vocab.py; None: the whole vocabulary), coverage, the share of the
        supervised tokens inside, and calibration, what `calibrate` has measured ({}
        before)."""
        super().__init__()
        self.cfg = cfg
        self.register_buffer("d2t", None)
        self.coverage = 1.0
        self.calibration: dict[str, Any] = {}
        self._rows: tuple[Tensor, Tensor | None] | None = None

    @classmethod
    def completed(cls, cfg: Any, target: Target, counts: Tensor | None = None) -> Any:
        """Its keys with those that they leave to the target and the data's `counts` (see
        for_target). Default: there are none. Raises UserError for a target that no such head
        can have."""
        return cfg

    @classmethod
    def for_target(cls, target: Target, cfg: Any, counts: Tensor | None = None) -> Self:
        """Return a fresh head in float32 on the target's device.

        counts: [V] int64, how often each token is supervised in the training data; None when
        there is no data (then no draft vocabulary can be chosen). Raises UserError for a
        configuration the target or the data cannot carry."""
        raise TypeError(f"{cls.__name__} must define for_target")

    def plan(self, batch: Batch, step: int) -> Any:
        """Return what `forward` wants to know of a batch on the CPU before it goes to a
        device, for `batch.plan`: everything that decides on shapes, so that the pass need
        not wait for the device. step: of the run, 0-based. Default: nothing."""
        return None

    def planned(self, batch: Batch) -> Any:
        """Return what `plan` has said of `batch`; of one that nobody asked about it says it
        now."""
        if batch.plan is not None:
            return batch.plan
        device = batch.ids.device
        return moved(self.plan(batch.to(torch.device("cpu")), self.step), lambda t: t.to(device))

    def forward(self, batch: Batch, target: Target) -> LossOut:
        """Return the training loss of one micro-batch."""
        raise TypeError(f"{type(self).__name__} must define forward")

    def compiles(self) -> list[tuple[Any, str]]:
        """Return what of `forward` may run compiled: (object, its name). Default: nothing."""
        return []

    def drafter(self, target: Target, draft: DraftSpec | None = None) -> Drafter:
        """Return a drafter over a copy of these weights in the target's dtype. draft: what
        is asked of it (`form`), None: nothing. Raises UserError as `form` does. Default: a
        `Drafts`."""
        return self.Drafts(self, target, self.form(target, draft))  # type: ignore[no-any-return]

    def form(self, target: Target, draft: DraftSpec | None = None) -> Form:
        """Return what a drafter drafts: what is asked for, and this head's own keys where
        that leaves them open. A head without the key `width` has dynamic trees only where a
        width is asked for; one of so many nodes is made wide enough to have them. A rank
        that the draft vocabulary has no token for is left out.

        Raises UserError for more levels than the head guesses."""
        requested, cfg, most = draft or DraftSpec(), self.cfg, self.deepest
        if most is not None and (requested.depth or 0) > most:
            asked = f"decode settings: {requested.depth} levels"
            raise UserError(f"{asked}, but the head guesses {most}; give fewer")
        shape = requested.shape or ("chain" if target.probe().states else cfg.shape)  # of hybrids
        depth = requested.depth or self.usual
        if shape == "chain":
            return Form.chain(depth)
        drawn = cfg.tree_draw == "sampled"
        nodes = requested.nodes or cfg.nodes
        static = self.tree(nodes, depth)
        ids = self.ids()
        known = target.vocab_size if ids is None else ids.numel()
        static = TreeShape(tuple(path for path in static.paths if max(path) < known))
        if not hasattr(cfg, "width"):
            if requested.width:
                nodes = max(nodes, len(static))
                return Form("tree", depth, nodes, static, requested.width, drawn)
            nodes = len(static)
            return Form("tree", static.depth, nodes, static, drawn=drawn)
        width = requested.width or cfg.width
        if requested.nodes and not requested.width:
            width = max(width, shapes.least_width(nodes, depth))
        return Form.tree(depth, nodes, width, static if drawn else None)

    @property
    def deepest(self) -> int | None:
        """Most levels of a draft. Default: None, as deep as one likes."""
        return None

    @property
    def usual(self) -> int:
        """Levels of a draft where nobody asks for a number of them."""
        return self.deepest or int(self.cfg.depth)

    def tree(self, nodes: int, depth: int) -> TreeShape:
        """Return the static tree of `nodes` nodes and `depth` levels: measured if
        calibrated, else a generic one."""
        return shapes.tree(self.calibration, nodes, depth)

    def teacher_forced(
        self, batch: Batch, target: Target, levels: int
    ) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Return what a draft of `levels` would be if every token before were the text's:
        (flat [m], level, logits [m, Vd]), the head's logits for the supervised tokens at
        batch.ids.reshape(-1)[flat] as the level-th (0-based) of a draft. Together all
        levels of all supervised tokens that the head can see; in any order. Default:
        nothing is known."""
        return iter(())

    def ids(self) -> Tensor | None:
        """[Vd] int64 ascending target ids of the draft vocabulary, None for the whole one."""
        return None if self.d2t is None else vocab.from_d2t(self.d2t)

    def choose_vocabulary(self, counts: Tensor | None, size: int) -> Tensor:
        """[size] int64 ascending: the tokens that are supervised most often; notes what they
        cover. counts: [V] int64.

        Raises UserError without counts, and for more tokens than were seen."""
        if counts is None:
            raise UserError(
                "head.draft_vocab: no token counts to choose from; set head.draft_vocab=0"
            )
        chosen = vocab.choose(counts, size)
        self.coverage = vocab.coverage(counts, chosen)
        return chosen

    def target_rows(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """Return the target's LM head over the draft vocabulary: weight [Vd, D] and bias
        [Vd] or None; gathered once."""
        if (
            self._rows is None
            or self._rows[0].device != target.device
            or self._rows[0].dtype != target.dtype
        ):
            ids, bias = self.ids(), getattr(target.lm_head, "bias", None)
            weight = target.lm_head_weight.detach()
            self._rows = (
                weight if ids is None else weight[ids],
                bias if ids is None or bias is None else bias[ids],
            )
        return self._rows

    def scaled_rows(self, target: Target) -> Tensor:
        """[Vd, D] the target's LM head over the draft vocabulary with its final scale
        inside; a softcap or a bias is left out (a softcap keeps the order of tokens, which
        is what a draft needs)."""
        rows, scale = self.target_rows(target)[0], target.head.scale
        return rows if scale == 1 else rows * scale

    def probs_rows(self, target: Target) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the target's LM head that its distribution is computed from
        (teacher.target_distribution)."""
        terms, rated = self.cfg.loss, getattr(self.cfg, "confidence", 0)
        if terms.mask == "argmax" or terms.tv or terms.lk or rated:
            return target.lm_head_weight.detach(), getattr(target.lm_head, "bias", None)
        return self.target_rows(target)

    @property
    def levels(self) -> int:
        """Count the levels of a draft that `calibrate` measures. Default: all, or one."""
        return self.deepest or 1

    def calibrate(self, batches: Iterable[Batch], target: Target) -> None:
        """Measure on held-out rows what decoding wants to know: acceptance by level and rank,
        and the static tree that follows from it, grown from hits of whole paths (levels are
        not independent). Tokens are the text's own."""
        found = [self._ranks(batch, target) for batch in batches]
        if found and sum(part.shape[0] for part in found):
            self.calibration = self.measure(torch.cat(found))

    @torch.no_grad()
    def _ranks(self, batch: Batch, target: Target) -> Tensor:
        """[A, levels] int64: rank of the right token at every level, shapes.RANKS for a
        miss, for each anchor t whose x_{t+2} is supervised; levels beyond the answer count
        as misses."""
        tokens, ids = batch.ids.reshape(-1), self.ids()
        table = torch.full((len(tokens), self.levels), shapes.RANKS, device=tokens.device)
        first = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for flat, level, z in self.teacher_forced(batch, target, self.levels):
            place = vocab.places(ids, tokens[flat])
            rank = (z > z.gather(1, place.clamp(min=0)[:, None])).sum(1).clamp_(max=shapes.RANKS)
            table[flat - 2 - level, level] = torch.where(place >= 0, rank, shapes.RANKS)
            if level == 0:
                first[flat - 2] = True
        return table[first]

    def measure(self, table: Tensor) -> dict[str, Any]:
        """Make the calibration that follows from ranks [A, levels] of the right tokens."""
        return shapes.measure(table)

    def begin_step(self, step: int) -> None:
        """Told before every update (0-based) of a run, for draws of the step."""
        self.step = step

    def check_loaded(self, target: Target) -> None:
        """Called once the weights are loaded from a folder. Raises UserError where no draft
        can be made with them. Default: nothing."""


class Drafting:
    """What the drafters of all trained heads share (decode.drafters.Drafter): their name
    and form, and how a draft grows, for which a subclass says what it guesses
    (decode.grow.LevelSource)."""

    def __init__(self, head: Head, target: Target, form: Form) -> None:
        self.name, self.form, self.shape = f"{head.kind}@{form.shape}", form, form.shape
        self.taps, self.max_depth, self.max_nodes = head.taps, form.depth, form.nodes
        self.ids, self.device = head.ids(), target.device

    @torch.inference_mode()
    def propose(self, budget: Tensor, sampling: Sampling, rng: Rng) -> DraftTree:
        """Return a draft no deeper than budget [B]."""
        return grow.draft(self, self.form, budget, sampling, rng)

    def draft_ids(self) -> Tensor | None:
        return self.ids

    def open(self, levels: int) -> Tensor:
        """Begin a draft: logits [B, 1, Vd] behind the last committed token."""
        raise TypeError("a subclass defines it")

    def level(self, nodes: Nodes) -> Tensor:
        """Go on with it: logits [B, P, Vd] of the children of P nodes."""
        raise TypeError("a subclass defines it")
