"""Several checkpoints behind one server, and new ones at SIGHUP, without a failed request."""

import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from service.catalog import Catalog, Listing
from service.model.checkpoint import Checkpoint, CheckpointError
from service.rollout import Rollout
from service.shared import MAX_NAMES, SharedState
from service.supervisor import Supervisor
from tests.helpers import ENDLESS, SLOW, exact, http_processes, lasting, save_random, serving, wait_until, web, workers
from tests.http.programs import changed
from tests.toolbox.http import PATIENCE, pieces, text_of


def ask(server, model=None, **body):
    body = {"prompt": "a", "max_tokens": 20, "seed": 1} | ({} if model is None else {"model": model}) | body
    return web.post(f"{server.url}/generate", json=body)


def text(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def served(server):
    return {
        card["id"]: web.get(f"{server.url}/info", params={"model": card["id"]}).json()["model"]["checkpoint_sha256"]
        for card in web.get(f"{server.url}/v1/models").json()["data"]
    }


def reload(server, result, name):
    """SIGHUP, and wait until it has had this result for the checkpoint `name`."""

    def count():
        line = f'chargpt_checkpoint_reloads_total{{model_name="{name}",result="{result}"}} '
        lines = web.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(it.removeprefix(line)) for it in lines if it.startswith(line))

    before = count()
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: count() > before, otherwise=server.output)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: two checkpoints with different vocabularies, one of them in best/, and what is none."""
    folder = tmp_path_factory.mktemp("runs")
    save_random(folder / "plays", seed=1)
    save_random(folder / "numbers" / "best", sorted("\n0123456789"), seed=2)
    (folder / "notes").mkdir()
    (folder / ".hidden").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(runs):
    yield from lasting(runs)


def test_a_request_chooses_its_model_by_name(server, runs):
    plays, numbers = Checkpoint.read(runs / "plays"), Checkpoint.read(runs / "numbers" / "best")
    assert served(server) == {"numbers": numbers.digest, "plays": plays.digest}
    assert text(ask(server, "plays")) == exact(plays, "a", 20, seed=1)
    answer = ask(server, "numbers", prompt="12")
    assert text(answer) == exact(numbers, "12", 20, seed=1)
    assert (answer.json()["model"], answer.headers["x-checkpoint"]) == ("numbers", numbers.digest)
    unknown = ask(server, "numbers", prompt="a")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_character")
    for path, body in {
        "/v1/completions": {"prompt": "12", "max_tokens": 3},
        "/v1/score": {"texts": "123"},
        "/v1/next": {"prompt": "12"},
        "/tokenize": {"prompt": "12"},
        "/detokenize": {"tokens": [1, 2]},
    }.items():
        assert web.post(server.url + path, json=body | {"model": "numbers"}).status_code == 200
    assert web.get(f"{server.url}/tokenizer_info", params={"model": "numbers"}).json()["vocab_size"] == 11
    assert web.get(f"{server.url}/v1/models/numbers").json()["id"] == "numbers"
    info = web.get(f"{server.url}/info", params={"model": "plays"}).json()
    assert (info["models"], info["model"]["name"]) == (["numbers", "plays"], "plays")


def test_a_request_must_name_its_model_where_none_is_the_default(server):
    answer = ask(server)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["message"] == "model: must be one of numbers, plays"
    answer = ask(server, "other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'numbers', 'plays'" in answer.json()["error"]["message"]
    assert web.get(f"{server.url}/info").status_code == 400


def test_metrics_tell_models_apart(server):
    def generated():
        page = web.get(f"{server.url}/metrics").text.splitlines()
        prefix = "chargpt_generation_tokens_total{model_name="
        return {line.split('"')[1]: float(line.split()[-1]) for line in page if line.startswith(prefix)}

    before = generated()
    for count, name, prompt in ((7, "plays", "a"), (9, "numbers", "1")):
        assert text(ask(server, name, prompt=prompt, max_tokens=count))
    wait_until(lambda: generated() == {"plays": before["plays"] + 7, "numbers": before["numbers"] + 9})


def test_the_default_has_no_name_and_a_model_does_not_wait_for_the_slots_of_another(tmp_path):
    """One that comes while another holds all slots starts at once."""
    save_random(tmp_path / "a", seed=1)
    second = save_random(tmp_path / "b", seed=2)
    options = {"model_name": "first", "max_running_requests": 4}
    with serving(f"{tmp_path}/a,second={tmp_path}/b", **options) as server:
        assert list(served(server)) == ["first", "second"]
        assert ask(server).json()["model"] == "first"
        assert ask(server, "second").json()["model"] == "second"
        flood = {"prompt": "a", "max_tokens": ENDLESS, "n": 8, "stream": True}
        with web.stream("POST", f"{server.url}/generate", json=flood) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert text(ask(server, "second", max_tokens=60)) == exact(second, "a", 60, seed=1)


def test_a_checkpoint_whose_worker_is_gone_leaves_the_others_alone(tmp_path):
    """The instance is not ready without it, and metrics tell which one it is."""
    for seed, name in enumerate("ab"):
        save_random(tmp_path / name, seed=seed)

    def slots():
        page = web.get(f"{server.url}/metrics").text.splitlines()
        lines = [line.split('"') for line in page if line.startswith("chargpt_cache_slots{")]
        return {name: float(value[2:]) for _, name, value in lines}

    with serving(tmp_path, max_running_requests=4) as server:
        assert {name: slots()[name] for name in "ab"} == {"a": 4, "b": 4}
        main = psutil.Process(server.process.pid)
        main.suspend()  # it cannot replace the worker
        try:
            workers(server)["worker-1"].kill()
            wait_until(lambda: web.get(f"{server.url}/readyz").status_code == 503)
            assert text(ask(server, "a"))
            refused = ask(server, "b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert text(ask(server, "a"))
        finally:
            main.resume()
        server.wait_until_ready()
        assert text(ask(server, "b")) and {name: slots()[name] for name in "ab"} == {"a": 4, "b": 4}
        assert server.metric("chargpt_worker_restarts_total") == 1


# -- SIGHUP --


def test_checkpoints_change_under_load_without_a_failed_request(tmp_path):
    first = save_random(tmp_path / "plays", seed=1)
    save_random(tmp_path / "names", seed=2)

    def pids():
        return {name: process.pid for name, process in workers(server).items()}

    expected = {first.digest: exact(first, "a", 100, seed=1)}
    seen, failed, stop = Counter(), [], threading.Event()
    with serving(tmp_path, http_processes=2) as server:

        def work(name):
            while not stop.is_set():
                answer = ask(server, name, max_tokens=100)
                if answer.status_code != 200:
                    failed.append(answer.text)
                    return
                seen[name, answer.headers["x-checkpoint"], text(answer)] += 1

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(work, name) for name in ("plays", "names") * 2]
            try:
                wait_until(lambda: len(seen) == 2)
                names, plays = before = pids()
                used = [process.cpu_times().user for process in workers(server).values()]
                wait_until(
                    lambda: all(
                        process.cpu_times().user > seconds
                        for process, seconds in zip(workers(server).values(), used, strict=True)
                    ),
                    otherwise="one process does the work of both checkpoints",
                )
                second = save_random(tmp_path / "plays", seed=3)
                expected[second.digest] = exact(second, "a", 100, seed=1)
                reload(server, "loaded", "plays")
                assert served(server)["plays"] == second.digest
                wait_until(lambda: len(seen) == 3)
                # The process of the old one has ended; that of the other checkpoint is the same.
                wait_until(lambda: pids().keys() == {names, "worker-2"})
                assert pids()[names] == before[names] and plays not in pids()
                assert server.metric("chargpt_workers") == server.metric("chargpt_workers_ready") == 2
                third = save_random(tmp_path / "logs", seed=4)
                reload(server, "loaded", "logs")
                assert text(ask(server, "logs")) == exact(third, "a", 20, seed=1)
                shutil.rmtree(tmp_path / "logs")
                reload(server, "removed", "logs")
                assert ask(server, "logs").status_code == 404
                again = save_random(tmp_path / "logs", seed=5)  # while its process may still end
                reload(server, "loaded", "logs")
                assert text(ask(server, "logs")) == exact(again, "a", 20, seed=1)
                reload_again = sum(seen.values()) + 20
                wait_until(lambda: sum(seen.values()) > reload_again or failed)
            finally:
                stop.set()
            for client in clients:
                client.result()
        assert failed == []
        texts = {(name, digest): text for name, digest, text in seen}
        assert len(texts) == len(seen) == 3  # a name, its checkpoint and the text always go together
        assert {digest: text for (name, digest), text in texts.items() if name == "plays"} == expected
        assert "Traceback" not in server.output()


SLOW_READING = """
import pathlib, psutil, sys, time
from service.__main__ import serve
from service.catalog import Catalog, Version
from service.settings import read_settings
from service.shared import SharedState

