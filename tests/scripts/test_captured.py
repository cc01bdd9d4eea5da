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
from collections.abc import Iterator
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
    captures. late: seconds between its answer and the complete file, locked meanwhile."""

    def __init__(self, folder: Path, layers: list[int], late: float = 0.0, **shape: Any) -> None:
        self.folder, self.layers, self.late = folder, layers, late
        self.target, self.numbers = tiny_target(**{**SHAPE, **shape}), itertools.count()
        self.one = threading.Lock()  # requests come at the same time

    def change(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is written in place of a request's tensors."""
        return tensors

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
            self.write(self.change(tensors), file)
            os.close(lock)

        threading.Thread(target=write).start()
        chosen = int(out.logits[0, -1].argmax())
        return {
            "choices": [{"text": "", "token_ids": [chosen]}],
            "kv_transfer_params": {"hidden_states_path": f"/elsewhere/{file.name}"},
        }

    def write(self, tensors: dict[str, torch.Tensor], file: Path) -> None:
        save_file(tensors, file)


@contextlib.contextmanager
def served(tmp_path: Path, kind: type[Capturing] = Capturing, **how: Any) -> Iterator[list[str]]:
    """The keys that name a server."""
    folder = tmp_path / "states"
    folder.mkdir()
    with answering(kind(folder, **{"layers": LAYERS, **how})) as url:
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


class Fp8(Capturing):
    """The form of hs-connectors."""

    def change(self, tensors: Any) -> Any:
        states = tensors["hidden_states"].float()
        scales = states.abs().amax((1, 2), keepdim=True) / 448
        small = (states / scales).to(torch.float8_e4m3fn)
        return {**tensors, "hidden_states": small, "hidden_states_scales": scales}


def test_the_form_with_scales_is_read(tmp_path: Path) -> None:
    data = chats(tmp_path / "data.jsonl", 4)
    assert run(command(data, tmp_path / "here")) == 0
    with served(tmp_path, Fp8) as keys:
        assert run(command(data, tmp_path / "there", *keys)) == 0
    for name in (tmp_path / "here").glob("*.safetensors"):
        for key, mine in load_file(name).items():
            theirs = load_file(tmp_path / "there" / name.name)[key]
            assert (theirs - mine).norm() < 0.1 * mine.norm(), key


class Normed(Capturing):
    def change(self, tensors: Any) -> Any:
        states = tensors["hidden_states"].clone()
        states[:, -1] = self.target.model.model.norm(states[:, -1])
        scale = torch.linspace(0.1, 5, states.shape[-1])  # so that a second norm is seen
        return {**tensors, "hidden_states": states * scale}


class Late(Capturing):
    def change(self, tensors: Any) -> Any:
        states = tensors["hidden_states"]
        return {**tensors, "hidden_states": torch.cat([states[:1], states[:-1]])}


class NotFinite(Capturing):
    def change(self, tensors: Any) -> Any:
        tensors["hidden_states"][1] = float("nan")
        return tensors


class OtherTokens(Capturing):
    def change(self, tensors: Any) -> Any:
        return {**tensors, "token_ids": tensors["token_ids"] + 1}


class NoStates(Capturing):
    def change(self, tensors: Any) -> Any:
        return {"token_ids": tensors["token_ids"]}


class Cut(Capturing):
    def write(self, tensors: Any, file: Path) -> None:
        save_file(tensors, file)
        file.write_bytes(file.read_bytes()[:-40])


class NoFile(Capturing):
    def write(self, tensors: Any, file: Path) -> None:
        pass


class NoCapture(Capturing):
    def __call__(self, path: str, body: Any) -> Any:
        reply = super().__call__(path, body)
        return {**reply, "kv_transfer_params": None} if body else reply


class NeverDone(Capturing):
    def write(self, tensors: Any, file: Path) -> None:
        time.sleep(3)


class OddName(Capturing):
    def __call__(self, path: str, body: Any) -> Any:
        reply = super().__call__(path, body)
        odd = {"hidden_states_path": "../states/a\ud800b.safetensors"}
        return {**reply, "kv_transfer_params": odd} if body else reply


class NoToken(Capturing):
    def __call__(self, path: str, body: Any) -> Any:
        reply = super().__call__(path, body)
        return {**reply, "choices": [{"token_ids": [10**9]}]} if body else reply


class OddScales(Capturing):
    def change(self, tensors: Any) -> Any:
        return {**tensors, "hidden_states_scales": torch.ones(3)}


class TooShort(Capturing):
    def __call__(self, path: str, body: Any) -> Any:
        if body is not None and len(body["prompt"]) > 4:
            raise ValueError("maximum context length is 4 tokens")
        return super().__call__(path, body)


@pytest.mark.parametrize(
    ("kind", "how", "named"),
    [
        (Normed, {}, "eagle_aux_hidden_state_layer_ids"),
        (Late, {}, "layer 2 is not the target's"),
        (Capturing, {"layers": [1, 3, 6]}, "layer 2 is not the target's"),
        (Capturing, {"layers": [2, 3, 5]}, "does not lead to the token"),
        (Capturing, {"layers": [2, 6]}, "holds hidden states"),
        (Capturing, {"seed": 5}, "layer 2 is not the target's"),
        (Capturing, {"hidden": 16}, "holds hidden states"),
        (NotFinite, {}, "not finite"),
        (OtherTokens, {}, "other tokens"),
        (NoStates, {}, "holds hidden states none"),
        (Cut, {}, "unreadable"),
        (NoFile, {}, "captured: "),
        (NoCapture, {}, "extract_hidden_states"),
        (TooShort, {}, "max-model-len"),
        (NeverDone, {}, ".lock: held"),
        (OddName, {}, "names no file"),
        (NoToken, {}, "no token"),
        (OddScales, {}, "hidden_states_scales"),
    ],
)
def test_what_is_not_asked_for_is_refused(
    kind: type[Capturing],
    how: dict[str, Any],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "SECONDS", 1.0)
    data = chats(tmp_path / "data.jsonl", 4)
    with served(tmp_path, kind, **how) as keys:
        assert run(command(data, tmp_path / "out", *keys)) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and named in errors[0], lines
    assert not [*(tmp_path / "out").glob("*.safetensors")], "nothing is half learned"
