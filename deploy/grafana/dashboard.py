"""The Grafana dashboards: `python deploy/grafana/dashboard.py` writes dashboards/*.json, which are committed.

chargpt.json shows in ten panels whether the service is well, chargpt-internals.json why it is not. Generated, not
hand-written: with grafana-foundation-sdk, which follows the schema of Grafana 11.6, mypy checks every field. Uses the
metrics of service/observe and the recording rules of deploy/prometheus.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TypeVar

from grafana_foundation_sdk.builders import common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphGradientMode,
    HeatmapCellLayout,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = TypeVar("Panel", timeseries.Panel, heatmap.Panel, stat.Panel, table.Panel)

FOLDER = Path(__file__).parent / "dashboards"
TITLES = {"chargpt": "chargpt", "chargpt-internals": "chargpt internals"}  # by uid, which is the name of the file

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = 'environment=~"$environment", model_name=~"$model_name", instance=~"$instance"'
CHOSEN_MODELS = 'environment=~"$environment", model_name=~"$model_name"'  # where instances are summed over
CHOSEN_SERVICES = 'environment=~"$environment", instance=~"$instance"'
# Series of the service as a whole, whose model_name is that of the service; checkpoints share its slots.
OF_SERVICE = (
    "chargpt_http_", "chargpt_process_", "chargpt_worker", "chargpt_cache_slots", "chargpt_build_info",
    "chargpt_engine_info",
)  # fmt: skip
QUANTILES = (0.5, 0.95, 0.99)
SECONDS, PER_SECOND, SHARE, COUNT, BYTES, CORES = "s", "cps", "percentunit", "short", "bytes", "short"
CHARACTERS_PER_SECOND = "suffix: characters/s"
FIRST = "chargpt_time_to_first_token_seconds"
BETWEEN = "chargpt_inter_token_latency_seconds"
FAILED = "environment_model_name:chargpt_failures:ratio_rate"


def select(series: str, labels: str = "") -> str:
    """The chosen series of this name."""
    chosen = CHOSEN_SERVICES if series.startswith(OF_SERVICE) else CHOSEN
    return f"{series}{{{chosen}{labels and ', ' + labels}}}"


def rate(series: str, by: str = "", labels: str = "") -> str:
    """Per-second rate, summed over the chosen instances, or grouped `by` labels."""
    return f"sum{by and f' by ({by})'} (rate({select(series, labels)}[$__rate_interval]))"


def gauge(series: str, by: str = "", labels: str = "") -> str:
    return f"sum{by and f' by ({by})'} ({select(series, labels)})"


def quantiles(histogram: str) -> dict[str, str]:
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le')})" for q in QUANTILES}


def mean(histogram: str, by: str = "", labels: str = "") -> str:
    return f"{rate(histogram + '_sum', by, labels)} / {rate(histogram + '_count', by, labels)}"


def query(expression: str, legend: str) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).datasource(DATASOURCE).range()


def described(panel: Panel, title: str, description: str) -> Panel:
    return panel.title(title).description(description).datasource(DATASOURCE)


def lines(title: str, description: str, unit: str, expressions: dict[str, str]) -> timeseries.Panel:
    """A time series panel; `expressions` maps legends to queries."""
    panel = (
        described(timeseries.Panel(), title, description)
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


def heat(title: str, description: str, unit: str, histogram: str) -> heatmap.Panel:
    target = query(rate(histogram + "_bucket", "le"), "{{le}}").format(PromQueryFormat.HEATMAP).ref_id("A")
    return (
        described(heatmap.Panel(), title, description)
        .calculate(False)
        .rows_frame(heatmap.RowsHeatmapOptions().layout(HeatmapCellLayout.LE))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Spectral").steps(64).reverse(False))
        .with_target(target)
    )


def number(title: str, description: str, unit: str, expression: str, legend: str) -> stat.Panel:
    return described(stat.Panel(), title, description).unit(unit).with_target(query(expression, legend).ref_id("A"))


def facts(title: str, description: str, series: str) -> table.Panel:
    """A table of the labels of an info metric."""
    tidy = {"excludeByName": {name: True for name in ("Time", "Value", "__name__", "job")}}
    target = Dataquery().expr(select(series)).datasource(DATASOURCE).instant().format(PromQueryFormat.TABLE).ref_id("A")
    panel = described(table.Panel(), title, description).with_target(target.legend_format(""))
    return panel.with_transformation(DataTransformerConfig(id_val="organize", options=tidy))


def empty(uid: str, description: str) -> Dashboard:
    """A dashboard without panels, with its variables and a link to the other one."""
    [other] = TITLES.keys() - {uid}
    dashboard = (
        Dashboard(TITLES[uid])
        .uid(uid)
        .description(description)
        .tags(["chargpt", "inference"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("15s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            DashboardLink(TITLES[other])
            .type(DashboardLinkType.LINK)
            .url(f"/d/{other}")
            .keep_time(True)
            .include_vars(True)
        )
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


class Page:
    """Adds panels to a dashboard, side by side."""

    def __init__(self, dashboard: Dashboard):
        self.dashboard = dashboard
        self._ids = itertools.count(1)

    def row(self, title: str) -> None:
        self.dashboard.with_row(Row(title).id(next(self._ids)))

    def show(self, *panels: timeseries.Panel | heatmap.Panel | stat.Panel | table.Panel, height: int = 8) -> None:
        for panel in panels:
            self.dashboard.with_panel(panel.id(next(self._ids)).height(height).span(24 // len(panels)))


def failures(window: str, slo: str = "") -> str:
    """The recorded ratio of an objective, or of all; that of HTTP answers is of the service, not of a model."""
    of_models = f"{FAILED}{window}{{{CHOSEN_MODELS}" + (f', slo="{slo}"}}' if slo else "}")
    of_service = f'{FAILED}{window}{{environment=~"$environment", slo="answers"}}'
    return {"": f"({of_models} or {of_service})", "answers": of_service}.get(slo, of_models)


def burn(windows: tuple[str, ...], slo: str, legend: str) -> dict[str, str]:
    budget = " / on (slo) group_left () chargpt:error_budget:ratio"
    return {legend.format(window): failures(window, slo) + budget for window in windows}


def overview() -> Dashboard:
    dashboard = empty("chargpt", "Character-level GPT service: whether it serves, how fast, and how full it is")
    page = Page(dashboard)
    page.show(
        lines("Requests", "HTTP requests without probes and scrapes, and sequences; a request may have several",
              PER_SECOND,
              {"requests": rate("chargpt_http_requests_total", labels='handler!~"/metrics|/livez|/readyz|/health"'),
               "sequences": rate("chargpt_request_success_total")}),
        lines("Failures", "Share of failures over the last hour, and the share that the objective allows", SHARE,
              {"{{environment}} {{model_name}} {{slo}}": failures("1h"),
               "{{slo}}, allowed": "chargpt:error_budget:ratio"}),
        lines("Error budget burn", "Failure rate divided by the error budget: 1 spends a month's budget in a month;"
              " 14.4 over 1 h and 6 over 6 h page", COUNT,
              burn(("1h", "6h"), "", "{{{{environment}}}} {{{{model_name}}}} {{{{slo}}}} {}")),
    )  # fmt: skip
    page.show(
        lines("Time to first character", "From request arrival to the first character written", SECONDS,
              quantiles(FIRST)),
        lines("Characters", "Characters generated, and prompt characters processed", CHARACTERS_PER_SECOND,
              {"generated": rate("chargpt_generation_tokens_total"), "prompts": rate("chargpt_prompt_tokens_total")}),
        lines("Running", "Sequences running, by instance", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_running", "instance")}),
    )  # fmt: skip
    page.show(
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
    return dashboard


def internals() -> Dashboard:
    dashboard = empty(
        "chargpt-internals", "Character-level GPT service: traffic, latency, engine and processes in detail"
    )
    page = Page(dashboard)

    page.row("Traffic")
    page.show(
        lines("HTTP requests", "Requests per second, by route", PER_SECOND,
              {"{{handler}}": rate("chargpt_http_requests_total", "handler")}),
        stacked("HTTP status", "Responses by status; 499: client disconnected", PER_SECOND,
                {"{{status}}": rate("chargpt_http_requests_total", "status")}),
        lines("Prompt length", "Characters per prompt", COUNT, quantiles("chargpt_request_prompt_tokens")),
        lines("Completion length", "Characters per completion", COUNT, quantiles("chargpt_request_generation_tokens")),
    )  # fmt: skip

    page.row("Objectives")
    page.show(
        *(
            lines(f"Burn rate: {slo.replace('_', ' ')}", "Failure rate divided by the error budget, by window", COUNT,
                  burn(("1h", "6h", "1d", "3d"), slo, "{{{{environment}}}} {{{{model_name}}}} {}"))
            for slo in ("sequences", "answers", "first_characters")
        )
    )  # fmt: skip
    page.show(
        stacked("Finish reasons", "Accepted sequences, by finish reason", PER_SECOND,
                {"{{finished_reason}}": rate("chargpt_request_success_total", "finished_reason")}),
        stacked("Rejections", "Sequences rejected at admission, by reason", PER_SECOND,
                {"{{reason}}": rate("chargpt_admission_rejections_total", "reason")}),
        lines("Unknown characters", "Characters absent from the vocabulary, by policy", CHARACTERS_PER_SECOND,
              {"{{policy}}": rate("chargpt_unknown_characters_total", "policy")}),
    )  # fmt: skip

    page.row("Latency")
    page.show(
        stacked("Time to first character, breakdown", "Means of its three parts", SECONDS,
                {part: mean(f"chargpt_{stem}_seconds")
                 for stem, part in (("request_queue_time", "queue"), ("request_prefill_time", "prefill"),
                                    ("request_first_decode_time", "first decode"))}),
        lines("HTTP request duration, p95", "From request headers to the end of the response, by route", SECONDS,
              {"{{handler}}": "histogram_quantile(0.95, "
               + rate("chargpt_http_request_duration_seconds_bucket", "le, handler") + ")"}),
        lines("Time in the engine, p95",
              "Inference: from cache slot assignment; decode: from the end of prefill; to the last character", SECONDS,
              {name: quantiles(f"chargpt_request_{name}_time_seconds")["p95"] for name in ("inference", "decode")}),
    )  # fmt: skip
    page.show(
        heat("Time to first character", "From request arrival to the first character written", SECONDS, FIRST),
        heat("Inter-character latency", "Time between consecutive characters of a sequence", SECONDS, BETWEEN),
        lines("Inter-character latency, quantiles", "Time between consecutive characters of a sequence", SECONDS,
              quantiles(BETWEEN)),
    )  # fmt: skip
    page.show(
        *(
            lines(title, description, SECONDS, quantiles(f"chargpt_{stem}_seconds"))
            for stem, title, description in (
                ("request_queue_time", "Queue time", "From request arrival to cache slot assignment"),
                ("request_prefill_time", "Prefill time", "From cache slot assignment to the end of prefill"),
                ("request_first_decode_time", "First decode time",
                 "From the end of prefill to the first character written"),
                ("e2e_request_latency", "End-to-end latency",
                 "From request arrival to the last character written; sequences ended by stop or length"),
            )
        )
    )  # fmt: skip

    page.row("Engine")
    of_workers = 'process=~"worker-.*"'
    workers = f"count({select('chargpt_process_start_time_seconds', of_workers)})"
    dropped = rate("chargpt_dropped_tokens_total")
    phases = rate("chargpt_iteration_phase_seconds_sum", "phase")
    step, between = rate("chargpt_iteration_seconds_sum"), 'phase="transport"'
    busy = f"({step} + {rate('chargpt_iteration_phase_seconds_sum', labels=between)})"
    utilization = "chargpt_iteration_batch_utilization_ratio"
    page.show(
        lines("Batch size", "Mean sequences decoded per engine step", COUNT,
              {"sequences": mean("chargpt_iteration_batch_size")}),
        lines("Batch utilization", "Sequences decoded per engine step divided by cache slots", SHARE,
              {"mean": mean(utilization)} | quantiles(utilization)),
        lines("Copied and dropped characters", "Share of prompt characters copied from another sequence's cache, and of"
              " generated characters beyond a stop", SHARE,
              {"copied": f"{rate('chargpt_prefix_cache_hit_tokens_total')} / {rate('chargpt_prompt_tokens_total')}",
               "dropped": f"{dropped} / ({dropped} + {rate('chargpt_generation_tokens_total')})"}),
        lines("Exact answers", "Share of candidates that match; low shares cost many candidates for each answer", SHARE,
              {"accepted": f"{rate('chargpt_exact_matches_total')} / {rate('chargpt_exact_candidates_total')}"}),
    )  # fmt: skip
    page.show(
        lines("Step duration", "Duration of an engine step", SECONDS, quantiles("chargpt_iteration_seconds")),
        lines("Step phases", "Mean duration of each phase, over the steps that have it", SECONDS,
              {"{{phase}}": mean("chargpt_iteration_phase_seconds", "phase")}),
        stacked("Worker time", "Share by phase; prefill and decode run the model, schedule and transport are"
                " overhead", SHARE,
                {"{{phase}}": f"{phases} / scalar({workers})",
                 "idle": f"clamp_min(1 - {busy} / {workers}, 0)"}),
    )  # fmt: skip

    page.row("Processes")
    by_process = "instance, process"
    page.show(
        lines("CPU", "Cores in use, by process", CORES,
              {"{{instance}} {{process}}": rate("chargpt_process_cpu_seconds_total", by_process)}),
        lines("Memory by process", "Resident memory, by process", BYTES,
              {"{{instance}} {{process}}": gauge("chargpt_process_resident_memory_bytes", by_process)}),
        lines("Files and threads", "Open file descriptors and threads, by process", COUNT,
              {"{{instance}} {{process}} files": gauge("chargpt_process_open_fds", by_process),
               "{{instance}} {{process}} threads": gauge("chargpt_process_threads", by_process)}),
        lines("Restarts", "Restarts of workers and of HTTP processes in the last 15 minutes", COUNT,
              {f"{{{{instance}}}} {kind}":
               f"sum by (instance) (increase({select(f'chargpt_{kind}_restarts_total')}[15m]))"
               for kind in ("worker", "http_process")}),
    )  # fmt: skip

    page.row("What runs")
    page.show(
        facts("Build", "Software versions", "chargpt_build_info"),
        facts("Engine", "Backend and dtype", "chargpt_engine_info"),
        facts("Checkpoint", "Hash and sizes of the served checkpoint", "chargpt_checkpoint_info"),
        number("Uptime", "Age of the oldest process of each instance", SECONDS,
               f"time() - min by (instance) ({select('chargpt_process_start_time_seconds')})", "{{instance}}"),
        height=5,
    )  # fmt: skip
    return dashboard


def texts() -> dict[str, str]:
    """The dashboards as JSON, by the names of their files."""
    return {
        f"{dashboard.uid}.json": json.dumps(dashboard, cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False)
        + "\n"
        for dashboard in (overview().build(), internals().build())
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
