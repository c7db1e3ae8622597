"""The service behind real proxies, with the configurations that their users have.

Answers come through whole and in time. The service receives the requests that the proxy forwarded, and no other. To
tell, each proxy gives a request that it forwards an id of its own (X-Request-Id), which the service logs and returns,
and logs it beside the id that came back. A different one belongs to the answer to another request.
"""

import contextlib
import http.client
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.stack import DEPLOY
from tests.helpers import ENDLESS, PATIENCE, SLOW, RunningServer, lasting, save_random, wait_until, web
from tests.toolbox.http import DONE, answer, events, post, received, sent
from tests.toolbox.launch import Program, free_port
from tests.toolbox.needs import program

TEMPLATES = Path(__file__).parent / "proxies"
SEEDS = range(4)


@dataclass(frozen=True)
class Kind:
    """A proxy with a configuration.

    files: functions that return the text of each, by name.
    command: has @PORT@, that of the proxy, @SERVICE@, the service's port, and @FOLDER@ in it, as the files have.
    """

    area: str
    files: dict[str, Callable[[], str]]
    command: str
    hides_metrics: bool = True


def template(name):
    return (TEMPLATES / name).read_text


def recommended():
    """The configuration of nginx in deploy/README.md."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    return replaced(block, {"listen 80;": "listen 127.0.0.1:@PORT@;", "127.0.0.1:8000": "127.0.0.1:@SERVICE@"})


def of_compose():
    """The configuration of haproxy before the replicas of compose.yaml, with one replica that is there already."""
    text = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    text, *_ = text.partition("# /metrics for Prometheus")
    [replicas] = re.findall(r"server-template .*", text)
    replica = {replicas: "server replica 127.0.0.1:@SERVICE@"}
    replica |= {
        "option httpchk GET /readyz": f"option httpchk GET /readyz\n  http-check send hdr X-Request-Id {DIRECT}"
    }
    return logged(replaced(text, replica | {"bind :8000": "bind 127.0.0.1:@PORT@", "option dontlog-normal": ""}))


SMUGGLED = "smuggled-"  # how the ids of requests begin that no proxy was to read as such
DIRECT = "direct"  # the id of a request that no proxy has forwarded


def logged(text):
    """A configuration of haproxy with ids."""
    own = """
  unique-id-format %[uuid]
  http-request set-header X-Request-Id %[unique-id]
  http-response set-var(txn.answered) res.hdr(X-Request-Id)
  log-format "forwarded %ID %[var(txn.answered)] %ST"
