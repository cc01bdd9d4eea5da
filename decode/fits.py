"""Whether requests, prompts and drafts fit the target and its cache: asked before anything is
written, and said in a line where they do not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.cache import TreeCache
from outrider.decode.records import Request
from outrider.decode.tree import DraftTree


class Room(Protocol):
    """What a target has room for, see decode.scorer.Scorer."""

    context_length: int
    first_range: int | None
    vocab_size: int


def unfit(target: Room, size: int, new: int) -> str:
    """Why a prompt of `size` tokens cannot have an answer of `new`; empty when it can. An answer
    may be ended by the context, but not by the end of LongRoPE's first range."""
    if size >= target.context_length:
        return f"has {size} tokens and the target's context holds {target.context_length}"
    if target.first_range and size + new > target.first_range:
        return (
            f"has {size} tokens, and {new} new ones cross {target.first_range}, where the "
            f"target's rotary embedding changes (LongRoPE): {target.first_range - size} would fit"
        )
    return ""


def longest_answer(request: Request, index: int, target: Room) -> int:
    """Tokens that request number `index` may get: those it asks for, as far as the target's
    context goes.

    Raises UserError for a prompt that is empty, fills the context or leaves the vocabulary, and
    for a text that would cross LongRoPE's first range."""
    longest = max(len(request.prompt), len(request.uncond or ()))
    if not -(1 << 63) <= request.id < 1 << 63:
        raise UserError(
            f"request {index}: its id {request.id} is no 64-bit number; give one below 2**63"
        )
    if not request.prompt:
        raise UserError(f"request {index}: the prompt is empty; give at least one token")
    if why := unfit(target, longest, request.max_new_tokens):
        raise UserError(f"request {index}: the prompt {why}; shorten the prompt")
    vocab = target.vocab_size
    wrong = next(
        (t for t in (*request.prompt, *(request.uncond or ())) if not 0 <= t < vocab), None
    )
    if wrong is not None:
        raise UserError(
            f"request {index}: token {wrong} lies outside the target's vocabulary "
            f"0..{vocab - 1}; "
            "tokenize the prompt with the target's own tokenizer"
        )
    return min(request.max_new_tokens, target.context_length - longest)


def check_sizes(max_rows: int, max_len: int, max_nodes: int, context: int) -> None:
    """Raise UserError for a cache without rows or tokens, or beyond the target's `context`."""
    if max_rows < 1 or max_len < 1 or max_nodes < 0:
        raise UserError(
            f"cache: {max_rows} rows of {max_len} tokens and {max_nodes} nodes; give "
            "at least 1, 1 and 0"
        )
    if max_len > context + max_nodes:
        raise UserError(
            f"cache: {max_len} tokens per row exceed the target's context of "
            f"{context}; "
            "ask for fewer new tokens or shorten the prompt"
        )


def check_prompts(cache: TreeCache, rows: list[Tensor], context: int) -> None:
    """Raise UserError when the 1-D prompts `rows`, one per new live row, cannot join the
    live ones.
    """
    if not rows:
        raise UserError("prefill: no prompt; give at least one")
    if cache.rows + len(rows) > cache.max_rows:
        raise UserError(
            f"cache: {cache.rows} live rows and {len(rows)} new ones exceed its "
            f"{cache.max_rows} rows; "
            "make it larger or wait until rows leave"
        )
    for row, prompt in enumerate(rows):
        if prompt.dim() != 1 or len(prompt) == 0:
            raise UserError(
                f"prompt {row}: shape {tuple(prompt.shape)}; give at least one "
                "token, as a 1-D tensor"
            )
        if len(prompt) > context:
            raise UserError(
                f"prompt {row}: {len(prompt)} tokens exceed the target's context of "
                f"{context}; shorten it"
            )
        if len(prompt) > cache.max_len:
            raise UserError(
                f"prompt {row}: {len(prompt)} tokens exceed the cache's "
                f"{cache.max_len} per row; "
                "make the cache longer or shorten the prompt"
            )


def check_depth(cache: TreeCache, tree: DraftTree, context: int) -> None:
    """Raise UserError when the draft of a live row would reach beyond the target's
    `context` positions.
    """
    for row, depth in enumerate(_depths(tree)):
        end = max(cache.physical[row * cache.width : (row + 1) * cache.width])
        if end + depth >= context:
            raise UserError(
                f"context: row {row} holds {end} tokens, and a draft of depth "
                f"{depth} behind the last one "
                f"exceeds the target's {context} positions; cap depth or stop this row"
            )


def check_chain(tree: DraftTree, reason: str) -> None:
    """Raise UserError for a tree that is no chain. reason: why the target takes no others."""
    node = torch.arange(tree.width, device=tree.parents.device)
    used = node < tree.size[:, None]
    wrong = ((tree.parents != node - 1) & used).any(1)
    if bool(wrong.any()):
        raise UserError(
            f"tree: row {int(wrong.nonzero()[0])} is no chain, and this target takes "
            "chains only "
            f"({reason}); use a chain drafter"
        )


def _depths(tree: DraftTree) -> list[int]:
    """Levels of each row's draft, padding left out."""
    node = torch.arange(tree.width + 1, device=tree.tokens.device)
    depths: list[int] = (
        torch.where(node <= tree.size[:, None], tree.positions(), 0).amax(1).tolist()
    )
    return depths
