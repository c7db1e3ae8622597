"""deploy/k8s as kubectl renders it: schemas of Kubernetes and the operators, and what must agree with the service."""

import functools
import json
import re
import shutil

import pytest
import yaml

from service.settings import Settings
from tests.deploy.stack import DEPLOY, ROOT, run
from tests.toolbox.needs import program

IMAGE_VOLUME, GATEWAY = "# - ../../components/checkpoint-volume ", "# - ../../components/gateway "
VARIANTS = {  # what the comments of the overlays offer, as an edit of their text
    "as it is": ("- ../../base", "- ../../base"),
    "keda": ("../../components/hpa ", "../../components/keda "),
    "checkpoint-volume": (IMAGE_VOLUME, IMAGE_VOLUME.removeprefix("# ")),
    "checkpoint-init": (IMAGE_VOLUME, "- ../../components/checkpoint-init "),
    "gateway": (GATEWAY, GATEWAY.removeprefix("# ")),
    "ingress": (GATEWAY, "- ../../components/ingress "),
}


class Rendered:
    """An overlay: its resources by kind, ConfigMaps by kind and name."""

    def __init__(self, overlay, name, folder):
        self.overlay, self.name = overlay, name
        self.by_kind = {}
        for resource in yaml.load_all(run(program("kubectl"), "kustomize", folder), yaml.CSafeLoader):
            kind, name = resource["kind"], re.sub(r"-[a-z0-9]{10}$", "", resource["metadata"]["name"])
            self.by_kind[f"{kind} {name}" if kind == "ConfigMap" else kind] = resource
        self.pod = self.spec("Deployment")["template"]["spec"]
        [self.container] = self.pod["containers"]
        variables = self.by_kind["ConfigMap chargpt"]["data"]
        variables |= {each["name"]: each["value"] for each in self.container.get("env", [])}
        # What the container sets, by the names of the settings.
        self.settings = {name.removeprefix("CHARGPT_").lower(): value for name, value in variables.items()}

    def spec(self, kind):
        return self.by_kind[kind]["spec"]


@pytest.fixture(scope="module", params=[(overlay, name) for overlay in ("cpu", "gpu") for name in VARIANTS], ids=str)
def k8s(request, tmp_path_factory):
    overlay, name = request.param
    folder = tmp_path_factory.mktemp("k8s") / "deploy"
    shutil.copytree(DEPLOY, folder)
    file = folder / "k8s" / "overlays" / overlay / "kustomization.yaml"
    before, after = VARIANTS[name]
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    return Rendered(overlay, name, file.parent)


@pytest.fixture(scope="module")
def validate():
    from kubernetes_validate import utils  # takes seconds, and each process that runs tests imports each test file

    utils.schema_contents = functools.cache(utils.schema_contents)  # read once, not for each resource

    @functools.cache  # most resources are the same in each variant
    def validate(resource: str, version: str) -> None:
        utils.validate(json.loads(resource), version, strict=True)

    return validate


def test_resources_are_valid_by_the_schemas_of_two_versions_and_of_the_operators(k8s, validate):
    from cloudcoil.models.keda import v1alpha1 as keda
    from cloudcoil.models.prometheus_operator import v1 as prometheus

    custom = {"ScaledObject": keda, "ServiceMonitor": prometheus, "PrometheusRule": prometheus}
    versions = ["1.37"] if k8s.name == "checkpoint-volume" else ["1.37", "1.29"]  # volumes of images are newer
    for kind, resource in k8s.by_kind.items():
        if kind in custom:
            model = getattr(custom[kind], kind).model_validate(resource)
            assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == resource
        elif kind != "HTTPRoute":  # no package has its schema
            for version in versions:
                validate(json.dumps(resource), version)


def test_variables_are_settings_and_their_values_are_accepted(k8s):
    settings = Settings(_cli_parse_args=[], **k8s.settings)
    for name, value in k8s.settings.items():
        expected = (f"['{value}']",) if name == "checkpoint" else (value, f"{value}.0")
        assert str(getattr(settings, name)).lower() in {each.lower() for each in expected}, name


