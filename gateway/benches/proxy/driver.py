"""The proxy bench: what a request costs in Meridian's edge with everything on, beside proxies that only pass it on.

A POST of 300 bytes to /v1/embeddings and an answer of 8 KB, over connections that are kept. A proxy has a core for itself;
who asks and who answers share another. Rounds interleave (A B C A B C …), the others are stopped meanwhile, and so what
disturbs the machine disturbs all of them; rounds in which something else took a part of it are left out where there are
others. A figure is the median over the rounds, a ratio the median of the rounds' own ratios.
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
from processes import Failed, Missing, Process, busy_seconds, embeds

PROXIES = {
    "meridian": peers.meridian,
    "meridian, no log": peers.meridian_quiet,
    "meridian, no receipts": peers.meridian_unreceipted,
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
# A part of a round before it counts: connections, caches, and Meridian hearing its regions after it was stopped.
WARM_UP_SECONDS = 0.7
# Processor time of others, in cores, above which a round is disturbed.
FOREIGN_MAX = 0.15
IDLE_CONNECTIONS = 1_000
# Who asks and who answers; the proxy's own core is the other one.
LOAD_CORE, PROXY_CORE = 0, 1


def load(place, proxy, kind, *numbers):
    """Runs the load generator against a proxy and returns what it saw."""
    command = ["taskset", "-c", str(LOAD_CORE), os.path.join(place.tools, "load"), kind, proxy.address]
    command += [*map(str, numbers), *proxy.headers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{proxy.name}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Direct:
    """No proxy: what the bench itself costs."""

    def __init__(self, address):
        self.name, self.address, self.headers = "direct", address, []


def turn(place, proxy, upstream, *kind):
    """One run under a kind of load: what the proxy gave, what it used, and what others took meanwhile."""
    proxy.process.resume()
    proxy.process.until(lambda: embeds(proxy.address, proxy.headers), "an embedding after a pause")
    watched = (proxy.process, upstream, *proxy.beside)
    before = [one.cpu_seconds() for one in watched], busy_seconds(), children_seconds()
    began = time.monotonic()
    seen = load(place, proxy, *kind)
    took = time.monotonic() - began
    used = [one.cpu_seconds() - then for one, then in zip(watched, before[0])]
    foreign = busy_seconds() - before[1] - sum(used) - (children_seconds() - before[2])
    proxy.process.pause()
    return {
        **seen,
        "cpu_us": used[0] / seen["sent"] * 1e6,
        "rss_mb": proxy.process.rss_mb(),
        "foreign": max(foreign / took, 0.0),
    }


def at_half_load(place, proxy, upstream, address, rate, seconds):
    """The median and the 99th percentile through the proxy and without it, at half of what it gives."""
    direct = load(place, Direct(address), "rate", CALLERS, seconds, 0.2, rate / 2)
    through = turn(place, proxy, upstream, "rate", CALLERS, seconds, WARM_UP_SECONDS, rate / 2)
    return {
        "foreign": through["foreign"],
        "p99_ms": through["p99_ms"],
        "added_p50_ms": through["p50_ms"] - direct["p50_ms"],
        "added_p99_ms": through["p99_ms"] - direct["p99_ms"],
    }


def idle_memory(place, proxy):
    """MB that so many idle connections take."""
    proxy.process.resume()
    proxy.process.until(lambda: embeds(proxy.address, proxy.headers), "an embedding after a pause")
    before = proxy.process.rss_mb()
    command = [os.path.join(place.tools, "load"), "idle", proxy.address, str(IDLE_CONNECTIONS), *proxy.headers]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        held = holder.stdout.readline()
        after = proxy.process.rss_mb()
        holder.stdin.close()
        holder.wait(timeout=30)
    proxy.process.pause()
    if not held:
        raise Failed(f"{proxy.name} does not hold {IDLE_CONNECTIONS} connections")
    return (after - before) * 1_000 / IDLE_CONNECTIONS


def calm(rounds):
    """The rounds that nothing disturbed, or all of them."""
    return [one for one in rounds if one["foreign"] <= FOREIGN_MAX] or rounds


def middle(rounds, key):
    return statistics.median(one[key] for one in calm(rounds))


def table(rows):
    heads = ("proxy", "rps", "p50 ms", "p99 ms", "CPU µs/req", "of pingora", "RSS MB", "MB/1k idle", "p99 half")
    heads += ("p50 added", "p99 added", "from", "to", "failed", "rounds")
    lines = [heads]
    for name, row in rows.items():
        half = calm(row.get("half", []))
        cells = [name, f"{row['per_second']:,.0f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]
        cells += [f"{row['cpu_us']:.1f}", f"{row['ratio']:.2f}" if "ratio" in row else "", f"{row['rss_mb']:.0f}"]
        cells += [f"{row['idle_mb']:.1f}" if "idle_mb" in row else ""]
        of = lambda key: [one[key] for one in half]
        added = of("added_p99_ms")
        figures = [f"{statistics.median(of(key)):.2f}" for key in ("p99_ms", "added_p50_ms", "added_p99_ms") if half]
        cells += [*figures, f"{min(added):.2f}", f"{max(added):.2f}"] if half else [""] * 5
        cells += [str(row["failed"]), f"{row['calm']}/{row['rounds']}"]
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


def start(place, wanted, upstream):
    """The proxies that are here; those that are not are named."""
    proxies = []
    for name in wanted:
        try:
            proxy = PROXIES[name](place, [upstream])
        except Missing as missing:
            print(f"{name} is not here and left out; it comes with: {missing}", file=sys.stderr)
            continue
        except Failed as failed:
            print(f"{name} is left out: {failed}", file=sys.stderr)
            continue
        proxy.process.pause()
        proxies.append(proxy)
    return proxies


def main():
    parser = argparse.ArgumentParser(prog="gateway/benches/proxy/run", description="What a request costs in a proxy.")
    parser.add_argument("--made", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tools", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--meridian", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--only", default=",".join(name.replace(", ", "/") for name in PROXIES), help="names, by comma")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="of each proxy (default 5)")
    parser.add_argument("--quick", action="store_true", help="two rounds of two seconds, neither LiteLLM nor half load")
    parser.add_argument("--no-extras", action="store_true", help="neither half load nor idle connections")
    options = parser.parse_args()
    if os.cpu_count() < 2:
        raise SystemExit("the bench needs two cores: one for the proxy, one for who asks and who answers")

    wanted = [name.replace("/", ", ") for name in options.only.split(",")]
    unknown = [name for name in wanted if name not in PROXIES]
    if unknown:
        raise SystemExit(f"there is no {unknown[0]}; there are {', '.join(PROXIES)}")
    seconds, rounds = (2.0, 2) if options.quick else (options.seconds, options.rounds)
    if options.quick:
        wanted = [name for name in wanted if name != "litellm"]

    place = peers.Place(options.made, options.tools, options.meridian, PROXY_CORE)
    address = peers.address()
    upstream = Process("upstream", [os.path.join(place.tools, "world"), "upstream", address, "0"], place.log("upstream"), LOAD_CORE)
    upstream.until(lambda: embeds(address, []), "an answer")
    proxies = start(place, wanted, address)
    report = {"machine": processor(), "seconds": seconds, "rounds": {}, "half": {}, "idle_mb": {}, "missing_receipts": {}}
    measured = report["rounds"]
    try:
        ceiling = load(place, Direct(address), "closed", CALLERS, 1, 0.2)["per_second"]
        for number in range(rounds):
            begin = number % len(proxies)
            for proxy in proxies[begin:] + proxies[:begin]:
                measured.setdefault(proxy.name, []).append(
                    turn(place, proxy, upstream, "closed", CALLERS, seconds, WARM_UP_SECONDS)
                )
        if not (options.quick or options.no_extras):
            # One round says little: who asks, who answers and the proxy have two cores, and what takes one of them for some
            # milliseconds is in the 99th percentile of whoever had his turn.
            for _ in range(rounds):
                for proxy in proxies:
                    rate = middle(measured[proxy.name], "per_second")
                    half = at_half_load(place, proxy, upstream, address, rate, seconds)
                    report["half"].setdefault(proxy.name, []).append(half)
        if not options.no_extras:
            for proxy in proxies:
                try:
                    report["idle_mb"][proxy.name] = idle_memory(place, proxy)
                except Failed as failed:
                    print(failed, file=sys.stderr)
        for proxy in proxies:
            if hasattr(proxy, "operations"):
                report["missing_receipts"][proxy.name] = peers.missing_receipts(proxy)
    finally:
        for proxy in proxies:
            proxy.end()
        upstream.end()

    rows = {}
    for name in (name for name in wanted if name in measured):
        runs = measured[name]
        row = {key: middle(runs, key) for key in ("per_second", "p50_ms", "p99_ms", "cpu_us", "rss_mb")}
        row["failed"] = sum(one["failed"] for one in runs)
        row["calm"], row["rounds"] = sum(one["foreign"] <= FOREIGN_MAX for one in runs), len(runs)
        if BASE in measured:
            pairs = [(one, base) for one, base in zip(runs, measured[BASE])]
            still = [pair for pair in pairs if max(one["foreign"] for one in pair) <= FOREIGN_MAX] or pairs
            row["ratio"] = statistics.median(one["cpu_us"] / base["cpu_us"] for one, base in still)
        for key in ("half", "idle_mb"):
            if name in report[key]:
                row[key] = report[key][name]
        rows[name] = row
    print(f"{report['machine']}, kernel {platform.release()}; {CALLERS} callers, {rounds} rounds of {seconds:g} s")
    print(f"who asks and who answers, without a proxy: {ceiling:,.0f} rps\n")
    table(rows)
    with open(os.path.join(place.made, "report.json"), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print(f"\nevery round is in {os.path.join(place.made, 'report.json')}")
    if any(report["missing_receipts"].values()):
        raise SystemExit(f"receipts are missing, so that this is not what a request costs: {report['missing_receipts']}")


if __name__ == "__main__":
    main()
