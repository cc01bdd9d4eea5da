"""Serve a target with its drafters behind an OpenAI-compatible API, and a page that shows the
gain.

    python scripts/serve.py target=smollm2 drafters=[runs/eagle3@tree,ngram]

/v1/models, /v1/chat/completions, /v1/completions (streamed or not), /metrics in vLLM's names,
/health, and at / a page on which one answer races itself. A request may name a drafter
("drafter": "ngram"; "none" is always there) and gets back what was drafted and accepted.
Requests join and leave a running batch.

What it is for: demonstrations, experiments, and the reference that other engines are checked
against (scripts/check.py, scripts/certify.py url=...). It is no production server:
one process, one model, no paged cache, no prefix cache.

It listens on this machine alone. host=ADDRESS needs an API key in the environment
(OUTRIDER_API_KEY). SIGTERM stops taking requests, ends the running answers and exits with 0.
"""

from __future__ import annotations

import copy
import os
import signal
import socket
import sys
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from outrider.conf.errors import UserError
from outrider.conf.schema import entry
from outrider.decode.models.load import load_target
from outrider.decode.models.memory import MemoryPlan
from outrider.decode.target import Target
from outrider.heads.names import NONE
from outrider.scripts.serve_http.config import ServeConfig

USUAL_LONGEST = 4096
PLANNED_NODES = 64  # of a draft tree, when memory is estimated


@entry("serve", ServeConfig)
def main(cfg: ServeConfig) -> int:
    """Load, listen, serve until SIGTERM or Ctrl-C."""
    try:
        from outrider.scripts.serve_http.app import Access, App
        from outrider.scripts.serve_http.connections import server
        from outrider.scripts.serve_http.requested import Service
        from outrider.scripts.serve_http.worker import Worker, WorkerLimits
    except ImportError as error:
        raise UserError(
            f"serve: {error.name} is not installed; pip install -e '.[serve]' in the clone"
        ) from None
    key = os.environ.get(cfg.key_env, "") if cfg.key_env else ""
    if not cfg.local and not key:
        raise UserError(
            f"host: {cfg.host} can be reached from other machines, and {cfg.key_env or 'key_env'} "
            "is empty; set an API key there, or leave host out"
        )
    bound = listening(cfg)
    rows = MemoryPlan(cfg.batch_size, cfg.longest or USUAL_LONGEST, PLANNED_NODES)
    target = load_target(cfg.target, cfg.dtype, cfg.device, rows)
    target.pack_weights()  # before anybody waits for it
    longest = longest_of(cfg, target)
    names = list(dict.fromkeys([*cfg.drafters, NONE]))
    worker = Worker(
        target, names, WorkerLimits(cfg.batch_size, longest, cfg.groups, cfg.queue), cfg.verify
    )
    service = Service(
        cfg.name or (target.identity.name if target.identity else "target"),
        tuple(names),
        longest,
        cfg.max_new_tokens,
        target.vocab_size,
        copy.deepcopy(target.tokenizer),  # the decoding thread reads the other one
    )
    app = App(worker, service, Access(key, cfg.local, cfg.max_body)).application()
    listener = server(app, cfg.batch_size + cfg.queue, cfg.patience, cfg.drain)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is ended
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"{service.model} with {', '.join(names)}: http://{shown}:{port}", flush=True)
    worker.start()
    try:
        listener.run([bound])
    finally:
        worker.close()
    return 0


def listening(cfg: ServeConfig) -> socket.socket:
    """A socket that is bound. Raises UserError where the port is taken or the host is not ours."""
    try:
        found = socket.getaddrinfo(cfg.host, cfg.port, type=socket.SOCK_STREAM)
        bound = socket.socket(found[0][0], socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(found[0][4])
        bound.listen(128)
    except OSError as error:
        raise UserError(
            f"port: {cfg.host}:{cfg.port} cannot be listened on ({error.strerror}); give another "
            "port=, or port=0 for any free one"
        ) from None
    return bound


def longest_of(cfg: ServeConfig, target: Target) -> int:
    """Tokens of a row. Raises UserError for more than the context."""
    if cfg.longest > target.context_length:
        raise UserError(
            f"longest: {cfg.longest} exceeds the target's context of {target.context_length}; set "
            "0 or less than that"
        )
    return cfg.longest or min(target.context_length, USUAL_LONGEST)


if __name__ == "__main__":
    main()
