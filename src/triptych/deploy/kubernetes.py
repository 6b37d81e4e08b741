"""Kubernetes manifests: NATS, the frontend behind a Service, and a StatefulSet for each role.

Workers are StatefulSets because each needs a stable id: the pod's ordinal is its ``--index``, from
a label that Kubernetes sets since 1.28. The manifests contain no secret.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from triptych.config import KEYS, Config, key_variable
from triptych.deploy.container import (
    DEFAULT,
    LEAVE_SECONDS,
    NATS_CONF,
    NATS_HEALTHY,
    NATS_IMAGE,
    NATS_PORT,
    NATS_STORE,
    NATS_USER,
    READY_FILE,
    SCRATCH,
    SHARED_GIB,
    USER,
    Containers,
    config_inside,
    frontend_memory,
    frontend_words,
    gpus_of_container,
    quote_for_nats,
    stop_seconds,
    worker_words,
)
from triptych.errors import InvalidConfig
from triptych.topology import Group, Role

ORDINAL = "metadata.labels['apps.kubernetes.io/pod-index']"
NATS_FOLDER, NATS_FILE = "/etc/nats", "nats.conf"
NATS_UID = 1000
NATS_STORE_SIZE = "1Gi"

Document = dict[str, Any]


def kubernetes_comments(config: Config, containers: Containers) -> str:
    """How to set the secrets, in a command of one line."""
    space = containers.kubernetes_namespace
    words = ["kubectl", *(["--namespace", space] if space else []), "create secret generic"]
    keys = {"secret": 32, "nats-password": 32, "api-key": 16, "admin-key": 16}
    joined = ""
    if config.join:
        del keys["nats-password"]
        joined = """\
# If NATS requires a login, add nats-user and nats-password, or nats-token, to that secret.
"""
    made = (f'--from-literal={key}="$(openssl rand -hex {n})"' for key, n in keys.items())
    return f"""\
# Once, before this is applied:
#   {" ".join([*words, containers.name, *made])}
# Clients must send the api-key; without it everyone who reaches the server may use it.
# The admin-key opens /cluster and /metrics.
{joined}"""


def kubernetes_documents(config: Config, containers: Containers) -> list[Document]:
    if config.host not in (DEFAULT.host, "0.0.0.0", "::"):
        raise InvalidConfig(
            f"--host {config.host} has no meaning in Kubernetes: the frontend listens on every "
            "address of its pod, behind a Service. Leave it out."
        )
    server = _Server(config, containers)
    return [*server.nats(), *server.workers(), *server.frontend()]


class Names(Struct, frozen=True):
    """Names and labels of one server's objects."""

    name: str
    namespace: str = ""  # empty: the namespace of kubectl

    def of(self, part: str) -> str:
        return f"{self.name}-{part}"

    def labels(self, component: str = "", role: str = "") -> dict[str, str]:
        """Labels of all objects, of one component, or of the workers of one role."""
        labels = {"app.kubernetes.io/name": "triptych", "app.kubernetes.io/instance": self.name}
        if component:
            labels["app.kubernetes.io/component"] = component
        if role:
            labels["triptych/role"] = role
        return labels

    def document(
        self, kind: str, part: str, labels: dict[str, str], spec: Document, version: str = "v1"
    ) -> Document:
        metadata = self.metadata(part, labels)
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def metadata(self, part: str, labels: dict[str, str]) -> Document:
        metadata: Document = {"name": self.of(part), "labels": labels}
        return metadata | ({"namespace": self.namespace} if self.namespace else {})


