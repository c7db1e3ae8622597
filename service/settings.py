"""Every setting of the service: a flag (`--max-queued-requests`) and a variable (`CHARGPT_MAX_QUEUED_REQUESTS`).

`python -m service` reads them once. The program ends with a message if a value has the wrong type or is out of bounds,
or if a flag or a variable is unknown. The message has the setting's name, the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import os
import re
import ssl
import stat
import sys
import tomllib
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service import BUNDLED, installing
from service.observe.exporter import check_variables
from service.observe.logs import LogFormat
from service.process import available_cpus

PLACE = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9._:-]{0,63})=)?(.*)", re.DOTALL)  # --checkpoint NAME=DIR, or DIR

# Variables with the prefix that are not settings. Training, deployment, tests and benchmarks read them.
NO_SETTINGS = frozenset(f"CHARGPT_{name}" for name in (
    "DATA_DIR", "IMAGE", "CPUS", "NATIVE_LIBRARY", "FUSED_LIBRARY", "REQUIRE", "CHAOS_SEED", "OPENAPI_CASES", "LM_EVAL",
    "LLAMA_CPP", "STUB_STEP_SECONDS",
))  # fmt: skip
# LitServe's variable, and the one in the page's examples. Users who set one expect that requests need a key.
API_KEY_VARIABLES = ("LIT_SERVER_API_KEY", "CHARGPT_API_KEY")

# The Origin header as browsers send it: lower case, no path, no default port.
ORIGIN = re.compile(r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def cpus_per_worker(others: dict[str, Any]) -> int:
    """Return all CPUs divided by the number of inference processes. HTTP processes share the same CPUs.

    With 2 CPUs, 1 to 128 clients and answers of 1 to 128 characters, no case was faster with one CPU left free.
    """
    workers = others.get("devices", 1) * others.get("workers_per_device", 1)
    return max(1, available_cpus() // workers)


cpus_per_worker.__qualname__ = "CPUs ÷ workers"  # how --help shows a default factory


class Limits(BaseModel):
    """The limits of one client; None: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    requests_per_minute: Annotated[int | None, Field(ge=1, le=1_000_000_000)] = None
    characters_per_minute: Annotated[int | None, Field(ge=1, le=1_000_000_000_000)] = None
    concurrent_requests: Annotated[int | None, Field(ge=1, le=1_000_000_000)] = None
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0  # share of a worker relative to other clients


