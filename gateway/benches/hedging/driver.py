"""Hedging benchmark: two regions of 20 ms, of which the primary stalls at random, with and without hedging.

The load is a fixed rate in an open loop. Rounds interleave, and each run starts its own gateway, so that no gateway has
state from an earlier run. Extra attempts are those beyond the first one of each request, by cause, from the gateway's
metrics: a hedged attempt runs beside the first one, an attempt after a timeout replaces it.

The hedging budget is 2 % of the requests. Hedging can therefore hide stalls up to that frequency, and a part of more
frequent ones; the others are left to timeouts and outlier detection.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "proxy"))

import peers  # noqa: E402
from processes import LOAD_CORE, PROXY_CORE, Failed, Process, get  # noqa: E402

CALLERS = 64
REPLICA_MS, STALL_MS = 20, 200
WARM_UP_SECONDS = 1.0
# Stalls per thousand requests: one case within the hedging budget, and one above it.
CASES = (15, 50)
ATTEMPT = re.compile(r'^meridian_gateway_attempts_total\{([^}]*)\} (\d+)$', re.MULTILINE)


def attempts(proxy):
    """Returns the number of attempts by cause, and the number of attempts at the region that stalls."""
    status, text = get(f"http://{proxy.operations}/metrics")
    if status != 200:
        raise Failed("the gateway does not serve its metrics")
    by_cause, of_primary = {}, 0
    for labels, count in ATTEMPT.findall(text):
        labels = dict(one.replace('"', "").split("=", 1) for one in labels.split(","))
        by_cause[labels["cause"]] = by_cause.get(labels["cause"], 0) + int(count)
        of_primary += int(count) if labels["region"] == peers.REGIONS[0] else 0
    return by_cause, of_primary


def measure_run(workspace, permille, hedge, rate, seconds):
    """Runs the load through a new gateway; returns its result and the shares of attempts."""
    upstreams, regions = [peers.address(), peers.address()], []
    try:
        for number, address in enumerate(upstreams):
            command = [os.path.join(workspace.tools, "world"), "upstream", address, str(REPLICA_MS), peers.REGIONS[number]]
            command += ["stalls", str(permille), str(STALL_MS)] if number == 0 else []
            region = Process(f"region-{number}", command, workspace.log(f"region-{number}"), LOAD_CORE)
            regions.append(region)
            region.wait_until(lambda: get(f"http://{address}/health")[0] == 200, "a response")  # noqa: B023
        proxy = peers.meridian(workspace, upstreams, "hedging", more=f"hedge = {str(hedge).lower()}\n")
        regions.append(proxy)
        command = ["taskset", "-c", str(LOAD_CORE), os.path.join(workspace.tools, "load"), "rate", proxy.address]
        command += [str(CALLERS), str(seconds), str(WARM_UP_SECONDS), str(rate), *proxy.headers]
        before, _ = attempts(proxy)
        result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        # The gateway counts the attempts of a request after it has written the response.
        time.sleep(0.2)
        after, of_primary = attempts(proxy)
    finally:
        for one in reversed(regions):
            one.end()
    made = {cause: count - before.get(cause, 0) for cause, count in after.items()}
    extra = {cause: 100 * count / result["sent"] for cause, count in made.items() if cause != "first" and count}
    return {**result, "extra": extra, "stalling": 100 * of_primary / sum(after.values())}


def row(runs):
    median = lambda key: statistics.median(run[key] for run in runs)  # noqa: E731
    causes = sorted({cause for run in runs for cause in run["extra"]})
    extra = {cause: statistics.median(run["extra"].get(cause, 0) for run in runs) for cause in causes}
    shares = ", ".join(f"{cause} {share:.1f}" for cause, share in extra.items()) or "none"
    cells = [f"{median('p50_ms'):.0f}", f"{median('p95_ms'):.0f}", f"{median('p99_ms'):.0f}", f"{median('max_ms'):.0f}"]
    return [*cells, shares, f"{median('stalling'):.0f}", str(sum(run["failed"] for run in runs))]


def main():
    description = "Measures the effect and the cost of hedging."
    parser = argparse.ArgumentParser(prog="gateway/benches/hedging/run", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each run in seconds (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each case (default 3)")
    parser.add_argument("--rate", type=float, default=400.0, help="requests per second (default 400)")
    options = parser.parse_args()
    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    runs = {}
    for _ in range(options.rounds):
        for permille in CASES:
            for hedge in (True, False):
                run = measure_run(workspace, permille, hedge, options.rate, options.seconds)
                runs.setdefault((permille, hedge), []).append(run)
    print(f"{options.rate:.0f} requests/s, regions of {REPLICA_MS} ms; the primary stalls for {STALL_MS} ms")
    heads = ("stalls", "hedging", "p50 ms", "p95 ms", "p99 ms", "max ms", "extra attempts, % of requests")
    print("| " + " | ".join((*heads, "sent to the primary, %", "failed")) + " |")
    print("|---|---|---:|---:|---:|---:|---|---:|---:|")
    for (permille, hedge), results in runs.items():
        print(f"| {permille / 10:g} % | {'on' if hedge else 'off'} | " + " | ".join(row(results)) + " |")


if __name__ == "__main__":
    main()
