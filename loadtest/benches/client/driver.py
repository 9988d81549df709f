"""Client bench: wall-clock and CPU time of embedding many short texts with several clients.

Started by `run`. One server with precomputed responses, and one long-lived, warmed-up process per client. In each
round every client embeds all texts once; the order rotates. With two cores the server has one and the clients the
other. Values are medians over the rounds, ratios are medians of the ratios of each round. A client that would need
more than SLOW_S for all texts gets a quarter of them, and the table says so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

DIMENSIONS = 384

#: A client that would need more seconds per round gets fewer texts.
SLOW_S = 8


def text(number):
    return f"short text {number:06} about ships on a calm sea"


def canned(index):
    """Returns the first two numbers of the server's row `index`."""
    return [(index * 31 + place * 17) % 1009 / 10090 - 0.05 for place in (0, 1)]


# Clients. Each takes texts and returns the object with their vectors, the first row and the last row.


def meridian(url, batch, in_flight):
    from meridian_client import PerformanceClient

    client = PerformanceClient(url, api_key="key")

    def embed(texts):
        array = client.embed(
            texts, model="bench", batch_size=batch, max_chars_per_request=10**6, max_concurrent_requests=in_flight
        ).numpy()
        assert array.shape == (len(texts), DIMENSIONS) and array.flags.c_contiguous
        return array, array[0, :2], array[-1, :2]

    return embed


def baseten(url, batch, in_flight, encoding=None):
    import base64

    import numpy
    from baseten_performance_client import PerformanceClient, RequestProcessingPreference

    client = PerformanceClient(url, "key")
    preference = RequestProcessingPreference(
        batch_size=batch, max_chars_per_request=10**6, max_concurrent_requests=in_flight
    )

    def embed(texts):
        response = client.embed(texts, model="bench", encoding_format=encoding, preference=preference)
        if encoding == "base64":
            # Its numpy() does not support base64, so users write this.
            rows = b"".join([base64.b64decode(row.embedding) for row in response.data])
            array = numpy.frombuffer(rows, dtype="<f4").reshape(-1, DIMENSIONS)
        else:
            array = response.numpy()
        assert array.shape == (len(texts), DIMENSIONS)
        return array, array[0, :2], array[-1, :2]

    return embed


def openai(url, batch, in_flight):
    import asyncio

    from openai import AsyncOpenAI

    async def all_of(texts):
        gate = asyncio.Semaphore(in_flight)
        async with AsyncOpenAI(base_url=url + "/v1", api_key="key", max_retries=0) as client:

            async def one(begin):
                async with gate:
                    return await client.embeddings.create(model="bench", input=texts[begin : begin + batch])

            return await asyncio.gather(*(one(begin) for begin in range(0, len(texts), batch)))

    def embed(texts):
        # Kept as lists, as the client returns them; a conversion to an array would add to its cost.
        responses = asyncio.run(all_of(texts))
        assert sum(len(response.data) for response in responses) == len(texts)
        return responses, responses[0].data[0].embedding[:2], responses[-1].data[-1].embedding[:2]

    return embed


CLIENTS = {
    "meridian": meridian,
    "baseten": baseten,
    "baseten, base64": lambda *how: baseten(*how, encoding="base64"),
    "openai": openai,
}


def child(name, url, count, batch, in_flight):
    """Runs one client: one operation per input line."""
    import gc
    import time

    embed = CLIENTS[name](url, batch, in_flight)
    texts = [text(number) for number in range(count)]
    print("ready", flush=True)
    for line in sys.stdin:
        some = texts[: int(line)]
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        kept, first, last = embed(some)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        expected = canned(0), canned((len(some) - 1) % batch)
        for got, want in zip((first, last), expected):
            assert all(abs(a - b) < 1e-6 for a, b in zip(got, want)), f"{name}: {got} is not {want}"
        del kept
        print(json.dumps({"seconds": wall, "cpu": cpu}), flush=True)


class Child:
    def __init__(self, command, core):
        pinned = ["taskset", "--cpu-list", str(core), *command] if core is not None else command
        self.process = subprocess.Popen(pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.first_line = self.process.stdout.readline().split()

    def embed(self, texts):
        self.process.stdin.write(f"{texts}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a client exited with {self.process.wait()}")
        return json.loads(line)

    def end(self):
        self.process.kill()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description="Benchmark of bulk embedding clients")
    parser.add_argument("--ours", required=True, help="Meridian's bench binary")
    parser.add_argument("--texts", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=128, help="texts per request")
    parser.add_argument("--in-flight", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="only clients whose name contains this")
    arguments = parser.parse_args()

    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    server = Child([arguments.ours, "serve"], server_core)
    one, two = server.first_line
    how = [str(arguments.texts), str(arguments.batch), str(arguments.in_flight)]
    commands = {name: [sys.executable, __file__, "--child", name, one, *how] for name in CLIENTS}
    commands["meridian (Rust)"] = [arguments.ours, "embed", one, *how, "1"]
    commands["meridian (Rust, h2c)"] = [arguments.ours, "embed", two, *how, "2"]
    names = [name for name in commands if arguments.only is None or arguments.only in name]
    clients = {name: Child(commands[name], client_core) for name in names}
    counts, warm = {}, min(arguments.texts, 5_000)
    try:
        for name, client in clients.items():
            client.embed(warm)
            whole = client.embed(warm)["seconds"] * arguments.texts / warm
            counts[name] = arguments.texts if whole <= SLOW_S else arguments.texts // 4
        rounds = []
        for number in range(arguments.rounds):
            order = names[number % len(names) :] + names[: number % len(names)]
            results = {name: clients[name].embed(counts[name]) for name in order}
            # Per text, in microseconds.
            rounds.append({name: (got["seconds"] / counts[name] * 1e6, got["cpu"] / counts[name] * 1e6) for name, got in results.items()})
    finally:
        for client in [*clients.values(), server]:
            client.end()

    where = "on any core" if client_core is None else f"server on core {server_core}, clients on core {client_core}"
    print(f"{arguments.texts} texts, {arguments.batch} per request, {arguments.in_flight} in flight, {arguments.rounds} rounds; {where}")
    print(f"{'client':<22} {'texts/s':>9} {'CPU µs/text':>12} {'speedup of ours':>19} {'our CPU / its CPU':>17}")
    for name in names:
        took, cpu = (statistics.median(one[name][what] for one in rounds) for what in (0, 1))
        line = f"{name:<22} {1e6 / took:>9,.0f} {cpu:>12.2f}"
        if "meridian" in names and name != "meridian":
            faster = statistics.median(one[name][0] / one["meridian"][0] for one in rounds)
            share = statistics.median(one["meridian"][1] / one[name][1] for one in rounds)
            line += f" {faster:>19.2f} {share:>17.2f}"
        print(line + ("" if counts[name] == arguments.texts else f"  ({counts[name]} texts)"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], *(int(number) for number in sys.argv[4:7]))
    else:
        main()
