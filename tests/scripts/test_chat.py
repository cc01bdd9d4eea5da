"""Chat: streamed text, the footer's figures, and conversations over a pipe."""

import io
import random
import sys

import pytest

from outrider.decode.detokenize import Stream
from outrider.decode.engine import Engine, Row
from outrider.decode.models.load import TargetConfig
from outrider.decode.models.tiny import byte_tokenizer
from outrider.scripts import chat
from tests.helpers.commands import code_of


def test_stream_shows_the_whole_text_and_never_half_a_character() -> None:
    tokenizer = byte_tokenizer()
    for text in ("naïve 🙂👩‍👧 日本語", " two  spaces \n", "cut \ufffd end"):
        stream = Stream(tokenizer)
        pieces = [stream.push(i) for i in tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text
        assert "\ufffd" in text or max(map(len, pieces)) <= 1


def test_a_stream_of_any_bytes_is_the_text_of_the_whole() -> None:
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for _ in range(300):
        ids = [3 + rng.choice([0x41, 0x82, 0xAC, 0xE2, 0xF0, 0x9F]) for _ in range(40)]
        stream = Stream(tokenizer)
        pieces = [stream.push(i) for i in ids]
        assert "".join([*pieces, stream.rest()]) == tokenizer.decode(ids)
    stream = Stream(tokenizer)  # nor does it wait for ever for the end of broken ones
    assert sum(bool(stream.push(3 + 0x80)) for _ in range(20)) > 10


def talk(monkeypatch, capsys, lines: str, *keys: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = code_of(chat.main, "target=tiny", "dtype=float32", "max_new_tokens=20", *keys)
    return code, *capsys.readouterr()


def test_piped_turns_are_answered_in_order_with_history(monkeypatch, capsys) -> None:
    code, two, _ = talk(monkeypatch, capsys, "hello\nagain\n", "temperature=0")
    assert code == 0 and two.count("accepted length") == 2 and "\x1b" not in two
    code, one, _ = talk(monkeypatch, capsys, "hello\n/exit\nagain\n", "temperature=0")
    assert code == 0 and one.count("accepted length") == 1
    _, reset, _ = talk(monkeypatch, capsys, "hello\n/reset\nhello\n", "temperature=0")
    _, kept, _ = talk(monkeypatch, capsys, "hello\nhello\n", "temperature=0")
    first, second = (half.rsplit("\n", 1)[-1] for half in reset.split("\naccepted length")[:2])
    assert first == second  # the same prompt again
    assert kept.split("\naccepted length")[1].rsplit("\n", 1)[-1] != first  # history changes it


def test_message_longer_than_the_context(monkeypatch, capsys) -> None:
    code, _, err = talk(monkeypatch, capsys, "x" * 400 + "\n", "target.context=128")
    assert code == 2 and "context holds 128" in err


def test_oldest_turns_leave_a_full_context(monkeypatch, capsys) -> None:
    lines = "".join(f"turn {i} {'y' * 30}\n" for i in range(6))
    code, out, err = talk(
        monkeypatch, capsys, lines, "target.context=200", "system=Be kind.", "temperature=0"
    )
    assert code == 0 and out.count("accepted length") == 6, err


def test_interrupt_keeps_what_was_said(monkeypatch, capsys) -> None:
    cfg = chat.ChatConfig(
        target=TargetConfig(kind="tiny"), temperature=0.0, max_new_tokens=50, dtype="float32"
    )
    talker = chat.Conversation(cfg)
    real, steps = Engine.step, list[None]()

    def stopped(batch: Engine) -> list[Row]:
        steps.append(None)
        if len(steps) % 9 == 0:
            raise KeyboardInterrupt
        return real(batch)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopped)
        with pytest.raises(KeyboardInterrupt):  # a pipe: the process stops
            talker.answer("hello")
        talker.reset()
        talker.console._force_terminal = True
        talker.answer("hello")
    said = capsys.readouterr().out
    assert " from accepted drafts · stopped" in said
    assert [m["role"] for m in talker.messages] == ["user", "assistant"]
    talker.answer("and now?")
    assert "accepted length" in capsys.readouterr().out
