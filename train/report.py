"""What a run tells of a step: the live line, and its lines of metrics."""

from __future__ import annotations

from outrider.train.evaluation import seen
from outrider.train.memory import on_gpu, peak_bytes
from outrider.train.metrics import PARTS, shares
from outrider.train.run import Run


def report(run: Run, norm: float, rate: float) -> None:
    """The live line at every step, a line of metrics at every log_every-th."""
    state, sums = run.state, run.state.window
    mean = {k: (total / count if count else 0.0) for k, (total, count) in sums.items()}
    speed = sums["tokens"][0] / sums["seconds"][0]
    steps = sums["seconds"][1]
    accuracy = " ".join(f"{mean[k]:.2f}" for k in sorted(mean) if k.startswith("top1_"))
    left = (run.cfg.steps - state.step) * sums["seconds"][0] / steps
    run.log.live(
        state.step, f"loss {mean['loss']:.3f}  top-1 {accuracy or '-'}  {speed:,.0f} tokens/s", left
    )
    if run.due(run.cfg.log_every):
        plain = {k: round(v, 6) for k, v in mean.items() if k not in ("tokens", "seconds", *PARTS)}
        run.log.metrics(
            state.step,
            {
                **plain,
                "lr": rate,
                "grad_norm": round(norm, 6),
                "tokens_per_second": round(speed, 1),
                "supervised_per_second": round(sums["loss"][1] / sums["seconds"][0], 1),
                **run.flops.rates(speed, run.world),
                **shares(sums),
                **on_gpu(run.device),
                "peak_memory_bytes": peak_bytes(run.device),
                **seen(state),
                **({"skipped_rows": state.skipped} if state.skipped else {}),
            },
        )
        state.window = {}
