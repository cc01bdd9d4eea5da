"""Evaluation while training: the drafter that the current weights make, on held-out
prompts, through the same engine that serves. Loss and accuracy are teacher-forced; the
accepted length found here decides which weights are best/. At the end of a run the parity
gate: decoding must find what training has learned.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from outrider.conf.errors import CheckFailed
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.stats import acceptance_by_position, accepted_length, split
from outrider.heads.checkpoint import load_head, save_head
from outrider.heads.names import DraftSpec
from outrider.heads.parity import check
from outrider.train.data.batches import JoinedRows, held_out_batches
from outrider.train.run import Run
from outrider.train.signals import Stop


class _Requested(Exception):
    """A signal came while prompts were being decoded."""


def requested_anywhere(stop: Stop, accelerator: Accelerator) -> int:
    """Return the signal that some rank was asked to stop by, 0 if none; the same truth on
    every rank."""
    if accelerator.num_processes == 1:
        return stop.requested
    mine = torch.tensor([float(bool(stop.requested))], device=accelerator.device)
    anywhere = bool(accelerator.reduce(mine, "sum").item())  # type: ignore[union-attr]
    return anywhere and (stop.requested or signal.SIGTERM)


def evaluate(run: Run) -> int:
    """Decode held-out prompts with the current weights, unless this step has been evaluated;
    write the figures, keep the best weights as OUT/best. Returns the signal that some rank was
    asked to stop by, 0 if none; an evaluation that a signal cut short leaves no trace."""
    state, log = run.state, run.log
    if not state.step or state.evaluated == state.step:
        return 0
    start = time.perf_counter()
    run.head.eval()
    found = decoded_acceptance(run)
    run.head.train()
    requested = requested_anywhere(run.stop, run.accelerator)
    if found is None:
        return requested or signal.SIGTERM
    state.evaluated = state.step
    if not found:
        log.say(f"step {state.step}: no held-out prompts (see data.held_out, eval.prompts)")
        return requested
    seconds = round(time.perf_counter() - start, 2)
    log.metrics(state.step, {"event": "eval", "seconds": seconds, **found, **state.took()})
    spread = f" [{found['low']:.2f}, {found['high']:.2f}]" if found["low"] is not None else ""
    log.say(
        f"step {state.step}: accepted length {found['accepted_length']:.2f}{spread}, "
        f"{found['shape']}, {found['cycles']} cycles, {seconds:.1f} s"
    )
    if found["accepted_length"] > state.best.get("accepted_length", -math.inf):
        state.best = _keep(run, found)
    return requested


def _keep(run: Run, found: dict[str, Any]) -> dict[str, float]:
    """Leave these weights as OUT/best; what `best` is by then."""
    state = run.state
    if run.main:
        about = {"step": state.step, **found, "training": state.took()}
        try:
            save_head(run.head, run.out / "best", run.target.identity, about)
        except (OSError, RuntimeError, SafetensorError) as error:
            run.log.say(f"step {state.step}: best/ not written ({error})")
            return state.best  # what best/ still holds
    return {"step": state.step, "accepted_length": found["accepted_length"]}


# Decoding
# -------------------------------------------------------------------------------------------


def decoded_acceptance(run: Run) -> dict[str, Any] | None:
    """Return accepted length (bonus token counted) and acceptance by position on held-out
    prompts; {} without any, None on every rank where a signal came.

    Prompts are shared out among the ranks (not with a sharded target); each rank gets the
    whole result. Cut and loop cycles are left out of the figures and counted. Also
    calibrates the head on held-out rows, which shapes its tree. The ranks of a sharded
    target ask each other for a signal at every answer that grew.
    """
    rows, target, keys, accelerator = run.rows, run.target, run.cfg.eval, run.accelerator
    chosen = rows.held.nonzero()[: keys.prompts, 0].tolist()
    if not chosen:
        return {}
    requests = [Request(rows.prompt(row), keys.max_new_tokens, id=row) for row in chosen]
    # The ranks of a sharded target only run it together.
    alone = run.world == 1 or target.sharded

    def check_stop(*_: Any) -> None:
        if requested_anywhere(run.stop, accelerator) if target.sharded else run.stop.requested:
            raise _Requested

    shape = ""
    decoded: list[Generation | _Requested]
    try:
        batches = held_out_batches(rows, keys.calibration_rows, run.room.rows, run.room.tokens)
        run.head.calibrate((batch.to(target.device) for batch in batches), target)
        drafter = run.head.drafter(target, DraftSpec(shape=keys.shape))
        shape = drafter.shape
        answers = generate(
            target,
            drafter,
            requests if alone else requests[run.rank :: run.world],
            Sampling(temperature=keys.temperature),
            batch_size=keys.batch_size,
            seed=run.cfg.seed,
            on_tokens=check_stop,
        )
        decoded = [*answers.generations]
    except _Requested as requested:
        decoded = [requested]
    gathered = decoded if alone else gather_object(decoded)
    every = [g for g in gathered if isinstance(g, Generation)]
    return figures(every, shape) if len(every) == len(requests) else None


def figures(every: Sequence[Generation], shape: str) -> dict[str, Any]:
    """Return what answers tell that were drafted in a shape; {} where no cycle counts."""
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
        "unconditional": [p.unconditional.mean for p in acceptance_by_position(clean)],
    }


# The parity gate
# -------------------------------------------------------------------------------------------


def prompts_of(rows: JoinedRows, count: int) -> list[list[int]]:
    """Return prompts of `count` rows: held-out ones first, then others (the gate asks
    whether two computations agree, which any text can tell)."""
    order = [*rows.held.nonzero()[:, 0].tolist(), *(~rows.held).nonzero()[:count, 0].tolist()]
    return [rows.prompt(row) for row in order[:count]]


def gate(run: Run) -> None:
    """Compare head, engine and OUT/head; write OUT/parity.json, a line of metrics and the
    table.

    Rank 0 does it alone, unless the target is sharded over the ranks. A gate that this step
    has passed is not run again. Raises CheckFailed when they disagree.
    """
    keys, result, step = run.cfg.eval, run.out / "parity.json", run.state.step
    if run.target.sharded:
        run.accelerator.wait_for_everyone()  # head/ is written, and no rank has written a result
    if not keys.parity or not (run.target.sharded or run.main) or _passed(result, step):
        return
    if run.target.sharded:
        run.accelerator.wait_for_everyone()
    run.log.say(f"parity: training against decoding, on {keys.parity} prompts")
    found = check(
        run.head,
        run.target,
        prompts_of(run.rows, keys.parity),
        keys.max_new_tokens,
        room=run.room,
        reload=lambda: load_head(run.out / "head", run.target),
    )
    if run.main:
        result.write_text(json.dumps({"step": step, **found.json()}, indent=1) + "\n")
    run.log.metrics(step, {"event": "parity", **found.json()})
    for line in found.lines():
        run.log.say(line)
    if not found.passed:
        raise CheckFailed(
            f"parity: {run.out / 'head'}: {'; '.join(found.problems)}. The head is saved, but do "
            f"not trust its training figures; outrider validate checks the parts ({result})"
        )


def _passed(path: Path, step: int) -> bool:
    try:
        saved: dict[str, Any] = json.loads(path.read_text())
        return saved["step"] == step and saved["passed"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False
