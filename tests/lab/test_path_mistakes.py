"""Mistakes along docs/path.md that need a state: each is answered with one line that names the key
and the fix, and nothing half-written is left; a server or hub that is dead is named within ten
seconds. Mistakes of a command line alone stand in tests/conf/mistakes.yaml."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.scripts import synthesize
from outrider.scripts.lab.rehearsing.page import steps
from outrider.scripts.serving import contract, contract_check
from tests.golden.cases import HEADS_FOLDER, TARGET
from tests.helpers.chats import chats
from tests.helpers.commands import code_of
from tests.helpers.faults import fork, wait
from tests.helpers.hub import at, hub_on_loopback
from tests.helpers.odd_server import odd, vllm
from tests.helpers.wording import FIX
from tests.scripts.test_from_server import requested, serving

SECONDS = 10.0  # in which something dead is named
TINY = "target=tiny target.vocab=260"
GOLDEN = f"target=local target.path={TARGET}"
SERVED = f"scripts.synthesize {TINY} backend=openai prompts=prompts.jsonl out=data.jsonl"
TRAIN = (
    f"train.eagle {TINY} data.path=chats.jsonl out_dir=run steps=6 batch_size=4 dtype=float32 "
    "device=cpu"
)
LOGS = f"scripts.synthesize {TINY} again=false out=traffic"
SCORE = f"scripts.evaluate {GOLDEN} prompts=prompts.jsonl dtype=float32 device=cpu quiet=true out=r"
EXPORT = f"scripts.export {GOLDEN} prompts=prompts.jsonl device=cpu out=e"
PUSH = f"scripts.push {GOLDEN} run=HEADS/eagle3 license=mit format=none"
CHECK = "scripts.check retries=1"


@dataclass(frozen=True)
class Mistake:
    """step: of the page. words: a module and what is given to it. said: what the line begins with
    ("^") or holds. state: by name, what is wrong with the world. code: exit code."""

    step: str
    words: str
    said: str
    state: str = ""
    code: int = 2


TABLE = (
    Mistake("A3", f"{SERVED} base_url=http://127.0.0.1:9/v1", "^base_url: nothing usable at http"),
    Mistake(
        "A3", f"{SERVED} base_url=URL", "^base_url: nothing usable at http", "server is silent"
    ),
    Mistake("A3", f"{SERVED} base_url=URL/v2", "it usually ends with /v1", "server"),
    Mistake("A3", f"{SERVED} base_url=URL", "choose one with model=NAME", "server of two"),
    Mistake(
        "A3", f"{SERVED} base_url=URL model=qwen", "does not serve 'qwen'; it serves", "server"
    ),
    Mistake("A3", f"{SERVED} base_url=URL", "^api_key_env: ", "server with a key"),
    Mistake("A3", f"{SERVED} base_url=URL", "MB free", "disk is full"),
    Mistake("A3", f"{SERVED} base_url=URL prompts=none.jsonl", "none.jsonl", "server"),
    Mistake("A3", f"{SERVED} base_url=URL prompts=broken.jsonl", "max_failed", "server"),
    Mistake("A3", f"{SERVED} base_url=URL out=chats.jsonl", "chats.jsonl", "server"),
    Mistake("A4", f"{TRAIN} data.path=none.jsonl", "^data.path: no such file"),
    Mistake("A4", f"{TRAIN} data.path=broken.jsonl", "data.max_bad_fraction"),
    Mistake("A4", f"{TRAIN} device=cuda", "^device: ", "no GPU"),
    Mistake("A4", f"{TRAIN} start=nowhere", "^start: nowhere"),
    Mistake("B1", f"{LOGS} logs=none.jsonl", "none.jsonl"),
    Mistake("B1", f"{LOGS} logs=other.jsonl", "^served: "),
    Mistake("B1", f"{LOGS} logs=prompts.jsonl", "^logs: "),
    Mistake("B1", f"{LOGS} logs=other.jsonl again=true backend=openai", "^base_url: "),
    Mistake("C1", f"{SCORE} drafters=[none,runs/theirs]", "^drafters: runs/theirs"),
    Mistake("C1", f"{SCORE} {TINY} drafters=[none,HEADS/eagle3]", "target.allow_other=true"),
    Mistake("C1", f"{SCORE} drafters=[none,HEADS/eagle3@tre]", "did you mean"),
    Mistake("C2", f"scripts.import_head {GOLDEN} from=nowhere out=i", "^from: "),
    Mistake("C2", f"scripts.import_head {GOLDEN} from=. out=i", "^from: "),
    Mistake("D2", f"scripts.certify {GOLDEN} drafter=nowhere out=c", "^drafter: nowhere: "),
    Mistake("D3", f"{EXPORT} drafter=nowhere format=vllm", "^drafter: nowhere: "),
    Mistake(
        "D3", f"{EXPORT} drafter=HEADS/eagle3 format=vllm", "overwrite=true", "export is there"
    ),
    Mistake("D3", f"{EXPORT} drafter=HEADS/hydra_heads format=vllm", "^format=vllm: no engine"),
    Mistake("D3", f"{EXPORT} drafter=HEADS/eagle3 format=gguf", "^format=gguf: head.taps"),
    Mistake(
        "D3",
        f"{EXPORT} drafter=none format=gguf tokenizer_from=no.gguf",
        "^tokenizer_from: no.gguf",
    ),
    Mistake("D5", f"{CHECK} url=http://127.0.0.1:9 expected=expected.json", "^url: "),
    Mistake(
        "D5",
        f"{CHECK} url=URL expected=nowhere",
        "^expected: no such file or folder nowhere",
        "server",
    ),
    Mistake("D5", f"{CHECK} url=URL expected=chats.jsonl", "export the head again", "server"),
    Mistake("D5", f"{CHECK} url=URL expected=expected.json", "^url: ", "server of none"),
    Mistake(
        "D7", f"{PUSH} repository=me/x".replace("HEADS/eagle3", "nowhere"), "^run: nowhere", "hub"
    ),
    Mistake("D7", f"{PUSH} repository=me/x", "^repository: no token is set; `hf", "no token"),
    Mistake("D7", f"{PUSH} repository=me/x", "set HF_TOKEN to one with write right", "it may read"),
    Mistake("D7", f"{PUSH} repository=you/x", "write one of these before the /", "hub"),
    Mistake("D7", f"{PUSH} repository=me/x report=prompts.jsonl", "^report: prompts.jsonl", "hub"),
    Mistake("D7", f"{PUSH} repository=me/x", "check the network and HF_ENDPOINT", "hub is dead"),
    Mistake("D8", f"{SCORE} drafters=[none,hub:me/x]", "no such repository, or a private", "hub"),
    Mistake("D8", f"{SCORE} drafters=[none,hub:x]", "write hub:OWNER/x", "hub"),
    Mistake("D8", f"{SCORE} drafters=[none,hub:me/x]", "check the network", "hub is dead"),
    Mistake("D6", f"{SCORE} 'drafters=[none,s@http://127.0.0.1:9]'", "127.0.0.1:9"),
)
# What a check of a server that answers otherwise prints, which is no mistake but a finding.
FINDING = Mistake(
    "D5", f"{CHECK} url=URL expected=expected.json", "token 1 is 9 instead of 5", "other answers", 1
)


@contextlib.contextmanager
def state(name: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The world that a mistake is made in; the address of its server."""
    url = ""
    with contextlib.ExitStack() as stack:
        if name in SERVERS:
            url = stack.enter_context(serving(folder, **SERVERS[name]))
        elif name == "server is silent":
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        elif name in HUBS:
            server = stack.enter_context(hub_on_loopback(folder.with_name("hub"), patch))
            if name == "hub is dead":
                at("http://127.0.0.1:9", patch)
            patch.setenv("HF_TOKEN", HUBS[name])
            url = server.url
        elif name == "other answers":
            url = stack.enter_context(odd(lambda body: vllm([9, 9, 9]))).url
        elif name == "disk is full":
            url = stack.enter_context(serving(folder))
            usage = shutil.disk_usage(folder)._replace(free=1000)
            patch.setattr(shutil, "disk_usage", lambda path: usage)
        elif name == "export is there":
            (folder / "e").mkdir()
            (folder / "e" / "mine.txt").write_text("kept")
        elif name == "no GPU":
            patch.setattr("torch.cuda.is_available", lambda: False)
        else:
            assert not name, name
        yield url


