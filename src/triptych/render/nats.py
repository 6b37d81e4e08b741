"""NATS on Kubernetes, for a server that joins no other: one replica, its store on a volume.

While it is away workers and frontends go on with whom they know, so it need not be three.
"""

from __future__ import annotations

from triptych.render.container import NATS_IMAGE, NATS_PORT, NATS_STORE, nats_words
from triptych.render.objects import (
    Document,
    Names,
    from_secret,
    get,
    locked_container,
    locked_pod,
    network_policy,
)

MONITOR = 8222
USER = 1000
STORE = "1Gi"


def url(names: Names) -> str:
    return f"nats://{names.of('nats')}:{NATS_PORT}"


def documents(names: Names) -> list[Document]:
    ours = {"podSelector": {"matchLabels": names.labels()}}
    reach = {"from": [ours], "ports": [{"port": NATS_PORT}]}
    return [_service(names), _set(names), network_policy(names, "nats", [reach])]


def _service(names: Names) -> Document:
    labels = names.labels("nats")
    spec = {"selector": labels, "ports": [{"name": "nats", "port": NATS_PORT}]}
    return names.document("Service", "nats", labels, spec)


def _set(names: Names) -> Document:
    labels = names.labels("nats")
    container = {
        "name": "nats",
        "image": NATS_IMAGE,
        "args": nats_words("$(NATS_USER)", "$(NATS_PASSWORD)", MONITOR),
        "env": [
            from_secret(names, "NATS_USER", "nats-user"),
            from_secret(names, "NATS_PASSWORD", "nats-password"),
        ],
        "ports": [{"name": "nats", "containerPort": NATS_PORT}],
        "readinessProbe": get("/healthz?js-enabled-only=true", MONITOR),
        "livenessProbe": get("/healthz?js-server-only=true", MONITOR, 10),
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "1Gi"},
        },
        "securityContext": locked_container(),
        "volumeMounts": [{"name": "store", "mountPath": NATS_STORE}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": locked_pod(USER),
        "containers": [container],
    }
    claim = {
        "metadata": {"name": "store"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": STORE}}},
    }
    spec = {
        "replicas": 1,
        "serviceName": names.of("nats"),
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        "volumeClaimTemplates": [claim],
    }
    return names.document("StatefulSet", "nats", labels, spec, "apps/v1")
