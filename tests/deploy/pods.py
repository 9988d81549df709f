"""Pods of the chart without a cluster: rendering, and the files that a pod sees at its mount paths."""

import datetime
import pathlib

import helm_python
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

REPOSITORY = pathlib.Path(__file__).parents[2]
DEPLOY = REPOSITORY / "configs/deploy"
CHART = DEPLOY / "helm/meridian"
NAMESPACE = "meridian"


def example(name):
    """Returns the values of an example."""
    return yaml.safe_load((DEPLOY / "helm/examples" / name).read_text())


def merged(values, more):
    """Returns values with further ones, as `helm --set` does."""
    both = dict(values)
    for key, value in more.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def rendered(values):
    """Returns the objects of the chart."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="meridian", namespace=NAMESPACE)
    texts = [files[name] for name in sorted(files) if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def of_kind(objects, *kinds):
    return [found for found in objects if found["kind"] in kinds]


def named(objects, kind, name):
    (found,) = [found for found in of_kind(objects, kind) if found["metadata"]["name"] == name]
    return found


class Authority:
    """Certificate authority in place of cert-manager."""

    def __init__(self):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.certificate = self._signed(self.name, self.key.public_key(), [
            (x509.BasicConstraints(ca=True, path_length=None), True)])

    def _signed(self, name, key, extensions):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder(
            issuer_name=self.name, subject_name=name, public_key=key, serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(minutes=5), not_valid_after=now + datetime.timedelta(days=7))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, hashes.SHA256())

    def secret(self, uris=(), names=()):
        """Returns the files of a secret: tls.crt, tls.key, ca.crt."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.UniformResourceIdentifier(uri) for uri in uris] + [x509.DNSName(name) for name in names]
        certificate = self._signed(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "process")]), key.public_key(), [
            (x509.SubjectAlternativeName(alternatives), False),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False)])
        pem = serialization.Encoding.PEM
        return {
            "tls.crt": certificate.public_bytes(pem),
            "tls.key": key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
            "ca.crt": self.certificate.public_bytes(pem),
        }


class Pod:
    """Pod of a workload."""

    def __init__(self, workload, number=0):
        self.role = workload["metadata"]["labels"]["app.kubernetes.io/component"]
        is_set = workload["kind"] == "StatefulSet"
        self.name = f"{workload['metadata']['name']}-{number if is_set else 'x'}"
        self.template = workload["spec"]["template"]
        self.spec = self.template["spec"]
        (self.container,) = self.spec["containers"]

    def arguments(self):
        arguments = self.container["args"]
        return [argument.replace("$(POD_NAME)", self.name) for argument in arguments]

    def environment(self):
        given = self.container.get("env", [])
        return {variable["name"]: variable["value"] for variable in given if "value" in variable}

    def config(self):
        """Returns the path of the configuration in the pod."""
        arguments = self.arguments()
        return arguments[arguments.index("--config") + 1]

    def mount(self, root, objects, secrets):
        """Writes the files of the volumes below a root directory."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        claims = ["data"] if "data" not in volumes else []
        for mount in self.container["volumeMounts"]:
            at = root / mount["mountPath"].lstrip("/")
            at.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(mount["name"], {})
            assert volume or mount["name"] in claims, f"{mount} of {self.name} has no volume"
            if "configMap" in volume:
                files = named(objects, "ConfigMap", volume["configMap"]["name"])["data"]
            elif "secret" in volume:
                files = secrets.get(volume["secret"]["secretName"])
                assert files is not None or volume["secret"].get("optional"), f"no secret {volume['secret']}"
            else:
                files = {}
            for name, content in (files or {}).items():
                (at / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pods(objects):
    """Returns a pod of each Deployment, and all pods of each StatefulSet."""
    found = []
    for workload in of_kind(objects, "Deployment", "StatefulSet"):
        count = workload["spec"]["replicas"] if workload["kind"] == "StatefulSet" else 1
        found += [Pod(workload, number) for number in range(count)]
    return found


def issued(objects, authority):
    """Returns the secrets of the Certificate objects, as cert-manager writes them."""
    certificates = [found["spec"] for found in of_kind(objects, "Certificate")]
    return {spec["secretName"]: authority.secret(uris=spec["uris"]) for spec in certificates}
