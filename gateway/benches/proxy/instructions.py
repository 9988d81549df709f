#!/usr/bin/env python3
"""Instructions per request in Meridian's gateway, without traces and with them, counted by callgrind.

CPU time on a virtual machine varies by more than the traces of 1 % of the requests cost, also between two processes with
the same configuration. Instructions do not depend on the load of the machine. Those of the kernel are not counted, and
SHA-256 is computed without the instructions of the processor for it, which valgrind does not support.

    gateway/benches/proxy/instructions.py --meridian target/release/meridian --tools target/proxies/tools/release
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile

import peers
import processes
from processes import LOAD_CORE, Process

VARIANTS = {"none": peers.meridian, "1 %": peers.meridian_traced_1, "100 %": peers.meridian_traced_100}
CALLERS = 4
# Requests before the counters are set to zero: connections are open and caches are warm.
WARM_UP_SECONDS = 3
# Valgrind runs the gateway some fifty times slower.
processes.START_SECONDS = 300


def output(workspace, name):
    """Returns the path of callgrind's output; it expands percent signs."""
    return os.path.join(workspace.files, re.sub(r"[^a-z0-9]+", "-", name) + "callgrind")


class Workspace(peers.Workspace):
    """Starts programs under callgrind."""

    def start(self, name, command, environment=None):
        callgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={output(self, name)}"]
        return Process(name, [*callgrind, *command], self.log(name), self.core, environment)


def requests(proxy):
    """Returns the number of requests that have ended at a gateway."""
    return peers.counted(proxy, "meridian_gateway_requests_total")


def load(workspace, proxy, seconds):
    command = ["taskset", "-c", str(LOAD_CORE), os.path.join(workspace.tools, "load"), "closed", proxy.address]
    command += [str(CALLERS), str(seconds), "0", *proxy.headers]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if result["failed"]:
        raise processes.Failed(f"{result['failed']} requests failed")


def measure(workspace, proxy, name, seconds):
    """Returns the instructions per request."""
    process = str(proxy.process.tree()[0])
    load(workspace, proxy, WARM_UP_SECONDS)
    before = requests(proxy)
    proxy.process.resume()
    control = lambda option: subprocess.run(["callgrind_control", option, process], check=True, capture_output=True)
    control("--zero")
    load(workspace, proxy, seconds)
    control("--dump")
    with open(output(workspace, name) + ".1", encoding="utf-8") as file:
        instructions = int(re.search(r"^(?:summary|totals): (\d+)", file.read(), re.MULTILINE).group(1))
    return instructions / (requests(proxy) - before)


def main():
    parser = argparse.ArgumentParser(description="Counts the instructions per request in Meridian's gateway.")
    parser.add_argument("--meridian", required=True, help="program of the release profile")
    parser.add_argument("--tools", required=True, help="folder with the tools of this benchmark")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each run in seconds (default 10)")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        raise SystemExit("valgrind is not installed; install it with: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as made:
        workspace = Workspace(made, options.tools, options.meridian, processes.PROXY_CORE)
        address = peers.address()
        upstream = peers.embedding_upstream(workspace, address)
        try:
            base = None
            print("| traces | thousand instructions/request | of none |\n|---|---:|---:|")
            for traces, begin in VARIANTS.items():
                proxy = begin(workspace, [address])
                try:
                    counted = measure(workspace, proxy, proxy.name, options.seconds)
                finally:
                    proxy.end()
                base = base or counted
                print(f"| {traces} | {counted / 1000:.1f} | {counted / base:.3f} |", flush=True)
        finally:
            upstream.end()


if __name__ == "__main__":
    main()
