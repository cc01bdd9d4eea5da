"""How fast servers of a target write the answers: a roofline of the GPU that is named.

A pass makes a token of every request. It reads the weights once, or computes with them if that
takes longer, and reads the keys and values of every request. What engines reach of that is
gpus.yaml's `served`, from published runs (tests/train/test_dry_run.py has them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.train.config import CONCURRENCY
from outrider.train.dry_run.memory import RESERVE
from outrider.train.dry_run.models import Model, active, numbers

SIXTEEN = 2  # bytes of a number: weights, keys and values as the target was published
TAKEN = 0.9  # of a GPU's memory, as vLLM does unless told otherwise
SOME = 32  # requests at a time, fewer leave a GPU idle


@dataclass(frozen=True)
class Servers:
    """count servers of width GPUs each, with so many requests at a time each. speed: tokens of
    answers a second of all of them, by the roofline."""

    count: int
    width: int
    requests: int
    speed: float


def cached(model: Model, tokens: float) -> float:
    """Bytes of the keys and values of a request of so many tokens."""
    text: Any = model.text
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    near = ["sliding" in kind for kind in getattr(text, "layer_types", None) or []]
    near = near or [False] * text.num_hidden_layers
    held = sum(min(tokens, text.sliding_window) if short else tokens for short in near)
    return 2 * SIXTEEN * (getattr(text, "num_key_value_heads", None) or heads) * size * held


def speed(
    model: Model, peak: float, bandwidth: float, requests: float, asked: float, answered: float
) -> float:
    """Tokens of answers a second of one server. peak: FLOP/s. bandwidth: bytes a second.
    asked, answered: tokens of a question and of its answer."""
    text = model.text
    table = text.vocab_size * text.hidden_size
    read = numbers(model.built) - (0 if text.tie_word_embeddings else table)
    products = 2 * (active(model) + table) * requests * (1 + asked / answered)
    seconds = max(SIXTEEN * read / bandwidth, products / peak)
    return requests / (seconds + requests * cached(model, asked + answered / 2) / bandwidth)


def servers(
    model: Model, gpus: int, gpu: tuple[float, float, float], asked: float, answered: float
) -> Servers | None:
    """So many GPUs as servers of the fewest that hold the target and SOME requests, or else
    of the most; None where none holds it. gpu: bytes of memory, FLOP/s, bytes a second."""
    best = None
    for width in (1 << n for n in range(gpus.bit_length())):
        room, peak, bandwidth = (width * amount for amount in gpu)
        free = TAKEN * room - SIXTEEN * numbers(model.built) - width * RESERVE
        requests = min(CONCURRENCY, int(free // cached(model, asked + answered / 2)))
        if requests > 0 and (best is None or best.requests < SOME):
            count = gpus // width
            rate = count * speed(model, peak, bandwidth, requests, asked, answered)
            best = Servers(count, width, requests, rate)
    return best
