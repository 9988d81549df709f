"""Failover benchmark: two replicas behind a proxy, sixteen clients in a closed loop, and a fault.

Each case starts its own processes, so that no proxy has state from an earlier fault. Each peer runs with two
configurations: that of its package, and one that its users tune for these faults (retries of POST, short timeouts,
outlier detection). Meridian runs twice too, with default configurations: its gateway over two regions, and its
ingress over two replicas.

crash    one replica is killed              freeze   one is stopped: its sockets stay open and accept bytes
slow     one takes 400 ms instead of 20     drain    the proxy is terminated, every replica takes 300 ms
stale    every replica closes a keep-alive connection at the second request, without a response
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "proxy"))

import peers  # noqa: E402
from processes import LOAD_CORE, PROXY_CORE, Failed, Missing, Process, get  # noqa: E402

CALLERS = 16
# Response time in ms of a replica, of a slow replica, and of both replicas in `drain`.
FAST, SLOW, DRAINING = 20, 400, 300
# A response that took longer came from the slow replica.
STALE_REQUESTS = 6

NGINX_TUNED = """proxy_next_upstream error timeout http_502 http_503 non_idempotent;
      proxy_connect_timeout 250ms;
      proxy_read_timeout 1s;"""
HAPROXY_TUNED = """    balance leastconn
    option redispatch
    retries 3
    retry-on conn-failure empty-response response-timeout 502 503
    timeout connect 250ms
    timeout server 1s
    default-server check inter 500ms observe layer7 error-limit 3 on-error mark-down
