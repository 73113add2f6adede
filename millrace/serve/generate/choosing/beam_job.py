"""A job whose choices are the best beams: the front drives the search, one token of every beam at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from millrace.beams import Beam, check_beams, search, step_params
from millrace.errors import BadRequest, MillraceError
from millrace.link.messages import Finish, TokenLogprobs
from millrace.link.search_steps import SearchSteps
from millrace.params.beams import BeamParams
from millrace.params.classes import FinishReason
from millrace.serve.generate.checks import name_fields
from millrace.serve.generate.choices import Choice
from millrace.serve.generate.generation import Generation, Prompt
from millrace.serve.generate.job import Job
from millrace.serve.generate.writer import Writer
from millrace.serve.http.event_stream import EventStream
from millrace.serve.state import FrontState
from millrace.text.text_stream import stop_finder


def make_job(
    state: FrontState, generation: Generation, make_writer: Callable[[Job], Writer], out: EventStream | None = None
) -> Job:
    kind = Job if generation.beams is None else BeamJob
    return kind(state, generation, make_writer, out)


class BeamJob(Job):
    """The tokens of the best beams are given to the choices when the search has ended, so a stream begins late."""

    _search: asyncio.Task[None] | None = None

    def __init__(
        self,
        state: FrontState,
        generation: Generation,
        make_writer: Callable[[Job], Writer],
        out: EventStream | None = None,
    ) -> None:
        super().__init__(state, generation, make_writer, out)
        self._searches: list[SearchSteps] = []
        self._limits: list[int] = []
        """Maximum number of output tokens. Like the others, by prompt."""
        self._ended: dict[int, Finish] = {}

    def start(self) -> None:
        ends = self._ends()
        beams = self.generation.beams
        assert beams is not None
        try:
            check_beams(beams, self.generation.params, len(ends))
            limit_of, params = self.state.client.output_limit, self.generation.params
            self._limits = [limit_of(len(prompt.token_ids), params) for prompt in self.generation.prompts]
        except BadRequest as error:
            asks = "echo" if self.generation.echo else "prompt_logprobs"
            names = {**self.writer.limit_names, "grammar": self.generation.format_field, "prompt_logprobs": asks}
            raise name_fields(error, names) from None
        self.state.client.check_room()
        self.begin()
        self._searches = [self._steps_after(prompt) for prompt in self.generation.prompts]
        self._search = asyncio.create_task(self._run(beams, ends))

    def _steps_after(self, prompt: Prompt) -> SearchSteps:
        generation = self.generation
        return SearchSteps(
            self.state.client,
            prompt.token_ids,
            self.error_of,
            priority=generation.priority,
            deadline=generation.deadline,
            cache_salt=generation.cache_salt,
            caller=generation.caller,
        )

    @property
    def is_started(self) -> bool:
        return self._search is not None

    def close(self) -> None:
        if self._search is None:
            return
        for steps in self._searches:
            steps.end(None)  # No effect on one that has ended.
        if self._search is not asyncio.current_task():
            self._search.cancel()

    def abort_choice(self, choice: Choice, reason: FinishReason) -> None:
        """A choice that meets a stop string: its tokens are all known, so there is nothing to abort."""

    @property
    def finishes(self) -> dict[int, Finish]:
        """Those of the searches, one for each prompt."""
        return self._ended

    def _ends(self) -> tuple[int, ...]:
        params, own = self.generation.params, self.state.tokenizer.end_token_ids
        return tuple(dict.fromkeys((*(() if params.ignore_eos else own), *params.stop_token_ids)))

    async def _run(self, beams: BeamParams, ends: tuple[int, ...]) -> None:
        try:
            numbers = range(len(self._searches))
            found = await asyncio.gather(*(self._beams_of(number, beams, ends) for number in numbers))
            for index, beam in enumerate(beam for best in found for beam in best):
                self._deliver(self.choices[index], beam, self._ended[index // self.generation.n])
        except MillraceError as error:
            self.fail(error)
        except Exception as error:
            self.on_bug(error)

    async def _beams_of(self, number: int, beams: BeamParams, ends: tuple[int, ...]) -> list[Beam]:
        """The beams of this prompt that are returned, best first."""
        params, steps, max_tokens = self.generation.params, self._searches[number], self._limits[number]
        asked = step_params(beams, len(ends), params.logprobs, self.state.adapter)
        best: list[Beam] = []

        async def expand(live: list[list[int]]) -> list[TokenLogprobs]:
            return list(await asyncio.gather(*(steps.following(tokens, asked) for tokens in live)))

        try:
            found = await search(
                beams,
                expand,
                max_tokens=max_tokens,
                ends=ends,
                min_tokens=params.min_tokens,
                has_stop=stop_finder(self.state.tokenizer, params),
            )
            best = found[: self.generation.n]
        finally:
            reason = best[0].finish_reason(max_tokens) if best else None
            self._ended[number] = steps.end(reason, sum(len(beam.token_ids) for beam in best))
        return best

    def _deliver(self, choice: Choice, beam: Beam, search: Finish) -> None:
        has_logprobs = self.generation.logprobs is not None
        # An end token is not part of the answer.
        num_shown = len(beam.token_ids) - beam.is_stopped
        for token, entry in zip(beam.token_ids[:num_shown], beam.logprobs[:num_shown], strict=True):
            choice.on_token(token, entry if has_logprobs else None)
        choice.on_finish(
            msgspec.structs.replace(
                search,
                reason="stop" if beam.is_stopped else "length",
                stop_token_id=beam.token_ids[-1] if beam.is_stopped else -1,
                output_tokens=len(beam.token_ids),
            )
        )
