"""Token ids to text, token by token."""

from __future__ import annotations

from typing import Any

UNKNOWN = "\ufffd"  # what bytes become that are no whole character
BYTES = 3  # of a character that is not whole yet, at most


class Stream:
    """Token ids to text as they come; all that `push` and `rest` return is the text of the whole.
    Some characters take several tokens: they appear with their last one.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        # Decoding starts here: some tokenizers need the token before to place a space.
        self.context = 0
        self.shown = 0  # ids whose text has been returned
        self.told = 0  # characters of later ones that have been, too

    def push(self, token: int) -> str:
        """Return the text that `token` adds; "" while a character is incomplete."""
        self.ids.append(token)
        return self._release(BYTES)

    def rest(self) -> str:
        """Return the text of an unfinished character at the end of an answer."""
        return self._release(0)

    def _release(self, held: int) -> str:
        """Return what is new, but for `held` unknown characters at its end."""
        before = self._text(self.ids[self.context : self.shown])
        fresh = self._text(self.ids[self.context :])[len(before) :]
        held = min(len(fresh) - len(fresh.rstrip(UNKNOWN)), held)
        out = fresh[self.told : len(fresh) - held]
        self.told += len(out)
        if not held:
            self.context, self.shown, self.told = self.shown, len(self.ids), 0
        return out

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
