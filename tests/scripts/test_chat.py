"""Chat: streamed text, the footer's figures, and conversations over a pipe."""

import io
import sys

import pytest

from outrider.decode.drafters import NoDraft
from outrider.decode.engine import Request, generate
from outrider.decode.models.load import TargetConfig, load_target
from outrider.decode.models.tiny import byte_tokenizer
from outrider.decode.ngram import NGram
from outrider.decode.sampling import Sampling
from outrider.decode.stats import accepted_length, split
from outrider.decode.text import Stream
from outrider.scripts import chat
from tests.helpers.commands import code_of


def test_stream_shows_the_whole_text_and_never_half_a_character() -> None:
    tokenizer = byte_tokenizer()
    for text in ("naïve 🙂👩‍👧 日本語", " two  spaces \n", "cut \ufffd end"):
        stream = Stream(tokenizer)
        pieces = [stream.push(i) for i in tokenizer(text)["input_ids"]]
        assert "".join(pieces) == text
        assert "\ufffd" in text or max(map(len, pieces)) <= 1


def test_stream_does_not_wait_forever_for_broken_bytes() -> None:
    stream = Stream(byte_tokenizer())
    pieces = [stream.push(3 + 0x80) for _ in range(20)]
    assert sum(map(bool, pieces)) == 2


def test_tally_of_a_stopped_answer_agrees_with_the_engine() -> None:
    target = load_target(TargetConfig(kind="tiny"))
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    for drafter in (NoDraft(), NGram()):
        tally = chat.AnswerTally(prompt)
        request = Request(prompt, 60, id=1)
        run = generate(
            target,
            drafter,
            [request],
            Sampling(),
            on_tokens=lambda _, t, d, tally=tally: tally.add(t, d),
        )
        (done,) = run.generations
        for name in ("token_ids", "from_draft"):
            assert getattr(tally.generation, name) == getattr(done, name)
        ours, theirs = tally.generation.cycles, done.cycles
        assert [(c.accepted, c.start) for c in ours] == [(c.accepted, c.start) for c in theirs]
        cycles = split(done)
        mean = accepted_length([cycles.clean + cycles.loop]).mean
        footer = tally.footer(done, "stopped")
        assert footer.startswith(f"accepted length {mean:.2f} · ") and footer.endswith(" · stopped")
        assert f"{len(done.token_ids)} tokens · {sum(done.from_draft)} from accepted" in footer
        assert (mean > 1.0) == isinstance(drafter, NGram)


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
    assert code == 2 and "message: " in err and "context holds 128" in err


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
    real = chat.generate

    def stopped(*args, on_tokens, **kwargs):
        seen = []

        def count(i, tokens, drafted):
            on_tokens(i, tokens, drafted)
            seen.append(i)
            if len(seen) == 9:
                raise KeyboardInterrupt

        return real(*args, on_tokens=count, **kwargs)

    monkeypatch.setattr(chat, "generate", stopped)
    with pytest.raises(KeyboardInterrupt):  # a pipe: the process stops
        talker.answer("hello")
    talker.reset()
    talker.console._force_terminal = True
    talker.answer("hello")
    assert "stopped" in capsys.readouterr().out
    assert [m["role"] for m in talker.messages] == ["user", "assistant"]
    monkeypatch.setattr(chat, "generate", real)
    talker.answer("and now?")
    assert "accepted length" in capsys.readouterr().out
