"""Hidden states that a server captured (vLLM's extract_hidden_states): the same features as a pass
here gives, and everything that is not what was asked for is refused in one line.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.scripts import cache_features
from outrider.scripts.data import captured
from tests.helpers.servers import answering, models
from tests.helpers.training import TINY, chats, tiny_target

SHAPE = {**TINY, "layers": 6}
LAYERS = [2, 3, 6]  # what the heads read by default, and the last
Tensors = dict[str, torch.Tensor]


def command(data: Path, out: Path, *more: str) -> list[str]:
    return [
        "target=tiny",
        *(f"target.{k}={v}" for k, v in SHAPE.items()),
        f"data.path={data}",
        "data.cache=false",
        f"out={out}",
        "heads=[eagle3]",
        "dtype=float32",
        "device=cpu",
        *more,
    ]


def run(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cache_features.main(words)
    return int(stop.value.code or 0)


class Capturing:
    """A server that does as vLLM 0.32's ExampleHiddenStatesConnector, or otherwise. layers: what it
    captures. late: seconds between its answer and the complete file, locked meanwhile. change,
    reply: what takes the place of its tensors and of parts of its answers; write: of a file."""

    def __init__(
        self,
        folder: Path,
        layers: Sequence[int] = LAYERS,
        late: float = 0.0,
        change: Callable[[Tensors], Tensors] = lambda tensors: {},
        reply: Callable[[Any], Any] = lambda reply: {},
        write: Callable[[Tensors, Path], None] = save_file,
        **shape: Any,
    ) -> None:
        self.folder, self.layers, self.late = folder, layers, late
        self.change, self.reply, self.write = change, reply, write
        self.target, self.numbers = tiny_target(**{**SHAPE, **shape}), itertools.count()
        self.one = threading.Lock()  # requests come at the same time

    def __call__(self, path: str, body: Any) -> Any:
        if body is None:
            return models("vllm") if path == "/v1/models" else None
        ids, before = torch.tensor([body["prompt"]]), []
        stack = self.target.model.model
        with self.one, torch.no_grad():
            hook = stack.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
            out = self.target.model(ids, output_hidden_states=True)
            hook.remove()
        every = [*out.hidden_states[:-1], before[0]]
        tensors = {
            "hidden_states": torch.stack([every[k][0] for k in self.layers], 1),
            "token_ids": ids[0],
        }
        file = self.folder / f"cmpl-{next(self.numbers)}.safetensors"
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.late)
            self.write(tensors | self.change(tensors), file)
            os.close(lock)

        threading.Thread(target=write).start()
        reply = {
            "choices": [{"text": "", "token_ids": [int(out.logits[0, -1].argmax())]}],
            "kv_transfer_params": {"hidden_states_path": f"/elsewhere/{file.name}"},
        }
        return reply | self.reply(reply)


@contextlib.contextmanager
def served(tmp_path: Path, **how: Any) -> Iterator[list[str]]:
    """The keys that name a server."""
    folder = tmp_path / "states"
    folder.mkdir()
    with answering(Capturing(folder, **how)) as url:
        yield [f"base_url={url}/v1", f"captured={folder}", "concurrency=3"]


def test_features_are_those_of_a_pass_here(tmp_path: Path) -> None:
    data = chats(tmp_path / "data.jsonl", 12)
    assert run(command(data, tmp_path / "here")) == 0
    with served(tmp_path, late=0.02) as keys:
        assert run(command(data, tmp_path / "there", *keys)) == 0
    here, there = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("here", "there"))
    assert [path.name for path in here] == [path.name for path in there] != []
    for mine, theirs in zip(map(load_file, here), map(load_file, there), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(theirs[name], mine[name], atol=1e-5, rtol=1e-4)
    assert not [*(tmp_path / "states").iterdir()], "a disk of fixed size must do"


def fp8(tensors: Tensors) -> Tensors:
    """The form of hs-connectors."""
    states = tensors["hidden_states"].float()
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    small = (states / scales).to(torch.float8_e4m3fn)
    return {"hidden_states": small, "hidden_states_scales": scales}


def test_the_form_with_scales_is_read(tmp_path: Path) -> None:
    data = chats(tmp_path / "data.jsonl", 4)
    assert run(command(data, tmp_path / "here")) == 0
    with served(tmp_path, change=fp8) as keys:
        assert run(command(data, tmp_path / "there", *keys)) == 0
    for name in (tmp_path / "here").glob("*.safetensors"):
        for key, mine in load_file(name).items():
            theirs = load_file(tmp_path / "there" / name.name)[key]
            assert (theirs - mine).norm() < 0.1 * mine.norm(), key


def states(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A server whose hidden states [T, F, D] are changed."""
    return {"change": lambda tensors: {"hidden_states": change(tensors["hidden_states"])}}


def replied(change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A server whose answers are changed."""
    return {"reply": change}


def too_long(reply: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("maximum context length is 4 tokens")


def cut(tensors: Tensors, file: Path) -> None:
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-40])


ODD_NAME = {"kv_transfer_params": {"hidden_states_path": "../states/a\ud800b.safetensors"}}


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (states(lambda x: torch.cat([x[:, :-1], x[:, -1:].roll(-1, 0)], 1)), "one token late"),
        (states(lambda x: torch.cat([x[:1], x[:-1]])), "layer 2 is not the target's"),
        ({"layers": [1, 3, 6]}, "layer 2 is not the target's"),
        ({"layers": [2, 3, 5]}, "does not lead to the token"),
        ({"hidden": 16}, "holds hidden states"),
        (states(lambda x: x.index_fill(0, torch.tensor([1]), torch.nan)), "not finite"),
        ({"change": lambda t: {"token_ids": t["token_ids"] + 1}}, "other tokens"),
        ({"change": lambda t: {"hidden_states_scales": torch.ones(3)}}, "hidden_states_scales"),
        ({"write": lambda t, file: save_file({"token_ids": t["token_ids"]}, file)}, "states none"),
        ({"write": cut}, "unreadable"),
        ({"write": lambda t, file: None}, "captured: "),
        ({"write": lambda t, file: time.sleep(3)}, ".lock: held"),
        (replied(lambda reply: {"kv_transfer_params": None}), "extract_hidden_states"),
        (replied(lambda reply: ODD_NAME), "names no file"),
        (replied(lambda reply: {"choices": [{"token_ids": [10**9]}]}), "no token"),
        (replied(too_long), "max-model-len"),
    ],
)
def test_what_is_not_asked_for_is_refused(
    how: dict[str, Any],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "SECONDS", 1.0)
    data = chats(tmp_path / "data.jsonl", 4)
    with served(tmp_path, **how) as keys:
        assert run(command(data, tmp_path / "out", *keys)) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and named in errors[0], lines
    assert not [*(tmp_path / "out").glob("*.safetensors")], "nothing is half learned"