FOLDER, beat, beats = pathlib.Path(sys.argv.pop(1)), SharedState.beat, []

def count_beats(self, name):
    beats.append(name)
    beat(self, name)

def slowly(read, who, is_large):
    def read_slowly(self, *given):
        if is_large(self, *given):
            (FOLDER / f"{who} reads").touch()
            first = len(beats)
            while len(beats) < first + 3 or not (FOLDER / f"{who} may go on").exists():
                time.sleep(0.02)
        return read(self, *given)
    return read_slowly

def is_http():
    return psutil.Process().name().startswith("http-")

if __name__ == "__main__":
    SharedState.beat = count_beats
    Catalog._read = slowly(Catalog._read, "main", lambda self, name, *_: name == "large")
    Version.read = slowly(Version.read, "http", lambda self, _: self.name == "large" and is_http())
    sys.exit(serve(read_settings()))
"""


def test_reading_a_large_checkpoint_at_sighup_holds_nothing_up(tmp_path):
    """Main once read it on the thread that shows its life and looks after the others: /livez became 503. HTTP processes
    showed no life meanwhile, and were killed. Here reading ends once its process has shown its life three times."""
    save_random(tmp_path / "runs" / "a")
    (tmp_path / "slow.py").write_text(SLOW_READING)
    with serving(tmp_path / "runs", (str(tmp_path / "slow.py"), str(tmp_path))) as server:
        save_random(tmp_path / "runs" / "large", seed=1)
        server.process.send_signal(signal.SIGHUP)
        wait_until((tmp_path / "main reads").exists, otherwise=server.output)
        worker = server.worker()
        worker.kill()
        wait_until(lambda: f"(process {worker.pid}) died" in server.output())
        server.wait_until_metric("chargpt_worker_restarts_total", 1)
        server.wait_until_metric("chargpt_workers_ready", 1)
        (tmp_path / "main may go on").touch()
        wait_until((tmp_path / "http reads").exists, otherwise=server.output)
        assert web.get(f"{server.url}/livez").status_code == 200
        wait_until(lambda: ask(server, "a").status_code == 200)
        (tmp_path / "http may go on").touch()
        wait_until(lambda: "checkpoint large: loaded" in server.output(), otherwise=server.output)
        assert not re.search(r"http-0 \(process \d+\) hangs", server.output())


def test_a_stream_ends_on_the_checkpoint_with_which_it_began_though_its_worker_dies(tmp_path):
    """Its worker is replaced by one of the same version, as long as a request uses it."""
    expected = exact(save_random(tmp_path / "model", **SLOW), "a", 40, seed=1)
    with serving(tmp_path / "model") as server:
        body = {"prompt": "a", "max_tokens": 1500, "seed": 1, "stream": True}
        with web.stream("POST", f"{server.url}/generate", json=body) as stream:
            lines = stream.iter_lines()
            first = [next(lines)]
            new = save_random(tmp_path / "model", seed=5)
            reload(server, "loaded", "chargpt")
            assert text(ask(server)) == exact(new, "a", 20, seed=1)
            assert workers(server).keys() == {"worker-0", "worker-1"}
            workers(server)["worker-0"].kill()
            answer = text_of(pieces([*first, *lines])[:-1])
        assert len(answer) == 1500 and answer.startswith(expected)
        wait_until(lambda: "dropped checkpoint chargpt" in server.output(), otherwise=lambda: server.output())
        assert workers(server).keys() == {"worker-1"}


def test_roll_outs_under_load_while_processes_are_killed(tmp_path, chance):
    """Ten in a row; at a random moment of each, one process is killed: of the old version, of the new one, or for HTTP.
    A roll-out may be refused then; no text may be another's, and nothing of an old version may stay."""
    current = save_random(tmp_path / "model", seed=0)
    expected, failed, stop = {current.digest: exact(current, "a", 60, seed=1)}, [], threading.Event()
    seen = Counter()
    program = changed({"service.supervisor.MAX_FAILED_STARTS": 1000})
    with serving(tmp_path / "model", program, http_processes=2, dtype="float64") as server:

        def work():
            while not stop.is_set():
                try:
                    answer = ask(server, max_tokens=60)
                except httpx.TransportError:  # its HTTP process was killed
                    continue
                if answer.status_code == 200:
                    seen[answer.headers["x-checkpoint"], text(answer)] += 1
                elif answer.status_code != 503 or answer.json()["error"]["code"] not in ("not_ready", "worker_lost"):
                    failed.append(answer.text)

        def results():
            return sum(server.output().count(f"checkpoint chargpt: {it}: ") for it in ("loaded", "refused"))

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(work) for _ in range(4)]
            try:
                for number in range(1, 11):
                    new = save_random(tmp_path / "model", seed=number)
                    expected[new.digest] = exact(new, "a", 60, seed=1)
                    before = results()
                    server.process.send_signal(signal.SIGHUP)
                    time.sleep(chance.uniform(0.0, 0.4))
                    with contextlib.suppress(psutil.NoSuchProcess):
                        chance.choice([*workers(server).values(), *http_processes(server)]).kill()
                    wait_until(lambda before=before: results() > before, otherwise=server.output)
                server.wait_until_ready()
                if f"loaded: {new.digest[:12]}" not in server.output():  # it was refused
                    reload(server, "loaded", "chargpt")
                wait_until(lambda: (new.digest, expected[new.digest]) in seen or failed, otherwise=server.output)
            finally:
                stop.set()
            for client in clients:
                client.result()
        assert failed == []
        assert {digest: text for digest, text in seen} == {digest: expected[digest] for digest, _ in seen}
        wait_until(lambda: len(workers(server)) == 1, otherwise=lambda: (workers(server), server.output()))
        server.wait_until_all_ended()
        assert served(server) == {"chargpt": new.digest}
        assert server.stop() == 0 and "Traceback" not in server.output()


