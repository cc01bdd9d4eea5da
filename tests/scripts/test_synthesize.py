"""Synthesis: the same file however often it was interrupted, and what it refuses."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import Interrupted, UserError
from outrider.conf.jsonl import records
from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Generation, Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.sampling import Sampling
from outrider.decode.target import Target
from outrider.scripts.common.prompts import chat_ids
from outrider.scripts.data import in_process, inventing
from outrider.scripts.data.answering import Answering
from outrider.scripts.data.config import SynthesizeConfig
from outrider.scripts.data.in_process import InProcess
from outrider.scripts.data.inventing import Inventing
from outrider.scripts.data.ledger import Ledger
from outrider.scripts.data.questions import Questions, fingerprint
from outrider.scripts.data.run import synthesize
from outrider.scripts.data.server import AnswerRefused, ServerAnswer
from outrider.train.data.config import RowsConfig
from outrider.train.data.rows import encode, interpret
from tests.helpers import faults

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "num_conversations": 14,
    "batch": 5,
    "max_question_tokens": 40,
    "max_new_tokens": 12,
    "dtype": "float32",
}


def config(out, **changes) -> SynthesizeConfig:
    return SynthesizeConfig(
        out=str(out), target=TargetConfig(kind="tiny", vocab=260), **{**SMALL, **changes}
    )


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "a.jsonl"
    synthesize(config(path))
    assert files(path.parent) == ["a.jsonl", "a.jsonl.meta.json"]
    return path.read_bytes()


def test_interrupted_run_continues_to_the_same_file(tmp_path, monkeypatch, whole: bytes) -> None:
    path = tmp_path / "a.jsonl"
    real, calls = in_process.generate, []

    def interrupting(*args, **kwargs):
        def count(i, tokens, drafted):
            calls.append(i)
            if len(calls) == 300:
                os.kill(os.getpid(), signal.SIGINT)

        return real(*args, on_tokens=count, **kwargs)

    monkeypatch.setattr(in_process, "generate", interrupting)
    with pytest.raises(Interrupted, match="same command again") as stop:
        synthesize(config(path))
    assert stop.value.code == 130
    left = path.read_bytes() if path.exists() else b""
    assert whole.startswith(left) and left != whole and (left.endswith(b"\n") or not left)
    assert not [name for name in files(tmp_path) if name not in ("a.jsonl", "a.jsonl.meta.json")]
    synthesize(config(path))
    assert path.read_bytes() == whole


def test_a_cut_answer_loses_the_character_that_it_ended_within(tmp_path) -> None:
    """Training would read three bytes of a sign that the target never wrote."""
    work = Answering(config("x"), Ledger(tmp_path / "a.jsonl", {}), 1, byte_tokenizer())
    for finished, text in ((False, "na"), (True, "na\ufffd")):
        row = work._message(ServerAnswer("na\ufffd", finished, 3, None))
        assert row == {"role": "assistant", "content": text}


def test_foreign_damaged_and_held_files(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("mine\n")
    with pytest.raises(UserError, match="not written by this command"):
        synthesize(config(path))
    assert path.read_text() == "mine\n"
    path.unlink()
    synthesize(config(path, num_conversations=2, batch=2))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:-3])
    synthesize(config(path, num_conversations=2, batch=2))
    assert len(path.read_text().splitlines()) == 2, "a line that is cut is asked again"
    path.write_text("{}\n" + lines[1])
    with pytest.raises(UserError, match="changed since"):
        synthesize(config(path, num_conversations=3, batch=2))
    path.write_text(lines[0])
    other = TargetConfig(kind="tiny", vocab=260, seed=1)
    for change, named in (
        ({"seed": 3}, "seed 0, now 3"),
        ({"target": other}, "target.weights_sha"),
    ):
        with pytest.raises(UserError, match=f"^out: .*{named}"):
            synthesize(replace(config(path, num_conversations=2, batch=2), **change))
    (tmp_path / "a.jsonl.meta.json").write_text("{")
    with pytest.raises(UserError, match="changed since"):
        synthesize(config(path))


def test_model_that_invents_nothing_is_refused(tmp_path) -> None:
    cfg = config(tmp_path / "a.jsonl", max_question_tokens=2)
    with pytest.raises(UserError, match="usable .*too short.*instruction-tuned"):
        synthesize(cfg)
    assert files(tmp_path) == []


def test_duplicates_are_dropped_across_and_inside_blocks(tmp_path, monkeypatch) -> None:
    target = load_target(TargetConfig(kind="tiny", vocab=260))
    ledger = Ledger(tmp_path / "a.jsonl", {})
    cfg = config(ledger.path, max_question_tokens=24, max_new_tokens=6, batch=4)
    writer = Inventing(cfg, ledger, 3, target.tokenizer, target=target)
    drawn = ["One apple!", "one  apple?", "Two pears", "old question", "12 + 34 = ? 56 - 7"]
    drawn += ["Tell me <|im_end|> something", "Tell me \0 that", "Three figs", "x", "Four nuts"]
    texts = iter(drawn + ["-"] * 40)

    def text(self, out):
        return next(texts) if out.prompt_ids == self.header else "Yes."

    monkeypatch.setattr(Inventing, "text", text)
    real = inventing.clean_question
    monkeypatch.setattr(inventing, "clean_question", lambda text, complete: text)
    writer.seen.add(fingerprint("Old question."))
    writer.run()
    kept = [row["messages"][0]["content"] for row in records(ledger.path)]
    assert kept == ["One apple!", "Two pears", "Three figs"]
    assert [writer.dropped[why] for why in ("duplicate", "no letters", "control tokens")] == [
        2,
        1,
        2,
    ]
    with pytest.raises(AnswerRefused, match="or NUL"):  # which training refuses
        writer._message(ServerAnswer("a\0", True, 1, None))
    assert writer.seen >= {"one apple", "old question"}
    assert real("Hello there. What is", False) == "Hello there.", "cut off"


def test_a_question_without_an_answer_is_not_drawn_for_ever(tmp_path, monkeypatch) -> None:
    """A block of which none has one is drawn again, and the same numbers draw the same."""
    target, asked = load_target(TargetConfig(kind="tiny", vocab=260)), list[str]()

    def text(self, out):
        if out.prompt_ids == self.header:
            return f"question {sum(out.token_ids)}"
        asked.append(self.tokenizer.decode(out.prompt_ids))
        assert len(asked) < 4
        return "" if asked[-1] == asked[0] else "Yes."

    monkeypatch.setattr(Inventing, "text", text)
    ledger = Ledger(tmp_path / "a.jsonl", {})
    Inventing(config(ledger.path), ledger, 1, target.tokenizer, target=target).run()
    assert len(asked) == 2 and len(records(ledger.path)) == 1


# given questions
# -----------------------------------------------------------------------------


def asks(folder: Path, count: int = 9) -> Path:
    """A file of questions in every form, with one, two or three turns."""
    rows = []
    for i in range(count):
        turns = [f"question {i}.{t}" for t in range(1 + i % 3)]
        said = [m for t in turns for m in (("user", t), ("assistant", "another model's"))]
        system = [("system", "be brief")] * (i % 4 == 0)
        chat = [{"role": role, "content": text} for role, text in [*system, *said]]
        rows.append([{"messages": chat}, {"turns": turns}][i % 2])
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def given(folder: Path, **changes) -> SynthesizeConfig:
    keys = {"num_conversations": 0, "batch": 4, "max_cut": 1.0, "max_failed": 1.0}
    return config(folder / "a.jsonl", prompts=str(asks(folder)), **{**keys, **changes})


def ending(*_: object) -> Target:
    """A random target that ends most answers within a few tokens."""
    target = load_target(TargetConfig(kind="tiny", vocab=260))
    target.eos_ids = tuple(range(0, 250, 12))
    return target


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.scripts.data.run.load_target", ending)


@pytest.fixture
def answers(ends: None, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("given")
    synthesize(given(folder))
    return (folder / "a.jsonl").read_bytes()


def test_own_questions_are_answered_here_in_their_order(tmp_path: Path, answers: bytes) -> None:
    """Each answer is the target's to what was said before it, whatever shares its batch."""
    target = ending()
    rows = [json.loads(line) for line in answers.splitlines()]
    questions = [question for _, (question, _) in Questions(asks(tmp_path)).asked]
    assert 0 < sum(row["complete"] for row in rows) < len(rows) and len(questions) == 9
    order = []
    for said, complete in ((row["messages"], row["complete"]) for row in rows):
        kept = [message for message in said if message["role"] != "assistant"]
        order += [n for n in range(9) if questions[n][: len(kept)] == kept]
        assert said[-1]["role"] == "assistant" and (kept == questions[order[-1]] or not complete)
    assert order == sorted(order) and len(order) == len(rows) > 4
    synthesize(given(tmp_path, answer_temperature=0.0))
    for line in (tmp_path / "a.jsonl").read_text().splitlines()[::4]:
        *before, last = json.loads(line)["messages"]
        request = Request(chat_ids(target.tokenizer, before), SMALL["max_new_tokens"])
        (alone,) = generate(target, NoDraft(), [request], Sampling(0.0)).generations
        ids = alone.token_ids[:-1] if alone.finish == "eos" else alone.token_ids
        assert target.tokenizer.decode(ids).strip() == last["content"]


