"""Processes that die, hang or run out of disk, under a real server: what clients see, what is counted, what remains."""

import concurrent.futures
import contextlib
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import service.process
from service.__main__ import serve
from service.placement import BackendError
from service.process import run_folder
from service.server import bind, url_of
from service.settings import Settings
from service.shared import REASONS, SharedState
from service.supervisor import Supervisor, TooManyDeathsError
from tests.helpers import ENDLESS, PATIENCE, RunningServer, http_processes, refusal, serving, wait_until, web
from tests.http.programs import changed
from tests.toolbox.disk import SmallDisk
from tests.toolbox.http import answer, pieces, post, sent, text_of
from tests.toolbox.launch import Program, free_port, is_worker

ONE_FAILED_START = changed({"service.supervisor.MAX_FAILED_STARTS": 1})


def generate(server, **body):
    return web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 5, "seed": 1} | body)


# -- a process dies --


def test_killed_http_processes_are_replaced(slow):
    with serving(slow.path, http_processes=2, drain_seconds=3600) as server:
        text = generate(server, max_tokens=20).json()["choices"][0]["text"]
        body = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
        streams = [web.stream("POST", f"{server.url}/generate", json=body) for _ in range(3)]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = [pool.submit(stream.__enter__) for stream in streams]
            assert [response.result().status_code for response in running] == [200] * 3
        before = http_processes(server)
        assert len(before) == 2
        for process in before:
            process.kill()
        wait_until(lambda: len(set(http_processes(server)) - set(before)) == 2)
        # The kernel has kept new connections; they are answered by the new process.
        assert generate(server, max_tokens=20).json()["choices"][0]["text"] == text
        server.wait_until_metric("chargpt_num_requests_running", 0)
        assert server.endings() == (5, {"stop": 0, "length": 2, "abort": 3, "timeout": 0, "error": 0})
        assert server.metric("chargpt_http_process_restarts_total") == 2
        answered = {"handler": "/generate", "method": "POST", "status": "200"}
        assert server.metric("chargpt_http_requests_total", **answered) == 2
        server.wait_until_metric("chargpt_http_requests_in_progress", 1)  # this one
        assert server.stop() == 0  # it does not wait for requests of a dead process
        assert f"http-0 (process {before[0].pid}) died (signal 9: Killed): restarting" in server.output()


def test_sequences_of_a_killed_worker_run_again_and_give_the_same_text(slow):
    bodies = [{"seed": i, "max_tokens": 300, "stream": i % 2 == 0} for i in range(6)]
    bodies[5] |= {"logprobs": 2, "echo": True, "prompt": "Hello", "seed": 4}
    bodies[4] = bodies[5] | {"stream": True}
    with serving(slow.path, max_running_requests=4) as server:

        def ask(body):
            response = generate(server, **body)
            assert response.status_code == 200, response.text
            if not body["stream"]:
                (choice,) = response.json()["choices"]
                return choice["text"], choice.get("logprobs")
            parts = pieces(response)
            assert not any("error" in part for part in parts), parts[-1]
            merged = None
            if "logprobs" in body:
                columns = [part["logprobs"] for part in parts if part.get("logprobs")]
                merged = {name: [row for column in columns for row in column[name]] for name in columns[0]}
            return text_of(parts), merged

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            expected = list(pool.map(ask, bodies))
            running = [pool.submit(ask, body) for body in bodies]
            server.wait_until_metric("chargpt_num_requests_running", 4)  # and two wait
            server.worker().kill()
            assert [it.result() for it in running] == expected
        assert server.metric("chargpt_worker_restarts_total") == 1
        assert server.endings() == (12, {"stop": 0, "length": 12, "abort": 0, "timeout": 0, "error": 0})
        assert server.stop() == 0
        assert "Traceback" not in server.output()


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_processes_that_are_killed_again_and_again_are_replaced_and_the_queue_keeps_connections(checkpoint):
    """The service once ended when more had died in five minutes than there may be failed starts, for all clients."""
    with serving(checkpoint.path, ONE_FAILED_START) as server:
        for number in range(5):
            process = server.worker() if number == 2 else http_processes(server)[0]
            process.kill()
            wait_until(lambda process=process: has_ended(process))
            with sent(server.port, post("/generate", {"prompt": "a", "max_tokens": 2})) as connection:
                with answer(connection) as response:
                    assert response.status == 200
        assert server.metric("chargpt_http_process_restarts_total") == 4
        assert server.stop() == 0


