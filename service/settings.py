"""Every setting of the service: a flag (`--max-queued-requests`) and a variable (`CHARGPT_MAX_QUEUED_REQUESTS`).

Read once, by `python -m service`. A bad value ends the program with its name, its value and what is allowed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

# Trained on tiny Shakespeare; `make bundled` trains it anew.
BUNDLED = Path(__file__).parent / "checkpoints" / "tinyshakespeare"


class Settings(BaseSettings):
    """Serve a character-level GPT checkpoint over HTTP."""

    model_config = SettingsConfigDict(
        env_prefix="CHARGPT_", cli_prog_name="python -m service", cli_kebab_case=True, cli_avoid_json=True
    )

    checkpoint: Path = Field(BUNDLED, description="folder of the checkpoint to serve; the bundled one by default")
    model_name: str = Field("chargpt", min_length=1, description="name of the model in requests, answers and metrics")
    host: Literal["127.0.0.1", "0.0.0.0", "::"] = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1024, le=65535, description="TCP port to listen on")

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="kind of device to run the model on")
    devices: int = Field(1, ge=1, le=64, description="how many devices of that kind; each gets its own process")
    workers_per_device: int = Field(1, ge=1, le=64, description="inference processes per device")
    threads: int = Field(
        default_factory=lambda: available_cpus(), ge=1, le=1024, description="CPU threads of each inference process"
    )
    http_processes: int = Field(1, ge=1, le=64, description="processes that speak HTTP")

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

    keep_alive_seconds: float = Field(
        15, gt=0, le=3600, allow_inf_nan=False, description="after so long without an event a stream gets a comment"
    )
    request_timeout_seconds: float = Field(
        300, gt=0, le=86_400, allow_inf_nan=False, description="time a request may take, in the queue and running"
    )
    drain_seconds: float = Field(
        30, ge=0, le=3600, allow_inf_nan=False, description="time running requests have to finish after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")


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
            name = str(problem["loc"][0])
            flag = "--" + name.replace("_", "-")
            given = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
            lines.append(f"{flag} (CHARGPT_{name.upper()}): {problem['msg']}{given}")
        print("python -m service: bad settings", *lines, sep="\n  ", file=sys.stderr)
        raise SystemExit(2) from None