"""
ENVOY_ROUTE = {
    "timeout": "5s",
    "retry_policy": {
        "retry_on": "connect-failure,refused-stream,reset,5xx",
        "num_retries": 2,
        "per_try_timeout": "1s",
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    },
}
ENVOY_CLUSTER = {
    "outlier_detection": {
        "consecutive_5xx": 3,
        "consecutive_gateway_failure": 3,
        "interval": "1s",
        "base_ejection_time": "5s",
        "max_ejection_percent": 50,
    },
    "circuit_breakers": {"thresholds": [{"max_retries": 128}]},
}


def nginx_tuned(workspace, upstreams):
    return peers.nginx(workspace, upstreams, "nginx-tuned", "max_fails=2 fail_timeout=5s", NGINX_TUNED)


def haproxy_tuned(workspace, upstreams):
    return peers.haproxy(workspace, upstreams, "haproxy-tuned", HAPROXY_TUNED)


def envoy_tuned(workspace, upstreams):
    return peers.envoy(workspace, upstreams, "envoy-tuned", ENVOY_ROUTE, ENVOY_CLUSTER)


def meridian_ingress(workspace, upstreams):
    """Starts the ingress of a region over replicas. Requests have the headers that a gateway sends."""
    listen, hub, name = peers.address(), peers.address(), "meridian-ingress"
    replicas = "".join(f'[[replica]]\nendpoint = "{one}"\n' for one in upstreams)
    config = workspace.write(
        f"{name}.toml",
        f'region = "{peers.REGIONS[0]}"\nlisten = "{listen}"\nadvertise = "{listen}"\nhub = "http://{hub}"\n{replicas}',
    )
    command = [os.path.join(workspace.tools, "world"), "hub", hub, f"{peers.REGIONS[0]}={listen}"]
    helper = Process(f"{name}-hub", command, workspace.log(f"{name}-hub"))
    process = workspace.start(name, [workspace.meridian, "spoke", "--config", config], {"MERIDIAN_LOG": "warn"})
    process.wait_until(lambda: get(f"http://{listen}/readyz")[0] == 200, "readiness")
    # After two rounds of status requests the ingress has the status of both replicas.
    time.sleep(0.5)
    return peers.Proxy(name, listen, process, ["x-meridian-deployment: bench", "x-request-id: bench"], [helper])


def meridian_edge(workspace, upstreams):
    return peers.meridian(workspace, upstreams, "meridian-edge", "warn")


PROXIES = {
    "meridian-edge": meridian_edge,
    "meridian-ingress": meridian_ingress,
    "nginx": peers.nginx,
    "nginx-tuned": nginx_tuned,
    "haproxy": peers.haproxy,
    "haproxy-tuned": haproxy_tuned,
    "envoy": peers.envoy,
    "envoy-tuned": envoy_tuned,
}
# Signals for a graceful shutdown, where it is not SIGTERM.
GRACEFUL_SIGNALS = {"nginx": signal.SIGQUIT, "haproxy": signal.SIGUSR1}


class Setup:
    """Replicas, and a proxy in front of them."""

    def __init__(self, workspace, name, delays_ms, stale=False):
        self.replicas, self.proxy, self.name, self.workspace = [], None, name, workspace
        addresses = [peers.address() for _ in delays_ms]
        for number, (address, delay) in enumerate(zip(addresses, delays_ms)):
            command = [os.path.join(workspace.tools, "world"), "upstream", address, str(delay), peers.REGIONS[number]]
            command += ["stale"] if stale else []
            label = f"replica-{number}"
            self.replicas.append(Process(label, command, workspace.log(label), LOAD_CORE))
        try:
            for replica, address in zip(self.replicas, addresses):
                replica.wait_until(lambda: get(f"http://{address}/health")[0] == 200, "a response")  # noqa: B023
            self.proxy = PROXIES[name](workspace, addresses)
        except (Failed, Missing):
            self.end()
            raise

    def load(self, kind, *numbers):
        command = ["taskset", "-c", str(LOAD_CORE), os.path.join(self.workspace.tools, "load"), kind, self.proxy.address]
        return subprocess.Popen([*command, *map(str, numbers), *self.proxy.headers], stdout=subprocess.PIPE, text=True)

    def end(self):
        for one in (*self.replicas, *([self.proxy] if self.proxy else [])):
            one.end()


def result_of(load):
    output, _ = load.communicate()
    if load.returncode != 0:
        raise Failed(f"the load generator exited with status {load.returncode}")
    return json.loads(output)


def fault(workspace, name, seconds, number):
    """Runs load and sends a signal to one replica after a third of the run; returns the result."""
    setup = Setup(workspace, name, (FAST, FAST))
    try:
        load = setup.load("closed", CALLERS, seconds, 0)
        time.sleep(seconds / 3)
        setup.replicas[0].signal(number)
        return result_of(load)
    finally:
        setup.end()


def crash(workspace, name, seconds):
    result = fault(workspace, name, seconds, signal.SIGKILL)
    return {"failed": result["failed"], "completed": result["completed"], "max ms": round(result["max_ms"])}


def freeze(workspace, name, seconds):
    result = fault(workspace, name, seconds, signal.SIGSTOP)
    row = {"failed": result["failed"], "completed": result["completed"], "p99 ms": round(result["p99_ms"])}
    return {**row, "over 0.5 s": result["over_500_ms"], "max ms": round(result["max_ms"])}


def slow(workspace, name, seconds):
    setup = Setup(workspace, name, (SLOW, FAST))
    try:
        result = result_of(setup.load("closed", CALLERS, seconds, 1))
    finally:
        setup.end()
    share = 100 * result["over_200_ms"] / max(result["completed"], 1)
    row = {"rps": round(result["per_second"]), "% slow": f"{share:.1f}", "failed": result["failed"]}
    return {**row, "p50 ms": round(result["p50_ms"]), "p99 ms": round(result["p99_ms"])}


def drain(workspace, name, _seconds):
    setup = Setup(workspace, name, (DRAINING, DRAINING))
    try:
        load = setup.load("drain", CALLERS, 12)
        time.sleep(2)
        signalled_at = time.time()
        os.kill(setup.proxy.process.process.pid, GRACEFUL_SIGNALS.get(name.split("-")[0], signal.SIGTERM))
        result = result_of(load)
        try:
            setup.proxy.process.process.wait(timeout=15)
            after = round((time.time() - max(result["last_response"], signalled_at)) * 1e3)
            exit_s = f"{time.time() - signalled_at:.1f}"
            row = {"exit after the last response, ms": after, "exit after the signal, s": exit_s}
        except subprocess.TimeoutExpired:
            row = {"exit after the last response, ms": "> 15 s", "exit after the signal, s": "> 15"}
        closed = {"responses with `connection: close`": result["closed"]}
        return {"completed": result["completed"], "lost": result["lost"], **closed, **row}
    finally:
        setup.end()


def stale(workspace, name, _seconds):
    setup = Setup(workspace, name, (0, 0), stale=True)
    try:
        host, port = setup.proxy.address.split(":")
        statuses = []
        for _ in range(STALE_REQUESTS):
            client = http.client.HTTPConnection(host, int(port), timeout=5)
            headers = {"content-type": "application/json", **dict(one.split(": ", 1) for one in setup.proxy.headers)}
            try:
                client.request("POST", "/v1/embeddings", b'{"model":"bench","input":"x"}', headers)
                statuses.append(str(client.getresponse().status))
            except OSError as error:
                statuses.append(type(error).__name__)
            client.close()
        return {"statuses": " ".join(statuses)}
    finally:
        setup.end()


CASES = {"crash": crash, "freeze": freeze, "slow": slow, "drain": drain, "stale": stale}


def table(case, rows):
    heads = list(next(iter(rows.values())))
    print(f"\n| {case} | " + " | ".join(heads) + " |\n|---|" + "---:|" * len(heads))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(str(row[head]) for head in heads) + " |")


def main():
    description = "Measures requests through a proxy during faults."
    parser = argparse.ArgumentParser(prog="gateway/benches/failover/run", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", default=",".join(PROXIES), help="comma-separated names of proxies (default: all)")
    parser.add_argument("--case", default=",".join(CASES), help="comma-separated cases (default: all)")
    parser.add_argument("--seconds", type=float, default=9.0, help="seconds of crash, freeze and slow (default 9)")
    parser.add_argument("--quick", action="store_true", help="five seconds, and of the peers only the tuned ones")
    options = parser.parse_args()
    names, cases = options.only.split(","), options.case.split(",")
    unknown = [one for one in names if one not in PROXIES] + [one for one in cases if one not in CASES]
    if unknown:
        raise SystemExit(f"unknown proxy or case {unknown[0]}; use {', '.join([*PROXIES, *CASES])}")
    seconds = 5.0 if options.quick else options.seconds
    if options.quick:
        names = [name for name in names if f"{name}-tuned" not in PROXIES]
    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    report = {}
    for case in cases:
        rows = {}
        for name in names:
            try:
                rows[name] = CASES[case](workspace, name, seconds)
            except Missing as missing:
                print(f"{name} is not installed, skipped; install it with: {missing}", file=sys.stderr)
            except Failed as failed:
                print(f"{name}, {case}: {failed}", file=sys.stderr)
        if rows:
            table(case, rows)
            sys.stdout.flush()
        report[case] = rows
    with open(os.path.join(workspace.made, "failover.json"), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
