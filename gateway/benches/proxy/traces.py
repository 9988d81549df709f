#!/usr/bin/env python3
"""CPU time per request in Meridian's gateway, without traces and with them, of several gateways of each kind.

On a virtual machine, the CPU time of two gateways with the same configuration differs by more than the traces of 1 % of
the requests cost. So this benchmark runs several gateways of each kind, in many short interleaved rounds, and prints the
standard error of the ratio, and the gateways of each kind.

    gateway/benches/proxy/traces.py --meridian target/release/meridian --tools target/proxies/tools/release
"""

import argparse
import math
import statistics
import tempfile

import peers
from driver import CALLERS, FOREIGN_MAX, measure_run
from processes import PROXY_CORE

# Share of the requests of each kind of gateway; none records no traces.
KINDS = {"none": None, "1 %": 0.01, "100 %": 1.0}
WARM_UP_SECONDS = 0.15


def start(workspace, address, kind, number):
    name, ratio = f"{kind} {number}".replace("%", "percent"), KINDS[kind]
    if ratio is None:
        proxy = peers.meridian(workspace, [address], name)
    else:
        proxy = peers.meridian_traced(workspace, [address], ratio, name)
    proxy.process.pause()
    return proxy


def main():
    parser = argparse.ArgumentParser(description="Measures the CPU time of traces in Meridian's gateway.")
    parser.add_argument("--meridian", required=True, help="program of the release profile")
    parser.add_argument("--tools", required=True, help="folder with the tools of this benchmark")
    parser.add_argument("--gateways", type=int, default=3, help="gateways of each kind (default 3)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds (default 40)")
    parser.add_argument("--seconds", type=float, default=0.4, help="duration of each run in seconds (default 0.4)")
    options = parser.parse_args()
    started, runs = [], {kind: [[] for _ in range(options.gateways)] for kind in KINDS}
    with tempfile.TemporaryDirectory() as made:
        workspace = peers.Workspace(made, options.tools, options.meridian, PROXY_CORE)
        address = peers.address()
        upstream = peers.embedding_upstream(workspace, address)
        try:
            for number in range(options.gateways):
                started += [(kind, number, start(workspace, address, kind, number)) for kind in KINDS]
            for turn in range(options.rounds):
                begin = turn % len(started)
                for kind, number, proxy in started[begin:] + started[:begin]:
                    run = measure_run(workspace, proxy, upstream, "closed", CALLERS, options.seconds, WARM_UP_SECONDS)
                    runs[kind][number].append(run)
            dropped = sum(peers.spans(proxy)[1] for kind, _, proxy in started if KINDS[kind] is not None)
        finally:
            for _, _, proxy in started:
                proxy.end()
            upstream.end()

    failed = sum(run["failed"] for gateways in runs.values() for gateway in gateways for run in gateway)
    disturbed = sum(run["foreign"] > FOREIGN_MAX for gateways in runs.values() for gateway in gateways for run in gateway)
    mean = lambda kind, turn: statistics.mean(gateway[turn]["cpu_us"] for gateway in runs[kind])
    print("| traces | CPU µs/request | each gateway | of none | standard error |\n|---|---:|---|---:|---:|")
    for kind, gateways in runs.items():
        ratios = [mean(kind, turn) / mean("none", turn) for turn in range(options.rounds)]
        each = [statistics.median(run["cpu_us"] for run in gateway) for gateway in gateways]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        shown = ", ".join(f"{one:.1f}" for one in each)
        print(f"| {kind} | {statistics.median(each):.1f} | {shown} | {statistics.median(ratios):.3f} | {error:.3f} |")
    total = len(KINDS) * options.gateways * options.rounds
    print(f"\n{total} runs of {options.seconds:g} s, {disturbed} of them disturbed; {failed} requests failed; dropped spans: {dropped}")


if __name__ == "__main__":
    main()
