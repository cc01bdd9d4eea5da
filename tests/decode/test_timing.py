"""Where a run says its time went: every phase by a clock that only the part under test moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.decode import engine, records
from outrider.decode.cache import TreeCache
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.verify import walk

REQUESTED = [
    Request([5, 6, 7, 8, 5, 6, 7], 12, id=0),
    Request([9, 9, 9, 9], 12, id=1),
    Request([1, 2, 1, 2], 7, id=2),
]


@pytest.mark.parametrize(
    "sampling, batch_size", [(Sampling(), 1), (Sampling(1.0, repetition_penalty=1.2), 3)]
)
def test_every_phase_gets_its_own_seconds(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, batch_size: int
) -> None:
    target = load_target(TargetConfig(kind="tiny"), torch.float64)
    target.probe()  # else the first run does, by passes of its own
    target.pack_weights()
    now, drafter = [0.0], NGram(depth=4)

    def taking(seconds: float, function: Any) -> Any:
        def moved(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return function(*args, **kwargs)

        return moved

    for module in (engine, records):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(target, "prefill", taking(1000.0, target.prefill))
    monkeypatch.setattr(target, "score", taking(2.0, target.score))
    monkeypatch.setattr(drafter, "propose", taking(3.0, drafter.propose))
    monkeypatch.setattr(TreeCache, "commit", taking(11.0, TreeCache.commit))
    run = generate(
        target,
        drafter,
        REQUESTED,
        sampling,
        batch_size=batch_size,
        verify=taking(7.0, walk),
        eos_ids=(),
    )
    assert [len(g.token_ids) for g in run.generations] == [12, 12, 7]
    timing, passes = run.timing, run.timing.cycles
    admitted = -(-len(REQUESTED) // batch_size)
    assert (timing.draft_s, timing.target_s) == (3.0 * passes, 2.0 * passes)
    assert (timing.verify_s, timing.commit_s) == (7.0 * passes, 11.0 * passes)
    assert timing.prefill_s == 1007.0 * admitted
    phases = timing.draft_s + timing.target_s + timing.verify_s + timing.commit_s
    assert phases == timing.decode_s == timing.total_s - timing.prefill_s
    assert len(timing.cycle_s) == passes == len(timing.cycle_nodes)
    assert sum(timing.cycle_s) == timing.decode_s
