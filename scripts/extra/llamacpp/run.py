"""Runs inside llama.cpp's own environment (no import of this repository): one server on
loopback, until its standard input is closed.

    .venv-llamacpp/bin/python scripts/extra/llamacpp/run.py SETTINGS.json

Settings: model (GGUF), draft (GGUF or null), method (EAGLE3, SIMPLE), draft_tokens,
probabilistic, slots, context, threads, talk (log level; 5 writes every draft token to standard
error), exact (K/V caches are float32 and flash attention is off: sums in the order of plain code;
else the engine's own).
Prints one JSON line {"url", "version", "system"} when the model is loaded; system: the instructions
that the build uses.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(path: str) -> None:
    """Start, tell the address, wait for the end of standard input, stop."""
    import xllamacpp as llama

    with open(path) as file:
        job: dict[str, Any] = json.load(file)
    params = llama.CommonParams()
    params.model.path = job["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = job["slots"]
    params.n_ctx = job["context"] * job["slots"]
    params.verbosity = job["talk"]
    params.endpoint_metrics = True
    params.warmup = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    if job["exact"]:
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    if job["draft"]:
        draft = params.speculative.draft
        kind = f"COMMON_SPECULATIVE_TYPE_DRAFT_{job['method']}"
        params.speculative.types = [getattr(llama.common_speculative_type, kind)]
        draft.mparams.path = job["draft"]
        draft.n_max = job["draft_tokens"]
        draft.p_min = 0.0
        draft.probabilistic = job["probabilistic"]
        if job["exact"]:
            draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
    server = llama.Server(params)
    said = {"url": server.listening_address, "version": llama.__version__}
    print(json.dumps(said | {"system": llama.get_system_info().strip(" |")}), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(sys.argv[1])