class ClientLimitsFile(BaseModel):
    """The tables of a limits file. A client's table takes missing entries from `default`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    default: Limits = Limits()
    clients: dict[str, Limits] = {}


def _split(given: object) -> object:
    if isinstance(given, Path) or (isinstance(given, str) and os.path.isdir(given)):  # may have a comma
        return [str(given)]
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


Separated = Annotated[list[str], NoDecode, BeforeValidator(_split)]  # by commas
Few = Annotated[int, Field(ge=1, le=64)]
Positive = Annotated[int, Field(ge=1, le=100_000_000)]
Natural = Annotated[int, Field(ge=0, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1 << 50)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Delay = Annotated[float, Field(ge=0, le=86_400)]


class Settings(BaseSettings):
    """Serve a character-level GPT checkpoint over HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="CHARGPT_", allow_inf_nan=False, validate_assignment=True, cli_kebab_case=True, cli_avoid_json=True
    )

    checkpoint: Separated = Field(
        [str(BUNDLED)],
        min_length=1,
        description="checkpoint folder to serve; NAME=DIR for each of several, repeated or comma-separated; or a "
        "folder of training runs, each served under its folder's name",
    )
    model_name: str = Field(
        "chargpt", min_length=1, max_length=256,
        description="name of a checkpoint given without one; also the default of requests without a model, and the "
        "model_name of the metrics of the whole service",
    )  # fmt: skip
    host: str = Field(
        "127.0.0.1", min_length=1, max_length=255,
        description="address or host name to listen on; 0.0.0.0 for all IPv4 addresses, :: for all addresses",
    )  # fmt: skip
    port: int = Field(8000, ge=1024, le=65535, description="TCP port to listen on")
    root_path: str = Field("", description="path prefix that a proxy adds, such as /chargpt")
    tls_certificate: Path | None = Field(None, description="PEM file of the certificate and its chain, for HTTPS")
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a password")
    api_keys_file: Path | None = Field(
        None, description="file of API keys, one per line; every route except the probes then needs a key"
    )
    client_limits: Path | None = Field(None, description="TOML file of the limits and weight of each client")
    client_header: str | None = Field(
        None, pattern=r"^[A-Za-z0-9-]{1,64}$",
        description="header to which a trusted proxy adds the client's address at the end, such as X-Forwarded-For",
    )  # fmt: skip
    public_metrics: bool = Field(False, description="serve /metrics without an API key")
    public_docs: bool = Field(False, description="serve the page at /, /docs and /openapi.json without an API key")
    cors_origins: Separated = Field(
        [], description="web origins whose pages may send requests, comma-separated; * for all"
    )

    accelerator: Literal["auto", "cpu", "cuda"] = Field("auto", description="device type for the model")
    backend: Literal["auto", "native", "cuda", "torch"] = Field(
        "auto",
        description="engine that runs the model; auto: cuda on a GPU, native on a CPU if available, otherwise torch",
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = Field(
        "auto", description="number format of the model; auto: float32 on native and cuda, otherwise float64"
    )
    devices: Few = Field(1, description="number of devices; each has its own inference processes")
    workers_per_device: Few = Field(1, description="inference processes per device")
    http_processes: Few = Field(
        1, description="HTTP processes, which divide the limits of clients, connections and memory"
    )
    threads: int = Field(default_factory=cpus_per_worker, ge=1, le=1024, description="CPU threads per worker")

    max_running_requests: int | Literal["auto"] = Field(
        72,
        description="maximum running sequences per worker; auto: as many as fit into GPU memory, 72 on other devices",
    )
    max_queued_requests: Natural = Field(1024, description="maximum waiting sequences per worker")
    max_queue_seconds: Seconds = Field(10, description="maximum expected wait in the queue; a longer one gets 429")
    max_prompt_characters: Positive = Field(100_000, description="maximum length of a prompt")
    max_tokens: Positive = Field(16_384, description="maximum length of a completion, in characters")
    max_body_bytes: Bytes = Field(4 << 20, le=1 << 30, description="maximum size of a request body")

    max_held_bytes: Bytes = Field(
        256 << 20,
        description="maximum estimated memory of all requests in progress; half of it per client, a quarter per "
        "request",
    )

    unknown_characters: Literal["refuse", "replace", "drop"] = Field(
        "refuse", description="default for characters outside the vocabulary"
    )

    stream_interval_seconds: Delay = Field(0.02, le=60, description="minimum time between two events of a stream")
    max_connections: int = Field(10_000, ge=1, le=1_000_000, description="maximum open connections")
    max_connections_per_address: Natural = Field(
        64,
        description="maximum open connections from one address, loopback apart; 0, or with --client-header: no limit",
    )
    idle_connection_seconds: int = Field(75, ge=1, le=3600, description="time an idle connection is kept open")
    request_timeout_seconds: Seconds = Field(300, description="time limit for a request, queue time included")
    shutdown_delay_seconds: Delay = Field(
        0, description="time after SIGTERM for which /readyz is 503 but requests are still accepted"
    )
    drain_seconds: Delay = Field(30, description="time limit for accepted requests after the shutdown delay")
    hang_seconds: Seconds = Field(10, ge=1, description="time without a heartbeat after which a process is replaced")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum level to log")
    log_format: LogFormat = Field("auto", description="log line format; auto: text on a terminal, json otherwise")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL to send traces to, by OTLP/HTTP; needs the extra tracing"
    )

    _api_keys: Mapping[bytes, str] = PrivateAttr({})
    _limits: ClientLimitsFile = PrivateAttr(ClientLimitsFile())

    @property
    def api_keys(self) -> Mapping[bytes, str]:
        """The name of each API key by its SHA-256; empty: no key is required."""
        return self._api_keys

    @property
    def max_request_bytes(self) -> int:
        """The maximum estimated memory of a request."""
        return self.max_held_bytes // 4

    @property
    def places(self) -> list[tuple[str | None, Path]]:
        """`checkpoint` as pairs of name and folder. Without NAME=, the whole entry is the folder."""
        found = [PLACE.fullmatch(place) for place in self.checkpoint]
        return [(match[1], Path(match[2])) for match in found if match]

    @property
    def limits(self) -> ClientLimitsFile:
        """The content of the `client_limits` file, as read at start."""
        return self._limits

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", path):
            raise ValueError(
                "Path must begin with /, must not end with /, and may contain letters, digits, -, ., _, ~ and /"
            )
        return path

    @field_validator("max_running_requests", mode="before")
    @classmethod
    def _check_slots(cls, given: object) -> object:
        is_number = type(given) is int or (isinstance(given, str) and given.isascii() and given.isdigit())
        if given == "auto" or (is_number and 1 <= int(str(given)) <= 4096):
            return given
        raise ValueError("must be auto or a whole number from 1 to 4096")

    @field_validator("tls_key")
    @classmethod
    def _check_tls(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_certificate" not in info.data:  # itself invalid
            return key
        certificate = info.data["tls_certificate"]
        if (certificate is None) != (key is None):
            raise ValueError(f"must be given together with --tls-certificate, which is {certificate}")
        if certificate is None or key is None:
            return key
        for path in (certificate, key):
            try:
                path.open().close()
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse_password)
        except ssl.SSLError as error:
            reason = error.reason or error
            raise ValueError(
                f"{certificate} and {key} are not a PEM certificate and its private key ({reason})"
            ) from None
        return key

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_traces(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/@?#\s]+/[^?#\s]*", endpoint):
            raise ValueError("must be a full URL without user or query, such as http://localhost:4318/v1/traces")
        return endpoint

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origins != ["*"] and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin as browsers send it: scheme://host or scheme://host:port, in lower "
                    "case, without a path or a default port; or * alone"
                )
        return origins

    @model_validator(mode="after")
    def _check_variables(self) -> Settings:
        known = {f"CHARGPT_{name.upper()}" for name in type(self).model_fields}
        for variable in sorted(os.environ):
            name = variable.upper()  # pydantic-settings reads either case
            if name in API_KEY_VARIABLES:
                if self.api_keys_file is None:
                    raise ValueError(
                        f"{variable} is set, but API keys are read from a file: --api-keys-file (CHARGPT_API_KEYS_FILE)"
                    )
            elif name.startswith("CHARGPT_") and name not in known | NO_SETTINGS:
                raise ValueError(f"unknown variable {variable}{_did_you_mean(name, known, 'CHARGPT_')}")
        return self

    @model_validator(mode="after")
    def _check_opentelemetry(self) -> Settings:
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None or "OTEL_PROPAGATORS" in os.environ:
            try:
                check_variables(endpoint)
            except ModuleNotFoundError as error:
                if endpoint is not None:
                    raise ValueError(
                        "--otlp-traces-endpoint (CHARGPT_OTLP_TRACES_ENDPOINT): needs the extra tracing "
                        f"(module {error.name} not found): {installing('tracing')}"
                    ) from None
        return self

    @model_validator(mode="after")
    def _read_files(self) -> Settings:
        # Not in a field validator: no key may become a field's value.
        if self.api_keys_file is not None:
            self._api_keys = read_api_keys(self.api_keys_file)
        if self.client_limits is not None:
            self._limits = read_client_limits(self.client_limits)
        return self


