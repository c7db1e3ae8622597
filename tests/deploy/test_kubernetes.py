"""deploy/k8s as kubectl renders it, against the schemas of Kubernetes and of the operators and against the service."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from starlette.routing import compile_path

from service.http.app import OPERATIONS
from service.settings import Settings
from tests.toolbox.needs import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "k8s" / "overlays").iterdir())
GATEWAY = {"HTTPRoute", "InferencePool"}  # no package has their schemas
CUSTOM = {"ScaledObject": ScaledObject, "ServiceMonitor": ServiceMonitor, "PrometheusRule": PrometheusRule}
STOP_SECONDS = 10  # for processes to end, after the drain

# What the comments of the overlays offer, as edits of their text.
VARIANTS = {
    "as it is": {},
    "keda": {"../../components/hpa ": "../../components/keda "},
    "checkpoint-volume": {"# - ../../components/checkpoint-volume ": "- ../../components/checkpoint-volume "},
    "checkpoint-init": {"# - ../../components/checkpoint-volume ": "- ../../components/checkpoint-init "},
    "ingress": {"# - ../../components/ingress ": "- ../../components/ingress "},
    "inferencepool": {"# - ../../components/ingress ": "- ../../components/inferencepool "},
}


def rendered(folder):
    """The resources by kind; several of a kind only of ConfigMap, whose names are part of the key."""
    command = [program("kubectl"), "kustomize", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    by_kind = {
        f"ConfigMap {re.sub(r'-[a-z0-9]{10}$', '', it['metadata']['name'])}"
        if it["kind"] == "ConfigMap"
        else it["kind"]: it
        for it in found
    }
    assert len(by_kind) == len(found)
    return by_kind


@pytest.fixture(scope="module", params=[(overlay, variant) for overlay in OVERLAYS for variant in VARIANTS], ids=str)
def variant(request, tmp_path_factory):
    overlay, name = request.param
    folder = tmp_path_factory.mktemp("k8s") / "deploy"
    shutil.copytree(DEPLOY, folder)
    file = folder / "k8s" / "overlays" / overlay / "kustomization.yaml"
    for before, after in VARIANTS[name].items():
        assert file.read_text().count(before) == 1
        file.write_text(file.read_text().replace(before, after))
    return overlay, name, rendered(file.parent)


@pytest.fixture(scope="module")
def resources(variant):
    return variant[2]


@pytest.fixture(scope="module")
def pod(resources):
    return resources["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    [container] = pod["containers"]
    return container


def variables(resources, container):
    """The environment of the container."""
    [source] = container["envFrom"]
    config = resources["ConfigMap chargpt"]
    assert source["configMapRef"]["name"] == config["metadata"]["name"]
    return config["data"] | {each["name"]: each["value"] for each in container.get("env", [])}


def settings(resources, container):
    return {name.removeprefix("CHARGPT_").lower(): value for name, value in variables(resources, container).items()}


def fields(given, kept):
    """Names that a model of the resource did not keep, because its schema has none such."""
    if isinstance(given, dict):
        unknown = given.keys() - kept.keys()
        return sorted(unknown) + [name for key in given.keys() - unknown for name in fields(given[key], kept[key])]
    if isinstance(given, list):
        return [name for one, other in zip(given, kept, strict=True) for name in fields(one, other)]
    return []


# -- schemas --


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_resources_are_valid_for_several_versions_of_kubernetes(variant, version):
    _, name, resources = variant
    core = [it for it in resources.values() if it["kind"] not in CUSTOM.keys() | GATEWAY]
    assert len(core) >= 6
    for resource in core:
        if name == "checkpoint-volume" and resource["kind"] == "Deployment" and version == "1.29":
            with pytest.raises(kubernetes_validate.ValidationError, match="'image' was unexpected"):
                kubernetes_validate.validate(resource, version, strict=True)
        else:
            kubernetes_validate.validate(resource, version, strict=True)


def test_custom_resources_are_valid_by_the_operators_own_schemas(resources):
    custom = [it for it in resources.values() if it["kind"] in CUSTOM]
    for resource in custom:
        model = CUSTOM[resource["kind"]].model_validate(resource)
        kept = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert fields(resource, kept) == []


def test_everything_but_the_namespace_is_in_the_namespace(resources):
    namespace = resources["Namespace"]["metadata"]["name"]
    others = [it for kind, it in resources.items() if kind != "Namespace"]
    assert {it["metadata"]["namespace"] for it in others} == {namespace}


# -- monitoring --


def test_dashboards_fit_the_annotation_that_kubectl_keeps():
    """256 KiB; and Grafana's sidecar finds them by a label."""
    resources = rendered(DEPLOY / "k8s" / "overlays" / "cpu")
    dashboards = [it for kind, it in resources.items() if kind.startswith("ConfigMap chargpt-dashboard")]
    assert len(dashboards) == 2
    for it in dashboards:
        assert it["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert all(len(text.encode()) < 200_000 for text in it["data"].values())


def test_make_rules_writes_the_committed_rules(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    file = Path("deploy/k8s/components/monitoring/prometheusrule.yaml")
    (tmp_path / file).parent.mkdir(parents=True)
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "deploy" / "prometheus")
    subprocess.run(["make", "rules", f"PYTHON={sys.executable}"], cwd=tmp_path, check=True, capture_output=True)
    for each in (file, "deploy/prometheus/rules.yml"):
        assert (tmp_path / each).read_text() == (ROOT / each).read_text()
    assert yaml.safe_load((ROOT / file).read_text())["spec"] == yaml.safe_load(
        (ROOT / "deploy/prometheus/rules.yml").read_text()
    )


def test_prometheus_finds_the_pods_under_the_job_of_the_rules():
    resources = rendered(DEPLOY / "k8s" / "overlays" / "cpu")
    monitor, service = resources["ServiceMonitor"]["spec"], resources["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "chargpt"
    assert 'up{job="chargpt"}' in (DEPLOY / "prometheus" / "rules.yml").read_text()
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert routes(endpoint["path"]) == {"/metrics"}
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["environment"]


# -- the service's own facts --


def routes(path):
    return {it.path for it in OPERATIONS if "GET" in it.methods and compile_path(it.path)[0].fullmatch(path)}


def test_variables_are_settings_and_their_values_are_accepted(resources, container, monkeypatch, tmp_path):
    given = variables(resources, container)
    assert {name.removeprefix("CHARGPT_").lower() for name in given} <= Settings.model_fields.keys()
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    read = Settings(_cli_parse_args=[])
    for name, value in settings(resources, container).items():
        expected = (f"['{value}']",) if name == "checkpoint" else (value, f"{value}.0")
        assert str(getattr(read, name)).lower() in {each.lower() for each in expected}, name


def test_a_pod_has_time_to_stop(resources, pod, container):
    chosen = settings(resources, container)
    delay, drain = float(chosen["shutdown_delay_seconds"]), float(chosen["drain_seconds"])
    assert pod["terminationGracePeriodSeconds"] >= delay + drain + STOP_SECONDS
    assert drain >= float(chosen["request_timeout_seconds"])
    ready = container["readinessProbe"]
    assert delay > ready["periodSeconds"] * ready["failureThreshold"]


def test_ways_in_wait_longer_than_a_request_and_lead_to_the_pods(variant, container):
    _, name, resources = variant
    chosen, service = settings(resources, container), resources["Service"]["spec"]
    if name == "ingress":
        [rule] = resources["Ingress"]["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend == {"name": "chargpt", "port": {"name": service["ports"][0]["name"]}}
        annotations = resources["Ingress"]["metadata"]["annotations"]
        values = {key.rpartition("/")[2]: value for key, value in annotations.items()}
        assert values["proxy-buffering"] == "off" and values["proxy-body-size"] == "4m"
        assert Settings.model_fields["max_body_bytes"].default == 4 << 20
        assert float(values["proxy-read-timeout"]) > float(chosen["request_timeout_seconds"])
    elif name == "inferencepool":
        pool, [rule] = resources["InferencePool"], resources["HTTPRoute"]["spec"]["rules"]
        assert rule["backendRefs"] == [
            {"group": pool["apiVersion"].partition("/")[0], "kind": pool["kind"], "name": pool["metadata"]["name"]}
        ]
        assert pool["spec"]["selector"]["matchLabels"] == service["selector"]
        assert pool["spec"]["targetPorts"] == [{"number": int(chosen["port"])}]
        assert chosen["metrics_vllm_names"] == "true"
        assert {
            float(wait.rstrip("s")) > float(chosen["request_timeout_seconds"]) for wait in rule["timeouts"].values()
        }


def test_probes_ask_routes_of_the_port_that_the_service_listens_on(resources, container):
    port = int(settings(resources, container)["port"])
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    for probe, path in paths.items():
        asked = container[probe]["httpGet"]
        assert asked == {"path": path, "port": "http"} and routes(path) == {path}
    assert settings(resources, container)["host"] == "0.0.0.0"
    assert [each["targetPort"] for each in resources["Service"]["spec"]["ports"]] == ["http"]


def test_selectors_match_the_pods(resources, pod):
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        resources["Deployment"]["spec"]["selector"]["matchLabels"],
        resources["Service"]["spec"]["selector"],
        resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        resources["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        *(spread["labelSelector"]["matchLabels"] for spread in pod["topologySpreadConstraints"]),
    ]
    assert len(selectors) == 6 and all(selector and selector.items() <= labels for selector in selectors)


def test_pods_have_no_rights_and_the_uid_of_the_image(resources, pod):
    enforced = resources["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted" and pod["automountServiceAccountToken"] is False
    uid = int(re.search(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1])
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] == uid
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys() & container["resources"]["requests"].keys()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert volumes.keys() == {mount["name"] for mount in mounts.values()}
    assert [path for path, mount in mounts.items() if not mount.get("readOnly")] == ["/tmp"]


def test_one_autoscaler_acts_on_the_deployment_and_an_eviction_leaves_a_replica(variant):
    overlay, name, resources = variant
    deployment = resources["Deployment"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}
    scalers = resources.keys() & {"HorizontalPodAutoscaler", "ScaledObject"}
    assert scalers == {"ScaledObject" if name == "keda" else "HorizontalPodAutoscaler"}
    [spec] = [resources[kind]["spec"] for kind in scalers]
    assert spec["scaleTargetRef"] == target and "replicas" not in deployment["spec"]
    least = spec.get("minReplicas", spec.get("minReplicaCount"))
    assert least - resources["PodDisruptionBudget"]["spec"]["maxUnavailable"] >= 1
    surge = 0 if overlay == "gpu" else 1  # no GPU is spare
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_checkpoint_of_an_image_is_served(variant, pod, container):
    _, name, resources = variant
    chosen = settings(resources, container)
    if not name.startswith("checkpoint"):
        assert "checkpoint" not in chosen  # the image's own, by its variable
        return
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "model"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "model"]
    assert mount["readOnly"] and chosen["checkpoint"] == f"{mount['mountPath']}/checkpoint"
    if name == "checkpoint-volume":
        assert volume["image"]["reference"].startswith("registry.example.com/chargpt-checkpoint:")
        assert "initContainers" not in pod
    else:
        [init] = pod["initContainers"]
        assert init["command"] == ["cp", "-R", "/checkpoint", f"{init['volumeMounts'][0]['mountPath']}/"]
        assert init["volumeMounts"] == [{"name": "model", "mountPath": mount["mountPath"]}] and "emptyDir" in volume


def test_gpu_overlay_asks_for_as_many_gpus_as_it_uses(variant, pod, container):
    overlay, _, resources = variant
    chosen, limits = settings(resources, container), container["resources"]["limits"]
    if overlay == "cpu":
        assert "nvidia.com/gpu" not in limits and "accelerator" not in chosen
        return
    assert chosen["accelerator"] == "cuda" and str(limits["nvidia.com/gpu"]) == chosen["devices"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
