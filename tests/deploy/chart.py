"""The Helm chart: rendered with its examples, validated with the schemas of Kubernetes, its configuration files read by `meridian check`.

    chart.py MERIDIAN SCRATCH
"""

import itertools
import json
import pathlib
import subprocess
import sys

import helm_python
import kubernetes_validate

import pods
from pods import of_kind

MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])
EXAMPLES = ["hub-region.yaml", "region.yaml", "join-tokens.yaml"]
# Oldest and newest version of Kubernetes: kubeVersion of the chart, and the newest schema.
VERSIONS = ["1.27", kubernetes_validate.latest_version()]


def check_objects(name, objects):
    """Validates the objects, except those of cert-manager, whose schema is not published with Kubernetes."""
    for found in objects:
        if found["apiVersion"].startswith("cert-manager.io/"):
            assert set(found["spec"]) <= {"secretName", "issuerRef", "uris", "usages", "privateKey", "duration", "renewBefore"}
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names)), f"{name}: an object twice: {names}"
    assert all(found["metadata"]["namespace"] == pods.NAMESPACE for found in objects)


def check_pods(objects):
    """Checks what every pod has: an unprivileged user, probes, limits, a budget, a spread, and an account."""
    accounts = {found["metadata"]["name"] for found in of_kind(objects, "ServiceAccount")}
    budgets = [found["spec"]["selector"]["matchLabels"] for found in of_kind(objects, "PodDisruptionBudget")]
    for pod in pods.pods(objects):
        spec, container = pod.spec, pod.container
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["seccompProfile"]
        for each in [container, *spec.get("initContainers", [])]:
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"], each["name"]
            assert context["capabilities"] == {"drop": ["ALL"]}
        cache = pod.environment().get("MERIDIAN_CACHE")
        assert cache not in [mount["mountPath"] for mount in container["volumeMounts"]], "a mount is writable by every user"
        paths = {"replica": "/health"}
        for probe in ["startupProbe", "readinessProbe"]:
            wanted = paths.get(pod.role, "/livez" if probe == "startupProbe" else "/readyz")
            assert container[probe]["httpGet"]["path"] == wanted, (pod.name, probe)
        assert "livenessProbe" in container and container["resources"]["limits"]["memory"]
        labels = pod.template["metadata"]["labels"]
        selects = lambda selector: selector.items() <= labels.items()
        assert sum(map(selects, budgets)) == 1, f"{pod.name} has one budget"
        assert len(spec["topologySpreadConstraints"]) == 2
        assert all(selects(spread["labelSelector"]["matchLabels"]) for spread in spec["topologySpreadConstraints"])
        assert spec["serviceAccountName"] in accounts
        scales = pod.role == "spoke" and of_kind(objects, "Role") != []
        assert spec["automountServiceAccountToken"] == scales, f"{pod.name}: only a spoke that scales has a token"
        assert labels["app.kubernetes.io/component"] == pod.role


def check_configurations(name, objects, authority):
    """Runs `meridian check` on the configuration of each pod, with the files at its mount paths."""
    secrets = pods.issued(objects, authority) | {
        "gateway-tls": authority.secret(names=["gateway.example.com"]),
        "meridian-etcd": authority.secret(names=["hub"]),
        "receipts-key": {"key": b"sixteen bytes and more"},
    }
    uri = "spiffe://m.example/{}/gcp/us-east4/in/us-va"
    for role in ["gateway", "spoke", "replica"]:
        secrets[f"{role}-identity"] = authority.secret(uris=[uri.format(role)])
    joins = not of_kind(objects, "Certificate") and name == "join-tokens.yaml"
    files = []
    for pod in pods.pods(objects):
        root = SCRATCH / name / pod.name
        pod.mount(root, objects, secrets)
        file = root / pod.config().lstrip("/")
        text = file.read_text()
        for path in ["/etc/meridian", "/var/lib/meridian"]:
            text = text.replace(f'"{path}', f'"{root}{path}')
        file.write_text(text)
        if joins:
            # The identity that the pod receives when it joins.
            identity = root / "var/lib/meridian" / ("pki/hub" if pod.role == "hub" else "identity")
            identity.mkdir(parents=True)
            issued = authority.secret(uris=[f"spiffe://m.example/{pod.role}/aws/eu-central-1/in/de"])
            for ours, theirs in [("certificate", "tls.crt"), ("key", "tls.key"), ("authorities", "ca.crt")]:
                (identity / f"{ours}.pem").write_bytes(issued[theirs])
            if pod.role == "hub":
                pki = root / "var/lib/meridian/pki"
                command = [MERIDIAN, "pki", "init", "--dir", str(root / "pki"), "--trust-domain", "m.example",
                           "--region", "aws/eu-central-1"]
                subprocess.run(command, check=True, capture_output=True)
                (root / "pki/authority").rename(pki / "authority")
        files.append(file)
    ran = subprocess.run([MERIDIAN, "check", "--verbose", *files], capture_output=True, text=True)
    assert ran.returncode == 0, f"{name}: {ran.stderr}"
    assert ran.stderr.count(": valid, read as: ") == len(files)
    print(f"{name}: {len(objects)} objects, {len(files)} configuration files are valid")


