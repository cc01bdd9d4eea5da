"""Evaluation while training: decoded accepted length on held-out prompts decides which weights
are best/.
"""

from __future__ import annotations

import math
import signal
import time
from typing import Any

from safetensors import SafetensorError

from outrider.heads.checkpoint import save_head
from outrider.train.accept import NoRoom, decoded_acceptance
from outrider.train.checkpoint import State
from outrider.train.run import Run
from outrider.train.saving import requested_anywhere


def seen(state: State) -> dict[str, float]:
    """What the run took so far, for a line of metrics."""
    return {name: round(amount, 2) for name, amount in state.seen.items()}


def evaluate(run: Run) -> int:
    """Decode held-out prompts with the current weights, unless this step has been evaluated;
    write the figures, keep the best weights as OUT/best. Returns the signal that some rank was
    asked to stop by, 0 if none; an evaluation that a signal cut short leaves no trace."""
    state, log = run.state, run.log
    if not state.step or state.evaluated == state.step:
        return 0
    start = time.perf_counter()
    run.head.eval()
    try:
        found = decoded_acceptance(
            run.head,
            run.target,
            run.rows,
            run.cfg,
            run.accelerator,
            run.stop,
            run.room,
        )
        if found == {}:
            log.say(
                "no held-out prompts: accepted length is not measured (see data.held_out, "
                "eval.prompts)"
            )
    except NoRoom:
        # No error: the restarted run would meet it again at once.
        found = {}
        log.say(
            f"step {state.step}: not evaluated: it does not fit into memory; set eval.batch_size, "
            "eval.max_new_tokens or micro_batch lower, or eval.every=0"
        )
    finally:
        run.head.train()
    requested = requested_anywhere(run.stop, run.accelerator)
    if found is None:
        return requested or signal.SIGTERM
    state.evaluated = state.step
    if not found:
        return requested
    seconds = time.perf_counter() - start
    log.metrics(state.step, {"event": "eval", "seconds": round(seconds, 2), **found, **seen(state)})
    spread = f" [{found['low']:.2f}, {found['high']:.2f}]" if found["low"] is not None else ""
    log.say(
        f"step {state.step}: accepted length {found['accepted_length']:.2f}{spread}, "
        f"{found['shape']}, {found['cycles']} cycles, {seconds:.1f} s"
    )
    if found["accepted_length"] > state.best.get("accepted_length", -math.inf):
        state.best = _keep(run, found)
    log.evaluated(state.best)
    return requested


def _keep(run: Run, found: dict[str, Any]) -> dict[str, float]:
    """Leave these weights as OUT/best; what `best` is by then."""
    state = run.state
    if run.main:
        about = {"step": state.step, **found, "training": seen(state)}
        try:
            save_head(run.head, run.out / "best", run.target.identity, about)
        except (OSError, RuntimeError, SafetensorError) as error:
            run.log.say(f"step {state.step}: best/ not written ({error})")
            return state.best  # what best/ still holds
    return {"step": state.step, "accepted_length": found["accepted_length"]}
