"""The hedging bench: two regions of 20 ms, of which the nearest stalls now and then, with hedging and without.

So many requests a second, whatever the answers do. Rounds interleave, and each has an edge of its own, so that none begins
with what another has learnt. What is counted as extra is every attempt beyond one for each request, by the edge's own
count, with its cause: a hedge is asked beside the first, a late attempt instead of it.

Hedging may cost two requests of a hundred. So it can hide stalls that are as rare as that, and of those that are more
frequent only a part; the rest is left to whatever finds out that a region is not well.
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
from processes import Failed, Process, get  # noqa: E402

CALLERS = 64
LOAD_CORE, PROXY_CORE = 0, 1
REPLICA_MS, STALL_MS = 20, 200
WARM_UP_SECONDS = 1.0
# Stalls of a thousand requests: fewer than the budget of hedges pays for, and more.
CASES = (15, 50)
ATTEMPT = re.compile(r'^meridian_gateway_attempts_total\{([^}]*)\} (\d+)$', re.MULTILINE)


def attempts(proxy):
    """How many attempts there were, by cause, and those of the region that stalls."""
    status, text = get(f"http://{proxy.operations}/metrics")
    if status != 200:
        raise Failed("the edge does not tell its metrics")
    by_cause, of_first = {}, 0
    for labels, count in ATTEMPT.findall(text):
        labels = dict(one.replace('"', "").split("=", 1) for one in labels.split(","))
        by_cause[labels["cause"]] = by_cause.get(labels["cause"], 0) + int(count)
        of_first += int(count) if labels["region"] == peers.REGIONS[0] else 0
    return by_cause, of_first


def turn(place, permille, hedge, rate, seconds):
    """One run behind an edge of its own."""
    upstreams, regions = [peers.address(), peers.address()], []
    try:
        for number, address in enumerate(upstreams):
            command = [os.path.join(place.tools, "world"), "upstream", address, str(REPLICA_MS), peers.REGIONS[number]]
            command += ["stalls", str(permille), str(STALL_MS)] if number == 0 else []
            region = Process(f"region-{number}", command, place.log(f"region-{number}"), LOAD_CORE)
            regions.append(region)
            region.until(lambda: get(f"http://{address}/health")[0] == 200, "an answer")  # noqa: B023
        proxy = peers.meridian(place, upstreams, "hedging", more=f"hedge = {str(hedge).lower()}\n")
        regions.append(proxy)
        command = ["taskset", "-c", str(LOAD_CORE), os.path.join(place.tools, "load"), "rate", proxy.address]
        command += [str(CALLERS), str(seconds), str(WARM_UP_SECONDS), str(rate), *proxy.headers]
        before, _ = attempts(proxy)
        seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        # The last accounts are closed when their answers are written.
        time.sleep(0.2)
        after, of_first = attempts(proxy)
    finally:
        for one in reversed(regions):
            one.end()
    made = {cause: count - before.get(cause, 0) for cause, count in after.items()}
    extra = {cause: 100 * count / seen["sent"] for cause, count in made.items() if cause != "first" and count}
    return {**seen, "extra": extra, "stalling": 100 * of_first / sum(after.values())}


def row(runs):
    middle = lambda key: statistics.median(run[key] for run in runs)  # noqa: E731
    causes = sorted({cause for run in runs for cause in run["extra"]})
    extra = {cause: statistics.median(run["extra"].get(cause, 0) for run in runs) for cause in causes}
    told = ", ".join(f"{cause} {share:.1f}" for cause, share in extra.items()) or "none"
    cells = [f"{middle('p50_ms'):.0f}", f"{middle('p95_ms'):.0f}", f"{middle('p99_ms'):.0f}", f"{middle('max_ms'):.0f}"]
    return [*cells, told, f"{middle('stalling'):.0f}", str(sum(run["failed"] for run in runs))]


def main():
    parser = argparse.ArgumentParser(prog="gateway/benches/hedging/run", description="What hedging does and costs.")
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second (default 400)")
    options = parser.parse_args()
    place = peers.Place(options.made, options.tools, options.meridian, PROXY_CORE)
    runs = {}
    for _ in range(options.rounds):
        for permille in CASES:
            for hedge in (True, False):
                runs.setdefault((permille, hedge), []).append(turn(place, permille, hedge, options.rate, options.seconds))
    print(f"{options.rate:.0f} requests a second, regions of {REPLICA_MS} ms; the nearest stalls for {STALL_MS} ms")
    print("| stalls | hedging | p50 ms | p95 ms | p99 ms | max ms | extra attempts, % of requests | asked there, % | failed |")
    print("|---|---|---:|---:|---:|---:|---|---:|---:|")
    for (permille, hedge), found in runs.items():
        print(f"| {permille / 10:g} % | {'on' if hedge else 'off'} | " + " | ".join(row(found)) + " |")


if __name__ == "__main__":
    main()
