"""How much memory a request may hold, and all requests together, so that no answer ends a process for lack of memory.

Knows sizes only; a client is a string that the caller chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from service.http.schemas import ApiError
from service.settings import Settings
from service.wire import Submit

if TYPE_CHECKING:
    from service.observe.metrics import Metrics

# Bytes per character in the HTTP process and the inference process together.
PROMPT_BYTES = 8  # a prompt's ids, once for all its sequences
SENT_BYTES = 24  # what of it is sent for a sequence: the request's ids, the sequence's, and those to be run
ECHO_BYTES = 4  # its text in an answer
COMPLETION_BYTES = 24  # ids, and texts as they arrive
LOGPROB_BYTES = 12  # of each alternative and of the character itself
MAX_CUTS = 3  # positions at which a candidate for an infill may end, besides its own end
WIDE_ID_BYTES = 32  # an id above 256, which Python does not share


class Estimate(NamedTuple):
    """Bytes that a request can hold at most, by the field that they depend on; each also depends on `n`."""

    prompt: int
    max_tokens: int
    logprobs: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def largest(self) -> str:
        """The field to lower first."""
        return max(zip(self, self._fields, strict=True))[1]


def estimate(
    submits: Sequence[Submit],
    receptive_field: int,
    vocab_size: int,
    *,
    echo: bool = False,
    window: int | None = None,
    num_rankings: int = 0,
) -> Estimate:
    """What a request of these sequences can hold. Sums over sequences, with the bytes above:

    - of each different prompt, all characters · PROMPT_BYTES;
    - characters sent · SENT_BYTES: all that a needed logit depends on, which is the whole prompt if it is scored; of
      the `window` longest only, if no more run at once;
    - of each of `num_rankings` candidates for an infill, which is scored whole and cut in MAX_CUTS ways, prompt and
      completion · PROMPT_BYTES, and twice the receptive field, where the suffix is, · SENT_BYTES;
    - with `echo`, characters of the prompt · ECHO_BYTES;
    - max_tokens · COMPLETION_BYTES;
    - characters with log-probabilities · (1 + alternatives) · LOGPROB_BYTES.

    With more than 257 ids, WIDE_ID_BYTES are added to each character sent or generated.
    """
    wide = WIDE_ID_BYTES if vocab_size > 257 else 0
    if len(submits) == 1 and submits[0].logprobs is None and not (echo or num_rankings):  # most requests
        length, max_tokens = len(submits[0].prompt), submits[0].max_tokens
        prompt = PROMPT_BYTES * length + (SENT_BYTES + wide) * min(length, receptive_field)
        return Estimate(prompt, (COMPLETION_BYTES + wide) * max_tokens, 0)
    sent: list[int] = []
    prompts: dict[int, int] = {}
    echoed = completion = logprobs = max_tokens = 0
    for submit in submits:
        length = len(submit.prompt)
        prompts[id(submit.prompt)] = length
        first_needed = length if submit.score_from is None else submit.score_from
        sent.append(length - max(0, first_needed - receptive_field))
        echoed += length if echo else 0
        completion += submit.max_tokens
        max_tokens = max(max_tokens, submit.max_tokens)
        if submit.logprobs is not None:
            alternatives = len(submit.logprob_ids) or min(submit.logprobs, vocab_size)
            reported = submit.max_tokens + (0 if submit.score_from is None else length - submit.score_from)
            logprobs += reported * (1 + alternatives)
    running = sum(sorted(sent)[-window:] if window else sent)
    prompt = PROMPT_BYTES * sum(prompts.values()) + (SENT_BYTES + wide) * running + ECHO_BYTES * echoed
    if num_rankings:
        longest = max(prompts.values()) + max_tokens
        ranking = PROMPT_BYTES * longest + (SENT_BYTES + wide) * 2 * min(receptive_field, longest)
        prompt += (1 + MAX_CUTS) * num_rankings * ranking
    return Estimate(prompt, (COMPLETION_BYTES + wide) * completion, LOGPROB_BYTES * logprobs)


class Admission:
    """Counts what the requests of one HTTP process hold: bodies while they are read, then estimates.

    All may hold this process's share of `max_held_bytes`, and one client half of that; but either at least as much as
    the largest request or body allowed, which could otherwise never be admitted.
    """

    def __init__(self, settings: Settings):
        share = settings.max_held_bytes // settings.http_processes
        largest = max(settings.max_request_bytes, settings.max_body_bytes)
        self.max_bytes, self.max_client_bytes = max(share, largest), max(share // 2, largest)
        self.held = 0
        self.metrics: Metrics | None = None  # in a running HTTP process
        self._by_client: dict[str, int] = {}

    def hold(self, client: str) -> Hold:
        """What a request of this client holds: nothing yet."""
        return Hold(self, client)

    def change(self, client: str, difference: int, num_sequences: int) -> None:
        if difference > 0 and (
            self.held + difference > self.max_bytes
            or self._by_client.get(client, 0) + difference > self.max_client_bytes
        ):
            if self.metrics is not None:
                self.metrics.request_rejected("overloaded", num_sequences)
            whose = "this client" if self.held + difference <= self.max_bytes else "all clients"
            message = f"requests of {whose} in progress leave no memory for {difference} bytes more: retry later"
            raise ApiError(429, message, code="overloaded", retry_after_seconds=1)
        self.held += difference
        held = self._by_client.get(client, 0) + difference
        if held:
            self._by_client[client] = held
        else:
            del self._by_client[client]
        if self.metrics is not None:
            self.metrics.held_bytes.set(self.held)


class Hold:
    """What one request holds, until the end of the `with` statement. `client` may change while that is nothing."""

    __slots__ = ("_admission", "bytes", "client")

    def __init__(self, admission: Admission, client: str):
        self._admission, self.client = admission, client
        self.bytes = 0

    def resize(self, bytes: int, num_sequences: int = 1) -> None:
        """Hold this much instead.

        Raises:
            ApiError: 429, it does not fit; as much as before is held.
        """
        if bytes != self.bytes:
            self._admission.change(self.client, bytes - self.bytes, num_sequences)
            self.bytes = bytes

    def grow(self, bytes: int) -> None:
        """Hold this much more; raises as `resize`."""
        self.resize(self.bytes + bytes)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.resize(0)
