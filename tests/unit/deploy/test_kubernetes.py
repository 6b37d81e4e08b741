"""Manifests are what the published schemas allow, and what this server needs."""

import copy
import re

import kubernetes_validate
import msgspec
import pytest
import yaml

from triptych import cli, deploy
from triptych.api.routes import Access, find_route
from triptych.config import Config
from triptych.deploy import kubernetes
from triptych.deploy.container import Containers
from triptych.engines.base import ENGINES
from triptych.errors import InvalidConfig

JOIN = "nats://nats.infra:4222"
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D", "E*2/P/D*3"]
VERSIONS = ["1.28", "1.31", kubernetes_validate.latest_version()]


def rendered(containers=None, **settings):
    """As a reader of the text sees it."""
    containers = Containers(**(containers or {}))
    return list(
        yaml.safe_load_all(deploy.render_text("kubernetes", Config(**settings), containers))
    )


def of(documents, kind, component=None):
    labels = "app.kubernetes.io/component"
    return [
        document
        for document in documents
        if document["kind"] == kind
        and component in (None, document["metadata"]["labels"].get(labels))
    ]


def pods(documents):
    kinds = ("StatefulSet", "Deployment")
    return [d["spec"]["template"] for d in documents if d["kind"] in kinds]


def container(pod):
    [only] = pod["spec"]["containers"]
    return only


def environment(pod):
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(pod)["env"]}


def parsed(pod, **filled):
    words = container(pod)["args"]
    for name, value in filled.items():
        words = [word.replace(f"$({name})", value) for word in words]
    return cli._parser().parse_args([word.replace("$$", "$") for word in words])