def test_a_roll_out_an_eviction_and_a_load_have_what_they_need(k8s):
    """Time for each request to end, a replica that stays, and one autoscaler of the Deployment."""
    delay, drain, wait = (
        float(k8s.settings[f"{name}_seconds"]) for name in ("shutdown_delay", "drain", "request_timeout")
    )
    assert k8s.pod["terminationGracePeriodSeconds"] >= delay + drain + 10 and drain >= wait
    ready = k8s.container["readinessProbe"]
    assert delay > ready["periodSeconds"] * ready["failureThreshold"]
    [kind] = k8s.by_kind.keys() & {"HorizontalPodAutoscaler", "ScaledObject"}
    assert kind == ("ScaledObject" if k8s.name == "keda" else "HorizontalPodAutoscaler")
    scaler, deployment = k8s.spec(kind), k8s.by_kind["Deployment"]
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"] and "replicas" not in deployment["spec"]
    least = scaler.get("minReplicas", scaler.get("minReplicaCount"))
    assert least - k8s.spec("PodDisruptionBudget")["maxUnavailable"] >= 1
    surge = 0 if k8s.overlay == "gpu" else 1  # no GPU is spare
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": surge, "maxUnavailable": 1 - surge}


def test_prometheus_and_the_ways_in_reach_the_pods_and_wait_longer_than_a_request(k8s):
    wait, port = float(k8s.settings["request_timeout_seconds"]), int(k8s.settings["port"])
    assert [each["containerPort"] for each in k8s.container["ports"]] == [port]
    assert k8s.settings["host"] == "::"  # in a cluster of either family
    # The rules are about this job.
    assert k8s.by_kind["Service"]["metadata"]["labels"][k8s.spec("ServiceMonitor")["jobLabel"]] == "chargpt"
    [rule] = k8s.spec("NetworkPolicy")["ingress"]
    [peer] = [each for each in rule["from"] if "namespaceSelector" in each]
    namespaces = {"monitoring"}
    if k8s.name == "ingress":
        annotations = k8s.by_kind["Ingress"]["metadata"]["annotations"]
        values = {key.rpartition("/")[2]: value for key, value in annotations.items()}
        assert values["proxy-buffering"] == "off" and float(values["proxy-read-timeout"]) > wait
        assert values["proxy-body-size"] == f"{Settings.model_fields['max_body_bytes'].default >> 20}m"
        namespaces.add("ingress-nginx")
    elif k8s.name == "gateway":
        route = k8s.spec("HTTPRoute")
        [rule], [gateway] = route["rules"], route["parentRefs"]
        assert all(float(each.rstrip("s")) > wait for each in rule["timeouts"].values())
        namespaces.add(gateway["namespace"])
    assert set(peer["namespaceSelector"]["matchExpressions"][0]["values"]) == namespaces


def test_the_namespace_enforces_warns_of_and_audits_one_level_of_pod_security(k8s):
    labels = k8s.by_kind["Namespace"]["metadata"]["labels"]
    modes = ("enforce", "warn", "audit")
    assert labels == {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in modes}


def test_pods_run_as_the_images_user_with_the_gpus_and_the_checkpoint_that_they_name(k8s):
    assert f"\nUSER {k8s.pod['securityContext']['runAsUser']}\n" in (ROOT / "Dockerfile").read_text()
    gpus = k8s.container["resources"]["limits"].get("nvidia.com/gpu")
    given = k8s.settings.get("accelerator"), k8s.settings.get("devices")
    assert given == (("cuda", str(gpus)) if k8s.overlay == "gpu" else (None, None)) and bool(gpus) == bool(given[0])
    paths = [f"{it['mountPath']}/checkpoint" for it in k8s.container["volumeMounts"] if it["name"] == "model"]
    assert k8s.settings.get("checkpoint") == (paths[0] if k8s.name.startswith("checkpoint") else None)
