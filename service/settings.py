"""Every setting of the service: a flag (`--max-queued-requests`) and a variable (`CHARGPT_MAX_QUEUED_REQUESTS`).

Read once, by `python -m service`. A bad value ends the program with its name, its value and what is allowed.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.observe.logs import LogFormat

# Trained on tiny Shakespeare; `make bundled` trains it anew.
BUNDLED = Path(__file__).parent / "checkpoints" / "tinyshakespeare"

# What browsers send as Origin: lower case, no path, no port that the scheme has anyway.
ORIGIN = re.compile(r"(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def cpus_left(others: dict[str, Any]) -> int:
    """CPUs for each inference process, beside one for each HTTP process: threads that wait for each other at every
    operation must not wait for a CPU as well."""
    workers = others.get("devices", 1) * others.get("workers_per_device", 1)
    return max(1, (available_cpus() - others.get("http_processes", 1)) // workers)


def available_cpus() -> int:
    """CPUs this process may use: its affinity, or a container's quota (cgroup v2 or v1) if that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cpus
    if quota in ("max", "-1"):
        return cpus
    return max(1, min(cpus, int(quota) // int(period)))


class Settings(BaseSettings):
    """Serve a character-level GPT checkpoint over HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="CHARGPT_", cli_prog_name="python -m service", cli_kebab_case=True, cli_avoid_json=True
    )

    checkpoint: Path = Field(BUNDLED, description="folder of the checkpoint to serve; the bundled one by default")
    model_name: str = Field("chargpt", min_length=1, description="name of the model in requests, answers and metrics")
    host: Literal["127.0.0.1", "0.0.0.0", "::"] = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1024, le=65535, description="TCP port to listen on")
    root_path: str = Field("", description="path before the routes where a proxy adds one, such as /chargpt")
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate and its chain; speaks HTTPS, TLS 1.2 at least, with --tls-key"
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a password")
    api_keys_file: Path | None = Field(
        None, description="file of API keys, one per line; needed on every route but the probes once it is given"
    )
    public_metrics: bool = Field(False, description="answer /metrics without an API key")
    public_docs: bool = Field(False, description="answer /docs and /openapi.json without an API key")
    cors_origins: Annotated[list[str], NoDecode] = Field(
        [], description="origins whose web pages may ask, comma-separated, such as https://example.org; * for all"
    )

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="kind of device to run the model on")
    devices: int = Field(1, ge=1, le=64, description="how many devices of that kind; each gets its own process")
    workers_per_device: int = Field(1, ge=1, le=64, description="inference processes per device")
    http_processes: int = Field(1, ge=1, le=64, description="processes that speak HTTP")
    threads: int = Field(
        default_factory=cpus_left,
        ge=1,
        le=1024,
        description="CPU threads of each inference process; by itself what the HTTP processes leave of the CPUs",
    )

    max_running_requests: int = Field(64, ge=1, le=4096, description="sequences that run at once, per worker")
    max_queued_requests: int = Field(1024, ge=0, le=1_000_000, description="sequences that may wait, per worker")
    prefill_budget: int = Field(512, ge=1, le=1_000_000, description="prompt characters per engine step")
    max_prompt_characters: int = Field(100_000, ge=1, le=100_000_000, description="longest prompt accepted")
    max_tokens: int = Field(16_384, ge=1, le=100_000_000, description="longest completion accepted, in characters")
    max_prompts: int = Field(128, ge=1, le=10_000, description="most sequences in one request: prompts × n or best_of")
    max_score_texts: int = Field(10_000, ge=1, le=1_000_000, description="most texts in one request of /v1/score")
    max_regex_characters: int = Field(1000, ge=1, le=10_000, description="longest regex and stop_regex accepted")
    max_body_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="largest request body accepted, in bytes")

    unknown_characters: Literal["refuse", "replace", "drop"] = Field(
        "refuse", description="what to do with characters that the model does not know, where a request does not say"
    )
    replacement_character: str = Field(
        " ", min_length=1, max_length=1, description="what replaces them, where a request does not say"
    )

    stream_interval_seconds: float = Field(
        0.02, ge=0, le=60, allow_inf_nan=False, description="time for which a stream's characters gather to one event"
    )
    keep_alive_seconds: float = Field(
        15, gt=0, le=3600, allow_inf_nan=False, description="after so long without an event a stream gets a comment"
    )
    body_timeout_seconds: float = Field(
        30, gt=0, le=3600, allow_inf_nan=False, description="time a request's body may take to arrive"
    )
    idle_connection_seconds: int = Field(
        75, ge=1, le=3600, description="time for which a connection is kept open between two requests"
    )
    request_timeout_seconds: float = Field(
        300, gt=0, le=86_400, allow_inf_nan=False, description="time a request may take, in the queue and running"
    )
    drain_seconds: float = Field(
        30, ge=0, le=3600, allow_inf_nan=False, description="time running requests have to finish after SIGTERM"
    )
    metrics_vllm_names: bool = Field(False, description="give /metrics under vLLM's own names too")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: LogFormat = Field("auto", description="how: json or text lines; by itself text on a terminal alone")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL that OpenTelemetry traces go to, by OTLP over HTTP; needs the extra tracing"
    )

    _api_key_digests: tuple[bytes, ...] = PrivateAttr(())

    @property
    def api_key_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each key; empty: none is needed."""
        return self._api_key_digests

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, path: str) -> str:
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", path):
            raise ValueError("Path should begin with /, not end with /, and be of letters, digits, -, ., _, ~ and /")
        return path

    @field_validator("tls_key")
    @classmethod
    def _check_tls(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_certificate" not in info.data:  # wrong itself
            return key
        certificate = info.data["tls_certificate"]
        if (certificate is None) != (key is None):
            raise ValueError(f"should be given exactly where --tls-certificate is, which is {certificate}")
        if certificate is None or key is None:
            return key
        for path in (certificate, key):
            try:
                path.open().close()
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _refuse_password)
        except ssl.SSLError as error:
            reason = error.reason or error
            raise ValueError(f"{certificate} and {key} are no certificate and its key in PEM ({reason})") from None
        return key

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check_traces(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        if not re.fullmatch(r"https?://[^/@?#\s]+/[^?#\s]*", endpoint):
            raise ValueError("should be a whole URL without a user or query, such as http://localhost:4318/v1/traces")
        for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            try:
                found = find_spec(module)
            except ModuleNotFoundError:  # not even the package that it would be in
                found = None
            if found is None:
                raise ValueError(f"needs the extra tracing: pip install 'chargpt[tracing]' (there is no {module})")
        return endpoint

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, given: object) -> object:
        return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        if origins == ["*"]:
            return origins
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin as browsers send it: scheme://host or scheme://host:port, in lower case, "
                    "no path, no port that the scheme has anyway; or * alone"
                )
        return origins

    @model_validator(mode="after")
    def _read_api_keys(self) -> Settings:
        # Here and not beside its field: read once, as the file may be a pipe, and no key becomes a setting's value.
        if self.api_keys_file is not None:
            self._api_key_digests = read_api_key_digests(self.api_keys_file)
        return self


