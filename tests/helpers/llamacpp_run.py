"""Runs inside llama.cpp's own environment (no import of this repository): one server on
loopback, until its standard input is closed.

    .venv-llamacpp/bin/python tests/helpers/llamacpp_run.py SETTINGS.json

Settings: model and draft (GGUF; draft "" for none), method (EAGLE3, SIMPLE), draft_tokens.
K/V caches are float32 and flash attention is off: sums in the order of plain code. Prints one
JSON line {"url"} when the model is loaded.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(path: str) -> None:
    """Start, print the address, wait for the end of standard input, stop."""
    import xllamacpp as llama

    with open(path) as file:
        job: dict[str, Any] = json.load(file)
    params = llama.CommonParams()
    params.model.path = job["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = 1
    params.n_ctx = 256
    params.endpoint_metrics = True
    params.warmup = False
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if job["draft"]:
        draft = params.speculative.draft
        kind = f"COMMON_SPECULATIVE_TYPE_DRAFT_{job['method']}"
        params.speculative.types = [getattr(llama.common_speculative_type, kind)]
        draft.mparams.path = job["draft"]
        draft.n_max = job["draft_tokens"]
        draft.p_min = 0.0
        draft.probabilistic = False
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    server = llama.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main(sys.argv[1])
