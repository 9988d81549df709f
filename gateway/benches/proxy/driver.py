"""Gateway overhead benchmark: cost of a request in Meridian's gateway, and in proxies that only forward.

Meridian runs with all features. The load is a POST of 300 bytes to /v1/embeddings with a response of 8 KB, over
keep-alive connections. The proxy has one core; load generator and upstream share another. Rounds interleave
(A B C A B C …) and the other proxies are stopped meanwhile, so that disturbances affect all of them. Rounds in which
other processes took more than FOREIGN_MAX cores are dropped if others remain. A figure is the median over the rounds,
a ratio the median of the ratios of each round.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

import peers
from processes import LOAD_CORE, PROXY_CORE, Failed, Missing, busy_seconds, embeds

PROXIES = {
    "meridian": peers.meridian,
    "meridian, no log": peers.meridian_quiet,
    "meridian, no receipts": peers.meridian_unreceipted,
    "meridian, traces 1 %": peers.meridian_traced_1,
    "meridian, traces 100 %": peers.meridian_traced_100,
    "pingora": peers.bare_pingora,
    "haproxy": peers.haproxy,
    "nginx": peers.nginx,
    "envoy": peers.envoy,
    "vllm-router": peers.vllm_router,
    "sglang-router": peers.sglang_router,
    "litellm": peers.litellm,
}
BASE = "pingora"
CALLERS = 16
# Warm-up of a run, not measured: opens connections, fills caches, and refreshes the health of Meridian's regions after
# the pause.
WARM_UP_SECONDS = 0.7
# CPU time of other processes, in cores; a round above it is disturbed.
FOREIGN_MAX = 0.15
IDLE_CONNECTIONS = 1_000


def load(workspace, proxy, kind, *numbers):
    """Runs the load generator against a proxy and returns its result."""
    command = ["taskset", "-c", str(LOAD_CORE), os.path.join(workspace.tools, "load"), kind, proxy.address]
    command += [*map(str, numbers), *proxy.headers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{proxy.name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Direct:
    """Upstream without a proxy: the cost of the benchmark itself."""

    def __init__(self, address):
        self.name, self.address, self.headers = "direct", address, []


def measure_run(workspace, proxy, upstream, *kind):
    """Runs one kind of load; returns its result, CPU time and memory of the proxy, and CPU time of other processes."""
    proxy.process.resume()
    proxy.process.wait_until(lambda: embeds(proxy.address, proxy.headers), "an embedding after a pause")
    watched = (proxy.process, upstream, *proxy.helpers)
    before = [one.cpu_seconds() for one in watched], busy_seconds(), children_seconds()
    started = time.monotonic()
    result = load(workspace, proxy, *kind)
    elapsed = time.monotonic() - started
    used = [one.cpu_seconds() - then for one, then in zip(watched, before[0])]
    foreign = busy_seconds() - before[1] - sum(used) - (children_seconds() - before[2])
    proxy.process.pause()
    return {
        **result,
        "cpu_us": used[0] / result["sent"] * 1e6,
        "rss_mb": proxy.process.rss_mb(),
        "foreign": max(foreign / elapsed, 0.0),
    }


def at_half_load(workspace, proxy, upstream, address, rate, seconds):
    """Returns the p99 at half of `rate`, and the p50 and p99 that the proxy adds to those without a proxy."""
    direct = load(workspace, Direct(address), "rate", CALLERS, seconds, 0.2, rate / 2)
    through = measure_run(workspace, proxy, upstream, "rate", CALLERS, seconds, WARM_UP_SECONDS, rate / 2)
    return {
        "foreign": through["foreign"],
        "p99_ms": through["p99_ms"],
        "added_p50_ms": through["p50_ms"] - direct["p50_ms"],
        "added_p99_ms": through["p99_ms"] - direct["p99_ms"],
    }


def idle_memory(workspace, proxy):
    """Returns the memory of a thousand idle connections in MB."""
    proxy.process.resume()
    proxy.process.wait_until(lambda: embeds(proxy.address, proxy.headers), "an embedding after a pause")
    before = proxy.process.rss_mb()
    command = [os.path.join(workspace.tools, "load"), "idle", proxy.address, str(IDLE_CONNECTIONS), *proxy.headers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        output = client.stdout.readline()
        after = proxy.process.rss_mb()
        client.stdin.close()
        client.wait(timeout=30)
    proxy.process.pause()
    if not output:
        raise Failed(f"{proxy.name} does not keep {IDLE_CONNECTIONS} connections open")
    return (after - before) * 1_000 / IDLE_CONNECTIONS


def undisturbed(rounds):
    """Returns the undisturbed rounds, or all rounds if there are none."""
    return [one for one in rounds if one["foreign"] <= FOREIGN_MAX] or rounds


def median(rounds, key):
    return statistics.median(one[key] for one in undisturbed(rounds))


def table(rows):
    heads = ("proxy", "rps", "p50 ms", "p99 ms", "CPU µs/req", "of pingora", "RSS MB", "MB/1k idle", "p99 half")
    heads += ("p50 added", "p99 added", "min", "max", "failed", "rounds")
    lines = [heads]
    for name, row in rows.items():
        half = undisturbed(row.get("half", []))
        cells = [name, f"{row['per_second']:,.0f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]
        cells += [f"{row['cpu_us']:.1f}", f"{row['ratio']:.2f}" if "ratio" in row else "", f"{row['rss_mb']:.0f}"]
        cells += [f"{row['idle_mb']:.1f}" if "idle_mb" in row else ""]
        of = lambda key: [one[key] for one in half]
        added = of("added_p99_ms")
        figures = [f"{statistics.median(of(key)):.2f}" for key in ("p99_ms", "added_p50_ms", "added_p99_ms") if half]
        cells += [*figures, f"{min(added):.2f}", f"{max(added):.2f}"] if half else [""] * 5
        cells += [str(row["failed"]), f"{row['undisturbed']}/{row['rounds']}"]
        lines.append(tuple(cells))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for number, line in enumerate(lines):
        first, *rest = (cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths)))
        print("| " + " | ".join([first, *rest]) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 1) + (":" if at else "-") for at, width in enumerate(widths)) + "|")


def processor():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())


def start(workspace, names_wanted, upstream):
    """Starts the installed proxies and returns them; prints the names of the others."""
    proxies = []
    for name in names_wanted:
        try:
            proxy = PROXIES[name](workspace, [upstream])
        except Missing as missing:
            print(f"{name} is not installed, skipped; install it with: {missing}", file=sys.stderr)
            continue
        except Failed as failed:
            print(f"{name} is skipped: {failed}", file=sys.stderr)
            continue
        proxy.process.pause()
        proxies.append(proxy)
    return proxies


def main():
    description = "Measures the cost of a request in a proxy."
    parser = argparse.ArgumentParser(prog="gateway/benches/proxy/run", description=description)
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    names = ",".join(name.replace(", ", "/") for name in PROXIES)
    parser.add_argument("--only", default=names, help="comma-separated names of proxies (default: all)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each run in seconds (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    rate = "requests per second for every proxy instead of as many as it can; compares the CPU time at an equal load"
    parser.add_argument("--rate", type=float, help=rate)
    parser.add_argument("--quick", action="store_true", help="two rounds of two seconds, without LiteLLM and half load")
    parser.add_argument("--no-extras", action="store_true", help="skip half load and idle connections")
    options = parser.parse_args()
    if os.cpu_count() < 2:
        raise SystemExit("the benchmark needs two cores: one for the proxy, one for load generator and upstream")

    names_wanted = [name.replace("/", ", ") for name in options.only.split(",")]
    unknown = [name for name in names_wanted if name not in PROXIES]
    if unknown:
        raise SystemExit(f"unknown proxy {unknown[0]}; use {', '.join(PROXIES)}")
    seconds, rounds = (2.0, 2) if options.quick else (options.seconds, options.rounds)
    if options.quick:
        names_wanted = [name for name in names_wanted if name != "litellm"]

    workspace = peers.Workspace(options.made, options.tools, options.meridian, PROXY_CORE)
    address = peers.address()
    upstream = peers.embedding_upstream(workspace, address)
    proxies = start(workspace, names_wanted, address)
    report = {"machine": processor(), "seconds": seconds, "rounds": {}, "half": {}, "idle_mb": {}, "missing_receipts": {}, "spans": {}}
    measured = report["rounds"]
    numbers = (CALLERS, seconds, WARM_UP_SECONDS)
    kind = ("closed", *numbers) if options.rate is None else ("rate", *numbers, options.rate)
    try:
        ceiling = load(workspace, Direct(address), "closed", CALLERS, 1, 0.2)["per_second"]
        for number in range(rounds):
            begin = number % len(proxies)
            for proxy in proxies[begin:] + proxies[:begin]:
                measured.setdefault(proxy.name, []).append(measure_run(workspace, proxy, upstream, *kind))
        if not (options.quick or options.no_extras):
            # A single round is not enough: load generator, upstream and proxy use both cores, and a process that
            # takes one of them for some milliseconds raises the p99 of the proxy under test.
            for _ in range(rounds):
                for proxy in proxies:
                    rate = median(measured[proxy.name], "per_second")
                    half = at_half_load(workspace, proxy, upstream, address, rate, seconds)
                    report["half"].setdefault(proxy.name, []).append(half)
        if not options.no_extras:
            for proxy in proxies:
                try:
                    report["idle_mb"][proxy.name] = idle_memory(workspace, proxy)
                except Failed as failed:
                    print(failed, file=sys.stderr)
        for proxy in proxies:
            if hasattr(proxy, "operations"):
                report["missing_receipts"][proxy.name] = peers.missing_receipts(proxy)
                report["spans"][proxy.name] = peers.spans(proxy)
    finally:
        for proxy in proxies:
            proxy.end()
        upstream.end()

    rows = {}
    for name in (name for name in names_wanted if name in measured):
        runs = measured[name]
        row = {key: median(runs, key) for key in ("per_second", "p50_ms", "p99_ms", "cpu_us", "rss_mb")}
        row["failed"] = sum(one["failed"] for one in runs)
        row["undisturbed"], row["rounds"] = sum(one["foreign"] <= FOREIGN_MAX for one in runs), len(runs)
        if BASE in measured:
            pairs = [(one, base) for one, base in zip(runs, measured[BASE])]
            undisturbed_pairs = [pair for pair in pairs if max(one["foreign"] for one in pair) <= FOREIGN_MAX] or pairs
            row["ratio"] = statistics.median(one["cpu_us"] / base["cpu_us"] for one, base in undisturbed_pairs)
        for key in ("half", "idle_mb"):
            if name in report[key]:
                row[key] = report[key][name]
        rows[name] = row
    print(f"{report['machine']}, kernel {platform.release()}; {CALLERS} clients, {rounds} rounds of {seconds:g} s")
    print(f"load generator and upstream without a proxy: {ceiling:,.0f} rps\n")
    table(rows)
    for name, (exported, dropped) in report["spans"].items():
        if exported + dropped:
            print(f"{name}: {exported:,} spans exported, {dropped:,} dropped")
    with open(os.path.join(workspace.made, "report.json"), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print(f"\nfigures of every round: {os.path.join(workspace.made, 'report.json')}")
    if any(report["missing_receipts"].values()):
        raise SystemExit(f"receipts are missing, so the cost of a request is understated: {report['missing_receipts']}")


if __name__ == "__main__":
    main()
