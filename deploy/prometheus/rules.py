"""Writes what repeats: make rules

The failures' ratios over each window into rules.yml, beside this file, between two comments; and all of rules.yml into
the resource in which the Prometheus operator takes rules, which no part of kustomize can make of another file.
"""

from pathlib import Path

RULES = Path(__file__).with_name("rules.yml")
RESOURCE = RULES.parents[1] / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"
BEGIN = "  # Failures over each window: written by rules.py, not to be edited.\n"
END = "  # End of what rules.py writes.\n"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
GROUP = """\
  - name: chargpt-failures-WINDOW
    rules:
      # "or 0 * …": a reason that never occurred has no series; without failures the ratio is 0, not absent.
      # After "or": with several checkpoints, rejections before it was known which one a request is for have
      # --model-name, under which nothing runs. They are a share of all sequences.
      - record: environment_model_name:chargpt_failures:ratio_rateWINDOW
        labels: {slo: sequences}
        expr: |
          sum by (environment, model_name) (
              rate(chargpt_request_success_total{finished_reason=~"error|timeout"}[WINDOW])
            or rate(chargpt_admission_rejections_total{reason!~"rate_limit|queue_full|overloaded"}[WINDOW])
            or 0 * rate(chargpt_request_success_total[WINDOW])
          )
          / (
            sum by (environment, model_name) (
                rate(chargpt_request_success_total[WINDOW])
              or rate(chargpt_admission_rejections_total{reason!~"rate_limit|queue_full|overloaded"}[WINDOW])
            )
            and sum by (environment, model_name) (rate(chargpt_request_success_total[WINDOW]))
          )
          or
          sum by (environment, model_name) (
            rate(chargpt_admission_rejections_total{reason!~"rate_limit|queue_full|overloaded"}[WINDOW])
          )
          / on (environment) group_left () sum by (environment) (
              rate(chargpt_request_success_total[WINDOW])
            or rate(chargpt_admission_rejections_total{reason!~"rate_limit|queue_full|overloaded"}[WINDOW])
          )
      - record: environment_model_name:chargpt_failures:ratio_rateWINDOW
        labels: {slo: answers}
        expr: |
          sum by (environment, model_name) (
              rate(chargpt_http_requests_total{handler!~"/metrics|/livez|/readyz|/health", status=~"5.."}[WINDOW])
            or 0 * rate(chargpt_http_requests_total{handler!~"/metrics|/livez|/readyz|/health"}[WINDOW])
          )
          / sum by (environment, model_name) (
            rate(chargpt_http_requests_total{handler!~"/metrics|/livez|/readyz|/health"}[WINDOW])
          )
      - record: environment_model_name:chargpt_failures:ratio_rateWINDOW
        labels: {slo: first_characters}
        expr: |
          1 - sum by (environment, model_name) (rate(chargpt_time_to_first_token_seconds_bucket{le="0.5"}[WINDOW]))
            / sum by (environment, model_name) (rate(chargpt_time_to_first_token_seconds_count[WINDOW]))
"""
HEAD = """\
# deploy/prometheus/rules.yml for the Prometheus operator: written by make rules, not to be edited.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: chargpt
spec:
"""


def texts() -> dict[Path, str]:
    """Both files."""
    before, rest = RULES.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    text = before + BEGIN + "\n".join(GROUP.replace("WINDOW", window) for window in WINDOWS) + END + after
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return {RULES: text, RESOURCE: HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines)}


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
