"""Clients that generators make of /openapi.json, and what programs with them read of the answers."""

import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from tests.helpers import lasting, web
from tests.toolbox.needs import program

PROGRAMS = Path(__file__).with_name("generated")
SEED = 2**53 - 1
# The native library's own classes for unions of lists do not compile. With these, a union is an Object.
UNIONS = (
    "CompletionRequest_prompt CompletionRequest_seed CompletionRequest_stop CompletionRequest_logit_bias "
    "NextRequest_prompt ScoreRequest_texts"
).split()
JAVA_OPTIONS = "--library=native", "--schema-mappings=" + ",".join(f"{union}=Object" for union in UNIONS)

pytestmark = [pytest.mark.tools, pytest.mark.needs("java")]


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path)


@pytest.fixture(scope="module")
def document(server, tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_bytes(web.get(f"{server.url}/openapi.json").raise_for_status().content)
    return path


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def jar():
    return str(resources.files("openapi_generator_cli") / "openapi-generator.jar")


def generate(language, document, folder, *options, properties=""):
    command = [program("java"), "-jar", jar(), "generate", f"--generator-name={language}", f"--input-spec={document}"]
    more = [f"--additional-properties={properties}"] if properties else []
    run(*command, f"--output={folder}", *more, *options)


def said_in_java(url, document, folder):
    # Without jackson-databind-nullable: the generator's own jar has what else the client needs.
    generate("java", document, folder, *JAVA_OPTIONS, properties="openApiNullable=false,documentationProvider=none")
    sources = [*folder.glob("src/main/**/*.java"), PROGRAMS / "Generated.java", PROGRAMS / "Calls.java"]
    run(program("java", "javac"), "-nowarn", "-proc:none", "-cp", jar(), "-d", folder / "built", *sources)
    return run(program("java"), "-cp", os.pathsep.join([str(folder / "built"), jar()]), "Calls", url)


def said_in_go(url, document, folder):
    go = program("go")
    generate("go", document, folder / "client", properties="packageName=client")
    shutil.rmtree(folder / "client" / "test")  # needs modules that the client does not
    (folder / "client" / "go.mod").unlink()
    (folder / "go.mod").write_text("module example.org\n\ngo 1.19\n")
    shutil.copy(PROGRAMS / "calls.go", folder)
    environment = os.environ | {"GOPROXY": "off", "GOFLAGS": "-mod=mod", "GOCACHE": str(folder / "cache")}
    run(go, "build", "-o", "calls", ".", cwd=folder, env=environment)
    return run(folder / "calls", url)


def said_in_python(url, document, folder):
    generate("python", document, folder)
    return run(
        sys.executable, PROGRAMS / "calls_openapi_generator.py", url, env=os.environ | {"PYTHONPATH": str(folder)}
    )


def said_with_attrs(url, document, folder):
    (folder / "config.yml").write_text("post_hooks: []\n")  # these only format the client
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta=none", "--fail-on-warning"]
    run(*command, "--path", document, "--output-path", folder / "client", "--config", folder / "config.yml")
    program = PROGRAMS / "calls_openapi_python_client.py"
    return run(sys.executable, program, url, env=os.environ | {"PYTHONPATH": str(folder)})


@pytest.mark.parametrize(
    "said_by",
    [
        pytest.param(said_in_java, id="java"),
        pytest.param(said_in_go, id="go", marks=pytest.mark.needs("go")),
        pytest.param(said_in_python, id="python"),
        pytest.param(said_with_attrs, id="openapi-python-client"),
    ],
)
def test_programs_with_a_generated_client_read_what_the_service_answers(server, document, tmp_path, said_by):
    def post(path, **body):
        return web.post(server.url + path, json=body).raise_for_status().json()

    def get(path):
        return web.get(server.url + path).raise_for_status().json()

    def seeded(**fields):
        answer = post("/generate", prompt="ab", max_tokens=8, **fields)
        return [answer["choices"][0]["text"], answer["choices"][0]["seed"], answer["chargpt"]["seeds"]]

    said = json.loads(said_by(server.url, document, tmp_path))
    text, seed, _ = said["drawn"]
    assert 0 <= seed <= SEED and said["drawn"] == seeded(seed=seed) and said["seeded"] == seeded(seed=SEED)
    fields = {"prompt": ["ab", "cd"], "max_tokens": 8, "seed": [SEED, 7], "logprobs": 1, "stop": ["e", "f"]}
    completion = post("/v1/completions", **fields, logit_bias={"g": -2.5})
    next = post("/v1/next", prompt="ab")["data"][0]["distribution"][0]
    tokenizer, info = get("/tokenizer_info"), get("/info")
    refused = web.post(f"{server.url}/generate", json={"prompt": "ab", "max_tokens": -1})
    error = refused.json()["error"]
    assert said == {
        "seeded": [said["seeded"][0], SEED, [SEED]],
        "drawn": [text, seed, [seed]],
        "completions": [
            [it["text"], it["seed"], it["finish_reason"], it["logprobs"]["token_logprobs"]]
            for it in completion["choices"]
        ],
        "scores": [[it["nats"], it["characters"]] for it in post("/v1/score", texts=["abc", "cb"])["data"]],
        "next": [next["character"], next["id"], next["probability"]],
        "tokens": post("/tokenize", prompt="abc")["tokens"],
        "text": "abc",
        "vocab_size": tokenizer["vocab_size"],
        "pad_token": None,
        "model": get("/v1/models")["data"][0]["id"],
        "info": [info["model"]["vocabulary"], info["limits"]["max_body_bytes"]],
        "status": "ready",
        "error": [400, error["param"], error["type"]],
    }
    assert refused.status_code == 400
