"""/metrics in vLLM's names, so that dashboards and `scripts/check.py` read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as rendered

from outrider.decode.engine import Cycle
from outrider.scripts.serve_http.worker import Ended

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
MODEL = ["model_name"]


@dataclass(frozen=True)
class DraftCounts:
    """Draft tokens of an answer: cycles that drafted, levels drafted and accepted, and those
    accepted at each level. Levels are counted, as in decode/stats.py; a tree holds more nodes.
    """

    drafts: int
    drafted: int
    accepted: int
    by_position: list[int]
    tried: list[int]

    @classmethod
    def of(cls, cycles: list[Cycle]) -> DraftCounts:
        """Counted over the cycles that drafted, as engines count."""
        used = [cycle for cycle in cycles if cycle.proposed]
        deepest = max((cycle.proposed for cycle in used), default=0)
        return cls(
            len(used),
            sum(cycle.proposed for cycle in used),
            sum(cycle.accepted for cycle in used),
            [sum(cycle.accepted > d for cycle in used) for d in range(deepest)],
            [
                sum(cycle.proposed > d and cycle.accepted >= d for cycle in used)
                for d in range(deepest)
            ],
        )


class Meters:
    """What has been counted since the start. counts: (running, waiting) now."""

    def __init__(self, model: str, counts: Callable[[], tuple[int, int]]):
        self.registry, self.model = CollectorRegistry(), model

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"vllm:{name}", about, [*MODEL, *labels], registry=self.registry)

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(f"vllm:{name}", about, MODEL, registry=self.registry, buckets=SECONDS)

        def now(place: int) -> Callable[[], float]:
            return lambda: counts()[place]

        for place, name in enumerate(("running", "waiting")):
            gauge = Gauge(
                f"vllm:num_requests_{name}", f"requests {name}", MODEL, registry=self.registry
            )
            gauge.labels(model).set_function(now(place))
        self._prompt = counter("prompt_tokens", "prompt tokens read")
        self._generated = counter("generation_tokens", "tokens generated")
        self._success = counter("request_success", "answers given", ("finished_reason",))
        self._drafts = counter("spec_decode_num_drafts", "cycles that drafted")
        self._drafted = counter("spec_decode_num_draft_tokens", "levels drafted")
        self._accepted = counter("spec_decode_num_accepted_tokens", "draft tokens accepted")
        self._places = counter(
            "spec_decode_num_accepted_tokens_per_pos", "accepted at each level", ("position",)
        )
        for one in (self._drafts, self._drafted, self._accepted):
            one.labels(model)  # tells 0 before the first answer, as whoever takes differences wants
        self._first = seconds("time_to_first_token_seconds", "until the first token")
        self._queued = seconds("request_queue_time_seconds", "until the prompt was read")
        self._whole = seconds("e2e_request_latency_seconds", "until the last token")

    def count(self, ended: Ended, draft: DraftCounts, whole: float) -> None:
        """Add an answer that took `whole` seconds from its request to its end."""
        me = self.model
        self._prompt.labels(me).inc(len(ended.generation.prompt_ids))
        self._generated.labels(me).inc(ended.tokens)
        self._success.labels(me, ended.finish).inc()
        self._drafts.labels(me).inc(draft.drafts)
        self._drafted.labels(me).inc(draft.drafted)
        self._accepted.labels(me).inc(draft.accepted)
        for place, count in enumerate(draft.by_position):
            self._places.labels(me, str(place)).inc(count)
        self._first.labels(me).observe(max(ended.first, 0.0))
        self._queued.labels(me).observe(ended.waited)
        self._whole.labels(me).observe(whole)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return rendered(self.registry)
