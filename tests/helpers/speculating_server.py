"""A small HTTP server of the completions API around this repository's own engine, sound or
with a rule that engines shipped.

    with serving(target, draft, "bonus from the draft's distribution") as url: ...

Requests that arrive together are decoded together. The answers have the form of vLLM's
completions with return_token_ids; prompt_logprobs come from a plain pass.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.verify import verify
from tests.helpers import wrong_rules
from tests.helpers.servers import answering, models, vllm

DEPTH = 2  # a longer draft is seldom accepted whole, and one defect shows there alone
TOGETHER = 0.01  # seconds that the decoder waits for further requests


RULES: dict[str, Any] = {
    "bonus from the draft's distribution": wrong_rules.bonus_from_the_draft,
    "rows mixed up above two": wrong_rules.rows_mixed_up,
    "typical acceptance": wrong_rules.typical_acceptance,
    "greedy at T > 0": wrong_rules.greedy_fallback,
}


class Decoder(threading.Thread):
    """Takes requests off a queue, those that wait together in one batch."""

    def __init__(self, target: Target, draft: Target | None, defect: str, depth: int) -> None:
        super().__init__(daemon=True)
        self.target, self.draft, self.defect, self.depth = target, draft, defect, depth
        self.waiting: queue.Queue[Any] = queue.Queue()
        self.drafts = self.drafted = self.accepted = 0
        self.places = [0] * depth

    def run(self) -> None:
        """Until None comes."""
        while (first := self.waiting.get()) is not None:
            time.sleep(TOGETHER)
            batch = [first]
            while not self.waiting.empty():
                batch.append(self.waiting.get())
            last = batch[-1] is None
            self._decode([b for b in batch if b is not None])
            if last:
                return

    def _decode(self, batch: list[Any]) -> None:
        alike: dict[Sampling, list[Any]] = {}
        for item in batch:
            alike.setdefault(item["sampling"], []).append(item)
        for sampling, items in alike.items():
            drafter: Any = DraftModel(self.draft, self.depth) if self.draft else NoDraft()
            rule = verify if sampling.greedy else RULES.get(self.defect, verify)
            requests = [Request(i["ids"], i["limit"], id=i["seed"]) for i in items]
            run = generate(
                self.target, drafter, requests, sampling, batch_size=len(items), verify=rule
            )
            for item, found in zip(items, run.generations, strict=True):
                for cycle in found.cycles:
                    self.drafts += cycle.proposed > 0
                    self.drafted += cycle.proposed
                    self.accepted += cycle.accepted
                    for d in range(cycle.accepted):
                        self.places[d] += 1
                item["tokens"] = found.token_ids
                item["done"].set()

    def answered(self, path: str, body: Any) -> Any:
        """/v1/models, /metrics and /v1/completions."""
        if path == "/v1/models":
            return models("vllm")
        if body is None:
            names = {"drafts": self.drafts, "draft_tokens": self.drafted}
            names |= {"accepted_tokens": self.accepted}
            lines = [f"vllm:spec_decode_num_{name}_total {n}" for name, n in names.items()]
            place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{place}{{position="{k}"}} {n}' for k, n in enumerate(self.places)]
            return "\n".join(lines)
        if isinstance(body["prompt"], str):
            body["prompt"] = self.target.tokenizer(body["prompt"])["input_ids"]
        if "prompt_logprobs" in body:
            rows = self._distributions(body["prompt"], body["prompt_logprobs"])
            return {"choices": [{"text": "", "finish_reason": "length", "prompt_logprobs": rows}]}
        settings = (body.get("top_k", 0), body["top_p"], body.get("min_p", 0.0))
        item = {
            "ids": body["prompt"],
            "limit": body["max_tokens"],
            "seed": body["seed"],
            "sampling": Sampling(body["temperature"], *settings),
            "done": threading.Event(),
        }
        self.waiting.put(item)
        item["done"].wait()
        tokens, stop = item["tokens"], set(body.get("stop_token_ids", ()))
        # a prefix of a sound answer is sound
        end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
        tokens = tokens[: end + 1]
        reply = vllm(tokens, tokens[-1] in self.target.eos_ids)
        text = self.target.tokenizer.decode(tokens)
        reply["choices"][0] |= {"prompt_token_ids": body["prompt"], "text": text}
        return reply

    @torch.no_grad()
    def _distributions(self, ids: list[int], top: int) -> list[Any]:
        rows = self.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        out: list[Any] = [None]
        for at in range(1, len(ids)):
            best = rows[at - 1].topk(min(top, rows.shape[1]))
            distribution = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            distribution[ids[at]] = float(rows[at - 1, ids[at]])
            out.append({str(t): {"logprob": v} for t, v in distribution.items()})
        return out


@contextlib.contextmanager
def serving(
    target: Target, draft: Target | None, defect: str = "", depth: int = DEPTH
) -> Iterator[str]:
    """The address of a server while the block runs. draft: None for plain decoding."""
    decoder = Decoder(target, draft, defect, depth)
    decoder.start()
    with answering(decoder.answered) as url:
        yield url
    decoder.waiting.put(None)
