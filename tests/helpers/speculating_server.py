"""A small HTTP server of the completions API around this repository's own engine, sound or
with a rule that engines shipped.

    with serving(target, draft, "bonus from the draft's distribution") as url: ...

Requests that arrive together are decoded together. The answers have the form of vLLM's
completions with return_token_ids; prompt_logprobs come from a plain pass.
"""

from __future__ import annotations

import contextlib
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
from outrider.decode.engine import Request, generate
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.decode.verify import verify
from tests.helpers import wrong_rules

DEPTH = 2  # a longer draft is seldom accepted whole, and one defect shows there alone
TOGETHER = 0.01  # seconds that the decoder waits for further requests


RULES: dict[str, Any] = {
    "bonus from the draft's distribution": wrong_rules.bonus_from_the_draft,
    "rows mixed up above two": wrong_rules.rows_mixed_up,
    "typical acceptance": wrong_rules.typical_acceptance,
    "greedy at T > 0": wrong_rules.greedy_fallback,
    "late rejection": wrong_rules.late_rejection,
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
            stop = set(body.get("stop_token_ids", ()))  # a prefix of a sound answer is sound
            end = next((i for i, token in enumerate(item["tokens"]) if token in stop), None)
            item["tokens"] = item["tokens"] if end is None else item["tokens"][: end + 1]
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
