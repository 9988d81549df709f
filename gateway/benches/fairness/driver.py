"""The fairness bench: a tenant within its limits, alone and beside one that asks twenty times what it may.

Rounds interleave, alone and beside, behind the same edge; the figure is the median of the rounds' own ratios. The edge has a
core for itself. Who asks and who answers share the other one, and there the aggressor's load generator runs only when
nobody else wants to (SCHED_IDLE): what it costs to make its requests is not to be taken for what they cost the neighbour.

What a refusal costs is the edge's processor time while only the aggressor asks, less what those which were let in cost.
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
from processes import Failed, Process, busy_seconds, get  # noqa: E402

CALLERS = 16
LOAD_CORE, PROXY_CORE = 0, 1
WARM_UP_SECONDS = 0.5
# Requests a second: of the neighbour, that the aggressor may, and that it makes.
NEIGHBOUR, LIMIT, TIMES = 400, 100, 20
AGGRESSOR_KEY = "aggressor-key"


class Load:
    """A load generator; an aggressor's gives way to everybody on its core."""

    def __init__(self, place, proxy, headers, rate, seconds, warm_up, gives_way=False):
        command = ["taskset", "-c", str(LOAD_CORE), *(["chrt", "--idle", "0"] if gives_way else [])]
        command += [os.path.join(place.tools, "load"), "rate", proxy.address]
        command += [str(CALLERS), str(seconds), str(warm_up), str(rate), *headers]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def seen(self):
        output, _ = self.process.communicate()
        if self.process.returncode != 0:
            raise Failed(f"the load generator ended with {self.process.returncode}")
        # One that is not served in time works off what it owes: then it lasts longer.
        return {**json.loads(output), "lasted": time.monotonic() - self.began}


def turn(place, proxy, seconds, beside):
    """What the neighbour saw, and what the aggressor did."""
    aggressor = None
    if beside:
        rate = TIMES * LIMIT
        aggressor = Load(place, proxy, [f"authorization: Bearer {AGGRESSOR_KEY}"], rate, seconds + 1.5, 0, True)
        # The burst that its limit allows is over by then.
        time.sleep(1)
    neighbour = Load(place, proxy, proxy.headers, NEIGHBOUR, seconds, WARM_UP_SECONDS).seen()
    return neighbour, aggressor.seen() if aggressor else None


def refusal_us(place, proxy, seconds):
    """Processor time of the edge for each refusal."""
    def used(headers, rate):
        before = proxy.process.cpu_seconds()
        seen = Load(place, proxy, headers, rate, seconds, 0).seen()
        return proxy.process.cpu_seconds() - before, seen

    let_in, seen = used(proxy.headers, LIMIT)
    each = let_in / seen["sent"]
    cpu, seen = used([f"authorization: Bearer {AGGRESSOR_KEY}"], 4 * TIMES * LIMIT)
    return (cpu - each * seen["completed"]) / max(seen["failed"], 1) * 1e6, seen["failed"] / seen["lasted"]


def measured(place, delay_ms, seconds, rounds):
    upstream = peers.address()
    command = [os.path.join(place.tools, "world"), "upstream", upstream, str(delay_ms), peers.REGIONS[0]]
    region = Process("region", command, place.log("region"), LOAD_CORE)
    proxy = None
    try:
        region.until(lambda: get(f"http://{upstream}/health")[0] == 200, "an answer")
        key = place.write("aggressor.key", AGGRESSOR_KEY)
        limits = f"limits = {{ requests_per_second = {LIMIT} }}"
        tenant = f'[[tenant]]\nname = "aggressor"\nkey_file = "{key}"\n{limits}\n'
        proxy = peers.meridian(place, [upstream], "fairness", more_tenants=tenant)
        turn(place, proxy, 1.0, False)
        pairs, busy = [], busy_seconds()
        began = time.monotonic()
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            found = {beside: turn(place, proxy, seconds, beside) for beside in order}
            pairs.append((found[False][0], *found[True]))
        cost = refusal_us(place, proxy, 2.0)
        return pairs, cost, (busy_seconds() - busy) / (time.monotonic() - began)
    finally:
        for one in (proxy, region):
            if one:
                one.end()


def main():
    parser = argparse.ArgumentParser(prog="gateway/benches/fairness/run", description="What an aggressor does to others.")
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="alone and beside (default 5)")
    parser.add_argument("--replica-ms", default="20,2", help="what a replica needs, by comma (default 20,2)")
    options = parser.parse_args()
    place = peers.Place(options.made, options.tools, options.meridian, PROXY_CORE)
    print(f"a neighbour of {NEIGHBOUR} requests a second; an aggressor that may {LIMIT} and makes {TIMES * LIMIT}")
    print("| replica ms | p50 alone | beside | p99 alone | beside | p99, median of ratios | of the rounds | aggressor let in, refused /s | lost |")
    print("|---:|---:|---:|---:|---:|---:|---|---|---:|")
    for delay_ms in options.replica_ms.split(","):
        pairs, (cost_us, refused), busy = measured(place, delay_ms, options.seconds, options.rounds)
        middle = lambda of: statistics.median(of(pair) for pair in pairs)  # noqa: E731
        ratios = [beside["p99_ms"] / alone["p99_ms"] for alone, beside, _ in pairs]
        cells = [delay_ms, f"{middle(lambda p: p[0]['p50_ms']):.2f}", f"{middle(lambda p: p[1]['p50_ms']):.2f}"]
        cells += [f"{middle(lambda p: p[0]['p99_ms']):.2f}", f"{middle(lambda p: p[1]['p99_ms']):.2f}"]
        cells += [f"{statistics.median(ratios):.3f}", " ".join(f"{ratio:.2f}" for ratio in ratios)]
        through, turned = (middle(lambda p, key=key: p[2][key] / p[2]["lasted"]) for key in ("completed", "failed"))
        cells += [f"{through:.0f}, {turned:.0f}", str(sum(a["failed"] + b["failed"] for a, b, _ in pairs))]
        print("| " + " | ".join(cells) + " |")
        print(f"  a refusal costs the edge {cost_us:.0f} µs ({refused:.0f} a second); the machine was {busy:.1f} cores busy", file=sys.stderr)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