def test_a_shutdown_during_a_roll_out(tmp_path, chance):
    """At any moment of it, while a stream runs on the old checkpoint."""
    old, body = save_random(tmp_path / "model", **SLOW), {"prompt": "a", "max_tokens": 600, "seed": 1, "stream": True}
    for seed in range(1, 4):
        with serving(tmp_path / "model") as server:
            with web.stream("POST", f"{server.url}/generate", json=body) as stream:
                assert stream.headers["x-checkpoint"] == old.digest
                lines = stream.iter_lines()
                first = next(lines)
                old = save_random(tmp_path / "model", seed=seed, **SLOW)
                server.process.send_signal(signal.SIGHUP)
                time.sleep(chance.uniform(0.0, 1.0))
                server.process.terminate()
                assert len(text_of(pieces([first, *lines])[:-1])) == 600
            assert server.process.wait(PATIENCE) == 0, server.output()
            server.wait_until_gone()
            assert "Traceback" not in server.output()


def test_a_bad_checkpoint_is_refused_and_the_old_one_keeps_serving(tmp_path):
    """A worker or HTTP process that is replaced has the old one too, whatever is in the folder."""
    first = save_random(tmp_path / "model", seed=1)
    expected = exact(first, "a", 20, seed=1)
    with serving(f"m={tmp_path}/model", max_running_requests=4096) as server:
        file = tmp_path / "model" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x00")
        reload(server, "refused", "m")
        assert text(ask(server)) == expected
        shutil.rmtree(tmp_path / "model")
        reload(server, "refused", "m")
        assert server.output().count("checkpoint m: refused: ") == 2
        server.worker().kill()
        server.wait_until_metric("chargpt_worker_restarts_total", 1)
        wait_until(lambda: ask(server).status_code == 200)
        assert text(ask(server)) == expected
        save_random(tmp_path / "model", seed=2, block_size=1 << 20)  # it verifies; its cache exceeds any memory
        reload(server, "refused", "m")
        assert text(ask(server)) == expected and served(server) == {"m": first.digest}
        new = save_random(tmp_path / "model", seed=3)
        reload(server, "loaded", "m")
        assert text(ask(server)) == exact(new, "a", 20, seed=1)
        (http,) = http_processes(server)
        http.kill()
        wait_until(lambda: (found := http_processes(server)) and found != [http])
        server.wait_until_ready()
        assert served(server) == {"m": new.digest}
        save_random(tmp_path / "model", seed=4)
        reload(server, "loaded", "m")


