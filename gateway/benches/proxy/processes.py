"""Processes of a benchmark: pinned to a core, measured through /proc, and stopped while another one is measured."""

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
START_SECONDS = 90
UNCHECKED = ssl.create_default_context()
UNCHECKED.check_hostname, UNCHECKED.verify_mode = False, ssl.CERT_NONE

# Load generator, upstream and collector share the first core; the proxy has the second.
LOAD_CORE, PROXY_CORE = 0, 1


class Missing(Exception):
    """A peer is not installed; the message is the command that installs it."""


class Failed(Exception):
    """A process or a request failed."""


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Process:
    """Process with its children."""

    def __init__(self, name, command, log, core=None, environment=None):
        self.name, self.log = name, log
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        with open(log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def wait_until(self, condition, description):
        """Waits until `condition()` is true; fails after START_SECONDS, or if the process exits."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Failed(f"{self.name} exited with status {self.process.returncode}; see {self.log}")
            if condition():
                return
            time.sleep(0.05)
        raise Failed(f"{self.name}: timeout after {START_SECONDS} s, waiting for {description}; see {self.log}")

    def tree(self):
        """Returns the ids of this process and its descendants."""
        parents = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as file:
                        parents[int(entry)] = int(file.read().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def cpu_seconds(self):
        ticks = 0
        for pid in self.tree():
            try:
                with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
            except OSError:
                continue
        return ticks / TICKS

    def rss_mb(self):
        pages = 0
        for pid in self.tree():
            try:
                with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                    pages += int(file.read().split()[1])
            except OSError:
                continue
        return pages * PAGE / 1e6

    def signal(self, number):
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def pause(self):
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    def end(self):
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.resume()
            self.process.wait()


def busy_seconds():
    """Returns the busy time of all CPUs since boot, including the time stolen by other virtual machines."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / TICKS


def get(url):
    """Returns status and body of a response; status 0 without a response."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError):
        return 0, ""


def embeds(address, headers, tls=False):
    """Returns whether a request gets an embedding; over TLS, the certificate is not verified."""
    request = urllib.request.Request(
        f"{'https' if tls else 'http'}://{address}/v1/embeddings",
        b'{"model":"bench","input":"x"}',
        {"content-type": "application/json", **dict(header.split(": ", 1) for header in headers)},
    )
    try:
        with urllib.request.urlopen(request, timeout=5, context=UNCHECKED if tls else None) as response:
            return response.status == 200 and b'"embedding"' in response.read()
    except (OSError, ValueError):
        return False