def allowed(objects, source, target, port):
    """Returns whether network policies permit a connection between the pods of two roles: egress of one, ingress of the other."""
    policies = {}
    for policy in of_kind(objects, "NetworkPolicy"):
        policies[policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]] = policy["spec"]
    (container,) = {json.dumps(pod.container["ports"]) for pod in pods.pods(objects) if pod.role == target}
    numbers = {given["name"]: given["containerPort"] for given in json.loads(container)}

    def permits(rules, key, peer):
        for rule in rules:
            peers = [given.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
                     for given in rule.get(key, [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": peer}}}])]
            ports = [numbers.get(given["port"], given["port"]) for given in rule.get("ports", [{"port": port}])]
            if peer in peers and port in ports:
                return True
        return False

    return permits(policies[source]["egress"], "to", target) and permits(policies[target]["ingress"], "from", source)


def check_network(objects, authority_port):
    """Compares the policies with the table of docs/identities.md and docs/operators.md (Authorization)."""
    permitted = {
        ("spoke", "hub", 7000), ("gateway", "hub", 7000),
        ("gateway", "spoke", 7100), ("spoke", "spoke", 7100),
    }
    roles = {pod.role for pod in pods.pods(objects)}
    if "replica" in roles:
        permitted.add(("spoke", "replica", 7200))
    if authority_port:
        permitted |= {("spoke", "hub", 7001), ("gateway", "hub", 7001)}
    if "hub" not in roles:
        permitted = {row for row in permitted if row[1] != "hub"}
    found = set()
    for pod in {pod.role: pod for pod in pods.pods(objects)}.values():
        for source, port in itertools.product(roles, pod.container["ports"]):
            if allowed(objects, source, pod.role, port["containerPort"]):
                found.add((source, pod.role, port["containerPort"]))
    # Gateways are open for all clients by default, but no process of the fleet has egress to them.
    assert found == permitted, (found ^ permitted)
    selected = {policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                for policy in of_kind(objects, "NetworkPolicy")}
    assert selected == roles, "a policy for each role"
    for policy in of_kind(objects, "NetworkPolicy"):
        role = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        anywhere = {given["port"] for rule in policy["spec"]["egress"] if "to" not in rule for given in rule["ports"]}
        assert 53 in anywhere, f"{role} resolves names"


def check_actuator(objects):
    """Compares the permissions of the spoke with the requests of its actuator, and these with the schemas.

    A test of the scheduler writes the file of requests, and compares it with what the actuator sends.
    """
    requests = json.loads((pathlib.Path(__file__).parent / "actuator_requests.json").read_text())
    used = set()
    for request in requests:
        path, _, query = request["path"].partition("?")
        parts = path.strip("/").split("/")
        if parts[-1] == "scale":
            assert parts[:4] == ["apis", "apps", "v1", "namespaces"]
            used.add(("apps", "deployments/scale", {"GET": "get", "PUT": "update"}[request["method"]]))
        else:
            assert parts[:3] == ["api", "v1", "namespaces"] and parts[4] == "pods"
            listing = "watch" if "watch=1" in query else "list"
            used.add(("", "pods", {"GET": listing, "PATCH": "patch"}[request["method"]]))
        if request["method"] == "PUT":
            kubernetes_validate.validate(request["body"], VERSIONS[-1], strict=True)
            assert request["content_type"] == "application/json"
        if request["method"] == "PATCH":
            pod = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "a"}]}, **request["body"]}
            kubernetes_validate.validate(pod, VERSIONS[-1], strict=True)
            assert request["content_type"] == "application/merge-patch+json"
    (role,) = of_kind(objects, "Role")
    granted = set()
    for rule in role["rules"]:
        granted |= set(itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"]))
    assert used == granted, f"not granted or not used: {used ^ granted}"
    workloads = {found["metadata"]["name"] for found in of_kind(objects, "Deployment")}
    assert set(role["rules"][0]["resourceNames"]) == workloads, "only the workloads of replicas"
    spoke = next(pod for pod in pods.pods(objects) if pod.role == "spoke")
    config = named_config(objects, spoke)
    derived = {config["scaling"]["name"].replace("{deployment}", name.lower().replace("_", "-").replace(".", "-"))
               for name in ["minilm", "Docs_rerank.v2"]}
    assert derived == workloads, "the names that the spoke derives"
    print(f"actuator: {len(requests)} requests, {len(granted)} permissions")


def named_config(objects, pod):
    import tomllib

    name = next(volume["configMap"]["name"] for volume in pod.spec["volumes"] if "configMap" in volume)
    return tomllib.loads(pods.named(objects, "ConfigMap", name)["data"][pathlib.Path(pod.config()).name])


# Wrong values, and parts of the error, which names the key.
WRONG = [
    ("region.yaml", {"regin": "x"}, ["regin"]),
    ("region.yaml", {"region": "us-east4"}, ["/region"]),
    ("region.yaml", {"jurisdiction": "USA"}, ["/jurisdiction"]),
    ("region.yaml", {"trustDomain": ""}, ["/trustDomain"]),
    ("region.yaml", {"gateway": {"replicas": "two"}}, ["/gateway/replicas", "integer"]),
    ("region.yaml", {"gateway": {"service": {"port": 0}}}, ["/gateway/service/port"]),
    ("region.yaml", {"spoke": {"storage": {"size": "10 GB"}}}, ["/spoke/storage/size"]),
    ("region.yaml", {"identity": {"source": "spire"}}, ["/identity/source", "cert-manager"]),
    ("region.yaml", {"identity": {"secrets": {"spoke": ""}}}, ["identity.secrets.spoke"]),
    ("region.yaml", {"replicas": [{"name": "a"}]}, ["/replicas/0", "model"]),
    ("region.yaml", {"networkPolicy": {"remote": {"hubs": ["hub.example.com"]}}}, ["/networkPolicy/remote/hubs/0"]),
    ("region.yaml", {"hubs": ["http://hub:7000"]}, ["/hubs/0"]),
    ("region.yaml", {"hubs": []}, ["hubs: is empty"]),
    ("region.yaml", {"hub": {"enabled": True}}, ["hubs: has no effect"]),
    ("region.yaml", {"spoke": {"advertise": ["a:1"]}}, ["spoke.advertise: has 1 addresses for 2 spokes"]),
    ("region.yaml", {"spoke": {"actuator": "process"}}, ["spoke.actuator: process"]),
    ("hub-region.yaml", {"hub": {"store": {"kind": "embedded"}}}, ["hub.replicas: 3 hubs need hub.store.kind"]),
    ("hub-region.yaml", {"hub": {"store": {"endpoints": []}}}, ["hub.store.endpoints"]),
    ("hub-region.yaml", {"identity": {"source": "join-tokens"}}, ["hub.replicas: 3 hubs share no authority"]),
    ("hub-region.yaml", {"replicas": [{"name": name, "model": "m", "engine": {"kind": "cpu", "precision": "f32"}}
                                      for name in ["a.b", "A_b"]]}, ["same workload"]),
    ("join-tokens.yaml", {"spoke": {"replicas": 2}}, ["spoke.replicas: 2 spokes"]),
]


def check_wrong_values():
    for name, more, parts in WRONG:
        try:
            pods.rendered(pods.merged(pods.example(name), more))
        except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
            assert all(part in str(error) for part in parts), f"{parts} in {error}"
        else:
            raise AssertionError(f"{name} with {more} is accepted")
    # A key of a configuration file that does not exist is rejected by the process.
    authority = pods.Authority()
    objects = pods.rendered(pods.merged(pods.example("hub-region.yaml"), {"gateway": {"config": {"connection_max": 1}}}))
    try:
        check_configurations("hub-region.yaml", objects, authority)
    except AssertionError as error:
        assert "did you mean connections_max" in str(error), error
    else:
        raise AssertionError("an unknown key of a configuration is accepted")
    print(f"{len(WRONG) + 1} wrong values are rejected")


def main():
    lint = helm_python.lint(str(CHART), pods.example("region.yaml"))
    problems = [found for found in lint["messages"] if found["severity"] > 1]
    assert not problems and not lint["errors"], lint
    authority = pods.Authority()
    for name in EXAMPLES:
        objects = pods.rendered(pods.example(name))
        check_objects(name, objects)
        check_pods(objects)
        check_configurations(name, objects, authority)
        check_network(objects, name == "join-tokens.yaml")
    check_actuator(pods.rendered(pods.example("hub-region.yaml")))
    check_wrong_values()


CHART = pods.CHART
main()
