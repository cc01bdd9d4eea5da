"""What one rank's passes take, counted on fake tensors: memory by part, arithmetic, traffic,
launches, host reads; and how long passes of other sizes take.

The head's pass is counted whole; of the pieces in which its losses meet the vocabulary three
are run, since those between are alike. Of the target a few layers are run, and what a layer
adds is carried on to all of them: exact for memory, since nothing of a frozen target's layer
outlives it but the hidden states.

Parts of the memory: target, head (weights); gradients; activations (what the head's pass keeps
or makes); target's pass (features and what makes them); logits and distributions ([chunk, V]
blocks and the gradients made of them); batch; inside kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from outrider.conf.errors import UserError, first_line
from outrider.decode.models.load import torch_dtype
from outrider.decode.probe import layer_stack
from outrider.decode.target import Target
from outrider.heads import head_class, losses
from outrider.heads.base import Batch, Head
from outrider.heads.batch import moved
from outrider.scripts.extra.cluster.lengths import blank
from outrider.scripts.extra.cluster.models import Model
from outrider.scripts.extra.cluster.phantom import Phantom, phantom
from outrider.train.resolve import DRAFT_VOCAB

MOST_TOKENS = 1 << 20  # of a pass
RUN = 3  # pieces of a loss that are run
FEW = 4  # layers of the target that are run, and two more
TARGET, HEAD, GRADIENTS, PASS = "target", "head", "gradients", "activations"
FEATURES, LOGITS, BATCH = "target's pass", "logits and distributions", "batch"
WORK = ("flops", "traffic", "launches")
_passed: dict[Any, PassCosts] = {}
_requested: dict[str, bool] = {}


@dataclass(frozen=True)
class PassShape:
    """A pass: rows of so many tokens, all of them full, the last `supervised` of each taught."""

    rows: int
    tokens: int
    supervised: float

    def __post_init__(self) -> None:
        """Raises UserError for a pass whose places the phantom would not compute."""
        if self.rows * self.tokens >= MOST_TOKENS:
            raise UserError(
                f"micro_batch: a pass of {self.rows} x {self.tokens} tokens is above "
                f"{MOST_TOKENS:,}, more than can be counted; set micro_batch to fewer rows"
            )


@dataclass
class PassCosts:
    """Of one rank, bytes unless said otherwise.

    trained: parameters with gradient; head: weights and buffers; copy: the head in the target's
    dtype, which decodes. parts: at the peak of the head's pass, without the target's weights.
    features: peak of the target's pass alone. calibration: peak of the pass that evaluation and
    gate make. flops, traffic, launches: of a pass, the target's and the head's (forward and
    backward). reads: host reads of a pass, as file:line.
    """

    trained: int = 0
    head: int = 0
    copy: int = 0
    hidden_states: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    features: int = 0
    calibration: int = 0
    flops: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    launches: dict[str, float] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Of the head's pass, its gradients among it."""
        return sum(self.parts.values())


def full_batch(ghost: Phantom, shape: PassShape, head: Head | None = None) -> Batch:
    """Rows of the shape, see `ragged`."""
    return ragged(ghost, (shape.tokens,) * shape.rows, shape.supervised, 0, head)


def ragged(
    ghost: Phantom,
    lengths: Sequence[int],
    supervised: float,
    pack: int,
    head: Head | None = None,
) -> Batch:
    """Rows of ones of these lengths as a run makes a batch of them, on the watched device,
    their values known, with what `head` plans for them beforehand. supervised: the last part
    of each. pack: of a sequence, 0: they are padded."""
    with no_dispatch():
        plain = blank(lengths, supervised).batch(range(len(lengths)), pack)
    batch: Batch = moved(plain, ghost.own)
    if head is not None:
        batch = dataclasses.replace(batch, plan=head.plan(batch, 1))
    return batch.to(ghost.device)


@dataclass(frozen=True)
class PassSpec:
    """What is counted: the passes of a head with the typed keys `typed` on a target.

    room: of a pass of the calibration, None: there is none. accumulates: gradients of other
    passes of the step are there already. device: phantom or cpu. cost: seconds of an operation
    by its FLOPs and traffic."""

    model: Model
    typed: Any
    dtype: str
    shape: PassShape
    room: PassShape | None
    accumulates: bool
    device: str
    cost: Callable[[float, float], float]

    def target(self, ghost: Phantom, layers: int) -> Target:
        """With so many layers, of fake tensors."""
        with ghost.within(TARGET):
            return self.model.target(layers, torch_dtype(self.dtype), ghost.device)


