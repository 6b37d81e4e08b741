"""NATS on Kubernetes, for a server that joins no other: one replica, its store on a volume.

While it is away workers and frontends go on with whom they know, so it need not be three.
"""

from __future__ import annotations

from triptych.deploy.container import (
    NATS_CONF,
    NATS_HEALTHY,
    NATS_IMAGE,
    NATS_PORT,
    NATS_STORE,
    quote_for_nats,
)
from triptych.deploy.objects import (
    Document,
    Names,
    config_map,
    from_secret,
    http_probe,
    locked_container,
    locked_pod,
    network_policy,
)

FOLDER, FILE = "/etc/nats", "nats.conf"
USER = 1000
STORE = "1Gi"


def nats_url(names: Names) -> str:
    return f"nats://{names.of('nats')}:{NATS_PORT}"


def nats_documents(names: Names) -> list[Document]:
    ours = {"podSelector": {"matchLabels": names.labels()}}
    reach = {"from": [ours], "ports": [{"port": NATS_PORT}]}
    return [
        config_map(names, "nats", {FILE: NATS_CONF}),
        _service(names),
        _set(names),
        network_policy(names, "nats", [reach]),
    ]


def _service(names: Names) -> Document:
    labels = names.labels("nats")
    spec = {"selector": labels, "ports": [{"name": "nats", "port": NATS_PORT}]}
    return names.document("Service", "nats", labels, spec)


def _set(names: Names) -> Document:
    labels, (port, path) = names.labels("nats"), NATS_HEALTHY
    container = {
        "name": "nats",
        "image": NATS_IMAGE,
        "command": ["nats-server", "-c", f"{FOLDER}/{FILE}"],
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
            {"name": "settings", "mountPath": FOLDER, "readOnly": True},
        ],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": locked_pod(USER),
        "containers": [container],
        "volumes": [{"name": "settings", "configMap": {"name": names.of("nats")}}],
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
