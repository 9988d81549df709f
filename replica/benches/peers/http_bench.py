"""HTTP part of the bench: compares our replica with Infinity, using one closed-loop load generator for both.

Each server runs alone: the others are stopped with SIGSTOP, so that all stay warm and rounds are interleaved. A request
is an OpenAI embeddings request with one short text. The generator is `peers load` of our side.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

CALLERS = (1, 32, 256)
TEXTS = 2048
START_SECONDS = 120


class Server:
    """Server process with /v1/embeddings on a separate port, stopped while another server is measured."""

    def __init__(self, name, command, port, ready_path, embed_path, model, log, environment=None):
        self.name, self.port, self.embed_path, self.model = name, port, embed_path, model
        self.log = open(log, "w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.wait_until_ready(ready_path)
        self.pause()

    def wait_until_ready(self, path):
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} exited with status {self.process.returncode}; see {self.log.name}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        self.end()
        raise SystemExit(f"{self.name} is not ready after {START_SECONDS} s; see {self.log.name}")

    def vectors(self, texts):
        """Returns the vectors of `texts`, for the comparison before the load."""
        self.resume()
        body = json.dumps({"model": self.model, "input": texts}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{self.embed_path}", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            rows = json.load(response)["data"]
        self.pause()
        return [row["embedding"] for row in sorted(rows, key=lambda row: row["index"])]

    def load(self, generator, bodies, callers, seconds):
        self.resume()
        command = [generator, "load", f"127.0.0.1:{self.port}", self.embed_path, bodies, str(callers), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.pause()
        if done.returncode != 0:
            raise SystemExit(f"{self.name}, {callers} callers: {done.stderr}")
        return json.loads(done.stdout)

    def pause(self):
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self):
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self):
        if self.process.poll() is None:
            self.resume()
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def replica(options, model, precision):
    port = free_port()
    config = os.path.join(options.made, f"replica-{precision}.toml")
    with open(config, "w", encoding="utf-8") as file:
        file.write(f'listen = "127.0.0.1:{port}"\nnames = ["bench"]\nmodel = "{model}"\n')
        file.write(f'engine = {{ kind = "cpu", precision = "{precision}" }}\n[threads]\nengine = {options.threads}\n')
    command = [options.meridian, "replica", "--config", config]
    log = os.path.join(options.made, f"replica-{precision}.log")
    return Server(f"meridian-{precision}", command, port, "/health", "/v1/embeddings", "bench", log)


def infinity(options, model_folder, engine):
    port = free_port()
    command = [os.path.join(os.path.dirname(sys.executable), "infinity_emb"), "v2", "--model-id", model_folder]
    command += ["--served-model-name", "bench", "--engine", engine, "--device", "cpu", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--url-prefix", "/v1", "--log-level", "warning"]
    threads = str(options.threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "RAYON_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    }
    log = os.path.join(options.made, f"infinity-{engine}.log")
    return Server(f"infinity-{engine}", command, port, "/health", "/v1/embeddings", "bench", log, environment)


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def write_bodies(options, texts):
    path = os.path.join(options.made, "bodies.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"model": "bench", "input": text}) + "\n")
    return path


def run(options, model, model_folder, texts):
    seconds, rounds = (3, 1) if options.quick else (6, 3)
    chosen = texts.short(TEXTS)
    bodies = write_bodies(options, chosen)
    servers = []
    try:
        for precision in options.precision.split(","):
            servers.append(replica(options, model, precision))
        servers.append(infinity(options, model_folder, "torch"))
        reference = servers[0].vectors(chosen[:16])
        for server in servers[1:]:
            worst = min(cosine(a, b) for a, b in zip(reference, server.vectors(chosen[:16]), strict=True))
            wanted = 0.9 if server.name.endswith("int8") else 0.999
            if worst < wanted:
                raise SystemExit(f"{server.name} disagrees with {servers[0].name}: cosine {worst:.4f}")
        rows = []
        for callers in CALLERS:
            measured = {server.name: [] for server in servers}
            for turn in range(rounds):
                begin = turn % len(servers)
                for server in servers[begin:] + servers[:begin]:
                    measured[server.name].append(server.load(options.ours, bodies, callers, seconds))
            ours = measured[servers[0].name]
            for name, figures in measured.items():
                row = {"server": name, "callers": callers}
                for key in ("per_second", "p50_ms", "p99_ms"):
                    row[key] = statistics.median(one[key] for one in figures)
                if name != servers[0].name:
                    pairs = zip(ours, figures)
                    row["ratio"] = statistics.median(mine["per_second"] / its["per_second"] for mine, its in pairs)
                rows.append(row)
        return {"text": "short, one a request", "seconds": seconds, "rounds": rounds, "rows": rows}
    finally:
        for server in servers:
            server.end()
