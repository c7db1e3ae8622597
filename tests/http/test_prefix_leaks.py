"""What one API key can learn of another's prompts from prefix reuse, by the attack itself over real sockets."""

import contextlib
import random

import pytest

from tests.helpers import ENDLESS, VOCABULARY, save_random, serving, wait_until, web

VICTIM, ATTACKER = ({"Authorization": f"Bearer key-of-the-{name}"} for name in ("victim", "attacker"))
LETTERS = "abcd"  # of what the attacker does not know
HITS = "chargpt_prefix_cache_hit_tokens_total"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose prompts are long enough to be shared, and take time."""
    return save_random(tmp_path_factory.mktemp("wide") / "checkpoint", block_size=1024, n_embd=64, n_layer=4)


class Service:
    """A server, and what its requests copy."""

    def __init__(self, server, seed=0):
        self.server, self.chance = server, random.Random(seed)
        self.before = 0.0  # as `total` found last

    def text(self, length):
        return "".join(self.chance.choices(VOCABULARY[1:], k=length))

    def ask(self, headers, path="/generate", **body):
        response = web.post(self.server.url + path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        return response

    def copied(self, headers, path="/generate", **body):
        """How many characters of prompts a request copies; none other may have run since `total`."""
        before = self.before
        self.ask(headers, path, **body)
        return self.total() - before

    def total(self):
        """Of all requests that have ended: the worker shows its counts before it takes the next request."""
        self.ask(ATTACKER, prompt=self.text(30), max_tokens=1)
        self.before = self.server.metric(HITS)
        return self.before


@contextlib.contextmanager
def serving_wide(wide, **settings):
    with serving(wide.path, public_metrics="true", **settings) as server:
        yield Service(server)


@pytest.fixture(scope="module")
def keyed(wide, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text("key-of-the-victim victim\nkey-of-the-attacker attacker\n")
    with serving_wide(wide, api_keys_file=path) as service:
        yield service


@pytest.fixture
def service(keyed):
    keyed.total()
    return keyed


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_counter_does_not_tell_a_right_guess_at_anothers_prompt(service, path):
    """The attacker knows how the prompt begins, and tries each letter after it while the victim repeats the prompt."""
    known = service.text(30)
    secret = known + "".join(service.chance.choices(LETTERS, k=2))

    def counts():
        """Of characters copied, and run."""
        found = service.server.metrics("chargpt_")
        return tuple(found[name, frozenset()] for name in (HITS, "chargpt_iteration_tokens_total_sum"))

    latest = counts()

    def copied(headers, prompt):
        """Without another request, which would take the slot of the one before."""
        nonlocal latest
        before = latest
        service.ask(headers, path, prompt=prompt, max_tokens=1)
        expected = sum(before) + len(prompt)
        latest = wait_until(lambda: sum(now := counts()) == expected and now)
        return latest[0] - before[0]

    copied(ATTACKER, f"{known}{'.' * 20}")
    for length in range(len(known), len(secret)):
        found = {}
        for letter in service.chance.sample(LETTERS, len(LETTERS)):
            copied(VICTIM, f"{secret} and more")
            found[letter] = copied(ATTACKER, f"{secret[:length]}{letter}{'.' * 20}")
        assert set(found.values()) == {length}, (secret[length], found)  # as much as the attacker's own guess before


def test_nothing_of_another_keys_prompt_is_copied(service):
    """Of prompts that have ended, 900 characters each. A copied one would take less time, by which it would tell."""
    for _ in range(3):
        secret = service.text(900)
        service.ask(VICTIM, prompt=secret, max_tokens=5)
        service.total()
        for prompt in (secret, service.text(900)):
            assert service.copied(ATTACKER, prompt=prompt, max_tokens=5) == 0


def test_a_running_prompt_of_another_key_is_not_copied(service):
    prompt, before = service.text(900), service.before
    body = {"prompt": prompt, "max_tokens": ENDLESS, "stream": True}
    with web.stream("POST", f"{service.server.url}/generate", json=body, headers=VICTIM) as stream:
        next(stream.iter_raw())
        service.ask(ATTACKER, prompt=prompt, max_tokens=5)
    service.server.wait_until_metric("chargpt_num_requests_running", 0)
    assert service.total() == before


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"suffix": "abc", "best_of": 4, "max_tokens": 3}),
        ("/generate", {"best_of": 3, "max_tokens": 3}),
        ("/v1/score", {"continuations": ["a", "b"]}),
        ("/v1/next", {}),
    ],
)
def test_a_key_divides_every_stage_of_every_route(service, path, fields):
    """Infill and `best_of` score what they sampled."""
    fields = fields | {"prefix" if path == "/v1/score" else "prompt": service.text(100)}
    if path == "/generate":
        fields["seed"] = 1
    first, other, again = (service.copied(key, path, **fields) for key in (VICTIM, ATTACKER, ATTACKER))
    assert first == other < again


def test_without_keys_addresses_share(wide):
    with serving_wide(wide, client_header="X-Forwarded-For") as service:
        service.total()
        body = {"prompt": service.text(100), "max_tokens": 1}
        found = [service.copied({"X-Forwarded-For": f"192.0.2.{number}"}, **body) for number in (1, 2)]
        assert found == [0, 99]