# -- at start --


def refused(folder, *places, **options):
    """Why these checkpoints cannot be opened."""
    with pytest.raises(CheckpointError) as error:
        Catalog([*places], "chargpt", folder, **options).open()
    return str(error.value)


def test_wrong_lists_are_refused(tmp_path):
    a = save_random(tmp_path / "a").path
    assert "two checkpoints have the name x: a and b" in refused(tmp_path, ("x", Path("a")), ("x", Path("b")))
    assert "two checkpoints have the name chargpt" in refused(tmp_path, (None, a), (None, a))
    (tmp_path / "empty" / "run").mkdir(parents=True)
    found = refused(tmp_path, (None, tmp_path / "empty"))
    assert f"no checkpoint at {tmp_path}/empty: looked for manifest.json in it, in best/, and in the folders" in found
    assert f"no checkpoint at {tmp_path}/none" in refused(tmp_path, ("a", a), ("b", tmp_path / "none"))


def test_a_bad_run_in_a_folder_of_runs_is_left_out(tmp_path):
    save_random(tmp_path / "good")
    save_random(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text("{}")
    catalog = Catalog([(None, tmp_path)], "chargpt", tmp_path)
    catalog.open()
    assert (list(catalog.served), catalog.refused) == (["good"], ["bad"])
    shutil.rmtree(tmp_path / "good")
    assert re.match("no checkpoint in .* can be served", refused(tmp_path, (None, tmp_path)))


def test_a_vocabulary_without_the_replacement_character_is_refused_at_start(tmp_path):
    save_random(tmp_path / "words", "\nab")
    problem = refused(tmp_path, (None, tmp_path / "words"), replaces=True)
    assert "vocabulary does not have the character ' ', which is to replace unknown ones" in problem
    assert "set --unknown-characters to drop or refuse" in problem
    (tmp_path / "run").mkdir()
    catalog = Catalog([(None, tmp_path / "words")], "chargpt", tmp_path / "run")
    catalog.open()
    assert list(catalog.served) == ["chargpt"]


def test_more_checkpoints_than_can_be_served_are_refused(tmp_path):
    save_random(tmp_path / "0")
    for i in range(1, MAX_NAMES + 1):
        shutil.copytree(tmp_path / "0", tmp_path / str(i))
    assert refused(tmp_path, (None, tmp_path)) == "at most 256 checkpoints can be served, got 257"


# -- the catalog and its roll-outs, with processes that the test plays --


class Played:
    """A process."""

    def __init__(self, name):
        self.name, self.pid, self.exitcode = name, 100, None

    def is_alive(self):
        return self.exitcode is None

    def terminate(self):
        self.exitcode = 0


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "run"))
    save_random(tmp_path / "runs" / "a", seed=1)
    catalog = Catalog([(None, tmp_path / "runs")], "chargpt", tmp_path / "run")
    catalog.open()
    return catalog


