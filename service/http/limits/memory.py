"""The resources of a request: memory, its client's share and its model. They are released together at its end.

A lack of memory must never end a process, so the memory of a request is estimated before it runs. This module knows
only sizes and names. Limits that are not configured cost nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from service.http.connection.errors import ApiError
from service.http.limits.clients import Charge, ClientLimits
from service.settings import Settings
from service.shared import SharedState
from service.text.candidates import MAX_CUTS
from service.wire import Submit
from service.words import plural

if TYPE_CHECKING:
    from service.http.models.model import Model
    from service.observe.metrics import Metrics

# Bytes of a sequence, without its characters.
SEQUENCE_BYTES = 2000
RUNNING_BYTES = 4000  # more for a sequence that was sent

# Bytes per character in the HTTP process and the inference process together.
PROMPT_BYTES = 8  # a prompt's ids, once for all its sequences
SENT_BYTES = 24  # the part sent for a sequence: ids of the request, of the sequence, and ids to run
ECHO_BYTES = 4  # echoed text in an answer
COMPLETION_BYTES = 28  # ids, and texts as they arrive; ids again after a lost worker
LOGPROB_BYTES = 12  # each alternative and the character itself
WIDE_ID_BYTES = 32  # an id above 256; Python shares the smaller ones
BIAS_BYTES = 300  # a pair of id and bias, in the body and in both processes


class Estimate(NamedTuple):
    """The maximum bytes of a request, by the field that they depend on. Each also depends on `n`."""

    prompt: int  # with everything that is sent once for all sequences
    max_tokens: int
    logprobs: int

    @property
    def largest(self) -> str:
        """The field to lower first: the one with the most bytes."""
        return max(zip(self, self._fields, strict=True))[1]


def estimate(
    submits: Sequence[Submit],
    receptive_field: int,
    vocab_size: int,
    *,
    echo: bool = False,
    window: int | None = None,
    answers: int | None = None,
    num_rankings: int = 0,
    beside: int = 0,
) -> Estimate:
    """Estimate the memory of a request with these sequences, from the bytes above.

    window: number of sequences that run at once.
    answers: exact answers of each sequence's prompt; `window` candidates run at once.
    num_rankings: candidates for an infill. Each is cut in MAX_CUTS ways and scored whole, with the suffix in its
    receptive field.
    beside: bytes that the request holds besides its sequences.
    """
    wide = WIDE_ID_BYTES if vocab_size > 257 else 0
    beside += SEQUENCE_BYTES * len(submits) + RUNNING_BYTES * len(submits if answers else submits[:window])
    beside += _beside(submits[0], SENT_BYTES + wide) if submits else 0
    if answers is None:
        answers = 1
    else:
        window = max(window or 0, len(submits))
        longest = min(receptive_field, max([len(submit.prompt) for submit in submits]))
        candidate = SEQUENCE_BYTES + RUNNING_BYTES + (SENT_BYTES + wide) * longest
        beside += SEQUENCE_BYTES * answers * len(submits) + candidate * (window - len(submits))
    if len(submits) == 1 and submits[0].logprobs is None and not (echo or num_rankings):  # most requests
        length, max_tokens = len(submits[0].prompt), answers * submits[0].max_tokens
        prompt = PROMPT_BYTES * length + (SENT_BYTES + wide) * min(length, receptive_field)
        return Estimate(prompt + beside, (COMPLETION_BYTES + wide) * max_tokens, 0)
    sent: list[int] = []
    prompts: dict[int, int] = {}
    echoed = completion = logprobs = max_tokens = 0
    for submit in submits:
        length = len(submit.prompt)
        prompts[id(submit.prompt)] = length
        first_needed = length if submit.score_from is None else submit.score_from
        sent.append(length - max(0, first_needed - receptive_field))
        echoed += length if echo else 0
        completion += answers * submit.max_tokens
        max_tokens = max(max_tokens, submit.max_tokens)
        logprobs += _num_logprobs(submit, answers, vocab_size)
    running = sum(sorted(sent)[-window:] if window else sent)
    prompt = PROMPT_BYTES * sum(prompts.values()) + (SENT_BYTES + wide) * running + ECHO_BYTES * echoed + beside
    if num_rankings:
        longest = max(prompts.values()) + max_tokens
        ranking = PROMPT_BYTES * longest + (SENT_BYTES + wide) * 2 * min(receptive_field, longest)
        ranking += SEQUENCE_BYTES + RUNNING_BYTES
        prompt += (1 + MAX_CUTS) * num_rankings * ranking
    return Estimate(prompt, (COMPLETION_BYTES + wide) * completion, LOGPROB_BYTES * logprobs)


def _num_logprobs(submit: Submit, answers: int, vocab_size: int) -> int:
    """Return the most log-probabilities that a sequence reports, each with its alternatives."""
    if submit.logprobs is None:
        return 0
    of_prompt = 0 if submit.score_from is None else len(submit.prompt) - submit.score_from
    return (answers * submit.max_tokens + of_prompt) * (
        1 + (len(submit.logprob_ids) or min(submit.logprobs, vocab_size))
    )


def _beside(submit: Submit, id_bytes: int) -> int:
    """Return the bytes sent besides a prompt, which the sequences of a request share (`wire.Submits`)."""
    if not (submit.stop or submit.constraint or submit.stop_pattern or submit.sampling.logit_bias):
        return 0
    packed = sum(len(each or b"") for each in (submit.constraint, submit.minimum, submit.stop_pattern))
    return id_bytes * sum(map(len, submit.stop)) + BIAS_BYTES * len(submit.sampling.logit_bias) + 2 * packed


def size_of(fields: Iterable[Any], num_body_bytes: int, longest: int) -> int:
    """Return the maximum bytes of a body's fields.

    longest: a list of more texts or lists is refused at once, so its items do not count.
    """
    lists = [value for value in fields if isinstance(value, list) and value]
    # Python shares the ids up to 256. Each larger id takes at least four bytes of the body.
    num_wide = num_body_bytes // 4 if any(isinstance(it[0], (int, list)) for it in lists) else 0
    return sum(_size(value, longest) for value in fields) + WIDE_ID_BYTES * num_wide


def _size(value: Any, longest: int) -> int:
    """Return the bytes of a text, a number, or a list or object of these. Ids count only their places in a list."""
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = (*value, *value.values())
    elif isinstance(value, tuple) or (isinstance(value, list) and value and not isinstance(value[0], int)):
        items = value if len(value) <= longest else ()
    return sys.getsizeof(value) + sum([_size(item, longest) for item in items])


class Ledger:
    """The memory that the leases of one HTTP process hold.

    Together they may hold this process's share of `max_held_bytes`, and one client may hold half of that. Both limits
    are at least the largest request or body allowed, which could otherwise never be admitted.
    """

    def __init__(self, settings: Settings, limits: ClientLimits, state: SharedState):
        self.limits, self.state = limits, state
        share = settings.max_held_bytes // settings.http_processes
        largest = max(settings.max_request_bytes, settings.max_body_bytes)
        self.max_bytes, self.max_client_bytes = max(share, largest), max(share // 2, largest)
        self.held = 0
        self.by_client: dict[str, int] = {}
        self.process_id = 0  # both are set when the HTTP process has started
        self.metrics: Metrics | None = None


class Lease:
    """The resources of one request. `client` may change until `begin`."""

    __slots__ = ("_ledger", "client", "bytes", "model", "_is_counted", "_charge")

    def __init__(self, ledger: Ledger, client: str):
        self._ledger, self.client = ledger, client
        self.bytes = 0
        self.model: Model | None = None
        self._is_counted = False
        self._charge: Charge | None = None

    def begin(self) -> None:
        """Count the request in its client's limits. Raises ApiError: 429."""
        try:
            self._ledger.limits.begin(self.client)
        except ApiError as error:
            raise self._rejected(error) from None
        self._is_counted = True

    def use(self, model: Model) -> None:
        """Keep the model until the request's end, even if another model takes its name. A shutdown waits for it."""
        self.model = model
        self._ledger.state.use(self._ledger.process_id, model.place, 1)

    def hold(self, bytes: int, num_sequences: int = 1) -> None:
        """Change the memory held to `bytes`. Raises ApiError: 429, it does not fit; nothing has changed."""
        ledger, client, difference = self._ledger, self.client, bytes - self.bytes
        if not difference:
            return
        held, of_client = ledger.held + difference, ledger.by_client.get(client, 0) + difference
        if difference > 0 and (held > ledger.max_bytes or of_client > ledger.max_client_bytes):
            whose = "this client" if held <= ledger.max_bytes else "all clients"
            message = f"requests of {whose} in progress leave no memory for {difference} bytes more: retry later"
            raise self._rejected(ApiError(429, message, code="overloaded", retry_after_seconds=1), num_sequences)
        ledger.held, self.bytes = held, bytes
        if of_client:
            ledger.by_client[client] = of_client
        else:
            del ledger.by_client[client]

    def take(self, bytes: int, num_characters: int, num_sequences: int = 1) -> None:
        """Take what the request needs to run: memory, and characters of its client's limit.

        Raises ApiError: 503, the server is shutting down; 429, it does not fit now; 400, it never fits.
        """
        if self._ledger.state.is_in("draining"):
            message = "server is shutting down"
            raise self._rejected(ApiError(503, message, code="shutting_down", retry_after_seconds=1), num_sequences)
        self.hold(bytes, num_sequences)
        if self._ledger.limits.has_any:
            self.charge(num_characters, num_sequences)

    def charge(self, num_characters: int, num_sequences: int = 1, must_wait: bool = True) -> None:
        """Charge characters to the client's limit. Raises as ClientLimits.charge."""
        try:
            new, before = self._ledger.limits.charge(self.client, num_characters, must_wait), self._charge
        except ApiError as error:
            raise self._rejected(error, num_sequences) from None
        if new is not None:
            self._charge = new if before is None else new._replace(characters=before.characters + new.characters)

    def spend(self) -> None:
        """Keep the whole charge at the end, because all of its characters run."""
        self._charge = None

    @property
    def is_charged(self) -> bool:
        return self._charge is not None

    def end(self, num_characters: int) -> None:
        """Release everything, and give back the charge of characters that did not run."""
        ledger = self._ledger
        self.hold(0)
        if self._is_counted:
            ledger.limits.end(self.client)
        if self._charge is not None:
            ledger.limits.give_back(self.client, self._charge, num_characters)
        if self.model is not None:
            ledger.state.use(ledger.process_id, self.model.place, -1)

    def _rejected(self, error: ApiError, num_sequences: int = 1) -> ApiError:
        """Count a refusal that may succeed later, and return its error."""
        metrics = self._ledger.metrics if self.model is None else self.model.metrics
        if metrics is not None and error.code is not None:
            metrics.request_rejected(error.code, num_sequences)
        return error


def too_much(needed: Estimate, num_sequences: int, limit: int) -> ApiError:
    """Return the refusal of a request that exceeds the limit of memory."""
    parts = ", ".join(f"{size} for {name}" for name, size in zip(needed._fields, needed, strict=True) if size)
    message = (
        f"{needed.largest}: {plural(num_sequences, 'sequence')} may need {sum(needed)} bytes of memory ({parts}), "
        f"{limit} are allowed: lower n, logprobs or max_tokens, or shorten the prompt, stops or biases"
    )
    return ApiError(400, message, param=needed.largest)