def _did_you_mean(given: str, known: Iterable[str], prefix: str) -> str:
    names = [name.removeprefix(prefix) for name in sorted(known)]
    close = difflib.get_close_matches(given.removeprefix(prefix), names, n=1, cutoff=0.8)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def refuse_password() -> str:
    raise ValueError("the private key must not have a password")


# A key of printable ASCII characters, and its name.
KEY_LINE = re.compile(rb"([\x21-\x7e]{8,})(?:[ \t]+([A-Za-z0-9_.-]{1,64}))?")


def read_api_keys(path: Path) -> dict[bytes, str]:
    """Return the name of each key in a file by the key's SHA-256.

    A line is KEY or KEY NAME. Keys may share a name. A key without a name is called key- and 8 digits of its SHA-256.
    Blank lines and lines that start with # are skipped.

    Raises ValueError: the file cannot be read, has no key, or has an invalid line. The message never shows the line.
    """
    flag = f"--api-keys-file (CHARGPT_API_KEYS_FILE): {path}"
    try:
        lines = _content(path).split(b"\n")
    except OSError as error:
        raise ValueError(f"{flag} cannot be read: {error.strerror}") from None
    names: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        if not line.strip() or line.startswith(b"#"):
            continue
        matched = KEY_LINE.fullmatch(line)
        if matched is None:
            raise ValueError(
                f"{flag}, line {number}: must be KEY or KEY NAME, a key of at least 8 printable ASCII characters, "
                "no blanks, and a name of 1 to 64 letters, digits, -, _ and ."
            )
        digest = sha256(matched[1]).digest()
        name = f"key-{digest.hex()[:8]}" if matched[2] is None else matched[2].decode()
        if names.setdefault(digest, name) != name:
            raise ValueError(f"{flag}, line {number}: the key has another name in an earlier line")
    if not names:
        raise ValueError(f"{flag} contains no key")
    return names