@pytest.fixture
def state(catalog):
    state = SharedState(http_processes=2, workers=2)
    catalog.publish_first(state)
    for name in state.http_names:
        state.beat(name)
        state.follow(name, 0)
    return state


class PlayedRollout(Rollout):
    """A roll-out, and the processes that it has started."""

    def __init__(self, catalog, state):
        supervisor = Supervisor(state, hang_seconds=1e9)
        super().__init__(catalog, state, supervisor, self._play)
        self.processes, self.no_memory = {}, False
        self.allocate()
        self.start()
        for name in self.processes:
            state.beat(name)

    def _play(self, version, id):
        if self.no_memory:
            raise OSError(12, "Cannot allocate memory")
        self.processes[f"worker-{id}"] = process = Played(version.id)
        return process

    def turn(self):
        self._supervisor.check()
        return self.check()

    @property
    def running(self):
        """The version of each process."""
        return {name: process.name for name, process in self.processes.items() if process.is_alive()}


@pytest.fixture
def rollout(catalog, state):
    return PlayedRollout(catalog, state)


def listing(catalog):
    found = Listing.read(catalog.folder)
    return [version.id for version in found.running], [version.id for version in found.serve]


def copies(catalog):
    return sorted(path.name for path in catalog.folder.glob("checkpoint-*"))


OLD = {"worker-0": 1, "worker-1": 1}


