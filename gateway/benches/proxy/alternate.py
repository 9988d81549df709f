#!/usr/bin/env python3
"""CPU time per request of traces in Meridian's gateway, measured within a process: traces are off and on in turns.

The CPU time of two gateways with the same configuration differs by more than the traces of 1 % of the requests cost
(traces.py), and the host of a virtual machine changes within seconds. A program with the feature `alternate-traces`
switches the traces of one process off and on in slots of some milliseconds and writes the CPU time and the requests of
each. The figure of a process is the mean over pairs of slots, without the tenth of the largest and smallest; the error
is the standard error over the processes.

    cargo build --release --features alternate-traces
    gateway/benches/proxy/alternate.py --meridian target/release/meridian --tools target/proxies/tools/release
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile

import peers
from driver import CALLERS, load
from processes import PROXY_CORE, Failed

# A slot with fewer requests was not under load.
SLOT_REQUESTS_MIN = 50


def pairs(path, warm_up):
    """Returns the CPU µs per request while off and while on, of each pair of slots."""
    with open(path, encoding="ascii") as file:
        lines = [[int(word) for word in line.split()] for line in file.read().splitlines()]
    busy = [line for line in lines if len(line) == 4 and min(line[1], line[3]) >= SLOT_REQUESTS_MIN]
    return [(line[0] / line[1] / 1e3, line[2] / line[3] / 1e3) for line in busy[warm_up:]]


def trimmed_mean(values):
    values = sorted(values)
    cut = len(values) // 10
    return statistics.mean(values[cut : len(values) - cut])


def measure(workspace, address, ratio, options, slot_ms):
    """Returns for each process: CPU µs per request while off and on, logarithm of the ratio, pairs, and dropped spans."""
    results = []
    for number in range(options.gateways):
        name = f"gateway-{ratio}-{slot_ms}-{number}"
        figures = os.path.join(workspace.files, f"{name}.slots")
        os.environ.update(MERIDIAN_ALTERNATE_TRACES=figures, MERIDIAN_ALTERNATE_TRACES_SLOT_MS=str(slot_ms))
        proxy = peers.meridian_traced(workspace, [address], ratio, name)
        try:
            load(workspace, proxy, "closed", CALLERS, options.seconds, 0)
            dropped = peers.spans(proxy)[1]
        finally:
            proxy.end()
        found = pairs(figures, warm_up=1 + 1000 // slot_ms)
        if len(found) < 5:
            raise Failed(f"{name}: {len(found)} pairs of slots; build with --features alternate-traces, or raise --seconds")
        medians = [statistics.median(side) for side in zip(*found)]
        results.append((*medians, trimmed_mean(math.log(on / off) for off, on in found), len(found), dropped))
    return results


def main():
    parser = argparse.ArgumentParser(description="Measures the CPU time of traces within gateway processes.")
    parser.add_argument("--meridian", required=True, help="release program with the feature alternate-traces")
    parser.add_argument("--tools", required=True, help="folder with the tools of this benchmark")
    parser.add_argument("--gateways", type=int, default=8, help="gateways, one after another (default 8)")
    parser.add_argument("--seconds", type=float, default=10, help="duration of the load of each in seconds (default 10)")
    parser.add_argument("--slots", type=int, nargs="+", default=[40, 400], help="durations of a slot in ms (default 40 400)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.01, 1.0], help="shares of requests (default 0.01 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        workspace = peers.Workspace(made, options.tools, options.meridian, PROXY_CORE)
        address = peers.address()
        upstream = peers.embedding_upstream(workspace, address)
        try:
            print("| traces | slot ms | pairs | µs/request off | on | more | standard error | each gateway | dropped spans |")
            print("|---|---:|---:|---:|---:|---:|---:|---|---:|")
            for ratio in options.ratios:
                for slot_ms in options.slots:
                    off, on, logs, counts, dropped = zip(*measure(workspace, address, ratio, options, slot_ms))
                    more = [math.expm1(one) * 100 for one in logs]
                    error = statistics.stdev(more) / math.sqrt(len(more))
                    cells = [f"{ratio:.0%}", slot_ms, sum(counts), f"{statistics.median(off):.1f}", f"{statistics.median(on):.1f}"]
                    cells += [f"{statistics.mean(more):.1f} %", f"{error:.1f}", ", ".join(f"{one:.1f}" for one in more), sum(dropped)]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        finally:
            upstream.end()


if __name__ == "__main__":
    try:
        main()
    except (Failed, subprocess.SubprocessError) as problem:
        sys.exit(str(problem))
