"""The text of one choice as it is generated: detokenised, with stop strings watched over."""

from __future__ import annotations

from collections.abc import Callable

from millrace.params import SamplingParams
from millrace.text.detokenizer import Detokenizer
from millrace.text.stop_strings import StopStrings
from millrace.text.tokenizers.tokenizer import Tokenizer


class TextStream:
    """Tokens in, showable text out. Stop strings are matched against the text that is shown, special tokens hidden or
    not as the request asks. For one thread."""

    __slots__ = ("_detokenizer", "_stops", "push")

    push: Callable[[int], str]
    """Takes the next token id; returns the text that may be shown now, "" while it is held back or after a stop."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        # Without stop strings there is nothing between a token and its text, so nothing is called in between.
        self.push = self._detokenizer.push if self._stops is None else self._push_watched

    def _push_watched(self, token_id: int) -> str:
        assert self._stops is not None
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if text else ""

    def finish(self) -> str:
        """The held-back rest, at the end of generation; "" after a stop. The end can itself complete a stop string,
        so look at `stopped_by` afterwards too."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.flush()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._stops is None else self._stops.matched