def test_a_list_changes_step_by_step(catalog, state, rollout, tmp_path):
    save_random(tmp_path / "runs" / "a", seed=2)
    catalog.refresh(state)
    assert rollout.is_busy and not rollout.turn() and listing(catalog) == ([1], [1])
    assert rollout.running == OLD | {"worker-2": 2, "worker-3": 2}
    state.beat("worker-2")
    assert not rollout.turn() and listing(catalog) == ([1], [1])
    state.beat("worker-3")
    assert rollout.turn() and listing(catalog) == ([1, 2], [2])
    state.follow("http-0", state.generation.value)
    assert not rollout.turn() and rollout.step
    state.died("http-1")  # its replacement reads the newest
    state.use(1, 0, 1)
    assert not rollout.turn() and not rollout.is_busy
    assert not rollout.turn() and listing(catalog) == ([1, 2], [2])  # a request still uses it
    assert len(rollout.running) == 4 and len(copies(catalog)) == 2
    state.use(1, 0, -1)
    assert not rollout.turn() and listing(catalog) == ([2], [2])
    assert not rollout.turn() and rollout.running == {"worker-2": 2, "worker-3": 2}
    assert state.num_reloads(0) == {"loaded": 1, "refused": 0, "removed": 0}
    assert copies(catalog) == ["checkpoint-2"]
    save_random(tmp_path / "runs" / "b", seed=3)
    catalog.refresh(state)
    rollout.turn()
    assert rollout.running == {"worker-0": 3, "worker-1": 3, "worker-2": 2, "worker-3": 2}


def is_complete(state):
    """Whether everything that was read last is served."""
    return state.last_reads()["checkpoints"][0]


@pytest.mark.parametrize("what", ["ends", "is killed", "cannot be started"])
def test_a_process_that_ends_before_it_is_ready_changes_nothing(catalog, state, rollout, tmp_path, what, caplog):
    """Both checkpoints are refused, though one would run; nothing is left of them, and the next roll-out is another."""
    for name in "bc":
        save_random(tmp_path / "runs" / name, seed=2)
    catalog.refresh(state)
    rollout.no_memory = what == "cannot be started"
    rollout.turn()
    if what != "cannot be started":
        assert len(rollout.running) == 6
        for name in ("worker-2", "worker-3", "worker-4"):
            state.beat(name)
        rollout.processes["worker-3"].exitcode = 1 if what == "ends" else -9
    assert not any(rollout.turn() for _ in range(3)) and not rollout.is_busy
    assert rollout.running == OLD and listing(catalog) == ([1], [1]) and copies(catalog) == ["checkpoint-1"]
    reason = {
        "ends": "worker-3 (process 100) died (exit status 1) before it was ready; see the log",
        "is killed": "worker-3 (process 100) died (signal 9: Killed) before it was ready; see the log",
        "cannot be started": "no inference process can be started for it: Cannot allocate memory",
    }[what]
    assert [f"checkpoint {name}: refused: {reason}" in caplog.text for name in "bc"] == [True, True]
    assert [state.num_reloads(catalog.listing.rows[name])["refused"] for name in "bc"] == [1, 1]
    assert not is_complete(state) and not any(state.restarts[name] for name in state.worker_names)
    rollout.no_memory = False
    catalog.refresh(state)
    rollout.turn()
    for name in rollout.running:
        state.beat(name)
    assert rollout.turn() and list(catalog.served) == ["a", "b", "c"]
    for name in state.http_names:
        state.follow(name, state.generation.value)
    assert not rollout.turn() and not rollout.is_busy and is_complete(state)


def test_a_process_that_serves_is_replaced_whatever_a_roll_out_does(catalog, state, rollout, tmp_path):
    """Of the old version and of the new one, at every moment; no longer once it was told to end."""

    def kill(name):
        state.assign(0, int(name.partition("-")[2]), 1)  # it has served
        rollout.processes[name].exitcode = -9
        old = rollout.processes[name]
        rollout._supervisor._watched[name].started_at -= 100
        rollout.turn()
        assert rollout.processes[name].name == old.name and rollout.processes[name] is not old
        state.beat(name)

    save_random(tmp_path / "runs" / "a", seed=2)
    catalog.refresh(state)
    rollout.turn()
    kill("worker-0")
    for name in ("worker-2", "worker-3"):
        state.beat(name)
    assert rollout.turn()
    kill("worker-1")
    kill("worker-3")
    for name in state.http_names:
        state.follow(name, state.generation.value)
    rollout.processes["worker-0"].exitcode = -9
    rollout.turn()
    assert rollout.running == {"worker-2": 2, "worker-3": 2}
    assert not any(rollout.turn() for _ in range(3)) and copies(catalog) == ["checkpoint-2"]


