"""Verification: which path of the draft the target accepts, and the bonus token after it.

Every rule here leaves the target's distribution unchanged (docs/lossless.md has the proofs in a few
lines):

walk        trees of deterministic candidates: draw a token from the target's distribution and step
            down if it is a child. Optimal for such trees (E[accepted] = sum over nodes of the
            target's path probability), and what both rules below reduce to there.
rejection   top-down: siblings in draw order, accept with min(1, p(x) / q(x)), else p <-
            norm([p - q]+). Leviathan et al. 2211.17192 on chains; recursive rejection (RSD
            2402.14160, Sequoia 2402.12374) on trees. Each candidate carries its own q: a point
            mass, or the distribution it was drawn from.
traversal   leaf to root (2505.12398), generalised to a q per candidate; equals block
            verification (Sun et al. 2403.10444) on chains and accepts at least as much as
            rejection there.

The arithmetic of one level is decode/residual.py, in float64. What is not finite is reported to
the `Distribution`, whose `check` refuses the cycle before anything is committed. Which slots are
read, and when, is decode/frontier.py.

`rng` is asked for accept(p), first(p) and draw(weights) only: an enumerator in its place walks
every branch. Nothing here knows a temperature: T = 0 is a distribution with one token.

Shape letters: B rows, N nodes, C siblings, D levels, R rows in hand, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode import devices, residual
from outrider.decode.frontier import AllAtOnce, Judged, LevelByLevel, parents
from outrider.decode.rng import Coins
from outrider.decode.sampling import Distribution
from outrider.decode.tree import DraftTree


@dataclass(frozen=True)
class Seen:
    """A verdict as the host knows it, and what it stands for on the device.

    path: [B, D], length: [B] as in Verdict, on the host. proposed: [B] levels drafted. emitted:
    [B][D + 1] the path's tokens, then the bonus token, then padding; tokens: the same on the
    device, [B, D + 1], and slots: [B, D + 1] that each of them was predicted by. ranks: [B][D]
    sibling rank of each node of the path; drafters: [B][D] who proposed it, [B][0] without a
    union. doubtful: a row holds what must not be committed.
    """

    path: Tensor
    length: Tensor
    proposed: list[int]
    emitted: list[list[int]]
    tokens: Tensor
    slots: Tensor
    ranks: list[list[int]]
    drafters: list[list[int]]
    doubtful: bool


@dataclass(frozen=True)
class Verdict:
    """path: [B, D] int64 accepted node numbers from the top, -1 padded. length: [B]. bonus:
    [B] token ids.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor

    def to_host(self, tree: DraftTree, doubtful: Tensor) -> Seen:
        """All that the host wants to know of it, in one round trip. doubtful: [B] bool, rows that
        must not be committed."""
        rows, levels = self.path.shape
        path, layout = self.path.clamp(min=0), tree.layout
        tokens = tree.tokens.gather(1, path) if levels else self.path
        tokens = torch.cat([tokens, self.bonus[:, None]], 1)
        tokens = tokens.scatter(1, self.length[:, None], self.bonus[:, None])
        slots = F.pad(self.path + 1, (1, 0))
        there = torch.arange(tree.width, device=path.device) < tree.size[:, None]
        depth = torch.where(there, layout.depth + 1, 0)
        proposed = depth.amax(1) if tree.width else torch.zeros_like(self.length)
        of_node = [layout.rank.expand(rows, tree.width)]
        of_node += [] if tree.drafters is None else [tree.drafters]
        columns = [
            torch.stack([doubtful, self.length, proposed], 1),
            *(self.path, tokens),
            *(t.gather(1, path) if tree.width else path for t in of_node),
        ]
        table = torch.cat(columns, 1).cpu()
        head, path, emitted, ranks, *drafters = table.split([t.shape[1] for t in columns], 1)
        return Seen(
            path=path,
            length=head[:, 1],
            proposed=head[:, 2].tolist(),
            emitted=emitted.tolist(),
            tokens=tokens,
            slots=slots,
            ranks=ranks.tolist(),
            drafters=drafters[0].tolist() if drafters else [[]] * rows,
            doubtful=bool(head[:, 0].any()),
        )


def verify_chain(
    distributions: Tensor, proposals: Tensor, drafted: Tensor, coins: Tensor, last_coin: float
) -> list[int]:
    """The accept rule for one chain, to be read: what every rule below does for a tree and
    many rows.

    distributions: [K + 1, V] float64, the target's distribution before each drafted token and after
    the last. proposals: [K, V] float64, the distribution that each drafted token was drawn from.
    drafted: [K] int64. coins: [K] uniforms, one for each test; last_coin: the uniform of the last
    draw. Returns the tokens that are emitted: an accepted prefix, then one more.

    A token x comes out at some place with probability q(x) min(1, p(x) / q(x)) = min(p(x),
    q(x)) when it was drafted and accepted, and with probability (1 - sum of min(p, q)) times
    norm([p - q]+)(x) = [p(x) - q(x)]+ when another one was rejected. The two add up to p(x),
    whatever q is.
    """
    emitted: list[int] = []
    for p, q, token, coin in zip(
        distributions, proposals, drafted.tolist(), coins.tolist(), strict=False
    ):
        accept_probability = min(1.0, float(p[token] / q[token]))
        if coin < accept_probability:
            emitted.append(token)
            continue
        return [*emitted, _inverse((p - q).clamp(min=0), last_coin)]
    return [*emitted, _inverse(distributions[-1], last_coin)]


