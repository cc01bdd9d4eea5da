"""Hidden states that a serving engine captured, in place of a pass of the target here.

    vllm serve TARGET --max-model-len N --speculative-config '{"method": "extract_hidden_states", \\
        "num_speculative_tokens": 1, "draft_model_config": {"hf_config": \\
        {"eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32]}}}' --kv-transfer-config \\
        '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", \\
        "kv_connector_extra_config": {"shared_storage_path": "/shared/states"}}'

Each row of token ids is a request for one greedy token. vLLM answers with the path of a safetensors
file (hidden_states [T, F, D], token_ids [T]; hs-connectors' FP8 form has hidden_states_scales
[T, 1, 1] as well) and holds a lock on FILE.lock until the file is complete. Layer id k is
hidden_states[k] of transformers; of the last layer vLLM keeps the state before the final norm,
which is applied here. Files are removed once they are read.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import fcntl
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.conf.errors import UserError
from outrider.decode.models.shards import without_layers
from outrider.decode.target import Target
from outrider.scripts.data.server import AnswerRefused, GivenUp, OpenAIServer

FIRST = 3  # layers that are loaded here, to check the lowest that was captured
TRIES, SECONDS = 5, 600.0  # of a request
CLOSE = 0.1  # of a state's size, by which the lowest layers in another precision may differ
TIE = 0.5  # nats below the likeliest token at which another one may still be chosen in 16 bits
START = "start vLLM with eagle_aux_hidden_state_layer_ids"


class CapturedStates:
    """A server that captures; use as `with`. folder: where its files are seen from here.
    concurrency: requests at a time. target: embedding, first layers, final norm and LM head;
    layers: the ids that the server captures, ascending, the last of them the target's last."""

    def __init__(
        self, url: str, folder: Path, concurrency: int, target: Target, layers: Sequence[int]
    ) -> None:
        self.target, self.layers, self.folder = target, tuple(layers), folder
        self.concurrency, self.server = concurrency, OpenAIServer(url, "", SECONDS, TRIES)
        self.model = ""

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        self._runner.run(self.server.__aenter__())
        self.model = self._runner.run(self.server.model(""))
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner as runner, contextlib.suppress(Exception):
            runner.run(self.server.__aexit__())

    def states(self, rows: Iterator[list[int]]) -> Iterator[Tensor]:
        """Yield the hidden states [T, F, D] of each row, `concurrency` of them asked for ahead.
        Raises UserError for a server, a file or states that are not what was asked for."""
        loop = self._runner.get_loop()
        asked = ((ids, loop.create_task(self._row(ids))) for ids in rows)
        ahead = collections.deque(itertools.islice(asked, self.concurrency))
        first = True
        try:
            while ahead:
                ids, found = ahead.popleft()
                ahead.extend(itertools.islice(asked, 1))
                yield self._checked(first, ids, *self._runner.run(_done(found)))
                first = False
        finally:
            for _, found in ahead:
                found.cancel()

    async def _row(self, ids: list[int]) -> tuple[Path, dict[str, Tensor], int | None]:
        """Return (file, its tensors, the token that the server chose next) of a row."""
        body = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "repetition_penalty": 1,
            "return_token_ids": True,
        }
        try:
            reply = await self.server.ask("POST", "/completions", body)
            path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
            chosen = (reply["choices"][0].get("token_ids") or [None])[-1]
        except (AnswerRefused, GivenUp) as error:
            raise UserError(
                f"base_url: {self.server.base_url} answers no row of {len(ids)} tokens ({error}); "
                "its --max-model-len must be longer by one than data.max_length"
            ) from None
        except (AttributeError, KeyError, IndexError, TypeError):
            raise UserError(f"base_url: {self.server.base_url} gives no completions") from None
        if not isinstance(path, str):
            raise UserError(
                f"base_url: {self.server.base_url} captures no hidden states; start it with "
                "method extract_hidden_states and a --kv-transfer-config (docs/scaling.md)"
            )
        if chosen is not None and chosen not in range(self.target.vocab_size):
            raise UserError(f"base_url: {self.server.base_url} chose {chosen!r}, which is no token")
        name = Path(path).name  # never a path that a server chose
        if not name.isprintable():
            raise UserError(f"base_url: {self.server.base_url} names no file ({name!r})")
        file = self.folder / name
        deadline = time.monotonic() + SECONDS
        while _locked(file):
            if time.monotonic() > deadline:
                raise UserError(f"{file}.lock: held for {SECONDS:g} s; look at the server's log")
            await asyncio.sleep(0.02)
        return file, await asyncio.to_thread(_read, file), chosen

    def _checked(
        self,
        first: bool,
        ids: list[int],
        file: Path,
        tensors: dict[str, Tensor],
        chosen: int | None,
    ) -> Tensor:
        """Return the states of a row, the final norm applied, after they were checked."""
        states, theirs = tensors.get("hidden_states"), tensors.get("token_ids")
        if theirs is None or theirs.tolist() != ids:
            raise UserError(f"{file}: holds other tokens than were asked for; is it vLLM's own?")
        wanted = (len(ids), len(self.layers), self.target.hidden_size)
        if states is None or tuple(states.shape) != wanted:
            has = "none" if states is None else list(states.shape)
            raise UserError(
                f"{file}: holds hidden states {has}, not {list(wanted)} (tokens, layers, width); "
                f"{START} {list(self.layers)} and the target of this command"
            )
        if (scales := tensors.get("hidden_states_scales")) is not None:
            if tuple(scales.shape) != (len(ids), 1, 1):
                raise UserError(f"{file}: hidden_states_scales is {list(scales.shape)}")
            states = states.float() * scales
        if not bool(states.float().isfinite().all()):
            raise UserError(f"{file}: holds states that are not finite; serve in a wider dtype")
        states = states.to(self.target.device, self.target.dtype)
        if first:
            self._check_first_layer(file, ids, states[:, 0])
        raw = states[:, -1]
        normed = self._norm(raw)
        if chosen is not None:
            self._check_last(file, chosen, raw, normed)
        file.unlink()
        Path(f"{file}.lock").unlink(missing_ok=True)
        return torch.cat([states[:, :-1], normed[:, None]], 1).cpu()

    @torch.no_grad()
    def _norm(self, states: Tensor) -> Tensor:
        """Return states [T, D] after the final norm: a body without layers is that norm."""
        with without_layers(self.target.model):
            out = self.target.body(inputs_embeds=states[None], use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _check_first_layer(self, file: Path, ids: list[int], states: Tensor) -> None:
        """Raise UserError where the lowest captured layer is not that of a pass here."""
        lowest = self.layers[0]
        if lowest >= FIRST:
            return
        here = torch.tensor([ids], device=self.target.device)
        wanted = self.target.features(here, torch.ones_like(here, dtype=torch.bool), [lowest])
        apart = _apart(states, wanted[0, :, 0])
        if apart > CLOSE:
            raise UserError(
                f"{file}: layer {lowest} is not the target's ({apart:.0%} apart from a pass here); "
                f"{START} {list(self.layers)} (k is the output of layer k, counted from 1), and "
                "with this target and tokenizer"
            )

    def _check_last(self, file: Path, chosen: int, raw: Tensor, normed: Tensor) -> None:
        """Raise UserError where the last state does not lead to the token that the server chose,
        with the reading under which it does."""
        if self._leads(normed[-1:], chosen):
            return
        readings = {
            "it holds them after the final norm, not before": raw[-1:],
            "it holds them one token late": normed[-2:-1],
        }
        why = next((w for w, s in readings.items() if len(s) and self._leads(s, chosen)), "")
        raise UserError(
            f"{file}: its last state does not lead to the token that the server chose"
            f"{f' ({why})' if why else ''}; {START} {list(self.layers)}, of which the last is the "
            "target's last layer, and with the weights of target="
        )

    @torch.no_grad()
    def _leads(self, state: Tensor, chosen: int) -> bool:
        """Return whether `chosen` is the likeliest token after a state [1, D], or nearly."""
        logits = self.target.head.finish(self.target.lm_head(state))[0].float()
        return bool(logits.max() - logits[chosen] <= TIE)


async def _done(task: asyncio.Task[Any]) -> Any:
    return await task


def _locked(file: Path) -> bool:
    """Return whether a file is still being written."""
    try:
        with open(f"{file}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a complete file. Raises UserError for one that is none."""
    try:
        return load_file(file)
    except FileNotFoundError:
        raise UserError(
            f"captured: {file} is not there; give the folder that vLLM's shared_storage_path is "
            "on this machine, and look at the server's log for a write that failed"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{file}: unreadable ({error}); look at the server's log") from None


def _apart(states: Tensor, wanted: Tensor) -> float:
    """Return how far two states [T, D] are apart, relative to their size, at the median token."""
    gap = (states - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(gap.median())
