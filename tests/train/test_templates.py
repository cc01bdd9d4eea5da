"""What templates of the field do to an answer, by behaviour: whatever it is, every supervised
answer is the target's own and whole, or the row is left out by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from outrider.decode.models.tiny import CHATML, byte_tokenizer
from outrider.train.data.config import RowsConfig
from outrider.train.data.rows import BadRow, Encoded, encode, interpret
from tests.helpers.chats import CHATML_WITH_SPANS

EOS = frozenset({2})
START, END = "<|im_start|>", "<|im_end|>"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ASK_INSIDE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
ASK_EITHER = (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>' if thinking else '<think></think>' }}{% endif %}"
)
TOOLS_SHOWN = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
# What stands of an answer's text: `text` without its reasoning, and `why`, the reasoning.
SPLIT = (
    "{% set text = m.content or '' %}{% set why = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].strip() %}{% endif %}"
)
BLOCK = "{{ '<think>\n' + why + '\n</think>\n\n' }}"


def each(answer: str, ask: str = ASK, before: str = TOOLS_SHOWN, end: str = END) -> str:
    """A template of ChatML's frame that writes `answer` for the assistant's turns, m."""
    return (
        before
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        + "{% if m.role == 'assistant' %}"
        + answer
        + f"{end}{{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}"
        + ask
    )


TEMPLATES = {
    "as it is": CHATML,
    "as it is, marked": CHATML_WITH_SPANS,
    "calls beside the text": each("{{ m.content or '' }}" + CALLS),
    "block in the last turn alone": each(
        SPLIT + "{% if loop.last %}" + BLOCK + "{% endif %}{{ text }}" + CALLS
    ),
    "block in the last turn, asked for inside": each(
        SPLIT + "{% if loop.last %}" + BLOCK + "{% endif %}{{ text }}" + CALLS, ASK_INSIDE
    ),
    "block in every turn, empty in earlier ones": each(
        SPLIT + "{% if not loop.last %}{% set why = '' %}{% endif %}" + BLOCK + "{{ text }}" + CALLS
    ),
    "reasoning cut off": each(SPLIT + "{{ text }}", ASK_INSIDE, ""),
    "reasoning cut off, marked": each(
        "{% generation %}" + SPLIT + "{{ text }}",
        ASK_INSIDE,
        "",
        "<|im_end|>{% endgeneration %}",
    ),
    "reasoning cut off, asked for outside": each(SPLIT + "{{ text }}", ASK, ""),
    "reasoning cut off, empty block": each(
        SPLIT + "{{ '<think></think>' + text }}", ASK_EITHER, ""
    ),
    "an empty block, then the text as it is": each(
        "{{ '<think>\n\n</think>\n' + (m.content or '') }}", ASK, ""
    ),
    "no "
    "system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + CHATML,
    "system in the last question": (
        "{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.index0 == ns.last and ns.system %}{{ ns.system + '\n\n' }}{% endif %}"
        "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    ),
    "a longer end behind the last turn": each(
        "{{ m.content or '' }}" + CALLS, end="{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}"
    ),
    "roles alternate": (
        "{% for m in messages if m.role != 'system' %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    ),
}
END_SHOWN = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
TEMPLATES["as it is, marked but for the end"] = CHATML_WITH_SPANS.replace(
    END_SHOWN, "{{ message['content'] }}{% endgeneration %}<|im_end|>"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def turns(*answers: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i, answer in enumerate(answers):
        found.append({"role": "user", "content": f"question {i}?"})
        said = answer if isinstance(answer, dict) else {"content": answer}
        found.append({"role": "assistant", **said})
    return found


def apart(why: str, text: str) -> dict[str, Any]:
    return {"reasoning_content": why, "content": text}


PLAIN = turns("first answer.", "second answer,\nof two lines.", "third <b>answer</b>.")
CALLED = [
    {"role": "user", "content": "what?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a thing"},
    {"role": "assistant", "content": "a thing."},
]
SPOKE = copy.deepcopy(CALLED)
SPOKE[1]["content"] = "I look."
INSIDE = "<think>\nwhy {0}\n</think>\n\nanswer {0}"
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "plain": (PLAIN, None),
    "system": ([{"role": "system", "content": "be brief"}, *PLAIN], None),
    "call": (CALLED, TOOLS),
    "words and a call": (SPOKE, TOOLS),
    "reasoning apart": (
        turns(apart("why one", "answer one"), apart("why two", "answer two")),
        None,
    ),
    "reasoning inside": (turns(INSIDE.format("one"), INSIDE.format("two")), None),
    "reasoning inside, opened by the words that ask": (
        turns(*(INSIDE.format(n).removeprefix("<think>\n") for n in ("one", "two"))),
        None,
    ),
    "blanks": (turns("  blanks before and behind.\n", "\n\nlines before"), None),
    "a closing word in the text": (turns("it ends with </think>, as they say"), None),
}


def texts(found: Encoded, tokenizer: Any) -> list[str]:
    """The supervised stretches of text."""
    parts: list[list[int]] = []
    for t, on in enumerate(found.loss):
        if on and not (t and found.loss[t - 1]):
            parts.append([])
        if on:
            parts[-1].append(found.ids[t])
    return [tokenizer.decode(part) for part in parts]


def bare(text: str) -> str:
    """Without blanks and without what delimits reasoning."""
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


def wanted(message: dict[str, Any], last: bool) -> list[str]:
    """What must be supervised of an answer; of an earlier one not the reasoning."""
    content = message["content"] or ""
    inside = "" if "</think>" not in content else content.rpartition("</think>")[0]
    text = content.rpartition("</think>")[2]
    called = ["look"] if message.get("tool_calls") else []
    reasons = [message.get("reasoning_content") or "", inside] if last else []
    return [bare(part) for part in (*reasons, text, *called) if part]


@pytest.mark.parametrize(("mode", "shift"), [("chat", 0), ("rows", 4)])
def test_an_answer_is_supervised_as_a_whole_or_left_out_by_name(mode: str, shift: int) -> None:
    """Every template with two of the chats, every chat with four or five templates."""
    for i, template in enumerate(TEMPLATES):
        check_answers(template, (*CHATS,)[(i + shift) % len(CHATS)], mode)


def check_answers(template: str, chat: str, mode: str) -> None:
    given, tools = CHATS[chat]
    tokenizer = byte_tokenizer(template=TEMPLATES[template])
    row = interpret({"messages": copy.deepcopy(given), "tools": tools}, "f:1")
    try:
        rows = encode(row, tokenizer, RowsConfig(4096, turns=mode), EOS)
    except BadRow as left_out:
        return named(str(left_out))
    answers = [m for m in given if m["role"] == "assistant"]
    if mode == "chat":
        (found,) = rows
        assert found.turns == (len(answers),) * 3, "or the header says so"
        got = texts(found, tokenizer)
        for i, (answer, text) in enumerate(zip(answers, got, strict=True)):
            for part in wanted(answer, i == len(answers) - 1):
                assert part in bare(text), (part, text)
        return None
    for found in rows:
        (text,) = texts(found, tokenizer)
        assert any(all(p in bare(text) for p in wanted(a, True)) for a in answers), text
    return None


def named(why: str) -> None:
    known = ("f:1: the chat template ", "f:1: turn ")
    assert why.startswith(known), why


def supervised(template: str, chat: list[dict[str, Any]], **more: Any) -> tuple[str, str]:
    """What stands before the first supervised token, and what is supervised."""
    tokenizer = byte_tokenizer(template=TEMPLATES[template])
    complete = more.pop("complete", True)
    row = interpret({"messages": chat, "complete": complete}, "f:1")
    (found,) = encode(row, tokenizer, RowsConfig(4096, **more), EOS)
    first = found.loss.index(True)
    return tokenizer.decode(found.ids[:first]), "|".join(texts(found, tokenizer))


QUESTION = "<|im_start|>user\nquestion 0?<|im_end|>\n<|im_start|>assistant\n"


CUT_OFF = [
    # As a server had it: the words that ask, and what the target wrote behind them.
    ("reasoning cut off", "<think>\n", "why one\n</think>\n\nanswer one<|im_end|>"),
    ("reasoning cut off, marked", "<think>\n", "why one\n</think>\n\nanswer one<|im_end|>"),
    ("reasoning cut off, asked for outside", "", INSIDE.format("one") + END),
    ("an empty block, then the text as it is", "", INSIDE.format("one") + END),
    ("block in the last turn alone", "", INSIDE.format("one") + END),
]


def test_reasoning_that_the_template_cuts_off_stands_as_the_server_had_it() -> None:
    for template, prompt, want in CUT_OFF:
        assert supervised(template, turns(INSIDE.format("one"))) == (QUESTION + prompt, want)


def test_reasoning_behind_words_that_close_its_block_is_left_out_or_the_server_was_requested_so() -> (
    None
):
    given, template = turns(INSIDE.format("one")), "reasoning cut off, empty block"
    with pytest.raises(BadRow, match="f:1: turn 1 holds reasoning, but .*chat_template_kwargs"):
        supervised(template, given)
    got = supervised(template, given, chat_template_kwargs={"thinking": True})
    assert got == (QUESTION + "<think>", "\nwhy one\n</think>\n\nanswer one<|im_end|>")


CUT = "<think>\nwell, the"


def test_an_answer_that_opens_a_block_and_never_closes_it_is_left_out() -> None:
    for template in ("block in the last turn alone", "an empty block, then the text as it is"):
        with pytest.raises(BadRow, match="f:1: turn 1 opens a block of reasoning and does not"):
            supervised(template, turns(CUT))


@pytest.mark.parametrize("form", ["inside", "apart"])
def test_an_answer_cut_inside_its_reasoning_stands_behind_the_words_that_asked(form: str) -> None:
    """No closing delimiter, no end of turn: nothing that the target has not written."""
    for template in [*TEMPLATES][::3]:
        check_cut(template, form)


def check_cut(template: str, form: str) -> None:
    given = turns(CUT if form == "inside" else apart("\nwell, the", ""))
    try:
        prompt, said = supervised(template, given, complete=False)
    except BadRow as left_out:
        assert form == "apart" or template == "reasoning cut off, empty block", left_out
        return named(str(left_out))
    tokenizer = byte_tokenizer(template=TEMPLATES[template])
    requested = tokenizer.apply_chat_template(
        given[:-1], tokenize=False, add_generation_prompt=True
    )
    assert prompt == requested.rstrip(" ") and said.endswith("well, the") and "answer" not in said
    if form == "inside":
        assert (prompt + said).replace("</think>", "").count("<think>") == 1
    return None


def test_an_answer_whose_last_token_runs_into_the_templates_words_is_left_out() -> None:
    """As where a template ends turns with a word that is no token of its tokenizer's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<e>": 0, "q": 1, "one": 2, ".[end]": 3, "|": 4}
    core = Tokenizer(models.WordLevel(words, unk_token="<e>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("|", "isolated")]
    )
    template = (
        "{% for m in messages %}{{ m.content + (' .[end]|' if m.role == 'x' else '[end]|') }}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template + "{% endfor %}"
    )
    row = interpret({"messages": turns("one .")}, "f:1")
    with pytest.raises(
        BadRow, match="f:1: the chat template does not show all of turn 1 in tokens"
    ):
        encode(row, tokenizer, RowsConfig(4096))
