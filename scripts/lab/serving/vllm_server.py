"""A vLLM server of our own on the CPU. (Named `vllm`, this file would stand before the package
for the scripts beside it that run in its environment.)"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.scripts.extra.llamacpp import process
from outrider.scripts.extra.llamacpp.process import Program, Running

START = 600.0  # seconds until it answers: its libraries alone take a minute on two cores
LOOKS_BACK = 4  # words of n-grams, at most


@dataclass(frozen=True)
class VllmServerSettings:
    """What a server runs. speculative: its speculative_config, None for plain decoding. slots:
    requests at a time. context: tokens of each. exact: float32 and eager; else bfloat16,
    compiled where it can be. Always without a prefix cache."""

    model: str
    speculative: dict[str, Any] | None = None
    slots: int = 8
    context: int = 1024
    threads: int = 1
    exact: bool = True


def ngram(draft_tokens: int) -> dict[str, Any]:
    """speculative_config of its n-grams: words of the text so far, no head."""
    return {
        "method": "ngram",
        "num_speculative_tokens": draft_tokens,
        "prompt_lookup_max": LOOKS_BACK,
        "prompt_lookup_min": 1,
    }


def running(
    python: Path, settings: VllmServerSettings, work: Path, name: str
) -> AbstractContextManager[Running]:
    """A server while the block runs. Raises UserError when it does not come up."""
    program = Program("vLLM", python, Path(__file__).with_name("run_vllm_server.py"), START)
    return process.running(program, asdict(settings), work, name)
