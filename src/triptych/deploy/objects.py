"""Parts of Kubernetes objects: names, labels, variables, probes, security, policies."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from triptych.topology import Role

Document = dict[str, Any]


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


def config_map(names: Names, component: str, files: dict[str, str]) -> Document:
    metadata = names.metadata(component, names.labels(component))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}


def from_secret(names: Names, variable: str, key: str, *, optional: bool = False) -> Document:
    reference = {"name": names.name, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def from_field(variable: str, path: str) -> Document:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def http_probe(path: str, port: int, seconds: int = 5) -> Document:
    """A probe by HTTP."""
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": seconds, "timeoutSeconds": 3}


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