def count(requested: PassSpec) -> PassCosts:
    """Count the passes. Raises UserError for a head that such a target cannot have."""
    layers, shape, room = requested.model.layers, requested.shape, requested.room
    few, more = _layers(requested)
    first = _passes(requested, few)
    if more == few:
        return first
    second, third = _features(requested, few), _features(requested, more)
    steps = (layers - few) / (more - few)
    for name in WORK:
        slope = getattr(third, name)[FEATURES] - getattr(second, name)[FEATURES]
        getattr(first, name)[FEATURES] += steps * slope
    first.features = round(third.features + (third.features - second.features) * (steps - 1))
    if room is not None:
        # What the other states of the target add where all of them are collected.
        grown = (third.features - second.features) * steps * room.rows / shape.rows
        first.calibration = max(first.calibration, round(second.features + grown))
    return first


def _layers(requested: PassSpec) -> tuple[int, int]:
    """Of the target, how many are run, and how many for what the others add."""
    few = max(FEW, getattr(requested.typed, "from_target_layers", 0) + 1)
    return min(requested.model.layers, few), min(requested.model.layers, few + 2)


def seconds(
    requested: PassSpec, trials: Sequence[Sequence[int]], pack: int
) -> list[dict[str, float]]:
    """Of passes over rows of these lengths: the target's and the head's, forward and backward.
    pack: see `ragged`. Raises UserError as `count`."""
    few, more = _layers(requested)
    first = _trials(requested, few, trials, pack)
    if more == few:
        return first
    less = _trials(requested, few, trials, pack, alone=True)
    most = _trials(requested, more, trials, pack, alone=True)
    ratio = (requested.model.layers - few) / (more - few)
    return [
        {part: amount + ratio * (b[part] - a[part]) for part, amount in trial.items()}
        for trial, a, b in zip(first, less, most, strict=True)
    ]


def _trials(
    requested: PassSpec,
    layers: int,
    trials: Sequence[Sequence[int]],
    pack: int,
    alone: bool = False,
) -> list[dict[str, float]]:
    """With `layers` layers of the target; alone: without a head."""
    found = []
    with phantom(requested.device, requested.cost) as ghost:
        target = requested.target(ghost, layers)
        head = None if alone else _head(ghost, target, requested.typed, requested.dtype)
        if head is not None:
            head.train().begin_step(1)
        for lengths in trials:
            with ghost.within(BATCH):
                batch = ragged(ghost, lengths, requested.shape.supervised, pack, head)
            _ask(requested.model, target, batch)
            ghost.restart()
            with _parts(ghost, target), ghost.within(PASS):
                if head is None:
                    target.features(batch.ids, batch.mask, (layers,), position=batch.position)
                else:
                    head(batch, target).sum.backward()
            found.append(_two(ghost.seconds))
    return found


def _passes(requested: PassSpec, layers: int) -> PassCosts:
    """With `layers` layers of the target."""
    with phantom(requested.device, requested.cost) as ghost:
        target = requested.target(ghost, layers)
        head = _head(ghost, target, requested.typed, requested.dtype)
        base = ghost.live[TARGET]
        trained = [p for p in head.parameters() if p.requires_grad]
        found = PassCosts(
            trained=sum(p.numel() for p in trained),
            head=ghost.live[HEAD],
            copy=sum(p.numel() for p in head.parameters()) * target.dtype.itemsize,
            hidden_states=states_of(head, layers),
        )
        for p in trained:
            if requested.accumulates:
                with ghost.within(GRADIENTS):
                    p.grad = torch.empty_like(p)
            p.register_post_accumulate_grad_hook(
                lambda p: ghost.belongs(p.grad, GRADIENTS) if p.grad is not None else None
            )
        with ghost.within(BATCH):
            batch = full_batch(ghost, requested.shape, head)
        head.train()
        head.begin_step(1)
        _ask(requested.model, target, batch)
        ghost.restart()
        with _parts(ghost, target), ghost.within(PASS):
            head(batch, target).sum.backward()
        found.parts = {k: int(v) for k, v in ghost.peak.items() if v}
        found.parts[TARGET] = found.parts.get(TARGET, 0) - base
        found.reads = ghost.list_reads()
        for name in WORK:
            setattr(found, name, _two(getattr(ghost, name)))
        found.features = found.peak
        for p in trained:
            p.grad = None
        if requested.room is not None:
            del batch
            found.calibration = _calibration(ghost, target, head, requested.room)
        return found


def _two(counter: dict[str, float]) -> dict[str, float]:
    """What the target's pass took, and everything else."""
    rest = sum((amount for part, amount in counter.items() if part != FEATURES), 0.0)
    return {FEATURES: counter.get(FEATURES, 0.0), PASS: rest}