def _inverse(weights: Tensor, coin: float) -> int:
    """The first token whose cumulative weight exceeds `coin` times the sum of `weights` [V]."""
    cumulative = weights.cumsum(0)
    return int((cumulative > coin * cumulative[-1]).view(torch.uint8).argmax())


# --- the same for a tree and many rows


def verify(
    tree: DraftTree, distribution: Distribution, rng: Coins, rule: str = "traversal"
) -> Verdict:
    """Accepted path and bonus token of every row. rule: "rejection" or "traversal" (the
    default accepts more).

    Ask `distribution.check()` before anything is committed: it raises where a distribution, a
    chance or a residual was not finite.
    """
    if rule not in RULES:
        raise UserError(f"verify={rule}: unknown; use one of {', '.join(RULES)}")
    deterministic = tree.sampled is None or tree.proposal is None
    if deterministic or not tree.width:
        return walk(tree, distribution, rng)
    return RULES[rule](tree, distribution, rng)


def walk(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """For trees whose candidates are all deterministic: draw a token at a slot, by the slot's own
    number, and step down to the child that is that token."""
    drawn = tree.tokens.new_full((tree.tokens.shape[0], tree.width + 1), -1)
    node, up = torch.arange(tree.width, device=drawn.device), tree.parents + 1
    tokens = torch.where(node < tree.size[:, None], tree.tokens, -2)  # padding is nobody's child
    on = drawn == 0  # [B, N + 1] bool, slots whose node and all above it were drawn: none yet

    def missing() -> Tensor:
        return on & (drawn < 0)

    frontier = (
        LevelByLevel(tree, distribution) if devices.on_cpu(drawn) else AllAtOnce(tree, distribution)
    )
    for rows, slots in frontier.batches(missing):
        support, undefined = distribution.read(rows, slots)
        drawn[rows, slots] = support.token(rng.draw(support.probs, rows, slots - 1))
        wrong = drawn.gather(1, up) != tokens
        on = ~(tree.layout.mask[:, :, 1:] & wrong[:, None]).any(2)
        distribution.miss(rows, slots, undefined & on[rows, slots])
    end = torch.where(on, tree.positions(), -1).argmax(1)
    return _verdict(tree, end, drawn.gather(1, end[:, None])[:, 0])


def rejection(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """Top-down recursive rejection; needs the target's distribution only where the walk goes."""
    count, device = tree.tokens.shape[0], tree.tokens.device
    end = torch.zeros(count, dtype=torch.int64, device=device)  # slots that the walk has come to
    rows, judged = torch.arange(count, device=device), list[Judged]()
    while rows.numel() and (family := parents(tree, distribution, rows, end[rows])) is not None:
        reach = torch.ones_like(family.rows, dtype=torch.float64)
        accept, left, rest = residual.level(family.siblings, reach)
        family.report(distribution, reach, rest)
        rows, trying = family.rows, torch.ones_like(family.rows, dtype=torch.bool)
        for j, (kid, valid) in enumerate(zip(family.kids.T, family.valid.T, strict=True)):
            chance = torch.where(trying & valid, accept[:, j], 1.0)
            accepted = rng.accept(chance, rows, kid) & trying & valid
            end[rows[accepted]] = kid[accepted] + 1
            trying = trying & ~accepted
        if bool(trying.any()):  # some stay
            judged.append(Judged(family, left, rest))
        rows = rows[~trying]
    return _verdict(tree, end, LevelByLevel(tree, distribution).bonus(rng, end, judged))


def traversal(tree: DraftTree, distribution: Distribution, rng: Coins) -> Verdict:
    """Leaf to root. A slot is accepted with the probability that is left to it after all its
    children failed.

    Neither that nor the residual depends on a coin, so both are computed for every slot that can
    be reached, from the root down; then the first slot in post-order whose own coin falls below
    its probability ends the path. A leaf's distribution is needed only if it ends the path.
    """
    count, n = tree.tokens.shape
    every, layout = torch.arange(count, device=tree.tokens.device), tree.layout
    # [B, N + 2], the last column for slots that are not there; what remains of a slot comes to
    # stand in the place of its reach.
    reach = torch.zeros(count, n + 2, dtype=torch.float64, device=every.device)
    remains = reach[:, : n + 1]
    remains[:, 0] = 1
    lazy = devices.on_cpu(reach) or layout.inner is None
    frontier = LevelByLevel(tree, distribution) if lazy else AllAtOnce(tree, distribution)
    judged: list[Judged] = []
    for family, memory in frontier.families(reach):
        step = residual.level(family.siblings, reach[family.rows, family.slots], memory)
        reach[family.rows[..., None], family.below] = step.accept
        judged.append(Judged(family, step.residual, step.rest))
    judged = frontier.whole(judged)
    for family, _, rest in judged:
        family.report(distribution, reach[family.rows, family.slots], rest)
        own = torch.where(family.valid[..., 0], family.slots, n + 1)
        reach[family.rows, own] = rest
    remains[:, 0] = 1  # the root never rejects; rounding must not either
    order = layout.postorder.expand(count, n + 1)
    end = order.gather(1, rng.first(remains.gather(1, order), every, order - 1)[:, None])[:, 0]
    return _verdict(tree, end, frontier.bonus(rng, end, judged))


def _verdict(tree: DraftTree, end: Tensor, bonus: Tensor) -> Verdict:
    """end: [B] the slot at which the path of each row ends."""
    every = torch.arange(len(end), device=end.device)
    path = tree.layout.paths.expand(len(end), -1, -1)[every, end]
    return Verdict(path, (path >= 0).sum(1), bonus)


RULES = {"rejection": rejection, "traversal": traversal}