class _Server:
    """The objects of one server."""

    def __init__(self, config: Config, containers: Containers) -> None:
        self._inside = config_inside(config, containers)
        self._containers = containers
        self._names = Names(containers.name, containers.kubernetes_namespace)
        self._join = config.join or nats_url(self._names)
        self._own_nats = not config.join
        # Keys that the operator has set are required.
        self._wanted_keys = {name for name in KEYS if getattr(config, name)}

    def nats(self) -> list[Document]:
        return nats_documents(self._names) if self._own_nats else []

    def workers(self) -> list[Document]:
        """Only pods of this server reach them, on any port."""
        groups, labels = self._inside.topology.groups, self._names.labels("worker")
        # A StatefulSet requires a Service; discovery does not use it.
        service = {"clusterIP": "None", "selector": labels}
        return [
            self._names.document("Service", "workers", labels, service),
            *(self._workers(group) for group in groups),
            network_policy(self._names, "worker", [{"from": [self._ours()]}]),
            *(disruption_budget(self._names, g.role) for g in groups if g.count > 1),
        ]

    def frontend(self) -> list[Document]:
        """Everyone reaches its port; workers may fetch decoded media from it."""
        labels, port = self._names.labels("frontend"), self._inside.port
        service = {"selector": labels, "ports": [{"name": "http", "port": port}]}
        reach = [{"ports": [{"port": port}]}, {"from": [self._ours()]}]
        return [
            self._frontend(),
            self._names.document("Service", "frontend", labels, service),
            network_policy(self._names, "frontend", reach),
        ]

    def _ours(self) -> Document:
        return {"podSelector": {"matchLabels": self._names.labels()}}

    def _workers(self, group: Group) -> Document:
        labels, sizes = self._names.labels("worker", group.role), self._containers
        words = worker_words(self._inside, group.role, "$(POD_INDEX)", "$(POD_IP)", self._join)
        container = self._container("worker", words, sizes.memory)
        # No liveness probe: a worker exits when its engine dies, and may load for long.
        container["readinessProbe"] = command_probe(["test", "-e", READY_FILE])
        container["env"].append(from_field("POD_INDEX", ORDINAL))
        container["volumeMounts"].append({"name": "shared", "mountPath": "/dev/shm"})
        container["resources"]["requests"]["cpu"] = str(sizes.cpus)
        if count := gpus_of_container(self._inside, sizes):
            container["resources"]["limits"]["nvidia.com/gpu"] = str(count)
        shared = {"medium": "Memory", "sizeLimit": f"{SHARED_GIB}Gi"}
        pod = self._pod(container)
        pod["volumes"].append({"name": "shared", "emptyDir": shared})
        spec = {
            "replicas": group.count,
            "serviceName": self._names.of("workers"),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        return self._names.document("StatefulSet", group.role.lower(), labels, spec, "apps/v1")

    def _frontend(self) -> Document:
        labels, port = self._names.labels("frontend"), self._inside.port
        tls = bool(self._inside.tls_cert)
        words = frontend_words(self._inside, "$(POD_IP)", self._join)
        memory = frontend_memory(self._inside, self._containers)
        container = self._container("frontend", words, memory)
        for key in KEYS:
            wanted, named = key in self._wanted_keys, key.replace("_", "-")
            variable = from_secret(self._names, key_variable(key), named, optional=not wanted)
            container["env"].append(variable)
        container["ports"] = [{"name": "http", "containerPort": port}]
        # A Service still routes to a pod for a moment after it is asked to stop.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_SECONDS)]}}}
        container["readinessProbe"] = http_probe("/health", port, tls=tls)
        container["livenessProbe"] = http_probe("/live", port, 10, tls)
        spec = {
            "replicas": 1,
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": self._pod(container)},
        }
        return self._names.document("Deployment", "frontend", labels, spec, "apps/v1")

    def _container(self, name: str, words: list[str], memory: int) -> Document:
        """What frontend and workers have in common."""
        mounts: list[Document] = [{"name": "scratch", "mountPath": SCRATCH}]
        if self._containers.volume:
            mounts.append({"name": "model", "mountPath": self._inside.model, "readOnly": True})
        return {
            "name": name,
            "image": self._containers.image,
            "args": words,
            "env": [
                {"name": "HOME", "value": SCRATCH},
                from_field("POD_IP", "status.podIP"),
                from_secret(self._names, "TRIPTYCH_SECRET", "secret"),
                *self._nats_login(),
            ],
            "resources": {
                "requests": {"cpu": "1", "memory": f"{memory}Gi"},
                "limits": {"memory": f"{memory}Gi"},
            },
            "securityContext": locked_container(),
            "volumeMounts": mounts,
        }

    def _nats_login(self) -> list[Document]:
        """The login for NATS. An existing NATS may need none, or a token."""
        if self._own_nats:
            return [
                {"name": "TRIPTYCH_NATS_USER", "value": NATS_USER},
                from_secret(self._names, "TRIPTYCH_NATS_PASSWORD", "nats-password"),
            ]
        return [
            from_secret(self._names, f"TRIPTYCH_NATS_{part}", f"nats-{part.lower()}", optional=True)
            for part in ("USER", "PASSWORD", "TOKEN")
        ]

    def _pod(self, container: Document) -> Document:
        volumes: list[Document] = [{"name": "scratch", "emptyDir": {}}]
        if claim := self._containers.volume:
            source = {"claimName": claim, "readOnly": True}
            volumes.append({"name": "model", "persistentVolumeClaim": source})
        return {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # their variables would begin with TRIPTYCH_
            "terminationGracePeriodSeconds": stop_seconds(self._inside),
            "securityContext": locked_pod(USER),
            "containers": [container],
            "volumes": volumes,
        }


def nats_url(names: Names) -> str:
    return f"nats://{names.of('nats')}:{NATS_PORT}"


def nats_documents(names: Names) -> list[Document]:
    """NATS with one replica and its store on a volume.

    One is enough: workers and frontends keep the peers they know while NATS is away.
    """
    ours = {"podSelector": {"matchLabels": names.labels()}}
    reach = {"from": [ours], "ports": [{"port": NATS_PORT}]}
    return [
        config_map(names, "nats", {NATS_FILE: NATS_CONF}),
        _nats_service(names),
        _nats_set(names),
        network_policy(names, "nats", [reach]),
    ]


def _nats_service(names: Names) -> Document:
    labels = names.labels("nats")
    spec = {"selector": labels, "ports": [{"name": "nats", "port": NATS_PORT}]}
    return names.document("Service", "nats", labels, spec)


def _nats_set(names: Names) -> Document:
    labels, (port, path) = names.labels("nats"), NATS_HEALTHY
    container = {
        "name": "nats",
        "image": NATS_IMAGE,
        "command": ["nats-server", "-c", f"{NATS_FOLDER}/{NATS_FILE}"],
        "env": [
            from_secret(names, "PASSWORD", "nats-password"),
            {"name": "NATS_PASSWORD", "value": quote_for_nats("$(PASSWORD)")},
        ],
        "ports": [{"name": "nats", "containerPort": NATS_PORT}],
        "readinessProbe": http_probe(path, port),
        "livenessProbe": http_probe("/healthz?js-server-only=true", port, 10),
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": locked_container(),
        "volumeMounts": [
            {"name": "store", "mountPath": NATS_STORE},
            {"name": "settings", "mountPath": NATS_FOLDER, "readOnly": True},
        ],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": locked_pod(NATS_UID),
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": names.of("nats")}}],
    }
    claim = {
        "metadata": {"name": "store"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": NATS_STORE_SIZE}},
        },
    }
    spec = {
        "replicas": 1,
        "serviceName": names.of("nats"),
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    return names.document("StatefulSet", "nats", labels, spec, "apps/v1")


def config_map(names: Names, component: str, files: dict[str, str]) -> Document:
    metadata = names.metadata(component, names.labels(component))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}


def from_secret(names: Names, variable: str, key: str, *, optional: bool = False) -> Document:
    reference = {"name": names.name, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def from_field(variable: str, path: str) -> Document:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def http_probe(path: str, port: int, seconds: int = 5, tls: bool = False) -> Document:
    """A probe by HTTP, or HTTPS; it checks no certificate."""
    scheme = {"scheme": "HTTPS"} if tls else {}
    get = {"path": path, "port": port, **scheme}
    return {"httpGet": get, "periodSeconds": seconds, "timeoutSeconds": 3}


def command_probe(command: list[str], seconds: int = 5) -> Document:
    """A probe by a command in the container."""
    return {"exec": {"command": command}, "periodSeconds": seconds, "timeoutSeconds": 3}


def locked_pod(user: int) -> Document:
    """Security of a pod; it leaves the sandbox what it needs to lock itself down."""
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",  # do not change every file at each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def locked_container() -> Document:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def network_policy(names: Names, component: str, ingress: list[Document]) -> Document:
    """Only ``ingress`` may reach the pods of a component."""
    labels = names.labels(component)
    spec = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return names.document("NetworkPolicy", component, labels, spec, "networking.k8s.io/v1")


def disruption_budget(names: Names, role: Role) -> Document:
    """Kubernetes may evict one worker of a role at a time."""
    labels = names.labels("worker", role)
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return names.document("PodDisruptionBudget", role.lower(), labels, spec, "policy/v1")
