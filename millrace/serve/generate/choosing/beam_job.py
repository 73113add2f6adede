"""A job whose choices are the best beams: the front drives the search, one token of every beam at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.beams import Beam, OneToken, check_beams, search, step_params
from millrace.errors import BadRequest, MillraceError, RequestFailed
from millrace.link.messages import Finish, TokenLogprobs
from millrace.params import BeamParams, FinishReason, SamplingParams
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

    is_search = True
    _search: asyncio.Task[None] | None = None

    def start(self) -> None:
        ends = self._ends()
        beams = self.generation.beams
        assert beams is not None
        try:
            check_beams(beams, self.generation.params, len(ends))
            for prompt in self.generation.prompts:
                self.state.client.output_limit(len(prompt.token_ids), self.generation.params)
        except BadRequest as error:
            asks = "echo" if self.generation.echo else "prompt_logprobs"
            names = {**self.writer.limit_names, "grammar": self.generation.format_field, "prompt_logprobs": asks}
            raise name_fields(error, names) from None
        self.begin()
        self._steps: set[int] = set()
        """Requests in flight."""
        self._search = asyncio.create_task(self._run(beams, ends))

    @property
    def is_started(self) -> bool:
        return self._search is not None

    def close(self) -> None:
        if self._search is None:
            return
        for request_id in tuple(self._steps):
            self.state.client.abort(request_id)
        if self._search is not asyncio.current_task():
            self._search.cancel()

    def abort_choice(self, choice: Choice, reason: FinishReason) -> None:
        """A choice that meets a stop string: its tokens are all known, so there is nothing to abort."""

    def _ends(self) -> tuple[int, ...]:
        params, own = self.generation.params, self.state.tokenizer.end_token_ids
        return tuple(dict.fromkeys((*(() if params.ignore_eos else own), *params.stop_token_ids)))

    async def _run(self, beams: BeamParams, ends: tuple[int, ...]) -> None:
        try:
            found = await asyncio.gather(*(self._beams_of(prompt, beams, ends) for prompt in self.generation.prompts))
            for index, beam in enumerate(beam for one in found for beam in one[: self.generation.n]):
                self._deliver(self.choices[index], beam)
        except MillraceError as error:
            self.fail(error)
        except Exception as error:
            self.on_bug(error)

    async def _beams_of(self, prompt: Prompt, beams: BeamParams, ends: tuple[int, ...]) -> list[Beam]:
        params = self.generation.params
        asked = step_params(beams, len(ends), params.logprobs)

        async def expand(live: list[list[int]]) -> list[TokenLogprobs]:
            steps = [self._submit(prompt.token_ids + tokens, asked) for tokens in live]
            return list(await asyncio.gather(*steps))

        max_tokens = self.state.client.output_limit(len(prompt.token_ids), params)
        return await search(
            beams,
            expand,
            max_tokens=max_tokens,
            ends=ends,
            min_tokens=params.min_tokens,
            has_stop=stop_finder(self.state.tokenizer, params),
        )

    async def _submit(self, token_ids: list[int], params: SamplingParams) -> TokenLogprobs:
        generation, step = self.generation, OneToken()
        request_id = self.state.client.submit(
            token_ids,
            params,
            step,
            priority=generation.priority,
            deadline=generation.deadline,
            cache_salt=generation.cache_salt,
            caller=generation.caller,
        )
        self._steps.add(request_id)
        try:
            finish = await step.done
        finally:
            self._steps.discard(request_id)
        if finish.reason not in ("stop", "length"):
            raise self.error_of(finish)
        if step.logprobs is None:
            raise RequestFailed("The engine sent no log-probabilities for a beam.")
        return step.logprobs

    def _deliver(self, choice: Choice, beam: Beam) -> None:
        has_logprobs = self.generation.logprobs is not None
        # An end token is not part of the answer.
        num_shown = len(beam.token_ids) - beam.is_stopped
        for token, entry in zip(beam.token_ids[:num_shown], beam.logprobs[:num_shown], strict=True):
            choice.on_token(token, entry if has_logprobs else None)
        last = beam.token_ids[-1]
        choice.on_finish(
            Finish(
                id=0,
                reason="stop" if beam.is_stopped else "length",
                stop_token_id=last if beam.is_stopped else -1,
                prompt_tokens=len(choice.prompt.token_ids),
                output_tokens=len(beam.token_ids),
            )
        )
