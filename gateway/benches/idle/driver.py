"""Idle connection benchmark: memory of a proxy for a keep-alive client connection that waits for its next request.

Each case starts its own process. The process first serves a burst of requests, so that caches, threads and pages of
the allocator exist. Then the connections are opened, each with one small request; the figure is the growth of the
resident memory divided by their number. Then some of the connections send a large request, and finally all are
closed. This shows the memory that connections keep after a large request, and the memory that the process keeps after
all are closed.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "proxy"))

import clients  # noqa: E402
import peers  # noqa: E402
from processes import LOAD_CORE, PROXY_CORE, Failed, Missing, Process, embeds  # noqa: E402

CONNECTIONS_MAX = 15_000
# File descriptors for the proxy's upstream connections and files.
RESERVED_DESCRIPTORS = 500
# Share of the connections that send a large request.
LARGE_SHARE = 0.1
WARM_UP_CONNECTIONS = 64
# Pause between the last request and a measurement, for work after a response (log lines, receipts).
SETTLE_SECONDS = 3
KEEP_SECONDS = 900
KINDS = {"http/1.1": (False, False), "http/1.1 tls": (True, False), "http/2": (False, True), "http/2 tls": (True, True)}
# Kinds of connection in the measurements of the peers.
PEER_KINDS = ("http/1.1", "http/1.1 tls")


def meridian(workspace, upstreams, tls, connections):
    more = f"connections_max = {connections}\nconnections_per_address_max = {connections}\n"
    more += f'[timeouts]\nidle = "{KEEP_SECONDS}s"\n'
    if tls:
        more += f'[tls]\ncertificate = "{tls.certificate}"\nkey = "{tls.key}"\n'
    return peers.meridian(workspace, upstreams, tls=tls, more=more)


def haproxy(workspace, upstreams, tls, connections):
    return peers.haproxy(workspace, upstreams, tls=tls, connections=connections, keep=KEEP_SECONDS)


def nginx(workspace, upstreams, tls, connections):
    # nginx closes idle connections when less than a sixteenth of its connections is free.
    connections += connections // 8
    return peers.nginx(workspace, upstreams, tls=tls, connections=connections, keep=KEEP_SECONDS)


PROXIES = {"meridian": meridian, "haproxy": haproxy, "nginx": nginx}


class Certificate:
    """A self-signed certificate and its key, in two files and in one."""

    def __init__(self, workspace):
        self.certificate, self.key = (os.path.join(workspace.files, name) for name in ("idle.crt", "idle.key"))
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
        made = subprocess.run([*command, "-out", self.certificate, "-keyout", self.key], capture_output=True, check=False)
        if made.returncode != 0:
            raise Failed(made.stderr.decode())
        both = "".join(open(path, encoding="ascii").read() for path in (self.certificate, self.key))
        self.both = workspace.write("idle.pem", both)


def settled(process):
    """Returns the resident memory in bytes after a pause."""
    time.sleep(SETTLE_SECONDS)
    return process.rss_mb() * 1e6


def measure(workspace, name, kind, certificate, upstream, count):
    has_tls, http2 = KINDS[kind]
    tls = certificate if has_tls else None
    proxy = PROXIES[name](workspace, [upstream], tls, count + RESERVED_DESCRIPTORS)
    try:
        def opened(number):
            return clients.open_all(number, proxy.address, proxy.headers, tls, http2)

        first = opened(WARM_UP_CONNECTIONS)
        clients.send_requests(first, clients.LARGE_BODY)
        for one in first:
            one.close()
        before = settled(proxy.process)
        started = time.monotonic()
        kept = opened(count)
        elapsed = time.monotonic() - started
        idle = settled(proxy.process)
        large = kept[: int(count * LARGE_SHARE)]
        clients.send_requests(large, clients.LARGE_BODY)
        after_large = settled(proxy.process)
        for one in kept:
            one.send_request(clients.SMALL_BODY)
            one.close()
        after = settled(proxy.process)
        return {
            "base_mb": before / 1e6,
            "kb": (idle - before) / count / 1e3,
            "large_mb": (after_large - idle) / 1e6,
            "left_mb": (after - before) / 1e6,
            "opened_per_second": count / elapsed,
        }
    finally:
        proxy.end()


def main():
    description = "Measures the memory of idle client connections."
    parser = argparse.ArgumentParser(prog="gateway/benches/idle/run", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", default=",".join(PROXIES), help="comma-separated names of proxies (default: all)")
    parser.add_argument("--kind", default=",".join(KINDS), help="comma-separated kinds of connection (default: all)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS_MAX, help="maximum connections (default 15000)")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(options.connections, hard - RESERVED_DESCRIPTORS)

    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    certificate = Certificate(workspace)
    address = peers.address()
    upstream = Process("upstream", [os.path.join(workspace.tools, "world"), "upstream", address, "0"], workspace.log("upstream"), LOAD_CORE)
    upstream.wait_until(lambda: embeds(address, []), "a response")
    print(f"{LARGE_SHARE:.0%} of the connections send a large request after the first measurement\n")
    heads = ("proxy", "connections", "MB before", "kB per connection", "MB growth after large requests")
    heads += ("MB left after closing", "opened/s")
    print("| " + " | ".join(heads) + " |")
    print("|---|---|" + "---:|" * (len(heads) - 2))
    try:
        for kind in options.kind.split(","):
            for name in options.only.split(","):
                if name != "meridian" and kind not in PEER_KINDS:
                    continue
                # HAProxy starts only if it may open two file descriptors per connection.
                own = min(count, (hard - 2 * RESERVED_DESCRIPTORS) // 2 - RESERVED_DESCRIPTORS) if name == "haproxy" else count
                try:
                    row = measure(workspace, name, kind, certificate, address, own)
                except Missing as missing:
                    print(f"{name} is not installed, skipped; install it with: {missing}", file=sys.stderr)
                    continue
                cells = [name, f"{own} {kind}", f"{row['base_mb']:.0f}", f"{row['kb']:.2f}", f"{row['large_mb']:+.0f}"]
                cells += [f"{row['left_mb']:.0f}", f"{row['opened_per_second']:.0f}"]
                print("| " + " | ".join(cells) + " |", flush=True)
    finally:
        upstream.end()


if __name__ == "__main__":
    main()
