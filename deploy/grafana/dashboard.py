"""The Grafana dashboard: `python deploy/grafana/dashboard.py` writes dashboards/chargpt.json, which is committed.

Made here and not by hand because a latency is three quantiles and a heat-map each time, and because the names and
values of Grafana's JSON are then those of its own schema: grafana-foundation-sdk is made from that of Grafana 11.6,
and mypy holds this file against it. Knows the series of service/observe/metrics.py and the rules of deploy/prometheus.
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

# What is measured of a sequence: the metric's stem, the panel's title, what it means.
LATENCIES = (
    ("time_to_first_token", "Time to first character", "From a request's arrival until its first character is written"),
    ("request_queue_time", "… in the queue", "From the arrival until the sequence got a cache slot"),
    ("request_prefill_time", "… in prefill", "From the cache slot until the prompt had run"),
    ("request_first_decode_time", "… to the first write", "From the end of the prompt until the first write"),
    ("inter_token_latency", "Between characters", "One value per character, also where several come in one event"),
    ("request_time_per_output_token", "Seconds per character", "A sequence's mean over the characters after the first"),
    ("e2e_request_latency", "End to end", "From the arrival to the last character; of what ended by stop or length"),
)


def rate(series: str, by: str = "", labels: str = "") -> str:
    """Of all chosen instances together, or apart by some labels."""
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
    """A graph with a line for each expression, by its legend, and each series that it has."""
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
    """The labels of a series that is always 1."""
    tidy = {"excludeByName": {name: True for name in ("Time", "Value", "__name__", "job", *hidden)}}
    return (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .height(5)
        .span(12)
        .with_target(latest(f"{series}{{{CHOSEN}}}", "").format(PromQueryFormat.TABLE).ref_id("A"))
        .with_transformation(DataTransformerConfig(id_val="organize", options=tidy))
    )


def build() -> Dashboard:
    ids = itertools.count(1)
    dashboard = (
        Dashboard("chargpt")
        .uid("chargpt")
        .description("A character-level GPT service: what clients see, what is promised, what the engine does")
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
        """Side by side."""
        for panel in panels:
            dashboard.with_panel(panel.id(next(ids)).height(height).span(24 // len(panels)))

    first, failed = "chargpt_time_to_first_token_seconds", "model_name:chargpt_failures:ratio_rate"
    for panel in (
        number("Instances up", "That answered the last scrape", COUNT, 'sum(up{job="chargpt", instance=~"$instance"})'),
        number("Sequences", "That ended, a second", PER_SECOND, rate("chargpt_request_success_total")),
        number("Characters", "Generated, a second", CHARACTERS_PER_SECOND, rate("chargpt_generation_tokens_total")),
        number("First character", "95 of 100 come sooner", SECONDS, quantiles(first)["p95"]),
        number("Failed", "Of sequences, in the last hour", SHARE,
               f'max({failed}1h{{model_name=~"$model_name", slo="sequences"}})'),
        number("Waiting", "Sequences without a cache slot: what to scale by", COUNT,
               gauge("chargpt_num_requests_waiting")),
    ):  # fmt: skip
        dashboard.with_panel(panel.id(next(ids)))

    row("Traffic")
    show(
        lines("HTTP requests", "By route", PER_SECOND,
              {"{{handler}}": rate("chargpt_http_requests_total", "handler")}),
        lines("HTTP requests in progress", "By instance", COUNT,
              {"{{instance}}": gauge("chargpt_http_requests_in_progress", "instance")}),
        lines("Characters", "Read in prompts and given away", CHARACTERS_PER_SECOND,
              {"generated": rate("chargpt_generation_tokens_total"), "prompts": rate("chargpt_prompt_tokens_total")}),
    )  # fmt: skip
    show(
        lines("Prompts", "Characters of a prompt", COUNT, quantiles("chargpt_request_prompt_tokens")),
        lines("Completions", "Characters of a completion", COUNT, quantiles("chargpt_request_generation_tokens")),
        lines("Unknown characters", "Replaced or dropped as the model does not know them", CHARACTERS_PER_SECOND,
              {"{{policy}}": rate("chargpt_unknown_characters_total", "policy")}),
    )  # fmt: skip

    row("Promises")
    show(
        *(
            lines(f"Burn rate: {slo.replace('_', ' ')}", "Failures over what the objective allows: 1 uses a month's"
                  " budget in a month; 14.4 in an hour and 6 in six hours page", COUNT,
                  {window: f'{failed}{window}{{model_name=~"$model_name", slo="{slo}"}}'
                           " / on (slo) group_left () chargpt:error_budget:ratio"
                   for window in ("1h", "6h", "1d", "3d")})
            for slo in ("sequences", "answers", "first_characters")
        )
    )  # fmt: skip
    show(
        stacked("Endings", "Of accepted sequences, by reason", PER_SECOND,
                {"{{finished_reason}}": rate("chargpt_request_success_total", "finished_reason")}),
        stacked("Refused", "Sequences that were not accepted, by reason", PER_SECOND,
                {"{{reason}}": rate("chargpt_admission_rejections_total", "reason")}),
        stacked("HTTP by status", "499: the client left", PER_SECOND,
                {"{{status}}": rate("chargpt_http_requests_total", "status")}),
        lines("Failures", "Share of the last 5 minutes", SHARE,
              {"{{model_name}} {{slo}}": f'{failed}5m{{model_name=~"$model_name"}}'}),
    )  # fmt: skip

    row("Latency")
    show(
        stacked("Parts of the time to first character", "Means, which add up", SECONDS,
                {part: mean(f"chargpt_{stem}_seconds")
                 for stem, part in (("request_queue_time", "queue"), ("request_prefill_time", "prefill"),
                                    ("request_first_decode_time", "first write"))}),
        lines("HTTP requests, p95", "From the headers to the end of the answer, by route", SECONDS,
              {"{{handler}}": "histogram_quantile(0.95, "
               + rate("chargpt_http_request_duration_seconds_bucket", "le, handler") + ")"}),
        lines("In the engine, p95",
              "From a sequence's cache slot, and from its prompt's end, to its last character", SECONDS,
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
    phases = rate("chargpt_iteration_phase_seconds_sum", "phase")
    step, between = rate("chargpt_iteration_seconds_sum"), 'phase="transport"'
    busy = f"({step} + {rate('chargpt_iteration_phase_seconds_sum', labels=between)})"
    show(
        lines("Queue", "Sequences that wait for a cache slot", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_waiting", "instance")}),
        lines("Running", "Sequences that hold a cache slot, and the slots there are", COUNT,
              {"{{instance}}": gauge("chargpt_num_requests_running", "instance"),
               "{{instance}} in use": gauge("chargpt_cache_slots_in_use", "instance"),
               "{{instance}} slots": gauge("chargpt_cache_slots", "instance")}),
        lines("Cache slots in use", "Share", SHARE,
              {"{{instance}}": f"max by (instance) (chargpt_kv_cache_usage_perc{{{CHOSEN}}})"}),
    )  # fmt: skip
    utilization = "chargpt_iteration_batch_utilization_ratio"
    show(
        lines("Rows of a decode step", "Mean", COUNT, {"rows": mean("chargpt_iteration_batch_size")}),
        lines("Batch utilisation", "Rows of a decode step over cache slots", SHARE,
              {"mean": mean(utilization)} | quantiles(utilization)),
        heat("Batch utilisation", "Rows of a decode step over cache slots", SHARE, utilization, exemplars=False),
        lines("Characters of a step", "Prompts included", COUNT, quantiles("chargpt_iteration_tokens_total")),
    )  # fmt: skip
    show(
        lines("Steps", "Duration of an engine step", SECONDS, quantiles("chargpt_iteration_seconds")),
        heat("Steps", "Duration of an engine step", SECONDS, "chargpt_iteration_seconds", exemplars=False),
        lines("Phases of a step", "Mean duration, where a step has the phase", SECONDS,
              {"{{phase}}": mean("chargpt_iteration_phase_seconds", "phase")}),
    )  # fmt: skip
    show(
        stacked("Where the workers' time goes", "The model is decode and prefill; schedule and transport are the"
                " service's own", SHARE,
                {"{{phase}}": f"{phases} / scalar({workers})",
                 "idle": f"clamp_min(1 - {busy} / {workers}, 0)"}),
        lines("Device and scheduler", "Share of the time in steps: forwards and sampling, and the scheduler", SHARE,
              {"device": rate("chargpt_iteration_phase_seconds_sum", labels='phase=~"decode|prefill|sample|decide"')
               + f" / {step}",
               "scheduler": rate("chargpt_iteration_phase_seconds_sum", labels='phase="schedule"') + f" / {step}"}),
        lines("Exact choices", "Characters chosen from fp64 logits, as a share of those generated", SHARE,
              {"share": f"{rate('chargpt_exact_choices_total')} / {rate('chargpt_generation_tokens_total')}"}),
    )  # fmt: skip

    row("Resources")
    by_process = "instance, process"
    show(
        lines("Memory", "Resident, by process", BYTES,
              {"{{instance}} {{process}}": gauge("chargpt_process_resident_memory_bytes", by_process)}),
        lines("CPU", "Cores, by process", CORES,
              {"{{instance}} {{process}}": rate("chargpt_process_cpu_seconds_total", by_process)}),
        lines("Files and threads", "Open file descriptors, and threads, by process", COUNT,
              {"{{instance}} {{process}} files": gauge("chargpt_process_open_fds", by_process),
               "{{instance}} {{process}} threads": gauge("chargpt_process_threads", by_process)}),
        lines("Restarts of workers", "In the last 15 minutes", COUNT,
              {"{{instance}}":
               f"sum by (instance) (increase(chargpt_worker_restarts_total{{{CHOSEN}}}[15m]))"}),
    )  # fmt: skip

    row("What is served")
    for part in (
        facts("Build", "Versions", "chargpt_build_info", ()),
        facts("Checkpoint", "Its hash and sizes", "chargpt_checkpoint_info", ()),
    ):
        dashboard.with_panel(part.id(next(ids)))
    for panel in (
        number("Validation loss", "Nats per character, as training noted it", "none",
               f"chargpt_checkpoint_validation_loss{{{CHOSEN}}}", "{{instance}}").decimals(4).span(8),
        number("Up for", "Age of the oldest process of each instance", SECONDS,
               f"time() - min by (instance) (chargpt_process_start_time_seconds{{{CHOSEN}}})", "{{instance}}").span(16),
    ):  # fmt: skip
        dashboard.with_panel(panel.id(next(ids)))
    return dashboard


def text() -> str:
    return json.dumps(build().build(), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
