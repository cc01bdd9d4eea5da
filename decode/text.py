"""Token ids to text, token by token."""

from __future__ import annotations

from typing import Any


class Stream:
    """Token ids to text as they come. Some characters take several tokens: they appear with
    their last one.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # Decoding starts here: some tokenizers need the token before to place a space.
        self.context = 0
        self.shown = 0  # ids whose text has been returned

    def push(self, token: int) -> str:
        """Return the text that `token` adds; "" while a character is incomplete."""
        self.ids.append(token)
        before = self._text(self.ids[self.context : self.shown])
        after = self._text(self.ids[self.context :])
        if after.endswith("\ufffd") and len(self.ids) - self.shown < 8:
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return after[len(before) :]

    def rest(self) -> str:
        """Return the text of an unfinished character at the end of an answer."""
        before = self._text(self.ids[self.context : self.shown])
        after = self._text(self.ids[self.context :])
        self.context = self.shown = len(self.ids)
        return after[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
