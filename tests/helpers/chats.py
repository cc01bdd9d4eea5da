"""A small chat file; torch stays out of what needs no more."""

from __future__ import annotations

import json
from pathlib import Path

SENTENCE = "the rider goes ahead of a slow horse and looks back along the road"
WORDS = SENTENCE.split()
# decode.models.tiny.CHATML with the assistant's spans marked for `return_assistant_tokens_mask`.
CHATML_WITH_SPANS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chats(path: Path, rows: int = 48) -> Path:
    """A chat file of `rows` conversations of different lengths."""
    with path.open("w") as file:
        for i in range(rows):
            answer = " ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(3 + i % 9))
            turns = [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path
