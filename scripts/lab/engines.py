"""Serve exported heads with a real engine and compare: `make engines` builds the environments
and runs this.

    python scripts/lab/engines.py drafters=[runs/medusa,runs/eagle1,runs/eagle3,runs/draft]

Every drafter is exported (scripts/export.py) and served by vLLM on the CPU at T = 0 in
float32. Its answers are compared with plain decoding of this repository token by token, its
own acceptance counters with ours under the same K, cycle for cycle. The speculators package
loads what was exported, and must give the same draft logits and the same tensors back. Writes
OUT (JSON), prints the table. Finished parts lie in WORK and are not done again; a drafter that
is not there is named, exit code 3.

    python scripts/lab/engines.py llamacpp drafters=[runs/eagle3_portable,runs/draft]

The same with llama.cpp (`make engines ONLY=llamacpp`): its server on loopback, prompts as
token ids; text, drafted and accepted tokens must be ours prompt by prompt.

    python scripts/lab/engines.py sampled drafters=[runs/draft] modes=[probabilistic,greedy]

Sampled speculation of llama.cpp, certified over HTTP as scripts/certify.py url=... does.

    python scripts/lab/engines.py race drafters=[none,runs/eagle3_portable]
    systems=[none,runs/eagle3]

llama.cpp and vLLM as they are fast, without a draft and with these, in one table with our engine
and transformers, prompt by prompt in turns.

    python scripts/lab/engines.py steps

What a step and a cycle cost in llama.cpp by draft tokens, build and type of weights, and the
accepted length from which on a draft pays. `make .venv-llamacpp-native/.installed` compiles
llama.cpp for this machine's CPU; where it is not there, the wheel alone is timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # else scripts/ comes first and shadows libraries
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from outrider.scripts.lab.serving import llamacpp, race, sampled, steps, vllm

PARTS = {
    "llamacpp": llamacpp.main,
    "sampled": sampled.main,
    "race": race.main,
    "steps": steps.main,
}

if __name__ == "__main__":
    part = PARTS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if part is None:
        vllm.main()
    else:
        part(sys.argv[2:])