"""
    # With several threads, haproxy drops a line of its log now and then.
    return replaced(text, {"frontend http\n": f"frontend http\n{own}", "\nglobal\n": "\nglobal\n  nbthread 1\n"})


def replaced(text, replacements):
    for old, new in replacements.items():
        assert old in text, f"{old} is not in\n{text}"
        text = text.replace(old, new)
    return text


def nginx(server):
    return Kind(
        "nginx",
        {"nginx.conf": template("nginx.conf"), "server.conf": server},
        "nginx -e stderr -p @FOLDER@ -c nginx.conf",
    )


def haproxy(text, hides_metrics=True):
    return Kind("haproxy", {"haproxy.cfg": text}, "haproxy -db -f @FOLDER@/haproxy.cfg", hides_metrics)


KINDS = {
    "nginx": nginx(recommended),
    "nginx-plain": nginx(template("plain.conf")),
    "nginx-websocket": nginx(template("websocket.conf")),
    "nginx-ingress": nginx(template("ingress.conf")),
    "haproxy": haproxy(lambda: logged(template("haproxy.cfg")())),
    "haproxy-compose": haproxy(of_compose, hides_metrics=False),
    "apache2": Kind(
        "apache2",
        {"apache2.conf": template("apache2.conf")},
        "apache2 -D FOREGROUND -f @FOLDER@/apache2.conf",
    ),
    "varnish": Kind(
        "varnish",
        {"varnish.vcl": template("varnish.vcl")},
        "varnishd -F -j none -n @FOLDER@/work -f @FOLDER@/varnish.vcl -a 127.0.0.1:@PORT@ -T none -s malloc,64m",
    ),
    "caddy": Kind(
        "caddy",
        {"Caddyfile": template("Caddyfile")},
        "caddy run --adapter caddyfile --config @FOLDER@/Caddyfile",
    ),
}


class Proxy(Program):
    """A proxy before a service, in a folder of its own and without root's rights."""

    def __init__(self, kind: Kind, service: RunningServer):
        self.kind, self.checked = kind, set()
        self.folder = Path(tempfile.mkdtemp(prefix="chargpt-proxy-"))  # one that the proxy's user may enter
        self.options = {"cwd": self.folder, "env": os.environ | {"HOME": str(self.folder)}}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self.options |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        port = free_port()
        self.values = {"@PORT@": port, "@SERVICE@": service.port, "@FOLDER@": self.folder}
        for name, text in kind.files.items():
            (self.folder / name).write_text(self.filled(text()))
        super().__init__(self.words(kind.command), port, "/readyz", **self.options)
        self.logger = None
        if kind.area == "varnish":  # writes its log to shared memory
            entry = "forwarded %{X-Request-Id}i %{X-Request-Id}o %s"
            command = "varnishncsa -b -t off -n @FOLDER@/work -w @FOLDER@/log -F"
            self.logger = subprocess.Popen([*self.words(command), entry], stderr=subprocess.DEVNULL, **self.options)

    def filled(self, text):
        for name, value in self.values.items():
            text = text.replace(name, str(value))
        return text

    def words(self, command):
        name, *words = self.filled(command).split()
        return [program(self.kind.area, name), *words]

    def forwarded(self) -> dict[str, list[str]]:
        """By id of each request in its log: the id that came back, and the status."""
        log = self.folder / "log"
        text = log.read_text(errors="replace") if log.exists() else self.output()
        if self.kind.area == "caddy":
            lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
            heads = [(line["resp_headers"], str(line["status"])) for line in lines]
            entries = [(it["X-Forwarded-Id"][0], it.get("X-Request-Id", "-")[0], status) for it, status in heads]
        else:
            entries = re.findall(r"forwarded (\S+) (\S+) (\S+)\n", text)
        # Some log the client's id, or none, of what they have not forwarded.
        return {id: it for id, *it in entries if id != "-" and not id.startswith(SMUGGLED)}

    def _is_ready(self):
        self.ready = f"/readyz?{time.perf_counter()}"  # not the answer that a cache has
        return super()._is_ready() and bool(self.forwarded())

    def close(self):
        super().close()
        if self.logger is not None:
            self.logger.terminate()
            self.logger.wait()
        shutil.rmtree(self.folder)


class Log:
    """The requests in a service's log, but for those that were sent without a proxy."""

    def __init__(self, server: RunningServer):
        self.server, self.num_characters = server, 0
        self.requests, self.num_checked = [], 0
        self.earlier: set[str] = set()  # what proxies that are gone have forwarded

    def forget(self):
        """Leave out what has come so far."""
        self.unchecked()
        self.num_checked = len(self.requests)

    def unchecked(self):
        text = self.server.output()[self.num_characters :]
        text = text[: text.rfind("\n") + 1]
        self.num_characters += len(text)
        lines = map(json.loads, text.splitlines())
        self.requests += [it for it in lines if it["logger"] == "service.access" and it["request_id"] != DIRECT]
        return self.requests[self.num_checked :]

    def differences(self, proxy: Proxy) -> list[str]:
        """How what the service has received since the last call differs from what the proxy has forwarded."""
        deadline = time.monotonic() + 60
        while True:
            forwarded, new = proxy.forwarded(), self.unchecked()
            found = self._differences(proxy, forwarded, new)
            if not found or time.monotonic() > deadline:
                self.num_checked = len(self.requests)
                proxy.checked |= forwarded.keys()
                return found
            time.sleep(0.02)  # for what is still to be logged

    def _differences(self, proxy, forwarded, new):
        count = Counter(it["request_id"] for it in self.requests)
        found = [
            f"received, not forwarded: {it['message']}, client {it['client']}, id {it['request_id']}"
            for it in new
            if it["request_id"] not in forwarded.keys() | self.earlier
        ]
        for id in forwarded.keys() - proxy.checked:
            answered, status = forwarded[id]
            if count[id] > 1:
                found.append(f"received twice: {id}")
            if answered == id and not count[id]:
                found.append(f"not received: {id}")
            # What is refused before it has reached a route is answered with an id of the service's.
            if answered not in (id, "-") and status not in REFUSALS:
                found.append(f"answered with the answer {status} to another request: {id}, {answered}")
        return found


