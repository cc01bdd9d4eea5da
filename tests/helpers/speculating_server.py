"""A small HTTP server of the completions API around this repository's own engine, sound or
with one of seven seeded defects or of the rules that engines shipped: what a certificate of a
running server must tell apart.

    with serving(target, draft, "bonus from the draft's distribution") as url: ...

Requests that arrive together are decoded together. The answers have the form of vLLM's
completions with return_token_ids; prompt_logprobs come from a plain pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from outrider.decode.draft_model import DraftModel
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.inverse_cdf import inverse_cdf
from outrider.decode.rng import ACCEPT
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.proofs.controls import field
from outrider.scripts.proofs.controls.catalogue import Mangled
from outrider.scripts.proofs.controls.row_rules import Path, TreeRow, by_row, descend
from outrider.scripts.proofs.controls.rules import typical_acceptance

DEPTH = 2  # a longer draft is seldom accepted whole, and one defect shows there alone
TOGETHER = 0.01  # seconds that the decoder waits for further requests


@by_row
def acceptance_by_softmax(row: TreeRow) -> Path:
    """A draft token is kept with the target's probability of it, whatever the draft's was."""
    slot = 0
    nodes: list[int] = []
    while True:
        r = row.p(slot)
        node = next(iter(row.kids(slot)), -1)
        if node < 0:
            return nodes, row.draw(r, slot)
        if not row.accept(r[row.tokens[node]], node):
            rest = (r - row.q(node, [])).clamp(min=0)
            return nodes, row.draw(rest if rest.sum() > 0 else r, slot)
        nodes.append(node)
        slot = node + 1


@by_row
def bonus_from_the_draft(row: TreeRow) -> Path:
    """Behind a whole draft the token comes from the distribution of the draft's last step."""
    return descend(
        row,
        final=lambda row, slot, r, rejected: row.q(slot - 1, []) if slot and not rejected else r,
    )


@by_row
def residual_not_renormalised(row: TreeRow) -> Path:
    """The residual is read as if it summed to one: what is missing falls on the last token."""

    def short(r: torch.Tensor, q: torch.Tensor, row: TreeRow) -> torch.Tensor:
        rest = (r - q).clamp(min=0)
        rest[-1] += 1 - rest.sum()
        return rest

    return descend(row, update=short)


@by_row
def one_number_twice(row: TreeRow) -> Path:
    """The number that decided acceptance also chooses the token in its place."""

    def again(row: TreeRow, weights: torch.Tensor, slot: int) -> int:
        kids = row.kids(slot)
        if not kids:
            return row.draw(weights, slot)
        u = row.rng.uniform(row.index, torch.tensor([kids[0]]), ACCEPT)  # type: ignore[attr-defined]
        return int(inverse_cdf(weights[None], u))

    return descend(row, end=again)


def untempered(tree: Any, temperature: float) -> Any:
    """The draft was drawn at the temperature and claims the distribution without it."""
    if tree.proposal is None:
        return tree
    distribution = tree.proposal.probs**temperature
    distribution = distribution / distribution.sum(-1, keepdim=True)
    return dataclasses.replace(
        tree, proposal=dataclasses.replace(tree.proposal, probs=distribution)
    )


RULES: dict[str, Any] = {
    "acceptance by softmax": acceptance_by_softmax,
    "bonus from the draft's distribution": bonus_from_the_draft,
    "residual not renormalised": residual_not_renormalised,
    "one random number used twice": one_number_twice,
    "rows mixed up above two": field.rows_mixed_up,
}
COOL = "temperature on the target's distribution alone"
CACHE = "every fifth repeated prompt answered from a cache"
DEFECTS = (*RULES, COOL, CACHE)
# What engines shipped; rows mixed up are among the defects.
SOFTLY = "argmax drafts judged softly"
WINDOW = 7  # draft tokens that must be accepted behind a deferred one
SHIPPED: dict[str, Any] = {
    "deferred acceptance": field.deferred_acceptance(WINDOW),
    "typical acceptance": typical_acceptance,
    "acceptance at a set rate": field.synthetic_acceptance,
    "greedy at T > 0": field.greedy_fallback,
    "late rejection": field.late_rejection,
    SOFTLY: "rejection",
}


class Decoder(threading.Thread):
    """Takes requests off a queue, those that wait together in one batch."""

    def __init__(self, target: Target, draft: Target | None, defect: str, depth: int) -> None:
        super().__init__(daemon=True)
        self.target, self.draft, self.defect, self.depth = target, draft, defect, depth
        self.waiting: queue.Queue[Any] = queue.Queue()
        self.drafts = self.drafted = self.accepted = 0
        self.places = [0] * depth
        self.cache: dict[Any, list[int]] = {}
        self.repeated = 0

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
            if self.defect == COOL and not sampling.greedy:
                heat = sampling.temperature
                drafter = Mangled(drafter, lambda tree, heat=heat: untempered(tree, heat))
            if self.defect == SOFTLY and not sampling.greedy:
                drafter = field.ArgmaxDrafts(drafter)
            known = RULES | SHIPPED
            rule = "rejection" if sampling.greedy else known.get(self.defect, "rejection")
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
                item["tokens"] = self._cached(sampling, found)
                item["done"].set()

    def _cached(self, sampling: Sampling, found: Generation) -> list[int]:
        """An answer, or the one from before."""
        key = (sampling, tuple(found.prompt_ids))
        self.repeated += key in self.cache
        first = self.cache.setdefault(key, found.token_ids)
        return first if self.defect == CACHE and self.repeated % 5 == 4 else found.token_ids


class Handler(BaseHTTPRequestHandler):
    """/v1/models, /v1/completions, /metrics."""

    decoder: Decoder

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        d = self.decoder
        if self.path == "/v1/models":
            self._send(json.dumps({"data": [{"id": "tiny", "owned_by": "vllm"}]}).encode())
        else:
            lines = [
                f"vllm:spec_decode_num_drafts_total {d.drafts}",
                f"vllm:spec_decode_num_draft_tokens_total {d.drafted}",
                f"vllm:spec_decode_num_accepted_tokens_total {d.accepted}",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}} {n}'
                    for k, n in enumerate(d.places)
                ),
            ]
            self._send("\n".join(lines).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if isinstance(body["prompt"], str):
            body["prompt"] = self.decoder.target.tokenizer(body["prompt"])["input_ids"]
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = self._distributions(body["prompt"], body["prompt_logprobs"])
        else:
            sampling = Sampling(
                body["temperature"], body.get("top_k", 0), body["top_p"], body.get("min_p", 0.0)
            )
            item = {
                "ids": body["prompt"],
                "limit": body["max_tokens"],
                "seed": body["seed"],
                "sampling": sampling,
                "done": threading.Event(),
            }
            self.decoder.waiting.put(item)
            item["done"].wait()
            choice["token_ids"], choice["prompt_token_ids"] = item["tokens"], body["prompt"]
            choice["text"] = self.decoder.target.tokenizer.decode(item["tokens"])
            if item["tokens"][-1] in self.decoder.target.eos_ids:
                choice["finish_reason"] = "stop"
        self._send(json.dumps({"choices": [choice]}).encode())

    def _distributions(self, ids: list[int], top: int) -> list[Any]:
        with torch.no_grad():
            rows = self.decoder.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
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
    handler = type("Bound", (Handler,), {"decoder": decoder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        decoder.waiting.put(None)
        server.shutdown()
        server.server_close()
