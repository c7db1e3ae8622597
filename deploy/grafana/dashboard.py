"""The Grafana dashboard: `python deploy/grafana/dashboard.py` writes dashboards/chargpt.json, which is committed.

Generated, not hand-written: every latency needs three quantiles and a heat map, and with grafana-foundation-sdk, which
follows the schema of Grafana 11.6, mypy checks every field. Uses the metrics of service/observe/metrics.py and the
recording rules of deploy/prometheus.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
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
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PATH = Path(__file__).parent / "dashboards" / "chargpt.json"

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = 'model_name=~"$model_name", instance=~"$instance"'
QUANTILES = (0.5, 0.95, 0.99)
SECONDS, PER_SECOND, SHARE, COUNT, BYTES, CORES = "s", "cps", "percentunit", "short", "bytes", "short"
CHARACTERS_PER_SECOND = "suffix: characters/s"

# Stem of the metric, title and description of its panels.
LATENCIES = (
    ("time_to_first_token", "Time to first character", "From request arrival to the first character written"),
    ("request_queue_time", "Queue time", "From request arrival to cache slot assignment"),
    ("request_prefill_time", "Prefill time", "From cache slot assignment to the end of prefill"),
    ("request_first_decode_time", "First decode time", "From the end of prefill to the first character written"),
    ("inter_token_latency", "Inter-character latency", "Time between consecutive characters of a sequence"),
    ("request_time_per_output_token", "Time per character", "Mean of a sequence, first character excluded"),
    ("e2e_request_latency", "End-to-end latency",
     "From request arrival to the last character written; sequences ended by stop or length"),
)  # fmt: skip


def rate(series: str, by: str = "", labels: str = "") -> str:
    """Per-second rate, summed over the selected instances, or grouped `by` labels."""
    selected = f"{series}{{{CHOSEN}{labels and ', ' + labels}}}"
    return f"sum{by and f' by ({by})'} (rate({selected}[$__rate_interval]))"


def gauge(series: str, by: str = "", labels: str = "") -> str:
    return f"sum{by and f' by ({by})'} ({series}{{{CHOSEN}{labels and ', ' + labels}}})"


def quantiles(histogram: str) -> dict[str, str]:
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le')})" for q in QUANTILES}


def mean(histogram: str, by: str = "", labels: str = "") -> str:
    return f"{rate(histogram + '_sum', by, labels)} / {rate(histogram + '_count', by, labels)}"


def query(expression: str, legend: str) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).datasource(DATASOURCE).range()


def latest(expression: str, legend: str) -> Dataquery:
    return Dataquery().expr(expression).legend_format(legend).datasource(DATASOURCE).instant()


def lines(
    title: str, description: str, unit: str, expressions: dict[str, str], *, exemplars: bool = False
) -> timeseries.Panel:
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
        panel.with_target(query(expression, legend).ref_id(name).exemplar(exemplars))
    return panel


def stacked(title: str, description: str, unit: str, expressions: dict[str, str]) -> timeseries.Panel:
    return (
        lines(title, description, unit, expressions)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("all"))
        .fill_opacity(40)
    )


def heat(title: str, description: str, unit: str, histogram: str, *, exemplars: bool = True) -> heatmap.Panel:
    target = query(rate(histogram + "_bucket", "le"), "{{le}}").format(PromQueryFormat.HEATMAP).ref_id("A")
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .calculate(False)
        .rows_frame(heatmap.RowsHeatmapOptions().layout(HeatmapCellLayout.LE))
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Spectral").steps(64).reverse(False))
        .with_target(target.exemplar(exemplars))
    )


def number(title: str, description: str, unit: str, expression: str, legend: str = "") -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .height(4)
        .span(4)
        .with_target(query(expression, legend).ref_id("A"))
    )


def facts(title: str, description: str, series: str, hidden: tuple[str, ...]) -> table.Panel:
    """A table of the labels of an info metric."""
    tidy = {"excludeByName": {name: True for name in ("Time", "Value", "__name__", "job", *hidden)}}
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(5)
        .span(8)
        .with_target(latest(f"{series}{{{CHOSEN}}}", "").format(PromQueryFormat.TABLE).ref_id("A"))
        .with_transformation(DataTransformerConfig(id_val="organize", options=tidy))
    )


def build() -> Dashboard:
    ids = itertools.count(1)
    dashboard = (
        Dashboard("chargpt")
        .uid("chargpt")
        .description("Character-level GPT service: traffic, objectives, latency, engine and resources")
        .tags(["chargpt", "inference"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("15s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, label, labels in (
        ("model_name", "Model", ""),
        ("instance", "Instance", '{model_name=~"$model_name"}'),
    ):
        dashboard.with_variable(
            QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query(f"label_values(chargpt_build_info{labels}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(text="All", value="$__all", selected=True))
        )

    def row(title: str) -> None:
        dashboard.with_row(Row(title).id(next(ids)))

    def show(*panels: timeseries.Panel | heatmap.Panel, height: int = 8) -> None:
        """Add panels side by side."""
        for panel in panels:
            dashboard.with_panel(panel.id(next(ids)).height(height).span(24 // len(panels)))

    first, failed = "chargpt_time_to_first_token_seconds", "model_name:chargpt_failures:ratio_rate"
    for panel in (
        number("Instances up", "Instances that answered the last scrape", COUNT,
               'sum(up{job="chargpt", instance=~"$instance"})'),
        number("Sequences", "Sequences ended per second", PER_SECOND, rate("chargpt_request_success_total")),
        number("Characters", "Characters generated per second", CHARACTERS_PER_SECOND,
               rate("chargpt_generation_tokens_total")),
        number("First character, p95", "95th percentile of the time to first character", SECONDS,
               quantiles(first)["p95"]),
        number("Failures", "Share of sequences that failed in the last hour", SHARE,
               f'max({failed}1h{{model_name=~"$model_name", slo="sequences"}})'),
        number("Waiting", "Sequences waiting for a cache slot; scale on this value", COUNT,
               gauge("chargpt_num_requests_waiting")),
    ):  # fmt: skip
        dashboard.with_panel(panel.id(next(ids)))

    row("Traffic")
    show(
        lines("HTTP requests", "Requests per second, by route", PER_SECOND,
              {"{{handler}}": rate("chargpt_http_requests_total", "handler")}),
        lines("HTTP requests in progress", "Requests in progress, by instance", COUNT,
              {"{{instance}}": gauge("chargpt_http_requests_in_progress", "instance")}),
        lines("Characters", "Prompt characters processed and characters generated", CHARACTERS_PER_SECOND,
              {"generated": rate("chargpt_generation_tokens_total"), "prompts": rate("chargpt_prompt_tokens_total")}),
    )  # fmt: skip
    show(
        lines("Prompt length", "Characters per prompt", COUNT, quantiles("chargpt_request_prompt_tokens")),
        lines("Completion length", "Characters per completion", COUNT, quantiles("chargpt_request_generation_tokens")),
        lines("Unknown characters", "Characters absent from the vocabulary, by policy", CHARACTERS_PER_SECOND,
              {"{{policy}}": rate("chargpt_unknown_characters_total", "policy")}),
    )  # fmt: skip

    row("Objectives")
    show(
        *(
            lines(f"Burn rate: {slo.replace('_', ' ')}", "Failure rate divided by the error budget: 1 spends a"
                  " month's budget in a month; 14.4 over 1 h and 6 over 6 h page", COUNT,
                  {window: f'{failed}{window}{{model_name=~"$model_name", slo="{slo}"}}'
                           " / on (slo) group_left () chargpt:error_budget:ratio"
                   for window in ("1h", "6h", "1d", "3d")})
            for slo in ("sequences", "answers", "first_characters")
        )
    )  # fmt: skip
    show(
        stacked("Finish reasons", "Accepted sequences, by finish reason", PER_SECOND,
                {"{{finished_reason}}": rate("chargpt_request_success_total", "finished_reason")}),
        stacked("Rejections", "Sequences rejected at admission, by reason", PER_SECOND,
                {"{{reason}}": rate("chargpt_admission_rejections_total", "reason")}),
        stacked("HTTP status", "Responses by status; 499: client disconnected", PER_SECOND,
                {"{{status}}": rate("chargpt_http_requests_total", "status")}),
        lines("Failure ratio", "Failures over the last 5 minutes, by objective", SHARE,
              {"{{model_name}} {{slo}}": f'{failed}5m{{model_name=~"$model_name"}}'}),
    )  # fmt: skip

    row("Latency")
    show(
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
    for stem, title, description in LATENCIES:
        name = f"chargpt_{stem}_seconds"
        show(
            lines(title, description, SECONDS, quantiles(name), exemplars=True),
            heat(title, description, SECONDS, name),
        )

    row("Engine")
    workers = f'count(chargpt_process_start_time_seconds{{{CHOSEN}, process=~"worker-.*"}})'
    dropped = rate("chargpt_dropped_tokens_total")
    phases = rate("chargpt_iteration_phase_seconds_sum", "phase")
    step, between = rate("chargpt_iteration_seconds_sum"), 'phase="transport"'
    busy = f"({step} + {rate('chargpt_iteration_phase_seconds_sum', labels=between)})"
    show(
        lines("Waiting", "Sequences waiting for a cache slot", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_waiting", "instance")}),
        lines("Running", "Sequences running, cache slots in use and cache slots available", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_running", "instance"),
               "{{instance}} slots in use": gauge("chargpt_cache_slots_in_use", "instance"),
               "{{instance}} slots": gauge("chargpt_cache_slots", "instance")}),
        lines("Cache slots in use", "Share of all cache slots", SHARE,
              {"{{instance}}": f"max by (instance) (chargpt_kv_cache_usage_perc{{{CHOSEN}}})"}),
    )  # fmt: skip
    utilization = "chargpt_iteration_batch_utilization_ratio"
    show(
        lines("Batch size", "Mean sequences decoded per engine step", COUNT,
              {"sequences": mean("chargpt_iteration_batch_size")}),
        lines("Batch utilization", "Sequences decoded per engine step divided by cache slots", SHARE,
              {"mean": mean(utilization)} | quantiles(utilization)),
        heat("Batch utilization", "Sequences decoded per engine step divided by cache slots", SHARE, utilization,
             exemplars=False),
        lines("Characters per step", "Characters processed per engine step, prompts included", COUNT,
              quantiles("chargpt_iteration_tokens_total")),
    )  # fmt: skip
    show(
        lines("Step duration", "Duration of an engine step", SECONDS, quantiles("chargpt_iteration_seconds")),
        heat("Step duration", "Duration of an engine step", SECONDS, "chargpt_iteration_seconds", exemplars=False),
        lines("Step phases", "Mean duration of each phase, over the steps that have it", SECONDS,
              {"{{phase}}": mean("chargpt_iteration_phase_seconds", "phase")}),
    )  # fmt: skip
    show(
        stacked("Worker time", "Share by phase; prefill and decode run the model, schedule and transport are"
                " overhead", SHARE,
                {"{{phase}}": f"{phases} / scalar({workers})",
                 "idle": f"clamp_min(1 - {busy} / {workers}, 0)"}),
        lines("Device and scheduler", "Share of step time: the runner, and the scheduler", SHARE,
              {"device": rate("chargpt_iteration_phase_seconds_sum", labels='phase=~"decode|prefill"')
               + f" / {step}",
               "scheduler": rate("chargpt_iteration_phase_seconds_sum", labels='phase="schedule"') + f" / {step}"}),
        lines("Copied and dropped characters", "Share of prompt characters copied from another sequence's cache, and of"
              " generated characters beyond a stop", SHARE,
              {"copied": f"{rate('chargpt_prefix_cache_hit_tokens_total')} / {rate('chargpt_prompt_tokens_total')}",
               "dropped": f"{dropped} / ({dropped} + {rate('chargpt_generation_tokens_total')})"}),
    )  # fmt: skip

    row("Resources")
    by_process = "instance, process"
    show(
        lines("Memory", "Resident memory, by process", BYTES,
              {"{{instance}} {{process}}": gauge("chargpt_process_resident_memory_bytes", by_process)}),
        lines("CPU", "Cores in use, by process", CORES,
              {"{{instance}} {{process}}": rate("chargpt_process_cpu_seconds_total", by_process)}),
        lines("Files and threads", "Open file descriptors and threads, by process", COUNT,
              {"{{instance}} {{process}} files": gauge("chargpt_process_open_fds", by_process),
               "{{instance}} {{process}} threads": gauge("chargpt_process_threads", by_process)}),
        lines("Worker restarts", "Restarts in the last 15 minutes", COUNT,
              {"{{instance}}":
               f"sum by (instance) (increase(chargpt_worker_restarts_total{{{CHOSEN}}}[15m]))"}),
    )  # fmt: skip

    row("Model and build")
    for part in (
        facts("Build", "Software versions", "chargpt_build_info", ()),
        facts("Engine", "Backend and dtype", "chargpt_engine_info", ()),
        facts("Checkpoint", "Hash and sizes of the served checkpoint", "chargpt_checkpoint_info", ()),
    ):
        dashboard.with_panel(part.id(next(ids)))
    for panel in (
        number("Validation loss", "Recorded in training, in nats per character", "none",
               f"chargpt_checkpoint_validation_loss{{{CHOSEN}}}", "{{instance}}").decimals(4).span(8),
        number("Uptime", "Age of the oldest process of each instance", SECONDS,
               f"time() - min by (instance) (chargpt_process_start_time_seconds{{{CHOSEN}}})", "{{instance}}").span(16),
    ):  # fmt: skip
        dashboard.with_panel(panel.id(next(ids)))
    return dashboard


def text() -> str:
    return json.dumps(build().build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