def test_a_worker_that_dies_leaves_its_work_to_the_others(checkpoint):
    with serving(checkpoint.path, workers_per_device=2) as server:
        wait_until(lambda: server.metric("chargpt_cache_slots") > 64)  # both are there
        text = generate(server).json()["choices"][0]["text"]
        server.worker().kill()
        assert [generate(server).json()["choices"][0]["text"] for _ in range(10)] == [text] * 10
        assert server.stop() == 0


def test_a_worker_never_loads_other_weights_than_those_that_are_served(checkpoint, temporary):
    """Not even if the service's own copy is altered. As no start succeeds, the service ends."""
    with serving(checkpoint.path, ONE_FAILED_START) as server:
        assert generate(server).status_code == 200  # otherwise the kill may count as a failed start
        (weights,) = temporary.glob("chargpt-*/checkpoint-*/model.safetensors")
        os.truncate(weights, 1000)
        server.worker().kill()
        assert server.process.wait(PATIENCE) == 1
        server.wait_until_gone()
        output = server.output()
        assert output.count("the file was altered") == 2 and "Traceback" not in output, output
        *_, last = output.splitlines()
        assert re.fullmatch(
            r"python -m service: worker-0 \(process \d+\) died \(exit status 1\): 2 failed starts of processes within "
            "300 s are more than the 1 allowed",
            last,
        ), last


def given_up(now, start, message):
    """Runs a supervisor until it has given up a process that `start`, which is given its state, starts. The clock is
    its own: the pauses take minutes. Returns the state."""
    state = SharedState()
    supervisor = Supervisor(state, hang_seconds=10, clock=lambda: now[0])
    supervisor.watch("worker-0", lambda: start(state), lambda: None, 600)
    with pytest.raises(TooManyDeathsError, match=message):
        for _ in range(100_000):
            supervisor.check()
            now[0] += 0.1
    return state


@pytest.mark.parametrize("shows_that_it_runs", [False, True])
def test_supervisor_waits_longer_each_time_and_gives_up_in_the_end(shows_that_it_runs):
    """A worker that died right after its first heartbeat was once replaced for ever, though it had served nobody."""
    times, now = [], [100.0]

    def start(state):
        times.append(now[0])
        if shows_that_it_runs:
            state.beat("worker-0")
        return SimpleNamespace(pid=7, exitcode=-11, is_alive=lambda: False)

    state = given_up(now, start, r"worker-0 .* \(signal 11: Segmentation fault\): 11 failed starts of processes")
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(times)]
    assert pauses == [1, 1, 2, 4, 4, 4, 4, 4, 4, 4]
    assert state.restarts["worker-0"] == 10


@pytest.mark.parametrize(
    ("name", "seconds", "is_used"), [("http-0", 0, False), ("worker-0", 0, True), ("worker-0", 6, False)]
)
def test_supervisor_never_gives_up_a_process_that_serves(name, seconds, is_used):
    """Whatever one client does to it; nor one that dies of itself now and then."""
    starts, now, state = [], [100.0], SharedState()

    def start():
        starts.append(now[0])
        state.beat(name)
        if is_used:
            state.assign(0, 0, 1)
        return SimpleNamespace(pid=7, exitcode=-9, is_alive=lambda began=now[0]: now[0] < began + seconds)

    supervisor = Supervisor(state, hang_seconds=1e9, clock=lambda: now[0])
    supervisor.watch(name, start, lambda: None, 600)
    for _ in range(1000):
        supervisor.check()
        now[0] += 0.1
    assert len(starts) > 15