REFUSALS = {"400", "408", "413", "414", "431", "501", "505"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxies")
    save_random(folder / "chargpt")
    save_random(folder / "slow", **SLOW)
    checkpoints = f"chargpt={folder / 'chargpt'},slow={folder / 'slow'}"
    settings = {"client_header": "X-Forwarded-For", "stream_interval_seconds": 0.1}
    yield from lasting(checkpoints, log_format="json", log_level="debug", **settings)


@pytest.fixture(scope="module")
def texts(service):
    """What the service answers without a proxy, by model and seed."""

    def text(model, seed):
        fields = {"prompt": "a", "model": model, "seed": seed, "max_tokens": LENGTHS[model]}
        with sent(service.port, post("/generate", fields, X_Request_Id=DIRECT)) as connection:
            return text_of(connection)

    return {("chargpt", seed): text("chargpt", seed) for seed in SEEDS} | {("slow", 0): text("slow", 0)}


@pytest.fixture(scope="module")
def log(service):
    return Log(service)


def installed(names):
    return [pytest.param(name, marks=pytest.mark.needs(KINDS[name].area)) for name in names]


@pytest.fixture(scope="module", params=installed(KINDS))
def proxy(request, service, log):
    with Proxy(KINDS[request.param], service) as proxy:
        proxy.wait_until_ready()
        wait_until(lambda: proxy.forwarded().keys() & {it["request_id"] for it in log.unchecked()})
        log.forget()  # what came before the proxy had a log
        yield proxy
        log.earlier |= proxy.forwarded().keys()


LENGTHS = {"chargpt": 20, "slow": 600}


def question(**fields):
    return post("/generate", {"prompt": "a"} | fields)


def text_of(connection):
    with answer(connection) as response:
        assert response.status == 200
        return json.load(response)["choices"][0]["text"]


def ask(proxy, texts, seed):
    """A client with a connection of its own."""
    with sent(proxy.port, question(seed=seed, max_tokens=LENGTHS["chargpt"])) as connection:
        assert text_of(connection) == texts["chargpt", seed]


# Answers


def test_whole_answers_on_one_connection(proxy, texts, log):
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=PATIENCE)
    with contextlib.closing(client):
        used = set()
        for seed in SEEDS:
            fields = {"prompt": "a", "seed": seed, "max_tokens": LENGTHS["chargpt"]}
            client.request("POST", "/generate", json.dumps(fields), {"Content-Type": "application/json"})
            used.add(client.sock)
            with client.getresponse() as response:
                assert response.status == 200
                assert json.load(response)["choices"][0]["text"] == texts["chargpt", seed]
        for method, path, status in [("HEAD", "/v1/models", 200), ("GET", "/nothing", 404), ("GET", "/v1/models", 200)]:
            client.request(method, path)
            used.add(client.sock)
            with client.getresponse() as response:
                body = response.read()
                assert (response.status, bool(body)) == (status, method != "HEAD")
        assert len(used) == 1
    assert not log.differences(proxy)