def _calibration(ghost: Phantom, target: Target, head: Head, room: PassShape) -> int:
    """Bytes that a pass of calibration takes beside what is there."""
    batch = full_batch(ghost, room)
    head.eval()
    ghost.restart()
    held = sum(ghost.live.values())
    with _parts(ghost, target), ghost.within(PASS):
        head.calibrate([batch], target)
    return ghost.most - held


def _features(requested: PassSpec, layers: int) -> PassCosts:
    """The target's pass alone, four hidden states tapped; counted once for all recipes of one
    target and shape."""
    key = (
        requested.model.key,
        layers,
        requested.dtype,
        requested.shape,
        requested.device,
        requested.cost,
    )
    if key in _passed:
        return _passed[key]
    with phantom(requested.device, requested.cost) as ghost:
        target = requested.target(ghost, layers)
        with ghost.within(BATCH):
            batch = full_batch(ghost, requested.shape)
        _ask(requested.model, target, batch)
        ghost.restart()
        held = ghost.live[TARGET]
        taps = tuple(sorted({1, 2, min(3, layers), layers}))
        with ghost.within(FEATURES):
            target.features(batch.ids, batch.mask, taps)
        work: dict[str, Any] = {name: dict(getattr(ghost, name)) for name in WORK}
        _passed[key] = PassCosts(features=ghost.most - held, **work)
    return _passed[key]


def states_of(head: Head, layers: int) -> int:
    """Hidden states that a cache of features would hold for this head, the last among them;
    few layers may make several taps one."""
    return len(head.taps) + (layers not in head.taps) if type(head).reads_features else 0


def _ask(model: Model, target: Target, batch: Batch) -> None:
    """Let a target find out, before anything is counted, how its hidden states are read: one
    answer for all sizes of an architecture."""
    name = str(model.config["model_type"])
    if name in _requested:
        target.tapped_layers = layer_stack(target) if _requested[name] else []
        return
    target.features(batch.ids[:1, :8], batch.mask[:1, :8], (1, target.num_layers))
    _requested[name] = bool(target.tapped_layers)


def _head(ghost: Phantom, target: Target, typed: Any, dtype: str) -> Head:
    """A fresh head on a fake target; every token of the vocabulary counts as seen."""
    counts = ghost.own(torch.ones(target.vocab_size, dtype=torch.int64))
    if typed.draft_vocab is None:
        typed = dataclasses.replace(typed, draft_vocab=DRAFT_VOCAB)
    ghost.script["item"] = 0  # what is tried out while a head is made differs by nothing
    try:
        with ghost.within(HEAD):
            head = head_class(typed.kind).for_target(target, typed, counts)
            if dtype == "float64":
                head.double()
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"head: {typed.kind} cannot be made for this target ({first_line(error)}); choose "
            "another head"
        ) from error
    finally:
        ghost.script.clear()
    return head


def _carried_on(first: PassCosts, second: PassCosts, ratio: float) -> PassCosts:
    """The second with `ratio` times more of what makes the difference between both."""

    def on(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {k: on(a.get(k, 0), b.get(k, 0)) for k in {*a, *b}}
        return type(b)(b + (b - a) * ratio)

    sizes = ("trained", "head", "copy", "parts", "features", "calibration")
    for name in (*sizes, *WORK):
        setattr(second, name, on(getattr(first, name), getattr(second, name)))
    return second


@contextlib.contextmanager
def _parts(ghost: Phantom, target: Target) -> Iterator[None]:
    """Within, the target's features and the vocabulary's blocks are counted apart."""
    features, plain, pieces = target.features, losses._ChunkedLoss, losses.pieces

    def few(count: int, size: int) -> Iterator[slice]:
        """The first ones and the last, which may be shorter; those between are as the one
        before them."""
        whole = list(pieces(count, size))
        first, between = whole[: RUN - 1], whole[RUN - 1 : -1]
        for part in first:
            before = ghost.amounts()
            yield part
        if between:
            ghost.repeat(before, len(between))
        yield from whole[len(first) :][-1:]

    def apart(*args: Any, **kwargs: Any) -> Tensor:
        with ghost.within(FEATURES):
            return features(*args, **kwargs)

    class Labelled:
        @staticmethod
        def apply(*args: Any) -> Any:
            with ghost.within(LOGITS):
                return plain.apply(*args)  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(target, "features", apart),
        mock.patch.multiple(losses, _ChunkedLoss=Labelled, pieces=few),
    ):
        yield
