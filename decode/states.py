"""Hybrid targets: attention beside layers that keep a recurrent or convolution state, one of a row
and not of each token. They take chains alone.

Such a state cannot be cut back to an accepted path: it is known only as a pass leaves it. Where
fewer tokens of a row were accepted than the pass has read, the row is put back, its keys and values
too, and the accepted tokens are read again at the head of its next pass; the logits are those
behind the last token and the draft. Of a row that was accepted whole nothing is read twice. When a
row falls more than BEHIND tokens back, one pass reads AT_ONCE tokens, for good, of every row that
lacks as many. Passes pad rows on their right alone, behind all that is asked, and no state is kept
of a row with padding: a recurrent layer would read it, and a mask does not keep it from decaying.

Shape letters: R live rows, n tokens of a pass, W tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.decode import devices
from outrider.decode.cache import TreeCache
from outrider.decode.tree import DraftTree

State = dict[tuple[str, int, int], Tensor]  # of (kind, layer, number in it): [rows, ..]
Taps = Sequence[int] | None  # None: the last hidden states in place of logits
Scored = tuple[Tensor, Tensor | None]  # logits [R, n, V], hidden states [R, n, taps, D]
# A pass over a token of each row and a chain behind it; third: where its logits are wanted [R, n].
Run = Callable[..., Scored]
BEHIND = 8  # most accepted tokens of a row that are read once more at the head of each pass
AT_ONCE = BEHIND // 2  # that are read for good when a row has more


class StateCache(TreeCache):
    """Keys and values, and the states of every live row.

    behind: per live row, committed tokens that are not in here yet, the first of ids [R, W].
    lengths: tokens that are. kept: the states of all live rows, `lengths` tokens on. single: a pass
    of several tokens forgets what was before it, so tokens are read one by one. tries: a pass may
    be followed by another without a commit. It is of one token that kernels write into the states
    that they are given; passes of several leave those as they were, which the probe makes sure of.
    """

    single = tries = False

    def __init__(self, *sizes: Any) -> None:
        """sizes: as of TreeCache."""
        shapes, max_rows, max_len, max_nodes, dtype, device = sizes
        super().__init__(shapes, max_rows, max_len, max_nodes + BEHIND, dtype, device)
        self.behind: list[int] = []
        self.ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.kept: State = {}
        self.state: State = {}  # of the rows of the pass under way
        self.after: dict[int, State] = {}  # what the pass left, so many tokens on

    # -- what layers ask of it in a pass

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("conv", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the columns of a layer's convolution [rows, C, T] behind those that it needs of
        the text before them, and keep the last."""
        key = ("conv", layer_idx, state_idx)
        before, new = self.state.get(key), conv_states.shape[-1]
        if before is None:  # a text begins
            size = conv_kernel_size or new
            whole = F.pad(conv_states, (max(0, size - new), 0))
        else:
            size = before.shape[-1]
            whole = torch.cat([before, conv_states], -1)
        self.state[key] = whole[..., -size:].clone()
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.get(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        key = ("recurrent", layer_idx, state_idx)
        self.state[key] = recurrent_states.to(self.state.get(key, recurrent_states).dtype)
        return self.state[key]

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the recurrent state under MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    # -- passes

    def open(self, start: int, stop: int, offset: int, new: int) -> None:
        """As of TreeCache. New rows begin without a state, the others where they were put back."""
        self._welcome()
        super().open(start, stop, offset, new)
        copies = self.tries and new == 1
        kept = _copy(self.kept) if copies else dict(self.kept)
        self.state = {} if start == self.rows else kept
        self.after = {new: self.state}

    def score(self, run: Run, last: Tensor, tree: DraftTree) -> Scored:
        """Return logits and hidden states behind the last committed token of each row [R] and its
        chain, by passes that `run` makes."""
        self._welcome()
        ids = torch.cat([last[:, None], tree.tokens], 1)
        if self.single:
            return self._one_by_one(run, ids)
        while max(self.behind) > BEHIND:
            self._catch_up(run)
        width = max(self.behind)
        if width == 0:
            self.ids = ids
            return run(last, tree)
        places = devices.send(self.behind, self.device)[:, None]
        places = places + torch.arange(ids.shape[1], device=self.device)
        ids = F.pad(self.ids[:, :width], (0, ids.shape[1])).scatter(1, places, ids)
        self.ids = ids
        logits, feats = run(ids[:, 0], DraftTree.chain(ids[:, 1:]), places)
        rows = torch.arange(self.rows, device=self.device)[:, None]
        return logits, None if feats is None else feats[rows, places]

    def _one_by_one(self, run: Run, ids: Tensor) -> Scored:
        """Read every token as if it was accepted, and keep what is behind each."""
        lengths, kept, after, parts = self.lengths, self.kept, {0: self.kept}, []
        for i in range(ids.shape[1]):
            self.kept = _copy(self.kept)  # a kernel for one token writes into it
            parts.append(run(ids[:, i], DraftTree.empty(self.rows, self.device)))
            self._keep([1] * self.rows)
            after[i + 1] = self.kept
        self.lengths, self.kept, self.after = lengths, kept, after
        self.offset = 0  # keys and values are where they belong
        return joined(parts, 1)

    def _catch_up(self, run: Run) -> None:
        """Read AT_ONCE tokens, for good, of the rows that lack as many."""
        ready = [behind >= AT_ONCE for behind in self.behind]
        first = torch.zeros(self.rows, 1, dtype=torch.int64, device=self.device)
        run(self.ids[:, 0], DraftTree.chain(self.ids[:, 1:AT_ONCE]), first)
        self._keep([AT_ONCE * row for row in ready])
        rest = self.ids.roll(-AT_ONCE, 1)
        self.ids = torch.where(devices.send(ready, self.device)[:, None], rest, self.ids)
        self.behind = [b - AT_ONCE * row for b, row in zip(self.behind, ready, strict=True)]

    # -- what is kept

    def _welcome(self) -> None:
        """Keep the states of rows that were prefilled since."""
        if new := len(self.lengths) - len(self.behind):
            self.behind += [0] * new
            self.ids = F.pad(self.ids, (0, 0, 0, new))
            old = self.kept or {key: state[:0] for key, state in self.state.items()}
            self.kept = {key: torch.cat([old[key], state]) for key, state in self.state.items()}

    def commit(self, path: Tensor, length: Tensor) -> None:
        """As of TreeCache, of chains alone. Raises ValueError for another path."""
        table = torch.cat([length[:, None], path], 1).tolist()
        if any(nodes[: max(0, count)] != [*range(count)] for count, *nodes in table):
            raise ValueError("a path that is no chain was accepted of a target with states")
        counts = [b + 1 + row[0] for b, row in zip(self.behind, table, strict=True)]
        kept = self._keep([count if count in self.after else 0 for count in counts])
        self.behind = [count - k for count, k in zip(counts, kept, strict=True)]

    def _keep(self, counts: list[int]) -> list[int]:
        """Let row b stand where the pass was after its first counts[b] tokens; 0: where it was
        before."""
        deepest = max(counts)
        if any(c and have < self.offset for c, have in zip(counts, self.lengths, strict=True)):
            rest = [[*range(c - 1)] + [-1] * (deepest - max(c, 1)) for c in counts]
            self._compact(rest, deepest - 1)
        for count in {*counts} - {0}:
            rows, state = [b for b, c in enumerate(counts) if c == count], self.after[count]
            if len(rows) < self.rows:
                index = devices.send(rows, self.device)
                state = {
                    key: old.index_copy(0, index, state[key][index])
                    for key, old in self.kept.items()
                }
            self.kept = state
        self.lengths = [have + c for have, c in zip(self.lengths, counts, strict=True)]
        return counts

    def select(self, rows: list[int]) -> None:
        self._welcome()
        super().select(rows)
        index = devices.send(torch.tensor(rows, dtype=torch.int64), self.device)
        self.kept = {key: state[index] for key, state in self.kept.items()}
        self.behind, self.ids = [self.behind[row] for row in rows], self.ids[index]


def committed(cache: TreeCache) -> list[int]:
    """Return how many tokens of every live row were committed: those in `cache`, and those that
    wait to be read."""
    behind = cache.behind if isinstance(cache, StateCache) else []
    return list(map(sum, itertools.zip_longest(cache.lengths, behind, fillvalue=0)))


def _copy(state: State) -> State:
    return {key: tensor.clone() for key, tensor in state.items()}


def cache_like(own: type, single: bool) -> type[StateCache]:
    """Return the cache for a model whose own is of class `own`, which MiniMax asks for. Nothing of
    that one is run: TreeCache calls no super()."""
    return type("StateCache", (StateCache, own), {"single": single})


def by_length(prefill: Callable[[list[Tensor]], Any], prompts: Sequence[Tensor]) -> Scored:
    """Return what `prefill` finds of prompts in passes over neighbours of one length."""
    steps = [prefill(list(run)) for _, run in itertools.groupby(prompts, len)]
    return joined([(step.logits, step.feats) for step in steps])


def joined(parts: Sequence[Scored], along: int = 0) -> Scored:
    """Return what was found of rows one below the other, or along 1: of tokens one behind the
    other. Hidden states of fewer tokens are padded on their right."""
    feats = [found for _, found in parts if found is not None]
    most = max((one.shape[1] for one in feats), default=0)
    feats = [F.pad(one, (0, 0, 0, 0, 0, most - one.shape[1])) for one in feats]
    return torch.cat([one for one, _ in parts], along), torch.cat(feats, along) if feats else None