def _content(path: Path) -> bytes:
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a pipe can be read only once, and SIGHUP would wait for it
        raise OSError(errno.EINVAL, "not a regular file")
    return path.read_bytes()


def read_client_limits(path: Path) -> ClientLimitsFile:
    """Read the limits of clients from a file.

    Raises ValueError: the file cannot be read, or is invalid. The message names the file, the table and the key.
    """
    flag = f"--client-limits (CHARGPT_CLIENT_LIMITS): {path}"
    try:
        tables = tomllib.loads(_content(path).decode())
        default, clients = tables.get("default"), tables.get("clients")
        if isinstance(default, dict) and isinstance(clients, dict):
            ClientLimitsFile.model_validate({"default": default})  # a wrong value is named once, in its own table
            tables["clients"] = {
                name: default | table if isinstance(table, dict) else table for name, table in clients.items()
            }
        return ClientLimitsFile.model_validate(tables)
    except OSError as error:
        raise ValueError(f"{flag} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        place = [str(part) for part in problem["loc"]]
        table, key = (place[:-1], place[-1]) if len(place) > (1 if place[0] == "default" else 2) else (place, None)
        where = f"[{'.'.join(table)}]" + (f" {key}" if key else "")
        if problem["type"] == "extra_forbidden":
            known = Limits.model_fields if key else ClientLimitsFile.model_fields
            reason = f"unknown; known are {', '.join(known)}"
        elif key is None:
            reason = "must be a table"
        else:
            reason = f"{problem['msg']}, got {problem['input']!r}"
        raise ValueError(f"{flag}, {where}: {reason}") from None
    except (ValueError, RecursionError) as error:  # UTF-8 or TOML
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{flag} is not valid TOML: {reason}") from None


def program() -> str:
    """Return the program as the user typed it. `service.command` sets argv[0] to "chargpt serve"."""
    return "chargpt serve" if sys.argv[0] == "chargpt serve" else "python -m service"


def read_settings(arguments: list[str] | None = None) -> Settings:
    """Read settings from flags, then variables, then defaults.

    Raises SystemExit: 2 for an invalid value or an unknown flag or variable, 0 for --help.
    """
    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    words = iter(sys.argv[1:] if arguments is None else arguments)
    for argument in words:
        flag, has_value, _ = argument.partition("=")
        if flag in ("-h", "--help"):
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                Settings(_cli_prog_name=program(), _cli_parse_args=["--help"])  # type: ignore[call-arg]
            print(re.sub(r"\(default:\s*\)", "(default: none)", text.getvalue()), end="")  # of an empty text
            raise SystemExit(0)
        wrong = f"argument {flag} needs a value"
        if flag not in flags:
            wrong = f"unknown argument {flag}{_did_you_mean(flag, flags, '--')}"
        elif has_value or not next(words, "--").startswith("--"):
            continue
        print(f"{program()}: {wrong}\nAll flags: {program()} --help", file=sys.stderr)
        raise SystemExit(2)
    try:
        return Settings(  # type: ignore[call-arg]
            _cli_prog_name=program(), _cli_parse_args=arguments if arguments is not None else True
        )
    except ValidationError as error:
        print(f"{program()}: invalid settings", file=sys.stderr)
        for problem in error.errors():
            message, given = problem["msg"].removeprefix("Value error, "), repr(problem["input"])
            if problem["loc"]:  # without it, the message names the settings
                name = str(problem["loc"][0])
                shown = "" if given in message else f", got {given}"
                message = f"--{name.replace('_', '-')} (CHARGPT_{name.upper()}): {message}{shown}"
            if problem["type"] != "default_factory_not_called":  # a consequence of another problem
                print(f"  {message}", file=sys.stderr)
        raise SystemExit(2) from None