def full(pattern="E*2/P/D*3"):
    given = {"volume": "models", "kubernetes_namespace": "vision", "gpus": 2}
    return rendered(given, pattern=pattern, model="/models/m", device="cuda", api_key="x")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_published_schemas_allow_all_of_it(pattern, version):
    for documents in (rendered(pattern=pattern), full(pattern)):
        for document in documents:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("StatefulSet", ("spec", "replica"), 2),
        ("StatefulSet", ("spec", "replicas"), "two"),
        ("Deployment", ("spec", "template", "spec", "container"), []),
        ("Deployment", ("spec", "template", "spec", "terminationGracePeriodSeconds"), "45s"),
        ("Service", ("spec", "ports"), [{"port": "http"}]),
        ("NetworkPolicy", ("spec", "ingres"), []),
        ("PodDisruptionBudget", ("spec", "selector"), "triptych"),
        ("ConfigMap", ("data", "nats.conf"), 4222),
    ],
)
def test_the_schemas_would_refuse_a_wrong_field(kind, path, value):
    document = copy.deepcopy(of(full(), kind)[0])
    kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    level = document
    for name in path[:-1]:
        level = level[name]
    level[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_role_has_its_workers_and_each_an_id_of_its_own(pattern):
    sets = of(rendered(pattern=pattern), "StatefulSet", "worker")
    groups = Config(pattern=pattern).topology.groups
    assert [(s["spec"]["replicas"], s["metadata"]["name"]) for s in sets] == [
        (g.count, f"triptych-{g.role.lower()}") for g in groups
    ]
    for one, group in zip(sets, groups, strict=True):
        pod = one["spec"]["template"]
        assert "pod-index" in environment(pod)["POD_INDEX"]["fieldRef"]["fieldPath"]
        assert environment(pod)["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
        args = parsed(pod, POD_INDEX="1", POD_IP="10.0.0.2")
        assert (args.role, args.index, args.worker_host) == (group.role, 1, "10.0.0.2")
        assert args.join == "nats://triptych-nats:4222"
        ready = container(pod)["readinessProbe"]["exec"]["command"]
        assert ready == ["test", "-e", args.ready_file]


def test_processes_get_the_settings_of_the_file():
    settings = {"prompt_template": "$(POD_IP) $$ <prompt>", "pattern": "E/PD", "cache": {}}
    config = msgspec.convert(settings, Config)
    documents = kubernetes.kubernetes_documents(config, Containers(cpus=4))
    for pod in pods(documents)[1:]:
        args = parsed(pod, POD_INDEX="0")
        read = cli._config(args)
        assert read.prompt_template == settings["prompt_template"]
        assert (read.pattern, read.cpu_threads, read.decode_processes) == ("E/PD", 4, 3)


def test_the_frontend_listens_and_is_asked_how_it_is():
    [deployment] = of(rendered(port=9000, host="0.0.0.0"), "Deployment")
    one = container(deployment["spec"]["template"])
    args = parsed(deployment["spec"]["template"])
    assert (args.host, args.port) == ("0.0.0.0", 9000)
    for probe, path in (("readinessProbe", "/health"), ("livenessProbe", "/live")):
        asked = one[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == (path, 9000)
        assert find_route(path).access is Access.OPEN  # kubelet has no key
        assert "scheme" not in asked
    [deployment] = of(rendered(tls_cert="/tls/tls.crt", tls_key="/tls/tls.key"), "Deployment")
    one = container(deployment["spec"]["template"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert one[probe]["httpGet"]["scheme"] == "HTTPS"


def test_what_selects_pods_selects_some_and_what_is_needed_is_there():
    documents = full()
    labels = [pod["metadata"]["labels"] for pod in pods(documents)]

    def chosen(selector):
        return [one for one in labels if selector.items() <= one.items()]

    for document in documents:
        if (spec := document.get("spec")) is None:
            continue
        selector = spec.get("selector") or spec["podSelector"]
        assert chosen(selector.get("matchLabels", selector)), document["metadata"]["name"]
    services = {one["metadata"]["name"] for one in of(documents, "Service")}
    assert {one["spec"]["serviceName"] for one in of(documents, "StatefulSet")} <= services
    assert {one["metadata"]["namespace"] for one in documents} == {"vision"}


def test_only_pods_of_this_server_reach_workers_and_nats():
    documents = rendered()
    ours = {"app.kubernetes.io/name": "triptych", "app.kubernetes.io/instance": "triptych"}
    peers = [{"podSelector": {"matchLabels": ours}}]
    [worker] = of(documents, "NetworkPolicy", "worker")
    assert worker["spec"]["ingress"] == [{"from": peers}]
    [nats] = of(documents, "NetworkPolicy", "nats")
    assert nats["spec"]["ingress"] == [{"from": peers, "ports": [{"port": 4222}]}]
    [frontend] = of(documents, "NetworkPolicy", "frontend")
    assert frontend["spec"]["ingress"] == [{"ports": [{"port": 8000}]}, {"from": peers}]
    assert all(one["spec"]["policyTypes"] == ["Ingress"] for one in of(documents, "NetworkPolicy"))


def test_secrets_are_named_and_never_shown():
    config = Config(api_key="sesame", admin_key="street")
    text = deploy.render_text("kubernetes", config, Containers())
    assert not re.search("sesame|street", text)
    documents = list(yaml.safe_load_all(text))
    named = {
        (name, value["secretKeyRef"]["key"], value["secretKeyRef"].get("optional", False))
        for pod in pods(documents)
        for name, value in environment(pod).items()
        if "secretKeyRef" in value
    }
    assert named == {
        ("TRIPTYCH_SECRET", "secret", False),
        ("TRIPTYCH_API_KEY", "api-key", False),  # wanted: it may not be forgotten
        ("TRIPTYCH_ADMIN_KEY", "admin-key", False),
        ("TRIPTYCH_NATS_PASSWORD", "nats-password", False),
        ("PASSWORD", "nats-password", False),
    }
    [frontend] = of(rendered(), "Deployment")
    for name in ("TRIPTYCH_API_KEY", "TRIPTYCH_ADMIN_KEY"):
        key = environment(frontend["spec"]["template"])[name]
        assert key["secretKeyRef"]["optional"] is True


def test_no_secret_is_a_word_of_a_command_line():
    """Fails with ``--pass=$(NATS_PASSWORD)``: a list of processes would show it."""
    for documents in (rendered(), rendered(join=JOIN)):
        for pod in pods(documents):
            one = container(pod)
            words = " ".join(one.get("command", []) + one.get("args", []))
            assert set(re.findall(r"\$\((\w+)\)", words)) <= {"POD_IP", "POD_INDEX"}


@pytest.mark.parametrize("join", ["", JOIN])
def test_the_command_of_its_first_lines_can_be_pasted_and_makes_what_is_needed(paste, join):
    """Fails with a remark behind it, or without a key that some pod needs."""
    containers = Containers(name="eyes", kubernetes_namespace="vision")
    text = deploy.render_text(
        "kubernetes", Config(join=join, api_key="x", admin_key="y"), containers
    )
    words = (paste(text) / "told").read_text().splitlines()
    assert words[:7] == ["kubectl", "--namespace", "vision", "create", "secret", "generic", "eyes"]
    made = dict(word.removeprefix("--from-literal=").split("=") for word in words[7:])
    references = [
        value["secretKeyRef"]
        for pod in pods(yaml.safe_load_all(text))
        for value in environment(pod).values()
        if "secretKeyRef" in value
    ]
    assert set(made) == {one["key"] for one in references if not one.get("optional")}
    assert {one["name"] for one in references} == {"eyes"}
    assert set(made.values()) == {"0a1b"}


def test_another_nats_may_be_joined():
    """Fails with a NATS of its own, or with the password of one."""
    documents = rendered(join=JOIN)
    assert not [one for one in documents if "nats" in one["metadata"]["name"]]
    for pod in pods(documents):
        assert parsed(pod, POD_INDEX="0").join == JOIN
        login = {k: v["secretKeyRef"] for k, v in environment(pod).items() if "NATS" in k}
        assert login == {
            f"TRIPTYCH_NATS_{part.upper()}": {
                "name": "triptych",
                "key": f"nats-{part}",
                "optional": True,
            }
            for part in ("user", "password", "token")
        }


def test_no_pod_is_killed_while_requests_may_run():
    config = msgspec.convert({"limits": {"drain_seconds": 99.5}}, Config)
    for pod in pods(kubernetes.kubernetes_documents(config, Containers()))[1:]:
        waits = container(pod).get("lifecycle", {"preStop": {"exec": {"command": [0, 0]}}})
        leave = int(waits["preStop"]["exec"]["command"][1])
        assert pod["spec"]["terminationGracePeriodSeconds"] >= 99.5 + leave


def test_every_container_is_locked_and_may_write_only_to_its_volumes():
    """As the Pod Security Standard ``restricted`` demands, and more."""
    for pod in pods(full()):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        kinds = {kind for volume in pod["spec"]["volumes"] for kind in volume} - {"name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        lock = container(pod)["securityContext"]
        assert lock["allowPrivilegeEscalation"] is False
        assert lock["readOnlyRootFilesystem"] is True
        assert lock["capabilities"] == {"drop": ["ALL"]}


def test_every_container_says_what_it_needs():
    for pod in pods(full()):
        resources = container(pod)["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert "memory" in resources["limits"]


def gpus(documents):
    sets = of(documents, "StatefulSet", "worker")
    limits = [container(one["spec"]["template"])["resources"]["limits"] for one in sets]
    return [one.get("nvidia.com/gpu") for one in limits]


def test_workers_get_the_gpus_that_the_device_asks_for():
    assert gpus(rendered(pattern="E/PD", device="cuda")) == ["1", "1"]
    assert gpus(rendered(pattern="E/PD", device="cpu")) == [None, None]
    assert gpus(rendered(pattern="E/PD", device="cuda", engine="fake")) == [None, None]
    assert gpus(rendered({"gpus": 4}, pattern="EPD", device="cuda")) == ["4"]
    assert gpus(rendered({"gpus": 0}, pattern="EPD", device="cuda")) == [None]


def test_where_a_role_has_several_one_at_a_time_may_be_moved():
    budgets = of(rendered(pattern="E*2/P/D*3"), "PodDisruptionBudget")
    assert [one["metadata"]["name"] for one in budgets] == ["triptych-e", "triptych-d"]
    assert not of(rendered(pattern="E/P/D"), "PodDisruptionBudget")


def test_the_model_is_where_the_processes_look_for_it():
    for pod in pods(full())[1:]:
        assert parsed(pod, POD_INDEX="0").model == "/models/m"
        mount = next(m for m in container(pod)["volumeMounts"] if m["name"] == "model")
        assert (mount["mountPath"], mount["readOnly"]) == ("/models/m", True)
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        assert volumes["model"]["persistentVolumeClaim"]["claimName"] == "models"
        assert set(volumes) == {m["name"] for m in container(pod)["volumeMounts"]}


@pytest.mark.parametrize(
    ("settings", "containers", "said"),
    [
        ({"model": "./m"}, {}, "must begin with a slash"),
        ({}, {"volume": "models"}, "set MODEL"),
        ({"run_dir": "/run/x"}, {}, "--join"),
        ({"port": 0}, {}, "--port 0"),
        ({"device": "cuda:1"}, {}, "Use --device cuda"),
        ({"join": "nats://localhost:4222"}, {}, "each container itself"),
        ({"host": "192.0.2.1"}, {}, "behind a Service"),
        ({"worker_host": "192.0.2.1"}, {}, "its own address"),
        ({"transport": "shm"}, {}, "Say one of auto, nixl, file, inline"),
        ({"engine": "tensors"}, {}, "is unknown"),
        ({"engine_python": "/opt/v/bin/python"}, {"image": "own"}, "the Python of --image"),
        ({"nats_ca": "/etc/ca.pem"}, {}, "to a NATS that --join names"),
        ({"nats_credentials": "/etc/creds"}, {}, "to a NATS that --join names"),
        ({"allowed_media_path": "media"}, {}, "--allowed-media-path 'media' is a path inside"),
        ({"worker_tls_cert": "c.pem"}, {}, "--worker-tls-cert 'c.pem' is a path inside"),
        ({"worker_tls_key": "k.pem"}, {}, "--worker-tls-key 'k.pem' is a path inside"),
        ({"tls_cert": "c.pem"}, {}, "--tls-cert 'c.pem' is a path inside"),
        ({"tls_cert": "/c.pem", "tls_key": "k.pem"}, {}, "--tls-key 'k.pem' is a path inside"),
        ({"tls_key": "/k.pem"}, {}, "--tls-key needs the certificate"),
        ({"keys_file": "keys.toml"}, {}, "--keys-file 'keys.toml' is a path inside"),
        ({"public_routes": "/metric"}, {}, "Did you mean /metrics"),
        ({"cors_origins": "example.com"}, {}, "is not an origin"),
    ],
)
def test_what_could_not_run_there_is_refused(settings, containers, said):
    with pytest.raises(InvalidConfig, match=said):
        rendered(containers, **settings)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_the_image_lacks_needs_an_image_that_has_it(engine):
    """Guard: ``_check_image``. The image's own engines are ours, which no package names."""
    if ENGINES[engine].package:
        with pytest.raises(InvalidConfig, match=f"--engine {engine} is not in .* set --image"):
            rendered(engine=engine)
    for pod in pods(rendered({"image": "own:1"}, engine=engine))[1:]:
        assert parsed(pod, POD_INDEX="0").engine == engine if engine != "torch" else True
        assert container(pod)["image"] == "own:1"