SERVERS = {
    "server": {},
    "server of two": {"others": ["another"]},
    "server of none": {"models": "empty-choices"},
    "server with a key": {"key": "secret"},
}
# state -> the token that the user has
HUBS = {"hub": "write-me", "hub is dead": "write-me", "no token": "", "it may read": "read-me"}


def world(folder: Path) -> None:
    """Chats, prompts, files that are broken, and a contract."""
    chats(folder / "chats.jsonl", rows=8)
    lines = (json.dumps({"question_id": n, "category": "x", "turns": ["Hi"]}) for n in range(3))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    sound = (folder / "chats.jsonl").read_text()
    (folder / "broken.jsonl").write_text(sound + '{"messages": 3}\n{\n')
    row = {"request": {"model": "other", "messages": [{"role": "user", "content": "Hi"}]}}
    answer = {"message": {"role": "assistant", "content": "Ho"}, "finish_reason": "stop"}
    row["response"] = {"model": "other", "choices": [answer]}
    (folder / "other.jsonl").write_text(json.dumps(row) + "\n")
    asked = {"ids": [3, 4], "tokens": [5, 6], "text": "", "proposed": [2], "accepted": [1]}
    known = {"format": 1, "max_new_tokens": 2, "draft_tokens": 2, "stop": [2], "prompts": [asked]}
    length = {"mean": 2.0, "low": None, "high": None}
    told = known | {"cycles": 1, "accepted_length": length, "acceptance_by_position": []}
    (folder / "expected.json").write_text(json.dumps(told))


