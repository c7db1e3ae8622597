"""The Grafana dashboard: `python deploy/grafana/dashboard.py` writes dashboards/chargpt.json, which is committed.

Generated, not hand-written: with grafana-foundation-sdk, which follows the schema of Grafana 11.6, mypy checks every
field. Uses the metrics of service/observe and the recording rules of deploy/prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableOption, VariableRefresh

FILE = Path(__file__).parent / "dashboards" / "chargpt.json"

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = 'environment=~"$environment", model_name=~"$model_name", instance=~"$instance"'
CHOSEN_MODELS = 'environment=~"$environment", model_name=~"$model_name"'  # where instances are summed over
CHOSEN_SERVICES = 'environment=~"$environment", instance=~"$instance"'
# Series of the service as a whole, whose model_name is that of the service; checkpoints share its slots.
OF_SERVICE = (
    "chargpt_http_", "chargpt_process_", "chargpt_worker", "chargpt_cache_slots", "chargpt_held_", "chargpt_max_held_",
    "chargpt_last_reload_",
)  # fmt: skip
QUANTILES = (0.5, 0.95, 0.99)
SECONDS, PER_SECOND, SHARE, COUNT, BYTES = "s", "cps", "percentunit", "short", "bytes"
CHARACTERS_PER_SECOND = "suffix: characters/s"
FAILED = "environment_model_name:chargpt_failures:ratio_rate"


def select(series: str, labels: str = "") -> str:
    """The chosen series of this name."""
    chosen = CHOSEN_SERVICES if series.startswith(OF_SERVICE) else CHOSEN
    return f"{series}{{{chosen}{labels and ', ' + labels}}}"


def rate(series: str, by: str = "", labels: str = "") -> str:
    """Per-second rate, summed over the chosen instances, or grouped `by` labels."""
    return f"sum{by and f' by ({by})'} (rate({select(series, labels)}[$__rate_interval]))"


def gauge(series: str, by: str = "") -> str:
    return f"sum{by and f' by ({by})'} ({select(series)})"


def quantiles(histogram: str) -> dict[str, str]:
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le')})" for q in QUANTILES}


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def query(expression: str, legend: str) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).datasource(DATASOURCE).range()


def lines(title: str, description: str, unit: str, expressions: dict[str, str]) -> timeseries.Panel:
    """A time series panel; `expressions` maps legends to queries."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .fill_opacity(8)
        .gradient_mode(GraphGradientMode.OPACITY)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    for name, (legend, expression) in zip("ABCDEFGH", expressions.items(), strict=False):
        panel.with_target(query(expression, legend).ref_id(name))
    return panel


def stacked(title: str, description: str, unit: str, expressions: dict[str, str]) -> timeseries.Panel:
    return (
        lines(title, description, unit, expressions)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("all"))
        .fill_opacity(40)
    )


def failures(window: str) -> str:
    """The recorded ratios of all objectives; that of HTTP answers is of the service, not of a model."""
    of_service = f'{FAILED}{window}{{environment=~"$environment", slo="answers"}}'
    return f"({FAILED}{window}{{{CHOSEN_MODELS}}} or {of_service})"