def test_a_new_checkpoint_without_the_replacement_character_is_refused_at_sighup(catalog, state, tmp_path, caplog):
    catalog.replaces = True
    for name in "ab":
        save_random(tmp_path / "runs" / name, "\nab")
    catalog.refresh(state)
    assert catalog.found is None and listing(catalog) == ([1], [1])
    assert [state.num_reloads(catalog.listing.rows[name])["refused"] for name in "ab"] == [1, 1]
    assert "set --unknown-characters" in caplog.text


def test_a_list_that_cannot_be_written_leaves_the_old_one(catalog, state, rollout, tmp_path):
    save_random(tmp_path / "runs" / "b", seed=2)
    (tmp_path / "run" / "checkpoints.json.new").mkdir()  # in the way, as a full disk would be
    catalog.refresh(state)
    rollout.turn()
    for name in ("worker-2", "worker-3"):
        state.beat(name)
    assert not any(rollout.turn() for _ in range(3)) and not rollout.is_busy
    assert list(catalog.served) == ["a"] and rollout.running == OLD and state.generation.value == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints.json.new")
    assert not rollout.turn() and listing(catalog) == ([1], [1])
    catalog.refresh(state)
    assert not rollout.turn() and len(rollout.running) == 4


def test_more_versions_than_have_places_are_refused(catalog, state, rollout, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("service.catalog.MAX_VERSIONS", 2)
    for name in "bc":
        save_random(tmp_path / "runs" / name, seed=2)
    catalog.refresh(state)
    assert [version.name for version in catalog.found] == ["a", "b"]
    assert "checkpoint c: refused: 2 versions of checkpoints have workers, which is the maximum" in caplog.text


def test_a_folder_of_runs_that_is_not_there_removes_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("runs/a", "runs/b", "other/best", "other/last"):
        save_random(tmp_path / name)
    catalog = Catalog([(None, tmp_path / "runs"), (None, tmp_path / "other")], "other", tmp_path / "run")
    catalog.open()
    state = SharedState()
    catalog.publish_first(state)
    (tmp_path / "other" / "best").rename(tmp_path / "gone")  # it is no folder of runs now, with one named "last"
    catalog.refresh(state)
    (tmp_path / "runs").rename(tmp_path / "away")
    catalog.refresh(state)
    assert not is_complete(state)
    (tmp_path / "runs").mkdir()  # an empty mount point
    catalog.refresh(state)
    assert catalog.found is None and list(catalog.served) == ["a", "b", "other"]
    assert list(catalog.listing.rows) == ["a", "b", "other"] and not is_complete(state)
    (tmp_path / "runs").rmdir()
    (tmp_path / "away").rename(tmp_path / "runs")
    (tmp_path / "gone").rename(tmp_path / "other" / "best")
    catalog.refresh(state)
    assert catalog.found is None and is_complete(state)


def test_a_run_whose_name_is_not_utf_8_is_left_out(catalog, state, tmp_path, caplog):
    save_random(Path(os.fsdecode(bytes(tmp_path / "runs") + b"/caf\xe9")))
    catalog.refresh(state)
    assert catalog.found is None and "because its name is not UTF-8" in caplog.text
    assert state.generation.value == 0, "an unchanged list is not rolled out"


def test_the_last_checkpoint_is_never_removed(catalog, state, tmp_path):
    shutil.rmtree(tmp_path / "runs" / "a")
    catalog.refresh(state)
    assert catalog.found is None and list(catalog.served) == ["a"] and not is_complete(state)
    assert Listing.read(catalog.folder) == catalog.listing


def test_a_full_disk_refuses_a_checkpoint(catalog, state, tmp_path, monkeypatch):
    save_random(tmp_path / "runs" / "b", seed=2)
    (tmp_path / "run" / "checkpoint-2").write_text("in the way")  # as root, no folder is read-only
    catalog.refresh(state)
    assert catalog.found is None and state.num_reloads(catalog.listing.rows["b"])["refused"] == 1
