"""What is wrong with a converted target, one line each: its tokenizer to the token, its
weights by what a sound model knows.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

from outrider.decode.models.packages.table import PackagedTarget

ROUND_TRIPS = [
    "",
    " ",
    "  leading",
    "trailing  ",
    "\n\n1. One\n\t2.  Two\r\n",
    "0123456789 ½ ² ٣",
    "naïve café — Ünï",
    "日本語のテキスト",
    "Привет, мир",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "def f(x):\n    return x**2  # ok",
    "a\u00a0b\u200bc",
]


def folder(target: PackagedTarget, out: Path) -> list[str]:
    """Of a whole converted folder; [] when it is sound."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()  # "Loading weights" of a second
    tokenizer = AutoTokenizer.from_pretrained(out)
    if problems := of_tokenizer(target, tokenizer):
        return problems
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    return of_model(target, model, tokenizer)


def of_tokenizer(target: PackagedTarget, tokenizer: Any) -> list[str]:
    """[] when it gives the ids of the table's texts, every text back, and the chat
    template's ChatML."""
    problems = []
    for text, want in target.vectors:
        if (got := tokenizer(text).input_ids) != want:
            problems.append(f"tokens of {text!r} are {got}, not {want}")
    for text in ROUND_TRIPS:
        back = tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False)
        if back != unicodedata.normalize("NFC", text):
            problems.append(f"{text!r} comes back as {back!r}")
    for token, want_id in target.ids.items():
        if tokenizer(token).input_ids != [want_id]:
            problems.append(f"{token} is {tokenizer(token).input_ids}, not {want_id}")
    end, size = target.generation["eos_token_id"][0], target.tokenizer["size"]
    if tokenizer.eos_token_id != end or len(tokenizer) != size:
        problems.append(
            f"end of turn is {tokenizer.eos_token_id} and size {len(tokenizer)}, "
            f"not {end} and {size}"
        )
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "1")]
    chat = [{"role": role, "content": content} for role, content in turns]
    want_text = "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in [("system", target.system), *turns]
    )
    want_text += "<|im_start|>assistant\n"
    if tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) != want_text:
        problems.append("the chat template does not render ChatML")
    return problems


# Plain English with a known kind of difficulty: a sound model of these sizes is near perplexity
# 10-20 here, one with permuted heads, a wrong rope base or a missing bias is far above 100.
PLAIN_TEXT = (
    "The sun rises in the east and sets in the west. During the day it warms the land "
    "and the sea, and "
    "at night the air cools again. Farmers plan their work around the seasons: they sow "
    "in spring, tend "
    "the fields in summer, and bring in the harvest before the first frost of winter."
)


def of_model(target: PackagedTarget, model: Any, tokenizer: Any) -> list[str]:
    """[] when it has the table's number of parameters, a perplexity in (3, 40) on a plain
    English text, and a greedy answer that knows the capital of France."""
    import torch

    problems = []
    if (count := sum(p.numel() for p in model.parameters())) != target.parameters:
        problems.append(f"{count} parameters, not {target.parameters}")
    ids = tokenizer(PLAIN_TEXT, return_tensors="pt").input_ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        perplexity = float(model(ids, labels=ids).loss.exp())
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    if not 3 < perplexity < 40:
        problems.append(f"perplexity {perplexity:.1f} on plain English, expected 3 to 40")
    if "Paris" not in (text := tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])):
        problems.append(f"the capital of France is {text!r}")
    return problems