def empty() -> Dashboard:
    """The dashboard without panels, with its variables."""
    dashboard = (
        Dashboard("chargpt")
        .uid("chargpt")
        .description("Character-level GPT service: whether it serves, how fast, and how full it is")
        .tags(["chargpt", "inference"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("15s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, label, series in (
        ("environment", "Environment", "chargpt_build_info"),
        ("model_name", "Model", 'chargpt_checkpoint_info{environment=~"$environment"}'),
        ("instance", "Instance", 'chargpt_build_info{environment=~"$environment"}'),
    ):
        dashboard.with_variable(
            QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query(f"label_values({series}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")  # matches targets without the label, too
            .current(VariableOption(text="All", value="$__all", selected=True))
        )
    return dashboard


def build() -> Dashboard:
    dashboard, budget = empty(), " / on (slo) group_left () chargpt:error_budget:ratio"
    id = 0

    def show(*panels: timeseries.Panel) -> None:
        """Add panels side by side."""
        nonlocal id
        for panel in panels:
            id += 1
            dashboard.with_panel(panel.id(id).height(8).span(24 // len(panels)))

    show(
        lines("Requests", "HTTP requests without probes and scrapes, and sequences; a request may have several",
              PER_SECOND,
              {"requests": rate("chargpt_http_requests_total", labels='handler!~"/metrics|/livez|/readyz|/health"'),
               "sequences": rate("chargpt_request_success_total")}),
        lines("Failures", "Share of failures over the last hour, and the share that the objective allows", SHARE,
              {"{{environment}} {{model_name}} {{slo}}": failures("1h"),
               "{{slo}}, allowed": "chargpt:error_budget:ratio"}),
        lines("Error budget burn", "Failure rate divided by the error budget: 1 spends a month's budget in a month;"
              " 14.4 over 1 h and 6 over 6 h page", COUNT,
              {f"{{{{environment}}}} {{{{model_name}}}} {{{{slo}}}} {window}": failures(window) + budget
               for window in ("1h", "6h")}),
    )  # fmt: skip
    show(
        lines("Time to first character", "From request arrival to the first character written", SECONDS,
              quantiles("chargpt_time_to_first_token_seconds")),
        lines("Characters", "Characters generated, and prompt characters processed", CHARACTERS_PER_SECOND,
              {"generated": rate("chargpt_generation_tokens_total"), "prompts": rate("chargpt_prompt_tokens_total")}),
        lines("Running", "Sequences running, by instance", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_running", "instance")}),
    )  # fmt: skip
    show(
        lines("Waiting", "Sequences waiting for a cache slot, by instance; scale on their sum", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_waiting", "instance")}),
        lines("Cache slots in use", "Share of all cache slots, by instance", SHARE,
              {"{{instance}}": f"clamp_max({gauge('chargpt_cache_slots_in_use', 'instance')}"
               f" / {gauge('chargpt_cache_slots', 'instance')}, 1)"}),
        lines("Replicas and workers", "Replicas that answered the last scrape; inference workers that are ready and"
              " that should be", COUNT,
              {"replicas": 'sum(up{job="chargpt", environment=~"$environment", instance=~"$instance"})',
               "workers ready": gauge("chargpt_workers_ready"), "workers configured": gauge("chargpt_workers")}),
        lines("Memory", "Resident memory of all processes, by instance", BYTES,
              {"{{instance}}": gauge("chargpt_process_resident_memory_bytes", "instance")}),
    )  # fmt: skip
    show(
        stacked("Finish reasons", "Accepted sequences, by finish reason", PER_SECOND,
                {"{{finished_reason}}": rate("chargpt_request_success_total", "finished_reason")}),
        stacked("Rejections", "Sequences rejected at admission, by reason", PER_SECOND,
                {"{{reason}}": rate("chargpt_admission_rejections_total", "reason")}),
        stacked("Time to first character, breakdown", "Means of its three parts", SECONDS,
                {part: mean(f"chargpt_{stem}_seconds")
                 for stem, part in (("request_queue_time", "queue"), ("request_prefill_time", "prefill"),
                                    ("request_first_decode_time", "first decode"))}),
        lines("CPU", "Cores in use, by process", COUNT,
              {"{{instance}} {{process}}": rate("chargpt_process_cpu_seconds_total", "instance, process")}),
    )  # fmt: skip
    files = f"{select('chargpt_process_open_fds')} / {select('chargpt_process_max_fds')}"
    show(
        stacked("Refused connections", "Requests refused before they reach a route, by reason", PER_SECOND,
                {"{{reason}}": rate("chargpt_http_connections_rejected_total", "reason")}),
        lines("Use of limits", "Memory of requests, connections, and open files of the process with the most, as a"
              " share of their limits", SHARE,
              {"{{instance}} memory": f"{gauge('chargpt_held_bytes', 'instance')}"
               f" / {gauge('chargpt_max_held_bytes', 'instance')}",
               "{{instance}} connections": f"{gauge('chargpt_http_connections', 'instance')}"
               f" / {gauge('chargpt_http_max_connections', 'instance')}",
               "{{instance}} files": f"max by (instance) ({files})"}),
        lines("Last reload", "1 if all processes took what they read last, 0 if one refused it", COUNT,
              {"{{instance}} {{what}}": select("chargpt_last_reload_successful")}),
    )  # fmt: skip
    return dashboard


def text() -> str:
    return json.dumps(build().build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