def test_supervisor_gives_up_on_a_process_that_takes_long_to_fail():
    """So long that its deaths are never too many within the window."""
    starts, now = [], [0.0]

    def start(_):
        starts.append(now[0])
        if len(starts) % 2 == 0:
            raise OSError(12, "Cannot allocate memory")
        return SimpleNamespace(pid=7, exitcode=1, is_alive=lambda began=now[0]: now[0] < began + 100)

    given_up(now, start, "11 failed starts of it in a row")
    assert len(starts) == 11


def test_supervisor_forgets_a_process_that_was_told_to_end():
    """It gets SIGTERM, and a minute; whether it ends then or at once, nothing replaces it."""
    state, now, signals = SharedState(), [100.0], []
    supervisor = Supervisor(state, hang_seconds=1e9, clock=lambda: now[0])
    process = SimpleNamespace(
        pid=7, exitcode=0, is_alive=lambda: "kill" not in signals,
        terminate=lambda: signals.append("terminate"), kill=lambda: signals.append("kill"),
    )  # fmt: skip
    supervisor.watch("worker-0", lambda: process, lambda: signals.append("died"), 600)
    state.beat("worker-0")
    supervisor.release("worker-0")
    while "kill" not in signals:
        supervisor.check()
        now[0] += 1.0
    assert signals == ["terminate", "kill"] and 160 <= now[0] <= 163
    assert supervisor.is_watched("worker-0")
    supervisor.check()
    assert signals == ["terminate", "kill", "died"] and not supervisor.is_watched("worker-0")
    assert state.running().keys() == {"main"} and state.restarts["worker-0"] == 0


# -- a process hangs --


def test_supervisor_is_patient_after_a_pause_of_all_processes():
    """As of a machine that slept: nobody could show that it runs. One that does not from then on hangs."""
    state, now, killed = SharedState(), [time.monotonic()], []
    process = SimpleNamespace(pid=7, is_alive=lambda: True, kill=lambda: killed.append(now[0]))
    supervisor = Supervisor(state, hang_seconds=10, clock=lambda: now[0])
    supervisor.watch("worker-0", lambda: process, lambda: None, 600)
    state.beat("worker-0")
    supervisor.check()
    woken = now[0] = now[0] + 1000
    while not killed:
        supervisor.check()
        now[0] += 0.5
        assert now[0] < woken + 20
    assert killed[0] > woken + 10


def test_processes_that_hang_or_are_gone(checkpoint):
    """They are replaced, and meanwhile not ready. Without the main process nobody replaces a worker: new requests wait
    for one that hangs, and are refused without one."""
    empty = dict.fromkeys(REASONS, 0)
    options = {"hang_seconds": 5, "http_processes": 2}
    with serving(checkpoint.path, **options) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        server.wait_until_metric("chargpt_http_processes_ready", 2)
        main, worker = psutil.Process(server.process.pid), server.worker()
        niceness = [process.nice() for process in (worker, *http_processes(server))]
        own = os.nice(0)
        assert niceness == [min(19, own + 5), own, own]  # refusals do not wait for texts
        main.suspend()
        worker.suspend()
        try:
            wait_until(lambda: web.get(f"{server.url}/readyz").status_code == 503)
            http_processes(server)[0].kill()
            server.wait_until_metric("chargpt_http_processes_ready", 1)
            expected = {"chargpt_http_processes": 2, "chargpt_workers_ready": 0, "chargpt_workers": 1}
            assert {name: server.metric(name) for name in expected} == expected
            waiting = pool.submit(generate, server)  # not refused: it may go on, or be replaced
            # A main process that looks after nobody is told too.
            wait_until(lambda: web.get(f"{server.url}/livez").status_code == 503)
        finally:
            worker.resume()
            main.resume()
        server.wait_until_ready()
        wait_until(lambda: web.get(f"{server.url}/livez").status_code == 200)
        server.wait_until_metric("chargpt_http_processes_ready", 2)
        assert server.metric("chargpt_workers_ready") == 1
        assert waiting.result().status_code == 200
        assert server.worker().pid == worker.pid, "a pause of all processes is no hang of one"
        assert server.endings() == (1, empty | {"length": 1})
        main.suspend()
        worker.kill()
        wait_until(lambda: web.get(f"{server.url}/readyz").status_code == 503)
        refused = generate(server, n=3, timeout_seconds=50)
        main.resume()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert refused.headers["retry-after"] == "1"
        server.wait_until_ready()
        assert server.endings() == (1, empty | {"length": 1})
        assert server.metric("chargpt_admission_rejections_total", reason="not_ready") == 3
        text = waiting.result().json()["choices"][0]["text"]
        hung = server.worker(), http_processes(server)[0]
        for process in hung:
            process.suspend()
        assert generate(server).json()["choices"][0]["text"] == text  # it waited for the new processes
        for process in hung:
            wait_until(lambda process=process: has_ended(process))
            assert f"(process {process.pid}) hangs: killing it" in server.output()
        assert server.stop() == 0


