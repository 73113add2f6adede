"""What a runner is told about a request beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from millrace.params.draws import DrawParams


@dataclass(frozen=True, slots=True)
class RowParams:
    """What a runner is told about a request beside its tokens. The scheduler reads only whether the prompt is scored or
    pooled."""

    params: DrawParams
    """Given as `SamplingParams`, only what a runner reads of them is kept."""
    end_token_ids: tuple[int, ...] = ()
    scope: str = ""
    """Requests of equal scope may see each other's text, as in the prefix cache."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", self.params.of_draws())

    @property
    def has_late_ends(self) -> bool:
        """End tokens cannot be drawn before a minimum length."""
        return self.params.min_tokens > 0 and bool(self.end_token_ids)

    def to_bytes(self) -> bytes:
        return _row_encoder.encode((self.params, self.end_token_ids, self.scope))

    @staticmethod
    def from_bytes(data: bytes) -> RowParams:
        """Raises a ValueError if the bytes are no parameters."""
        return RowParams(*_row_decoder.decode(data))


_row_encoder = msgspec.msgpack.Encoder()


_row_decoder = msgspec.msgpack.Decoder(tuple[DrawParams, tuple[int, ...], str])


DEFAULT_ROW_PARAMS = RowParams(DrawParams())