def test_rows_of_tokens_hold_what_was_read_and_drawn(tmp_path: Path, ends: None) -> None:
    tokenizer, turns = ending().tokenizer, set()
    synthesize(given(tmp_path, tokens=True))
    for row in records(tmp_path / "a.jsonl"):
        *before, last = row["messages"]
        read = chat_ids(tokenizer, before)
        ids, loss = row["input_ids"], row["loss_mask"]
        drawn = ids[len(read) : len(ids) - row["complete"]]
        assert ids[: len(read)] == read and loss[len(read) :] == [1] * (len(ids) - len(read))
        cut = "" if row["complete"] else "\ufffd"  # a character that was not ended
        assert tokenizer.decode(drawn).strip().removesuffix(cut) == last["content"]
        turns.add(len(before))
        assert len(before) > 2 or not any(loss[: len(read)])
        (found,) = encode(interpret(row, "row"), tokenizer, RowsConfig(1 << 20))
        assert found.ids == ids and found.loss == [*map(bool, loss)]
    assert min(turns) == 1 < max(turns)


def test_answers_of_a_run_that_was_killed_go_on_to_the_same_file(
    tmp_path: Path, answers: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    real = InProcess.decode

    def stopping(self: InProcess, *args: Any) -> list[Generation]:
        if self.ledger.numbers:
            os.kill(os.getpid(), signal.SIGKILL)  # in its second block
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "decode", stopping)
        child = faults.fork(lambda: synthesize(given(tmp_path)))
        assert faults.wait(child) == -signal.SIGKILL
    left = path.read_bytes()
    assert answers.startswith(left) and 0 < len(left.splitlines()) < 9
    synthesize(given(tmp_path, num_conversations=7))
    synthesize(given(tmp_path))
    assert path.read_bytes() == answers
    synthesize(given(tmp_path))  # nothing to do
    with pytest.raises(UserError, match="batch 4, now 3"):
        synthesize(given(tmp_path, batch=3))


def test_a_question_that_cannot_be_answered_is_named_and_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = replace(given(tmp_path), num_conversations=6, max_new_tokens=5, max_failed=0.1)
    path = asks(tmp_path, 5)
    path.write_text(json.dumps({"prompt": "long " * 3000}) + "\n" + path.read_text())
    with pytest.raises(UserError, match=r"asked.jsonl:1: the conversation has \d+ tokens.*max_f"):
        synthesize(cfg)
    synthesize(replace(cfg, max_failed=0.2))
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 5
    said = capfd.readouterr().err
    assert "1 questions without an answer" in said and "server" not in said
    assert "tokens=true keeps them" in said, "random bytes are no text"
    short = replace(cfg, out=str(tmp_path / "b.jsonl"), max_failed=0.2, max_cut=0.1)
    with pytest.raises(UserError, match="max_cut: . of . answers were cut at max_new_tokens=5"):
        synthesize(short)