def _refuse_password() -> str:
    raise ValueError("the private key should not need a password")


def read_api_key_digests(path: Path) -> tuple[bytes, ...]:
    """SHA-256 of each key in a file: one per line; blank lines and lines that start with # are skipped.

    Raises:
        ValueError: the file cannot be read, has no key, or a line is none; the line is not shown.
    """
    name = f"--api-keys-file (CHARGPT_API_KEYS_FILE): {path}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    digests = []
    for number, line in enumerate(lines, 1):
        key = line.removesuffix(b"\r")
        if not key.strip() or key.startswith(b"#"):
            continue
        if len(key) < 8 or not all(0x21 <= byte <= 0x7E for byte in key):
            raise ValueError(f"{name}, line {number}: a key should be at least 8 printable ASCII characters, no blanks")
        digests.append(sha256(key).digest())
    if not digests:
        raise ValueError(f"{name} has no key")
    return tuple(digests)


def read_settings(arguments: list[str] | None = None) -> Settings:
    """Settings from flags, then variables, then defaults.

    Raises:
        SystemExit: a value is bad or a flag unknown (status 2), or help was asked for (status 0).
    """
    try:
        return Settings(_cli_parse_args=arguments if arguments is not None else True)  # type: ignore[call-arg]
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            if problem["type"] == "default_factory_not_called":  # only because of another problem
                continue
            message = problem["msg"].removeprefix("Value error, ")
            if not problem["loc"]:  # of no single setting; the message says which
                lines.append(message)
                continue
            name = str(problem["loc"][0])
            flag = "--" + name.replace("_", "-")
            given = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
            lines.append(f"{flag} (CHARGPT_{name.upper()}): {message}{given}")
        print("python -m service: bad settings", *lines, sep="\n  ", file=sys.stderr)
        raise SystemExit(2) from None
