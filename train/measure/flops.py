"""The arithmetic that a head's training costs beyond the target's: what heads are given alike
where they are compared."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from decode.target import Target
from heads.base import Head
from train.texts.batches import Plan, Rows

ROWS = 4  # rows of the micro-batch that is counted


def draft_flops(target: Target, head: Head, rows: Rows, plan: Plan) -> float:
    """Floating point operations of one step of a head, forward and backward, without those of
    the target's own pass; counted on a few rows of the first batch and scaled by tokens."""
    chosen = plan.batch(0)[:: max(1, plan.batch_size // ROWS)][:ROWS]
    batch = rows.batch(chosen).to(target.device)
    head.train()
    with FlopCounterMode(display=False) as whole:
        head(batch, target).sum.backward()
    with FlopCounterMode(display=False) as alone:
        target.features(batch.ids, batch.mask, head.taps or (target.num_layers,))
    for weight in head.parameters():
        weight.grad = None
    per_step = float(rows.lengths[plan.train].double().mean()) * plan.batch_size
    flops = whole.get_total_flops() - alone.get_total_flops()
    return flops / int(batch.mask.sum()) * per_step
