"""Tenant isolation benchmark: a tenant within its limits, alone and beside a tenant at twenty times its limit.

Rounds interleave, alone and beside, behind the same gateway; the figure is the median of the ratios of each round. The
gateway has one core; load generators and upstream share the other. The aggressor's load generator runs at idle priority
(SCHED_IDLE), so that the cost of generating its requests does not count as an effect on the neighbour.

The cost of a rejection is the CPU time of the gateway while only the aggressor sends requests, minus the cost of the
admitted requests.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "proxy"))

import peers  # noqa: E402
from processes import LOAD_CORE, PROXY_CORE, Failed, Process, busy_seconds, get  # noqa: E402

CALLERS = 16
WARM_UP_SECONDS = 0.5
# Requests per second of the neighbour, limit of the aggressor, and rate of the aggressor as a multiple of its limit.
NEIGHBOUR, LIMIT, TIMES = 400, 100, 20
AGGRESSOR_KEY = "aggressor-key"


class Load:
    """Running load generator, for an aggressor at idle priority."""

    def __init__(self, workspace, proxy, headers, rate, seconds, warm_up, is_aggressor=False):
        command = ["taskset", "-c", str(LOAD_CORE), *(["chrt", "--idle", "0"] if is_aggressor else [])]
        command += [os.path.join(workspace.tools, "load"), "rate", proxy.address]
        command += [str(CALLERS), str(seconds), str(warm_up), str(rate), *headers]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def result(self):
        output, _ = self.process.communicate()
        if self.process.returncode != 0:
            raise Failed(f"the load generator exited with status {self.process.returncode}")
        # After slow responses a generator still sends its overdue requests, so the run takes longer than scheduled.
        return {**json.loads(output), "elapsed": time.monotonic() - self.started}


def measure_run(workspace, proxy, seconds, beside):
    """Runs the load; returns the result of the neighbour, and that of the aggressor if there is one."""
    aggressor = None
    if beside:
        rate = TIMES * LIMIT
        aggressor = Load(workspace, proxy, [f"authorization: Bearer {AGGRESSOR_KEY}"], rate, seconds + 1.5, 0, True)
        # By then the aggressor has used the burst of its rate limit.
        time.sleep(1)
    neighbour = Load(workspace, proxy, proxy.headers, NEIGHBOUR, seconds, WARM_UP_SECONDS).result()
    return neighbour, aggressor.result() if aggressor else None


def rejection_us(workspace, proxy, seconds):
    """Returns the CPU time of the gateway per rejection in µs, and rejections per second."""
    def used(headers, rate):
        before = proxy.process.cpu_seconds()
        result = Load(workspace, proxy, headers, rate, seconds, 0).result()
        return proxy.process.cpu_seconds() - before, result

    admitted, result = used(proxy.headers, LIMIT)
    each = admitted / result["sent"]
    cpu, result = used([f"authorization: Bearer {AGGRESSOR_KEY}"], 4 * TIMES * LIMIT)
    return (cpu - each * result["completed"]) / max(result["failed"], 1) * 1e6, result["failed"] / result["elapsed"]


def measure_case(workspace, delay_ms, seconds, rounds):
    upstream = peers.address()
    command = [os.path.join(workspace.tools, "world"), "upstream", upstream, str(delay_ms), peers.REGIONS[0]]
    region = Process("region", command, workspace.log("region"), LOAD_CORE)
    proxy = None
    try:
        region.wait_until(lambda: get(f"http://{upstream}/health")[0] == 200, "a response")
        key = workspace.write("aggressor.key", AGGRESSOR_KEY)
        limits = f"limits = {{ requests_per_second = {LIMIT} }}"
        tenant = f'[[tenant]]\nname = "aggressor"\nkey_file = "{key}"\n{limits}\n'
        proxy = peers.meridian(workspace, [upstream], "fairness", more_tenants=tenant)
        measure_run(workspace, proxy, 1.0, False)
        pairs, busy = [], busy_seconds()
        started = time.monotonic()
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            results = {beside: measure_run(workspace, proxy, seconds, beside) for beside in order}
            pairs.append((results[False][0], *results[True]))
        cost = rejection_us(workspace, proxy, 2.0)
        return pairs, cost, (busy_seconds() - busy) / (time.monotonic() - started)
    finally:
        for one in (proxy, region):
            if one:
                one.end()


def main():
    description = "Measures the effect of an aggressor on another tenant."
    parser = argparse.ArgumentParser(prog="gateway/benches/fairness/run", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each run in seconds (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each alone and beside (default 5)")
    parser.add_argument("--replica-ms", default="20,2", help="response times of a replica in ms (default 20,2)")
    options = parser.parse_args()
    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    print(f"neighbour: {NEIGHBOUR} requests/s; aggressor: {TIMES * LIMIT} requests/s with a limit of {LIMIT}")
    heads = ("replica ms", "p50 alone", "p50 beside", "p99 alone", "p99 beside", "p99 ratio, median")
    heads += ("p99 ratio of each round", "aggressor: admitted, rejected per second", "failed")
    print("| " + " | ".join(heads) + " |")
    print("|---:|---:|---:|---:|---:|---:|---|---|---:|")
    for delay_ms in options.replica_ms.split(","):
        pairs, (cost_us, rejected), busy = measure_case(workspace, delay_ms, options.seconds, options.rounds)
        median = lambda of: statistics.median(of(pair) for pair in pairs)  # noqa: E731
        ratios = [beside["p99_ms"] / alone["p99_ms"] for alone, beside, _ in pairs]
        cells = [delay_ms, f"{median(lambda p: p[0]['p50_ms']):.2f}", f"{median(lambda p: p[1]['p50_ms']):.2f}"]
        cells += [f"{median(lambda p: p[0]['p99_ms']):.2f}", f"{median(lambda p: p[1]['p99_ms']):.2f}"]
        cells += [f"{statistics.median(ratios):.3f}", " ".join(f"{ratio:.2f}" for ratio in ratios)]
        rates = [median(lambda p, key=key: p[2][key] / p[2]["elapsed"]) for key in ("completed", "failed")]
        cells += [", ".join(f"{rate:.0f}" for rate in rates), str(sum(a["failed"] + b["failed"] for a, b, _ in pairs))]
        print("| " + " | ".join(cells) + " |")
        cost = f"CPU time of the gateway per rejection: {cost_us:.0f} µs ({rejected:.0f} rejections/s)"
        print(f"  {cost}; busy cores of the machine: {busy:.1f}", file=sys.stderr)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