def num_open(service):
    """Sequences of all models that have begun and not ended."""
    lines = web.get(f"{service.url}/metrics", headers={"X-Request-Id": DIRECT}).text.splitlines()

    def total(name):
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"chargpt_{name}{{"))

    return total("requests_accepted_total") - total("request_success_total")


def test_streams_arrive_event_by_event(proxy, texts, service):
    """The first event, before the last one is written: at least once, as this machine may be slow."""
    fields = {"model": "slow", "seed": 0, "max_tokens": LENGTHS["slow"], "stream": True}
    for _ in range(20):
        with sent(proxy.port, question(**fields)) as connection, answer(connection) as response:
            stream = events(line.decode() for line in response)
            data = [next(stream)]
            in_time = num_open(service)
            data += stream
        assert data.pop() == DONE
        assert "".join(json.loads(it).get("text", "") for it in data) == texts["slow", 0]
        if in_time:
            return
    pytest.fail("every first event came after its request's end")


def test_answers_are_not_kept(proxy, log):
    """A cache would answer with an old state of the service."""
    assert not log.differences(proxy)
    for path in ("/v1/models", "/info", "/readyz", "/nothing") * 2:
        with sent(proxy.port, message(f"GET {path}".encode(), b"Connection: close")) as connection:
            received(connection)
    wait_until(lambda: [it["method"] for it in log.unchecked()].count("GET") == 8, otherwise=log.unchecked)


@pytest.mark.parametrize("framing", ["length", "chunked", "expect"])
def test_uploads(proxy, framing):
    content = json.dumps({"prompt": "abcde" * 200_000}).encode()
    field = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: %d" % len(content)
    if framing == "expect":
        field += b"\r\nExpect: 100-continue"
    with sent(proxy.port, message(b"POST /tokenize", field)) as connection:
        if framing == "expect":
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        connection.sendall(chunked(content, 50_000) if framing == "chunked" else content)
        with answer(connection) as response:
            assert (response.status, json.load(response)["count"]) == (200, 1_000_000)


def test_a_sequence_ends_when_its_client_leaves(proxy, log):
    assert not log.differences(proxy)
    with sent(proxy.port, question(max_tokens=ENDLESS, stream=True)) as connection, answer(connection) as response:
        assert response.readline().startswith(b"data: ")
    left = wait_until(lambda: [it for it in log.unchecked() if it["status"] == 499], otherwise=log.unchecked)
    assert [it["endings"] for it in left] == [{"abort": 1}]
    assert not log.differences(proxy)