# -- signals, ports, folders --


def test_sighup_ends_no_process_even_one_that_is_starting(checkpoint):
    """As when a terminal closes."""
    with RunningServer(checkpoint.path) as server:
        first = wait_until(lambda: next(filter(is_worker, server.processes()), None))
        for _ in range(20):
            os.killpg(server.process.pid, signal.SIGHUP)
            time.sleep(0.05)
        server.wait_until_ready()
        assert server.worker() == first
        pids, hangups = {process.pid for process in server.processes()}, server.output().count("SIGHUP")
        os.killpg(server.process.pid, signal.SIGHUP)
        wait_until(lambda: server.output().count("SIGHUP") > hangups)
        assert generate(server).status_code == 200
        assert {process.pid for process in server.processes()} == pids
        assert "Traceback" not in server.output()
        assert server.stop() == 0


@pytest.fixture
def temporary(monkeypatch):
    """The folder of temporary files, with a path that is short enough for sockets; empty again at the end."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("are_stopped", [False, True])
def test_no_process_outlives_a_killed_main_process_and_the_next_start_removes_its_folder(
    checkpoint, temporary, are_stopped
):
    other = temporary / "chargpt-of-someone-else"
    other.mkdir()
    with serving(checkpoint.path) as server:
        if are_stopped:
            for process in (server.worker(), *http_processes(server)):
                process.suspend()
        else:  # while a worker loads
            server.worker().kill()
            wait_until(lambda: server.metric("chargpt_worker_restarts_total") == 1)
        server.process.kill()
        server.process.wait()
        server.wait_until_gone()
    assert len(list(temporary.glob("chargpt-*/lock"))) == 1
    with run_folder() as first, run_folder() as second:  # whose start leaves those of running services
        assert {*temporary.iterdir()} == {first, second, other}
        assert first.stat().st_mode & 0o777 == 0o700
    assert list(temporary.iterdir()) == [other]
    other.rmdir()


def test_of_two_servers_that_start_at_a_port_one_ends_with_a_sentence(checkpoint):
    """Both can bind it, as long as neither listens."""
    with RunningServer(checkpoint.path) as one, RunningServer(checkpoint.path, port=one.port) as other:
        wait_until(lambda: one.process.poll() is not None or other.process.poll() is not None)
        lost, won = (one, other) if one.process.poll() is not None else (other, one)
        assert lost.process.wait() == 2
        assert f"cannot listen on 127.0.0.1, port {one.port}: Address already in use" in lost.output()
        assert Program.wait_until_ready(won) and won.stop() == 0


def test_a_worker_is_replaced_though_the_working_directory_is_gone_and_stderr_is_closed(checkpoint, tmp_path):
    """Importing torch and starting processes need a working directory."""
    folder = tmp_path / "release"
    folder.mkdir()
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "service"]
    command += ["--checkpoint", checkpoint.path, "--backend", "torch", "--port", port := free_port()]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with contextlib.closing(Program(command, port, "/readyz", cwd=folder, env=environment)) as server:
        server.wait_until_ready()
        folder.rmdir()
        worker = server.worker()
        worker.kill()
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
        server.wait_until_ready()


def test_a_program_that_has_used_torch_may_serve_with_it(checkpoint):
    """Its threads of OpenMP do not survive a fork, in which the worker would wait for them for ever."""
    used = "import torch; torch.set_num_threads(2); torch.ones(999, 999).exp().sum()"
    program = f"{used}\nif __name__ == '__main__': import service.__main__; service.__main__.main()"
    with serving(checkpoint.path, ("-c", program), backend="torch", threads=2) as server:
        assert web.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_urls_are_for_people():
    for host, shown in (("::1", "[::1]"), ("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")):
        assert url_of(Settings(host=host, port=8123)) == f"http://{shown}:8123"


def test_the_url_is_logged_last_once_it_answers(checkpoint):
    host = "::1" if Path("/proc/net/if_inet6").exists() else "localhost"
    with RunningServer(checkpoint.path, http_processes=2, host=host) as server:
        server.url = url_of(Settings(host=host, port=server.port))
        line = f'"message":"ready: {server.url}"}}\n'
        wait_until(lambda: line in server.output(), otherwise=server.output)
        assert web.get(f"{server.url}/readyz").status_code == 200
        assert server.output().endswith(line)
        assert "uvicorn" not in server.output() and "litserve.server" not in server.output()
        http_processes(server)[0].kill()
        server.wait_until_metric("chargpt_http_process_restarts_total", 1)
        server.wait_until_ready()
        assert server.output().count("ready: ") == 1
        assert server.stop() == 0


def test_an_address_that_cannot_be_bound_is_one_sentence(checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, in_use = taken.getsockname()[1], "Address already in use"
        for host, reason in (
            ("127.0.0.1", message := f"cannot listen on 127.0.0.1, port {port}: {in_use}; choose another port: --port"),
            ("localhost", f"cannot listen on localhost (127.0.0.1), port {port}: {in_use}"),
            ("192.0.2.1", f"cannot listen on 192.0.2.1, port {port}: Cannot assign requested address"),
            ("a" * 80, f"--host {'a' * 80}: neither an IP address nor a name that has one: "),
        ):
            with pytest.raises(BackendError) as error:
                bind(host, port)
            assert str(error.value).startswith(reason) and "\n" not in str(error.value)
        refused = refusal("--checkpoint", checkpoint.path, "--port", port)
        assert refused == f"python -m service: {message} {port ^ 1}\n"
    with bind("127.0.0.1", 0) as listener, listener.dup():  # as starting processes do
        assert not os.get_blocking(listener.fileno()), "processes that accept would wait there"


def test_an_unusable_temporary_folder_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(service.process, "SHARED_MEMORY", str(tmp_path / "shm"))
    for folder, message in (
        (tmp_path / "absent", "TMPDIR: No usable temporary directory found in "),
        (tmp_path / ("d" * 80), f"TMPDIR: {tmp_path / ('d' * 80)} is too long for Unix sockets: at most 75 bytes"),
    ):
        if "d" * 80 in str(folder):
            folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda folder=folder: [str(folder)])
        assert serve(Settings()) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"python -m service: {message}")
        assert (f"nor is {tmp_path / 'shm'} writable" in error) == (folder.name == "absent")


def test_a_full_temporary_folder_ends_nothing(checkpoint, temporary, monkeypatch):
    with SmallDisk(temporary, "16m") as disk:
        monkeypatch.setenv("TMPDIR", str(disk.path))
        with serving(checkpoint.path) as server:
            disk.fill()
            pids = {process.pid for process in server.processes()}
            # Each of these begins new series of metrics.
            for path in ("/tokenize", "/detokenize", "/v1/score", "/v1/next", "/nothing", "/generate"):
                assert web.post(server.url + path, json={"prompt": "a"}).status_code < 500
            assert {process.pid for process in server.processes()} == pids
            server.worker().kill()
            wait_until(lambda: server.metric("chargpt_worker_restarts_total") == 1)
            server.wait_until_ready()
            assert generate(server).status_code == 200
            http_processes(server)[0].kill()
            wait_until(lambda: len(http_processes(server)) == 1)
            assert generate(server).status_code == 200
            server.wait_until_all_ended()
            assert server.stop() == 0
        disk.ballast.unlink()
        disk.fill(1 << 20)
        problem = refusal(f"--checkpoint={checkpoint.path}", f"--port={free_port()}")
        assert "No space left on device" in problem and "Traceback" not in problem
