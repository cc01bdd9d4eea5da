"""Decoded acceptance while training: the drafter that the current weights make, on held-out
prompts, through the same engine that serves. Loss and accuracy are teacher-forced; this is the
figure that ranks checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from outrider.decode.drafters import Drafter
from outrider.decode.engine import Generation, OnTokens, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.stats import acceptance_by_position, accepted_length, split
from outrider.decode.target import Target
from outrider.heads.base import Head
from outrider.heads.names import DraftSpec
from outrider.heads.parity import PassLimits
from outrider.train.config import EvalConfig, TrainConfig
from outrider.train.data.batches import JoinedRows, held_out_batches
from outrider.train.facts import is_no_memory
from outrider.train.saving import requested_anywhere
from outrider.train.signals import Stop


class _Requested(Exception):
    """A signal came while prompts were being decoded."""


class NoRoom(Exception):
    """Decoding did not fit into the memory of some rank; raised on every rank."""


def decoded_acceptance(
    head: Head,
    target: Target,
    rows: JoinedRows,
    cfg: TrainConfig,
    accelerator: Accelerator,
    stop: Stop | None = None,
    room: PassLimits | None = None,
) -> dict[str, Any] | None:
    """Accepted length (bonus token counted) and acceptance by position on held-out prompts; {}
    without any.

    Prompts are shared out among the ranks (not with a sharded target); each rank gets the
    whole result. Cut and loop cycles are left out of the figures and counted. Also calibrates
    the head on held-out rows, which shapes its tree.
    stop: a signal ends the decoding, and the result is None on every rank; the ranks of a
        sharded target ask each other at every answer that grew.
    room: of a pass of the calibration.
    Raises NoRoom on every rank when some rank ran out of memory.
    """
    keys = cfg.eval
    chosen = rows.held.nonzero()[: keys.prompts, 0].tolist()
    if not chosen:
        return {}
    requests = [Request(rows.prompt(row), keys.max_new_tokens, id=row) for row in chosen]
    # The ranks of a sharded target only run it together.
    alone = accelerator.num_processes == 1 or target.sharded
    mine = requests if alone else requests[accelerator.process_index :: accelerator.num_processes]

    def check(*_: Any) -> None:
        if stop is None:
            return
        if requested_anywhere(stop, accelerator) if target.sharded else stop.requested:
            raise _Requested

    shape = ""
    decoded: list[Generation | _Requested | NoRoom]
    try:
        calibrated(head, target, rows, keys, room or PassLimits())
        drafter = head.drafter(target, DraftSpec(shape=keys.shape))
        shape = drafter.shape
        decoded = [*_answers(target, drafter, mine, cfg, check)]
    except _Requested as requested:
        decoded = [requested]
    except (RuntimeError, MemoryError) as error:
        if target.sharded or not is_no_memory(error):  # other ranks would wait for this one
            raise
        decoded = [NoRoom()]
    gathered = decoded if alone else gather_object(decoded)
    if any(isinstance(g, NoRoom) for g in gathered):
        raise NoRoom
    every = [g for g in gathered if isinstance(g, Generation)]
    if len(every) < len(requests):
        return None
    return figures(every, shape)


def _answers(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    cfg: TrainConfig,
    check: OnTokens,
) -> list[Generation]:
    """What the target answers. check: called whenever an answer grew."""
    return generate(
        target,
        drafter,
        requests,
        Sampling(temperature=cfg.eval.temperature),
        batch_size=cfg.eval.batch_size,
        seed=cfg.seed,
        on_tokens=check,
    ).generations


def calibrated(
    head: Head, target: Target, rows: JoinedRows, cfg: EvalConfig, room: PassLimits
) -> None:
    """Calibrate the head on held-out rows, in passes that `room` holds."""
    batches = held_out_batches(rows, cfg.calibration_rows, room.rows, room.tokens)
    head.calibrate((batch.to(target.device) for batch in batches), target)


def figures(every: Sequence[Generation], shape: str) -> dict[str, Any]:
    """What answers tell that were drafted in a shape; {} where no cycle counts."""
    parts = [split(g) for g in every]
    clean = [p.clean for p in parts]
    length = accepted_length(clean)
    if not any(clean):
        return {}
    return {
        "shape": shape,
        "accepted_length": length.mean,
        "low": length.low,
        "high": length.high,
        "cycles": sum(map(len, clean)),
        "cut": sum(len(p.cut) for p in parts),
        "loop": sum(len(p.loop) for p in parts),
        "tokens": sum(len(g.token_ids) for g in every),
        "unconditional": [
            p.unconditional for p in acceptance_by_position(c for g in clean for c in g)
        ],
    }