@pytest.mark.needs("curl")
def test_a_client_that_offers_http_2(proxy, texts, log):
    fields = {"prompt": "a", "seed": 1, "max_tokens": LENGTHS["chargpt"]}
    command = [program("curl"), "--http2", "--silent", "--show-error", "--json", json.dumps(fields)]
    done = subprocess.run([*command, f"{proxy.url}/generate"], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == texts["chargpt", 1]
    assert not log.differences(proxy)


@pytest.mark.parametrize("proxy", installed(it for it in KINDS if KINDS[it].hides_metrics), indirect=True)
def test_metrics_are_hidden_under_every_name(proxy):
    targets = """
        /metrics /metrics? /metrics?a=/livez /metrics/ //metrics /./metrics /livez/../metrics /%6detrics /metrics%20
        /metrics%00 /metrics%2f /metrics; /metrics;a=b /metrics# /livez#/../metrics http://other/metrics
        /metrics/../metrics /livez/%2e%2e/metrics /%2fmetrics metrics *
    """
    for target in targets.split():
        with sent(proxy.port, message(f"GET {target}".encode(), b"Connection: close")) as connection:
            assert b"# HELP" not in received(connection), target


# Requests that two readers may read differently


def message(line, *fields, body=b"", newline=b"\r\n"):
    lines = [line + b" HTTP/1.1", b"Host: proxy", b"Content-Type: application/json", *filter(None, fields), b"", b""]
    return newline.join(lines) + body


def chunked(body, size=1 << 20):
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def length(body, value=b"%d"):
    return b"Content-Length: " + (value % len(body) if b"%d" in value else value)


# What may be taken for a request: a fast one, and one whose answer comes when another client has asked. Each attempt
# puts its number in place of 000.
OWN = (b"X-Request-Id: smuggled-000", b"X-Forwarded-For: 203.0.113.9")
FAST = message(b"GET /v1/models", *OWN)
LATE_BODY = b'{"prompt": "a", "model": "slow", "max_tokens": 150}'
LATE = message(b"POST /generate", *OWN, length(LATE_BODY), body=LATE_BODY)
LAST = message(b"GET /readyz", b"Connection: close")

CHUNKED = b"Transfer-Encoding: chunked"
UPGRADES = {
    "unknown": (b"Connection: upgrade", b"Upgrade: x"),
    "h2c": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),
    "websocket": (
        b"Connection: upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ),
    "TLS": (b"Connection: upgrade", b"Upgrade: TLS/1.0"),
    "no Connection": (b"Upgrade: x",),
    "no Upgrade": (b"Connection: upgrade",),
}  # fmt: skip
CODINGS = [
    b"Transfer-Encoding: chunked", b"transfer-encoding: CHUNKED", b"Transfer-Encoding:chunked",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding: xchunked", b"Transfer-Encoding: x",
    b"Transfer-Encoding:\tchunked", b"Transfer-Encoding: chunked\t", b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: chunked\x0b", b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding:\n chunked",
    b"X: x\r\n Transfer-Encoding: chunked", b"X: x\nTransfer-Encoding: chunked", b"X: x\rTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding: identity, chunked", b"Transfer-Encoding: identity",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding: chunked,",
    b"Transfer-Encoding: chunked;q=1", b'Transfer-Encoding: "chunked"', b"Transfer-Encoding: chunked\x00",
    b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x",
    b"Transfer-Encoding:\r\nTransfer-Encoding: chunked", b"Transfer_Encoding: chunked",
    b"\x00Transfer-Encoding: chunked", b"Transfer-Encoding\x00: chunked",
    b"Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked",
]  # fmt: skip
LENGTH_FIELDS = [
    b"Content-Length: +%d", b"Content-Length: -%d", b"Content-Length: 0%d", b"Content-Length: 0x%d",
    b"Content-Length: %d.0", b"Content-Length: %d 0", b"Content-Length: %d, 0", b"Content-Length: 0, %d",
    b"Content-Length: %d,%d", b"Content-Length: %d\r\nContent-Length: 0", b"Content-Length: 0\r\nContent-Length: %d",
    b"Content-Length: %d\r\nContent-Length: %d", b"Content-Length: %d\x0b", b"Content-Length:\t%d",
    b"Content-Length : %d", b"Content_Length: %d", b"Content-Length\x00: %d", b"Content-Length:\r\n %d",
    b"X: x\r\n Content-Length: %d", b"X: x\nContent-Length: %d", b"X: x\rContent-Length: %d",
    b"Content-Length: 1844674407370955%d", b"Content-Length: ", b"Connection: Content-Length\r\nContent-Length: %d",
    b"Connection: close, Content-Length\r\nContent-Length: %d",
]  # fmt: skip
SPLIT = b"0\r\n\r\n" + FAST  # within a chunk: for who takes the chunk's data for further chunks
CHUNKS = {
    "extension": b"2;a=b\r\nxx\r\n0;c\r\n\r\n",
    "extension in quotes": b'2;a="\r\nxx\r\n0\r\n\r\n',
    "extension, LF": b"2;\nxx\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "extension, CR": b"2;\rxx\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "data, LF": b"2\r\nxx\n0\r\n\r\n",
    "data without a line end": b"2\r\nxx0\r\n\r\n",
    "data, two bytes more": b"2\r\nxxxx%x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "size, LF": b"2\nxx\r\n0\r\n\r\n",
    "size, CR": b"2\rxx\r\n0\r\n\r\n",
    "size, space": b"2 \r\nxx\r\n0\r\n\r\n",
    "size, two words": b"0 %x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "space, size": b" 2\r\nxx\r\n0\r\n\r\n",
    "size, plus": b"+2\r\nxx\r\n0\r\n\r\n",
    "size, minus": b"-2\r\nxx\r\n0\r\n\r\n",
    "size, 0x": b"0x%x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "size, underscore": b"0_%x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "size of 65 bits": b"1%016x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "size of 33 bits": b"1%08x\r\n%b\r\n0\r\n\r\n" % (len(SPLIT), SPLIT),
    "no size": b"\r\nxx\r\n0\r\n\r\n",
    "zeros": b"2\r\nxx\r\n0000\r\n\r\n",
    "end, LF": b"2\r\nxx\r\n0\n\n",
    "end without an empty line": b"2\r\nxx\r\n0\r\n",
    "trailers": b"2\r\nxx\r\n0\r\nX-Request-Id: smuggled\r\nContent-Length: %d\r\n\r\n" % len(FAST),
    "trailers about framing": b"2\r\nxx\r\n0\r\nTransfer-Encoding: x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "trailer that is no field": b"2\r\nxx\r\n0\r\n" + FAST,
    "trailer, folded": b"2\r\nxx\r\n0\r\nX: x\r\n " + FAST + b"\r\n",
    "trailer, LF": b"2\r\nxx\r\n0\r\nX: x\n\n" + FAST + b"\r\n",
}  # fmt: skip


# By kind and name: what is sent, in one part or several.
POST = b"POST /generate"


def upgrades():
    for name, fields in UPGRADES.items():
        yield f"{name}, length", message(POST, *fields, length(FAST), body=FAST)
        yield f"{name}, chunked", message(POST, *fields, CHUNKED, body=chunked(FAST))
        yield f"{name}, late", message(POST, *fields, length(LATE), body=LATE)
        yield f"{name}, body later", message(POST, *fields, length(FAST)), FAST
        yield f"{name}, GET", message(b"GET /v1/models", *fields, length(FAST), body=FAST)
        yield f"{name}, LF", message(POST, *fields, length(FAST), body=FAST, newline=b"\n")
    yield "preface", message(b"GET /v1/models", *UPGRADES["h2c"]), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", FAST


def codings():
    for coding in CODINGS:
        yield f"CL.TE {coding!r}", message(POST, length(SPLIT), coding, body=SPLIT)
        body = chunked(FAST)
        yield f"TE.CL {coding!r}", message(POST, length(body[: body.index(b"\n") + 1]), coding, body=body)


def lengths():
    for field in LENGTH_FIELDS:
        yield str(field), message(POST, field % ((len(FAST),) * field.count(b"%d")), body=FAST)


def chunks():
    for name, body in CHUNKS.items():
        yield name, message(POST, CHUNKED, body=body), FAST


def bodies():
    """Where none is expected, or nobody waits for it."""
    for method in (b"GET /info", b"HEAD /info", b"DELETE /generate", b"OPTIONS /generate", b"POST /livez", b"POST /no"):
        yield f"{method!r}, length", message(method, length(FAST), body=FAST)
        yield f"{method!r}, late", message(method, length(LATE), body=LATE)
        yield f"{method!r}, chunked", message(method, CHUNKED, body=chunked(FAST))
        yield f"{method!r}, later", message(method, length(FAST)), FAST
        yield f"{method!r}, expect", message(method, length(FAST), b"Expect: 100-continue"), FAST
    asked = b"Expect: 100-continue"
    for field in (
        asked, b"Expect: 100-Continue", b"Expect: x", b"Expect: x 100-continue", b"Expect: 100-continue, x", b"Expect:",
        b"Expect:\r\n 100-continue", asked + b"\r\n" + asked, b"Expect : 100-continue",
    ):  # fmt: skip
        yield f"{field!r}", message(POST, length(FAST), field), FAST
        yield f"{field!r}, at once", message(POST, length(FAST), field, body=FAST)
        yield f"{field!r}, chunked", message(POST, CHUNKED, field), chunked(FAST)


def lines():
    get = message(b"GET /v1/models")
    yield "pipeline", get * 3
    yield "pipeline after line breaks", b"\r\n\r\n" + get + b"\r\n" + get
    yield "LF", message(POST, length(FAST), body=FAST, newline=b"\n")
    yield "CR", message(POST, length(FAST), body=FAST, newline=b"\r")
    for field in (
        b"X: x\r\n " + FAST, b"X: x\n" + FAST, b"X: x\r" + FAST, b"X: \x00", b"X : x", b"X x: x", b"X", b": x",
        b" X: x", b"Host: other", b"Host : other", b"\x00: x", b"Connection: close, X-Forwarded-For", b"Keep-Alive: 1",
        b"TE: trailers", b"Proxy-Connection: close", b"X-HTTP-Method-Override: GET", b"X-Original-URL: /metrics",
    ):  # fmt: skip
        yield f"field {field[:30]!r}", message(POST, length(FAST), field, body=FAST)
    for target in (
        b"http://other/generate", b"http://other:80/generate", b"HTTP://OTHER/generate", b"//other/generate",
        b"/generate?a=%0d%0aX:%20x", b"/generate%20HTTP/1.1%0d%0aX:%20x", b"/generate#a", b"/generate\x00",
        b"/generate\xff", b"generate", b"*", b"/generate a", b" /generate", b"/generate ", b"\t/generate",
        b"/generate\t", b"/generate\r/metrics",
    ):  # fmt: skip
        yield f"target {target!r}", message(b"POST " + target, length(FAST), body=FAST)


def versions():
    for version in b"HTTP/1.0 HTTP/1.2 HTTP/2.0 HTTP/0.9 HTTP/1.10 http/1.1 HTTP/1 HTTP/1.1a".split():
        for kept in (b"", b"Connection: keep-alive"):
            for fields, body in (((length(FAST),), FAST), ((length(SPLIT), CHUNKED), SPLIT)):
                data = message(POST, kept, *fields, body=body).replace(b"HTTP/1.1", version, 1)
                yield f"{version!r} {kept!r} {fields}", data


@pytest.mark.parametrize("kind", [upgrades, codings, lengths, chunks, bodies, lines, versions])
def test_nothing_is_smuggled(proxy, texts, log, kind):
    attempts, problems = list(kind()), []
    names = {f"{SMUGGLED}{number:03}": name for number, (name, *_) in enumerate(attempts)}

    def check_another_client(seed, after):
        try:
            ask(proxy, texts, seed)
        except Exception as error:
            problems.append(f"another client's answer after {after}: {error!r}")

    def attempt(number):
        first, *parts = (it.replace(b"-000", b"-%03d" % number) for it in attempts[number][1:])
        with sent(proxy.port, first) as connection, contextlib.suppress(OSError):
            for part in (*parts, LAST):
                time.sleep(0.02)
                connection.sendall(part)
            connection.settimeout(0.4)
            received(connection)  # until the proxy closes the connection, or sends nothing more
        check_another_client(number % len(SEEDS), attempts[number][0])

    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(attempt, range(len(attempts))))
    for seed in SEEDS:
        check_another_client(seed, "all")
    problems += log.differences(proxy)
    found = re.sub(rf"{SMUGGLED}\d+", lambda it: names.get(it[0], it[0]), "\n".join(problems))
    assert not found, found