def files(folder: Path) -> dict[str, bytes]:
    """Every file but marks of who writes."""
    found = (
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def run(
    mistake: Mistake, folder: Path, patch: pytest.MonkeyPatch, said: Callable[[], str]
) -> tuple[int, str, float]:
    """(exit code, what stands on stderr and stdout, seconds)."""
    patch.chdir(folder)
    patch.setenv("OUTRIDER_CACHE", str(folder.with_name("cache")))
    with state(mistake.state, folder, patch) as url:
        text = mistake.words.replace("HEADS", str(HEADS_FOLDER)).replace("URL/v2", f"{url[:-3]}/v2")
        module, *words = shlex.split(text.replace("URL", url))
        main = importlib.import_module(f"outrider.{module}").main
        said()
        before, began = files(folder), time.monotonic()
        with pytest.raises(SystemExit) as stop:
            main(words)
        seconds = time.monotonic() - began
    assert files(folder) == before, "nothing half-written"
    return int(stop.value.code or 0), said(), seconds


@pytest.mark.parametrize("mistake", TABLE, ids=lambda m: f"{m.step} {m.said[:30]} {m.state}")
def test_a_mistake_on_the_path_is_one_line_and_leaves_nothing(
    mistake: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world(tmp_path)
    code, text, seconds = run(mistake, tmp_path, monkeypatch, lambda: capsys.readouterr().err)
    last = text.rstrip("\n").rpartition("\n")[2]
    assert code == mistake.code and last.startswith("error: ") and "Traceback" not in text, text
    line = last.removeprefix("error: ")
    assert len(line) < 400
    assert FIX.search(line), f"no fix: {line}"
    held = line.startswith(mistake.said[1:]) if mistake.said[0] == "^" else mistake.said in line
    assert held, line
    dead = "127.0.0.1:9" in mistake.words or mistake.state in ("server is silent", "hub is dead")
    if dead and seconds >= SECONDS:  # a machine with other work to do has a second try
        seconds = run(mistake, tmp_path, monkeypatch, lambda: capsys.readouterr().err)[2]
    assert seconds < SECONDS or not dead


def test_a_server_that_answers_otherwise_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world(tmp_path)
    code, text, _ = run(FINDING, tmp_path, monkeypatch, lambda: capsys.readouterr().out)
    assert code == 1 and FINDING.said in text and "does not serve what was trained" in text


def test_a_server_that_drafts_more_than_the_export_says_is_told_so() -> None:
    asked = {"ids": [3], "tokens": [5, 6], "text": "", "proposed": [2], "accepted": [1]}
    wanted = {"stop": [2], "prompts": [asked]}
    for drafted, told in ((5, True), (2, False)):
        answer = {"tokens": [5, 6], "text": "", "accepted": 1, "draft_tokens": drafted}
        said = contract.verdict(wanted, [answer]) | {"counters": "", "draft_tokens": 2}
        lines = "\n".join(contract_check.summary(said))
        assert said["served"] != told and ("start it with K = 2 to compare" in lines) == told


def test_a_server_that_dies_on_the_way_is_named_at_once_and_the_run_goes_on(tmp_path: Path) -> None:
    requested(tmp_path, 40)
    words = f"{TINY} backend=openai prompts=asked.jsonl out=a.jsonl concurrency=2".split()
    said = tmp_path / "said.txt"

    def lines() -> list[str]:
        text = said.read_text() if said.exists() else ""
        return [line for line in text.splitlines() if "next try" in line]

    with serving(tmp_path, dies_after=6) as url:

        def asked() -> int:
            os.chdir(tmp_path)
            return code_of(synthesize.main, *words, f"base_url={url}")

        child = fork(asked, said)
        try:
            while not lines():
                assert os.waitpid(child, os.WNOHANG) == (0, 0), said.read_text()
                time.sleep(0.02)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it goes on"
        finally:
            os.kill(child, signal.SIGKILL)
            wait(child)
    line = lines()[0]
    assert line.startswith(f"synthesize: {url}: ")
    assert float(line.rpartition(" in ")[2].removesuffix(" s")) <= 2  # it is the first trouble


def test_every_step_that_asks_or_writes_has_its_mistakes() -> None:
    numbers = {step.number for step in steps()}
    tried = {mistake.step for mistake in TABLE}
    assert tried <= numbers and len(TABLE) >= 30
    assert {"A3", "A4", "B1", "C1", "C2", "D2", "D3", "D5", "D6", "D7", "D8"} <= tried
