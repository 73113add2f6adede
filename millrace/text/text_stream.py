"""Text of one choice as it is generated: detokenizer and stop strings together."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence

from millrace.params.sampling import SamplingParams
from millrace.text.detokenizer import Detokenizer
from millrace.text.stop_strings import StopStrings
from millrace.text.tokenizers.tokenizer import Tokenizer


class TextStream:
    """Converts token ids to text for the client. Stop strings are matched against the text that the client sees, so
    special tokens count only if the request shows them. Not thread-safe."""

    __slots__ = ("_detokenizer", "_markers", "_stops", "push")

    push: Callable[[int], str]
    """Takes the next token id and returns the text to send: "" while it is held back or after a stop."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, markers: Mapping[int, str] = types.MappingProxyType({})
    ) -> None:
        """`markers`: special tokens that are part of the text even if special tokens are hidden."""
        self._markers = markers
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        # Without stop strings, `push` is the detokenizer's method: one call less per token.
        self.push = self._detokenizer.push if self._stops is None else self._push_with_stops
        if markers and params.skip_special_tokens:
            self.push = self._push_with_markers

    def _push_with_stops(self, token_id: int) -> str:
        assert self._stops is not None
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if text else ""

    def _push_with_markers(self, token_id: int) -> str:
        marker = self._markers.get(token_id)
        text = self._detokenizer.push(token_id) if marker is None else self._detokenizer.flush() + marker
        return text if self._stops is None or not text else self._stops.push(text)

    def finish(self) -> str:
        """Text still held back at the end of generation; "" after a stop. This text can complete a stop string, so
        read `stopped_by` afterwards."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.flush()

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return None if self._stops is None else self._stops.matched


def stop_finder(tokenizer: Tokenizer, params: SamplingParams) -> Callable[[Sequence[int]], bool] | None:
    """Says whether the text of output tokens contains a stop string that their last token completes. None: there are
    no stop strings."""
    if not params.stop:
        return None
    # Every token that is shown has a byte at least. The further ones let the first character of the window be whole.
    window = max(len(stop.encode("utf-8", "surrogatepass")) for stop in params.stop) + 8

    def has_stop(token_ids: Sequence[int]) -> bool:
        text = TextStream(tokenizer, params)
        for token in token_ids[-window:]:
            text.push(token)
        return text.stopped_by is not None

    return has_stop
