#!/usr/bin/env python3
"""Source of the Grafana dashboards in this directory.

    python3 build.py            write all of them
    python3 build.py NAME       print one, such as `global`
    python3 build.py --list     print their names

Edit this file, run it, and commit both: a test compares the files with its output. It needs Python 3.9 and nothing else. The
files have the format of Grafana 10 and later; provisioning.yml loads them.
"""

import json
import sys
from pathlib import Path

# Colour of each region in every panel. List the regions of your fleet; others get a colour by their name, which is the same in
# all panels, too, but may resemble another one. The colours are those of Okabe and Ito, which colour-blind readers can tell
# apart; their yellow is too pale for a line on white, so it is the last one.
REGIONS = {
    "aws/us-east-1": "#0072B2",
    "aws/us-east-2": "#56B4E9",
    "aws/us-west-2": "#009E73",
    "aws/eu-central-1": "#CC79A7",
    "gcp/europe-west4": "#D55E00",
    "oci/ap-tokyo-1": "#E69F00",
    "azure/eastasia": "#F0E442",
}
# States that mean the same in all panels.
STATES = {
    "ok": "green", "healthy": "green", "closed": "green", "ready": "green",
    "unknown": "text", "suspect": "yellow", "half_open": "yellow", "probing": "yellow", "recovering": "yellow",
    "down": "red", "ejected": "red", "server_error": "red", "client_error": "blue", "unfinished": "orange",
}

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "[$__rate_interval]"
# Columns of Grafana's grid, and the size of a panel: three in a row.
COLUMNS, WIDTH, HEIGHT = 24, 8, 8


# --- building blocks ---

def rate(metric, by="", selector=""):
    """Rate per second, summed by labels."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{braces(selector)}{WINDOW}))"


def share(part, whole, by=""):
    """Share of one rate in another. Nothing is shown without traffic."""
    grouping = f" by ({by})" if by else ""
    return (f"sum{grouping} (rate({part}{WINDOW})) / "
            f"(sum{grouping} (rate({whole}{WINDOW})) > 0)")


def quantile(q, metric, by="", selector=""):
    """Quantile of a histogram. It is interpolated within a bucket, whose bounds are a factor of about 2 apart."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{braces(selector)}{WINDOW})))"


def quantiles(metric, selector=""):
    """Median, 90th and 99th percentile, with their legends."""
    return [(quantile(q, metric, selector=selector), name) for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def braces(selector):
    return f"{{{selector}}}" if selector else ""


def fixed_color(matcher, options, color):
    return {"matcher": {"id": matcher, "options": options},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]}


def panel(title, description, unit, *queries, kind="timeseries", regions=False, stacked=False, maximum=None,
          thresholds=None, width=WIDTH):
    """A panel with queries (expression, legend). With `regions` the legend begins with the region, which sets the colour."""
    overrides = []
    if regions:
        for region, color in REGIONS.items():
            escaped = region.replace("/", "\\/")
            overrides.append(fixed_color("byRegexp", f"/^{escaped}( .*)?$/", color))
    else:
        if any(legend in ("{{state}}", "{{outcome}}") for _, legend in queries):
            overrides += [fixed_color("byName", state, color) for state, color in STATES.items()]
    defaults = {"unit": unit, "min": 0, "color": {"mode": "palette-classic-by-name" if regions else "palette-classic"}}
    if maximum is not None:
        defaults["max"] = maximum
    steps = [{"color": "green", "value": None}]
    if thresholds:
        steps += [{"color": color, "value": value} for value, color in thresholds]
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    options = {}
    if kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 25 if stacked else 0, "showPoints": "never",
            "spanNulls": False, "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if thresholds else "off"},
        }
        options = {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
                   "tooltip": {"mode": "multi", "sort": "desc"}}
    elif kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        overrides = []
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value",
                   "graphMode": "area", "textMode": "auto"}
    elif kind == "table":
        overrides = []
        options = {"showHeader": True}
    targets = [{"refId": chr(ord("A") + at), "datasource": DATASOURCE, "editorMode": "code", "expr": expr,
                "legendFormat": legend, "range": kind != "table", "instant": kind == "table",
                "format": "table" if kind == "table" else "time_series"}
               for at, (expr, legend) in enumerate(queries)]
    return {"type": kind, "title": title, "description": description, "datasource": DATASOURCE, "width": width,
            "fieldConfig": {"defaults": defaults, "overrides": overrides}, "options": options, "targets": targets}


def variable(name, label, metric, selector="", several=True):
    """A variable with the values of a label of a metric."""
    query = f"label_values({metric}{braces(selector)}, {name})"
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE,
            "query": {"query": query, "refId": "variable"}, "definition": query, "refresh": 2, "sort": 1,
            "multi": several, "includeAll": several, "allValue": ".*" if several else None,
            "current": {"text": "All", "value": "$__all"} if several else {}}


def dashboard(name, title, description, variables, rows):
    """A dashboard of rows (title, panels)."""
    panels, y, number = [], 0, 0
    for row_title, row in rows:
        number += 1
        panels.append({"id": number, "type": "row", "title": row_title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y, x = y + 1, 0
        for each in row:
            width = each.pop("width")
            if x + width > COLUMNS:
                x, y = 0, y + HEIGHT
            number += 1
            panels.append({"id": number, **each, "gridPos": {"x": x, "y": y, "w": width, "h": HEIGHT}})
            x += width
        y += HEIGHT
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    alerts = {"name": "Alerts", "enable": False, "iconColor": "red", "datasource": DATASOURCE,
              "expr": 'ALERTS{alertname=~"Meridian.+",alertstate="firing",severity="page"}',
              "titleFormat": "{{alertname}}", "step": "1m"}
    links = {"title": "Meridian", "type": "dashboards", "tags": ["meridian"], "asDropdown": True, "includeVars": True,
             "keepTime": True}
    return {"uid": f"meridian-{name}", "title": title, "description": description, "tags": ["meridian"],
            "schemaVersion": 39, "editable": False, "graphTooltip": 1, "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"}, "timezone": "utc", "links": [links],
            "annotations": {"list": [alerts]}, "templating": {"list": [source, *variables]}, "panels": panels}


# --- dashboards ---

def global_():
    requests, attempts = "meridian_gateway_requests_total", "meridian_gateway_attempts_total"
    return dashboard(
        "global", "Meridian / Global", "The service as its clients see it, and where their requests are served.", [],
        [
            ("Objectives", [
                panel("Failed requests, last hour",
                      "Share of valid requests that failed through a fault of Meridian. The objective is 0.1 %.",
                      "percentunit", ("meridian_fleet:requests_bad:ratio_rate1h", "failed"), kind="stat",
                      thresholds=[(0.001, "yellow"), (0.0144, "red")], width=6),
                panel("Slow interactive requests, last hour",
                      "Share of interactive requests that took more than 0.5 s. The objective is 1 %.",
                      "percentunit", ("meridian_fleet:requests_slow:ratio_rate1h", "slow"), kind="stat",
                      thresholds=[(0.01, "yellow"), (0.144, "red")], width=6),
                panel("Error budget burn rate",
                      "Failed requests as a multiple of what the objective of 99.9 % allows. Above 14.4 in both windows of an "
                      "hour and five minutes an alert pages.",
                      "none", ("meridian_fleet:requests_bad:ratio_rate5m / 0.001", "5 min"),
                      ("meridian_fleet:requests_bad:ratio_rate1h / 0.001", "1 h"),
                      ("meridian_fleet:requests_bad:ratio_rate6h / 0.001", "6 h"), thresholds=[(14.4, "red")], width=12),
            ]),
            ("Clients", [
                panel("Requests", "Finished requests per second at all gateways, by the location of the gateway.", "reqps",
                      (rate(requests, "origin"), "{{origin}}"), regions=True, stacked=True),
                panel("Failures by outcome",
                      "Requests that did not succeed, by error code or kind of incomplete response. docs/errors.md has the meaning "
                      "and the party at fault of each code.",
                      "reqps", (rate(requests, "outcome", 'outcome!="ok"'), "{{outcome}}"), stacked=True),
                panel("Time of interactive requests",
                      "From the head of a request to the last byte of its response, at the gateways. Quantiles are interpolated "
                      "within buckets.", "s", *quantiles("meridian_gateway_request_seconds", 'priority="interactive"')),
            ]),
            ("Regions", [
                panel("Requests by region", "Requests by the region whose response was forwarded to the client.", "reqps",
                      (rate("meridian_gateway_region_requests_total", "region"), "{{region}}"), regions=True, stacked=True),
                panel("Server errors by region", "Share of the requests to a region that ended with its server error.",
                      "percentunit",
                      (share('meridian_gateway_region_requests_total{outcome="server_error"}',
                             "meridian_gateway_region_requests_total", "region"), "{{region}}"), regions=True),
                panel("Gateways that see a region down",
                      "Share of gateways for which a region is down. At 1 the region itself is down; below, the path from some "
                      "gateways to it.",
                      "percentunit", ('avg by (region) (meridian_gateway_region_health{state="down"})', "{{region}}"),
                      regions=True, maximum=1),
                panel("Attempts that left their primary region",
                      "Attempts other than the first, by cause. Spillover is overload of the nearest region, evacuation and replay "
                      "a lost one, hedge a slow response.",
                      "reqps", (rate(attempts, "cause", 'cause!="first"'), "{{cause}}"), stacked=True),
                panel("Ready replicas", "Ready replicas of all deployments. The spokes of a region serve the same replicas, so the "
                      "largest count of a spoke is shown.", "none",
                      ("sum by (region) (max by (region, deployment) (meridian_ingress_replicas_ready))", "{{region}}"),
                      regions=True, stacked=True),
                panel("Oldest job", "Age of the oldest unfinished job of each region with a queue.", "s",
                      ("max by (region) (meridian_jobs_oldest_seconds)", "{{region}}"), regions=True),
            ]),
            ("Redundancy and residency", [
                panel("Classes without N+1 capacity",
                      "Traffic classes that would not survive the loss of a region, as the leading hub plans.", "none",
                      ("max(meridian_hub_uncovered_classes and on (instance) meridian_hub_leader == 1)", "classes"),
                      kind="stat", thresholds=[(1, "red")]),
                panel("Requests rejected by residency",
                      "no_capacity_in_allowed_regions: all allowed regions are unreachable. policy_too_old: no contact with a hub. "
                      "region_not_permitted: the policies together allow no region. not_resident_here: a region may not see it.",
                      "reqps", (rate(requests, "outcome", 'outcome=~"region_not_permitted|not_resident_here|'
                                     'no_capacity_in_allowed_regions|policy_too_old"'), "{{outcome}}"), stacked=True),
                panel("Firing alerts", "Alerts of configs/observability/rules/alerts.yml that fire now.", "none",
                      ('ALERTS{alertname=~"Meridian.+",alertstate="firing"}', ""), kind="table"),
            ]),
        ])


def region():
    of = 'region=~"$region"'
    return dashboard(
        "region", "Meridian / Region", "One region, from the gateways' side and from its own.",
        [variable("region", "Region", "meridian_ingress_requests_in_flight")],
        [
            ("As gateways see it", [
                panel("Requests", "Requests whose response came from the region, by the region.", "reqps",
                      (rate("meridian_gateway_region_requests_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Outcome of attempts", "Attempts at the region by outcome; each but `ok` may be followed by another attempt.",
                      "reqps", (rate("meridian_gateway_attempts_total", "outcome", of), "{{outcome}}"), stacked=True),
                panel("Duration of attempts, p99", "99th percentile of the time of an attempt, with the network.", "s",
                      (quantile(0.99, "meridian_gateway_attempt_seconds", "region", of), "{{region}}"), regions=True),
                panel("Health", "Number of gateways by the health state that they see.", "none",
                      (f"sum by (state) (meridian_gateway_region_health{{{of}}})", "{{state}}"), stacked=True),
                panel("Circuit breaker", "Number of gateways by the state of their circuit breaker.", "none",
                      (f"sum by (state) (meridian_gateway_region_circuit{{{of}}})", "{{state}}"), stacked=True),
                panel("Age of the last report", "Oldest last report at any gateway. Above 0.6 s a region is suspect, above 3 s down.",
                      "s", (f"max by (region) (meridian_gateway_region_report_age_seconds{{{of}}})", "{{region}}"), regions=True),
                panel("Spillover received", "Attempts that came to the region as spillover of an overloaded one.", "reqps",
                      (rate("meridian_gateway_attempts_total", "region", f'{of},cause="spillover"'), "{{region}}"),
                      regions=True),
                panel("Round-trip time", "Estimated round-trip time from the nearest gateway.", "s",
                      (f"min by (region) (meridian_gateway_region_rtt_seconds{{{of}}})", "{{region}}"), regions=True),
                panel("Evacuation budget", "Requests that may still fail over from the region if it is lost, at all gateways.",
                      "none", (f"sum by (region) (meridian_gateway_evacuation_budget{{{of}}})", "{{region}}"), regions=True),
            ]),
            ("Ingress", [
                panel("Requests at the spokes", "Finished requests for a replica, by outcome.", "reqps",
                      (rate("meridian_ingress_requests_total", "outcome", of), "{{outcome}}"), stacked=True),
                panel("Time of requests at the spokes", "From the head of a request to the last byte of its response.", "s",
                      *quantiles("meridian_ingress_request_seconds", of)),
                panel("Requests in flight", "Requests at all spokes of the region.", "none",
                      (f"sum by (region) (meridian_ingress_requests_in_flight{{{of}}})", "{{region}}"), regions=True),
                panel("Held requests", "Requests that wait for a replica to become ready, as during a cold start.", "none",
                      (f"sum by (region) (meridian_ingress_held_requests{{{of}}})", "{{region}}"), regions=True),
                panel("Requests that were not held", "Requests that found no ready replica and were rejected at once, by reason.",
                      "reqps", (rate("meridian_ingress_not_held_total", "reason", of), "{{reason}}"), stacked=True),
                panel("Failed connections to replicas", "By cause; docs/identities.md has the fix for each.", "cps",
                      (rate("meridian_ingress_replica_connection_failures_total", "cause", of), "{{cause}}"), stacked=True),
            ]),
            ("Capacity", [
                panel("Queue", "Time that the queued and running tokens of the region would take at its measured throughput.", "s",
                      (f"max by (region, deployment) (meridian_ingress_pending_tokens{{{of}}} / "
                       f"(meridian_ingress_tokens_per_second{{{of}}} > 0))", "{{region}} {{deployment}}"), regions=True),
                panel("Throughput", "Measured tokens per second of the ready replicas.", "short",
                      (f"max by (region, deployment) (meridian_ingress_tokens_per_second{{{of}}})",
                       "{{region}} {{deployment}}"), regions=True),
                panel("Granted credits", "Tokens of other regions' overflow that gateways may still send. 0 while the region has no "
                      "spare capacity.", "short",
                      (f"sum by (region, deployment) (meridian_ingress_granted_tokens{{{of}}})",
                       "{{region}} {{deployment}}"), regions=True),
            ]),
        ])


def deployment():
    of = 'deployment=~"$deployment"'
    scaler = "and on (instance) meridian_scaling_is_scaler == 1"

    def scaling(metric):
        return f"max by (region) (meridian_scaling_replicas_{metric}{{{of}}} {scaler})"

    return dashboard(
        "deployment", "Meridian / Deployment",
        "One deployment in all regions: its objectives, its replicas, their load, and the autoscaler.",
        [variable("deployment", "Deployment", "meridian_ingress_replicas_ready", several=False)],
        [
            ("Objectives, at the gateways", [
                panel("Failed requests", "Share of the requests that failed through a fault of Meridian, at all gateways.", "percentunit",
                      (f"meridian_deployment:requests_bad:ratio_rate5m{{{of}}}", "5 min"),
                      (f"meridian_deployment:requests_bad:ratio_rate1h{{{of}}}", "1 h"), thresholds=[(0.0144, "red")]),
                panel("Slow interactive requests", "Share of interactive requests that took more than 0.5 s.", "percentunit",
                      (f"meridian_deployment:requests_slow:ratio_rate5m{{{of}}}", "5 min"),
                      (f"meridian_deployment:requests_slow:ratio_rate1h{{{of}}}", "1 h"), thresholds=[(0.144, "red")]),
                panel("Latency of interactive requests", "From the head of a request to the last byte of its response. With OpenMetrics, "
                      "exemplars lead to traces.", "s",
                      *quantiles("meridian_gateway_deployment_request_seconds", of + ',priority="interactive"')),
                panel("Requests by result", "At the gateways. Excluded: the client is at fault, over a quota or disconnected.", "reqps",
                      (rate("meridian_gateway_deployment_requests_total", "result", of), "{{result}}"), stacked=True),
                panel("Shed requests", "Requests that load shedding rejected, by priority.", "reqps",
                      (rate("meridian_gateway_deployment_shed_total", "priority", of), "{{priority}}"), stacked=True),
                panel("Requests by error code", "Ended requests at the replicas other than ok.", "reqps",
                      (rate("meridian_replica_requests_total", "code", f'{of},code!="ok"'), "{{code}}"), stacked=True),
            ]),
            ("Load", [
                panel("Requests", "Ended requests at the replicas, by region.", "reqps",
                      (rate("meridian_replica_requests_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Tokens", "Tokens of successful requests per second.", "short",
                      (rate("meridian_replica_tokens_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Queue", "Time that the queued and running tokens of a region would take at its measured throughput.", "s",
                      (f"max by (region) (meridian_ingress_pending_tokens{{{of}}} / "
                       f"(meridian_ingress_tokens_per_second{{{of}}} > 0))", "{{region}}"), regions=True),
                panel("Time at the replica, p99", "99th percentile of the total time of interactive requests at a replica.", "s",
                      (quantile(0.99, "meridian_replica_stage_seconds", "region",
                                f'{of},stage="total",priority="interactive"'), "{{region}}"), regions=True),
                panel("Stages, p99", "99th percentiles of the stages of interactive requests: a long queue needs replicas, a long engine "
                      "stage is a slow machine or large requests.", "s",
                      (quantile(0.99, "meridian_replica_stage_seconds", "stage", f'{of},priority="interactive"'), "{{stage}}")),
                panel("Granted credits", "Tokens of other regions' overflow that a region offers.", "short",
                      (f"sum by (region) (meridian_ingress_granted_tokens{{{of}}})", "{{region}}"), regions=True),
            ]),
            ("Replicas", [
                panel("Ready replicas", "The spokes of a region serve the same replicas, so the largest count of a spoke is shown.",
                      "none", (f"max by (region) (meridian_ingress_replicas_ready{{{of}}})", "{{region}}"), regions=True,
                      stacked=True),
                panel("Desired replicas", "By the spoke that scales the region.", "none", (scaling("desired"), "{{region}}"),
                      regions=True, stacked=True),
                panel("Provisioning and draining replicas", "Replicas that are being started, and those that finish their requests.",
                      "none", (scaling("provisioning"), "{{region}} provisioning"), (scaling("draining"), "{{region}} draining"),
                      regions=True),
                panel("Reason of the desired number", "Regions by the rule that decided. `max` for long: raise scaling.max.", "none",
                      (f"sum by (reason) (meridian_scaling_decided_by{{{of}}} {scaler})", "{{reason}}"), stacked=True),
                panel("Crashes", "Replicas that exited without being stopped, in five minutes.", "none",
                      (f"sum by (region) (increase(meridian_scaling_replicas_crashed_total{{{of}}}[5m]))", "{{region}}"),
                      regions=True),
                panel("Failed", "Regions in which no replica can start, by reason. The runbook has a line for each reason.", "none",
                      (f"max by (region, reason) (meridian_deployment_failed{{{of}}})", "{{region}} {{reason}}"), regions=True),
                panel("Start time, p90", "90th percentile of the start time of a replica.", "ms",
                      (scaling("start_ms"), "{{region}}"), regions=True),
                panel("Replicas with another model", "Replicas that report a model other than that of the deployment, and receive no "
                      "requests.", "none", (f"max by (region) (meridian_ingress_replicas_mismatched{{{of}}})", "{{region}}"),
                      regions=True),
            ]),
        ])


def gateway():
    of = 'origin=~"$origin",instance=~"$instance"'
    server_errors = f'{of},outcome="server_error"'
    return dashboard(
        "gateway", "Meridian / Gateway", "Gateways: requests, attempts, limits and their view of the control plane.",
        [variable("origin", "Location", "meridian_gateway_requests_in_flight"),
         variable("instance", "Gateway", "meridian_gateway_requests_in_flight", 'origin=~"$origin"')],
        [
            ("Requests", [
                panel("Requests", "Finished requests by gateway.", "reqps",
                      (rate("meridian_gateway_requests_total", "instance", of), "{{instance}}"), stacked=True),
                panel("Outcomes", "Finished requests by outcome.", "reqps",
                      (rate("meridian_gateway_requests_total", "outcome", of), "{{outcome}}"), stacked=True),
                panel("Endpoints", "Finished requests by endpoint.", "reqps",
                      (rate("meridian_gateway_requests_total", "endpoint", of), "{{endpoint}}"), stacked=True),
                panel("Time by priority, p99", "99th percentile of the time of a request. `unknown`: rejected before the priority was "
                      "known.", "s", (quantile(0.99, "meridian_gateway_request_seconds", "priority", of), "{{priority}}")),
                panel("Stages, p99", "99th percentiles of the stages of forwarded requests. network is what remains between gateway and "
                      "replica.", "s", (quantile(0.99, "meridian_gateway_stage_seconds", "stage", of), "{{stage}}")),
                panel("Requests in flight", "Requests that have begun and not ended.", "none",
                      (f"meridian_gateway_requests_in_flight{{{of}}}", "{{instance}}")),
            ]),
            ("Tenants", [
                panel("Requests by tenant", "The ten tenants with the most requests.", "reqps",
                      (f"topk(10, {rate('meridian_gateway_tenant_requests_total', 'tenant', of)})", "{{tenant}}"), stacked=True),
                panel("Tokens by tenant", "Computed tokens per second, the ten largest tenants.", "short",
                      (f"topk(10, {rate('meridian_gateway_tenant_tokens_total', 'tenant', of)})", "{{tenant}}"), stacked=True),
                panel("Server errors by tenant", "The ten tenants with the most server errors.", "reqps",
                      (f"topk(10, {rate('meridian_gateway_tenant_requests_total', 'tenant', server_errors)})", "{{tenant}}"),
                      stacked=True),
            ]),
            ("Attempts and regions", [
                panel("Attempts by region", "Attempts per second.", "reqps",
                      (rate("meridian_gateway_attempts_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Attempts by cause", "Reasons of all attempts after the first.", "reqps",
                      (rate("meridian_gateway_attempts_total", "cause", of + ',cause!="first"'), "{{cause}}"), stacked=True),
                panel("Attempts that failed", "Attempts by outcome, other than ok and client_error.", "reqps",
                      (rate("meridian_gateway_attempts_total", "outcome", of + ',outcome!~"ok|client_error"'), "{{outcome}}"),
                      stacked=True),
                panel("Spillover by overloaded region", "Requests that were sent past their primary region.", "reqps",
                      (rate("meridian_gateway_spillovers_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Load shedding", "Requests that admission control rejected, by reason.", "reqps",
                      (rate("meridian_gateway_shed_total", "reason", of), "{{reason}}"), stacked=True),
                panel("Retry and hedge budgets", "Attempts that the budgets allow now. At 0 clients receive the first error.", "none",
                      (f"min(meridian_gateway_retry_budget{{{of}}})", "retries, least gateway"),
                      (f"min(meridian_gateway_hedge_budget{{{of}}})", "hedged requests, least gateway")),
                panel("Failed TLS connections to regions", "By cause; docs/identities.md has the fix for each.", "cps",
                      (rate("meridian_gateway_hop_failures_total", "cause", of), "{{cause}}"), stacked=True),
            ]),
            ("Limits", [
                panel("Use of limits", "Share of each limit in use, at the fullest gateway. At 1 requests or connections are rejected.",
                      "percentunit",
                      (f"max(meridian_gateway_connections{{{of}}} / meridian_gateway_connections_max{{{of}}})", "connections"),
                      (f"max(meridian_gateway_bodies_bytes{{{of}}} / meridian_gateway_bodies_bytes_max{{{of}}})", "request bodies"),
                      (f"max(meridian_gateway_bodies_tenant_bytes{{{of}}} / meridian_gateway_bodies_tenant_bytes_max{{{of}}})",
                       "request bodies of one tenant"),
                      (f"max(meridian_gateway_pieces_bytes{{{of}}} / meridian_gateway_pieces_bytes_max{{{of}}})", "parts"),
                      (f"max(meridian_gateway_split_requests{{{of}}} / meridian_gateway_split_requests_max{{{of}}})",
                       "split requests"),
                      (f"max(meridian_gateway_dns_names{{{of}}} / meridian_gateway_dns_names_max{{{of}}})", "DNS names"),
                      thresholds=[(0.9, "red")]),
                panel("Rejected bodies", "Request bodies that were rejected, by reason.", "reqps",
                      (rate("meridian_gateway_bodies_rejected_total", "reason", of), "{{reason}}"), stacked=True),
                panel("Closed connections", "Connections that the gateway closed, by reason.", "cps",
                      (rate("meridian_gateway_connections_closed_total", "reason", of), "{{reason}}"), stacked=True),
            ]),
            ("Control plane, receipts, faults", [
                panel("Age of the route table", "Time since a hub last confirmed it. Requests of locked deployments are rejected at "
                      "policy_max_age.", "s", (f"meridian_gateway_policy_age_seconds{{{of}}}", "{{instance}}")),
                panel("Rejected tables, plans and tenants files", "Rejections in five minutes; the last valid version stays in use.",
                      "none",
                      (f"sum(increase(meridian_gateway_tables_refused_total{{{of}}}[5m]))", "route tables"),
                      (f"sum(increase(meridian_gateway_plans_refused_total{{{of}}}[5m]))", "traffic plans"),
                      (f"sum(increase(meridian_gateway_tenants_reload_failures_total{{{of}}}[5m]))", "tenants files")),
                panel("Receipts", "Receipts written and missing per second. A missing one is a gap in the chain.", "ops",
                      (rate("meridian_receipts_written_total", selector=of), "written"),
                      (rate("meridian_receipts_missing_total", selector=of), "missing"),
                      (rate("meridian_receipts_rejected_total", selector=of), "rejected requests")),
                panel("Oldest receipt that is not durable", "Age; usually below a second.", "s",
                      (f"meridian_receipts_oldest_pending_seconds{{{of}}}", "{{instance}}")),
                panel("Waiting for receipts, p99", "Time that requests wait for their receipt to be durable, with receipts.required.", "s",
                      (quantile(0.99, "meridian_receipts_commit_seconds", "instance", of), "{{instance}}")),
                panel("DNS names that fail", "Names whose last query failed; their last addresses are used for a day at most.", "none",
                      (f"meridian_gateway_dns_names_failing{{{of}}}", "{{instance}}")),
                panel("Panics and restarted tasks", "In five minutes. Each is a defect.", "none",
                      (f"sum by (scope) (increase(meridian_gateway_panics_total{{{of}}}[5m]))", "panic: {{scope}}"),
                      (f"sum by (task) (increase(meridian_gateway_task_restarts_total{{{of}}}[5m]))", "restart: {{task}}")),
            ]),
        ])


def replica():
    of = 'region=~"$region",deployment=~"$deployment",instance=~"$instance"'
    return dashboard(
        "replica", "Meridian / Replica", "Replicas: batches, queue and engine.",
        [variable("region", "Region", "meridian_replica_engine_busy_seconds_total"),
         variable("deployment", "Deployment", "meridian_replica_engine_busy_seconds_total", 'region=~"$region"'),
         variable("instance", "Replica", "meridian_replica_engine_busy_seconds_total",
                  'region=~"$region",deployment=~"$deployment"')],
        [
            ("Requests", [
                panel("Requests by error code", "Ended requests.", "reqps",
                      (rate("meridian_replica_requests_total", "code", of), "{{code}}"), stacked=True),
                panel("Time of interactive requests", "Total time at the replica.", "s",
                      *quantiles("meridian_replica_stage_seconds", of + ',stage="total",priority="interactive"')),
                panel("Stages, p99", "99th percentiles of the stages of successful requests, both priorities.", "s",
                      (quantile(0.99, "meridian_replica_stage_seconds", "stage", of), "{{stage}}")),
            ]),
            ("Queue and batches", [
                panel("Queued tokens", "Tokens in the queue, by priority.", "short",
                      (f"sum by (priority) (meridian_replica_queue_tokens{{{of}}})", "{{priority}}"), stacked=True),
                panel("Rejected because the queue was full", "By priority.", "reqps",
                      (rate("meridian_replica_requests_shed_total", "priority", of), "{{priority}}"), stacked=True),
                panel("Batches by reason", "Reason why a batch was closed: mostly `full` means that the replica is saturated.", "ops",
                      (rate("meridian_replica_batches_total", "reason", of), "{{reason}}"), stacked=True),
                panel("Tokens of a batch", "Quantiles over all batches.", "none", *quantiles("meridian_replica_batch_tokens", of)),
                panel("Inputs of a batch", "Quantiles over all batches.", "none", *quantiles("meridian_replica_batch_inputs", of)),
                panel("Compute time of a batch", "Quantiles over all batches.", "s", *quantiles("meridian_replica_batch_seconds", of)),
            ]),
            ("Engine", [
                panel("Engine busy", "Share of time in which the engine computes.", "percentunit",
                      (rate("meridian_replica_engine_busy_seconds_total", "instance", of), "{{instance}}"), maximum=1),
                panel("Speed", "Measured tokens per second of the engine.", "short",
                      (f"meridian_replica_engine_tokens_per_second{{{of}}}", "{{instance}}")),
                panel("Tokens", "Tokens of successful requests per second.", "short",
                      (rate("meridian_replica_tokens_total", "instance", of), "{{instance}}"), stacked=True),
                panel("Failures", "Batches on which the engine failed, and those that were retried input by input.", "ops",
                      (rate("meridian_replica_engine_failures_total", selector=of), "failed batches"),
                      (rate("meridian_replica_engine_retried_batches_total", selector=of), "retried batches")),
                panel("GPU memory", "Memory in use, of engines that report it.", "bytes",
                      (f"meridian_replica_engine_gpu_bytes{{{of}}}", "{{instance}}")),
                panel("Cache hits", "Share of inputs found in the cache of rows, of replicas with a cache.", "percentunit",
                      (f"{rate('meridian_replica_cache_hits_total', 'instance', of)} / "
                       f"({rate('meridian_replica_cache_hits_total', 'instance', of)} + "
                       f"{rate('meridian_replica_cache_misses_total', 'instance', of)})", "{{instance}}"), maximum=1),
                panel("Panics and restarted tasks", "In five minutes. Each is a defect.", "none",
                      (f"sum by (scope) (increase(meridian_replica_panics_total{{{of}}}[5m]))", "panic: {{scope}}"),
                      (f"sum by (task) (increase(meridian_replica_task_restarts_total{{{of}}}[5m]))", "restart: {{task}}")),
            ]),
        ])


def control_plane():
    of = 'instance=~"$instance"'
    return dashboard(
        "control-plane", "Meridian / Control plane", "Hubs: election, store, route table, plan, and the readers of both.",
        [variable("instance", "Hub", "meridian_hub_leader")],
        [
            ("Election and store", [
                panel("Leader", "1 at the hub that is the leader. Exactly one is.", "none",
                      (f"meridian_hub_leader{{{of}}}", "{{instance}}"), stacked=True, maximum=2),
                panel("Elections", "Terms that began in ten minutes. Frequent elections are a slow store.", "none",
                      (f"sum by (instance) (increase(meridian_hub_terms_total{{{of}}}[10m]))", "{{instance}}")),
                panel("Failed requests to the store", "The published route table stays in force meanwhile.", "ops",
                      (rate("meridian_hub_store_errors_total", "instance", of), "{{instance}}")),
                panel("Registered spokes", "At the leader.", "none", (f"max(meridian_hub_spokes{{{of}}})", "spokes")),
                panel("Ended leases", "Leases of spokes that ended in five minutes.", "none",
                      (f"sum(increase(meridian_hub_spoke_leases_ended_total{{{of}}}[5m]))", "leases")),
                panel("Mass lease expiry", "1 while the hub suspects the store because most leases expired at once.", "none",
                      (f"max by (instance) (meridian_hub_mass_lease_expiry{{{of}}})", "{{instance}}"), maximum=1),
            ]),
            ("Route table and plan", [
                panel("Generation at hubs and gateways", "Generation of the route table within its epoch. Lines that stay apart are "
                      "readers that do not get the newest table.", "none",
                      (f"meridian_hub_route_generation{{{of}}}", "hub {{instance}}"),
                      ("meridian_gateway_route_generation", "gateway {{instance}}")),
                panel("Published tables", "Per second, by hub.", "ops",
                      (rate("meridian_hub_tables_published_total", "instance", of), "{{instance}}")),
                panel("Time to compute a plan", "Quantiles; the plan is computed once a second.", "s",
                      *quantiles("meridian_hub_plan_seconds", of)),
                panel("Classes without N+1 capacity", "Traffic classes that would not survive the loss of a region, at the leader.",
                      "none", ("max(meridian_hub_uncovered_classes and on (instance) meridian_hub_leader == 1)", "classes")),
                panel("Regions and deployments in the table", "As published.", "none",
                      (f"max(meridian_hub_route_regions{{{of}}})", "regions"),
                      (f"max(meridian_hub_route_deployments{{{of}}})", "deployments")),
                panel("Age of the route table at its readers", "Time since a hub confirmed it, the oldest gateway and the oldest spoke.",
                      "s", ("max(meridian_gateway_policy_age_seconds)", "gateways"),
                      ("max(meridian_ingress_policy_age_seconds)", "spokes")),
            ]),
            ("Requests", [
                panel("Requests by path", "Requests at the hubs.", "reqps",
                      (rate("meridian_hub_requests_total", "path", of), "{{path}}"), stacked=True),
                panel("Failed requests", "Requests with a status of 400 or more.", "reqps",
                      (rate("meridian_hub_requests_total", "path, status", of + ',status=~"4..|5.."'), "{{path}} {{status}}"),
                      stacked=True),
                panel("Open long polls", "Share of the limit, at the fullest hub.", "percentunit",
                      (f"max(meridian_hub_polls{{{of}}} / meridian_hub_polls_max{{{of}}})", "long polls"),
                      thresholds=[(0.9, "red")]),
                panel("Denied requests and joins", "Requests that the role or region may not send, tokens that were rejected, and join "
                      "requests that the authority rejected.", "reqps",
                      (rate("meridian_hub_requests_denied_total", "reason", of), "denied: {{reason}}"),
                      (rate("meridian_hub_token_rejections_total", "reason", of), "token: {{reason}}"),
                      (rate("meridian_hub_joins_rejected_total", "reason", of), "join: {{reason}}"), stacked=True),
                panel("Life of certificates that is left", "The certificate with the smallest rest, by role. A process renews at a half.", "percentunit",
                      *((f"min((meridian_{name}_certificate_not_after_seconds - time()) / (meridian_{name}_certificate_not_after_seconds"
                         f" - meridian_{name}_certificate_not_before_seconds))", role)
                        for name, role in (("gateway", "gateways"), ("ingress", "spokes"), ("replica", "replicas"), ("hub", "hubs"))),
                      maximum=1),
                panel("Failed renewals of certificates", "In an hour, by role.", "none",
                      *((f"sum(increase(meridian_{name}_certificate_renewal_failures_total[1h]))", role)
                        for name, role in (("gateway", "gateways"), ("ingress", "spokes"), ("replica", "replicas"), ("hub", "hubs")))),
                panel("Builds", "Processes by version, commit and compiler; two during an upgrade.", "none",
                      ("count by (version, commit, rust) (meridian_build_info)", "{{version}} {{commit}} {{rust}}"), stacked=True),
                panel("Rejected connections", "By cause; docs/identities.md has the fix for each.", "cps",
                      (rate("meridian_hub_connections_refused_total", "cause", of), "{{cause}}"), stacked=True),
                panel("Panics and restarted tasks", "In five minutes. Each is a defect.", "none",
                      (f"sum by (scope) (increase(meridian_hub_panics_total{{{of}}}[5m]))", "panic: {{scope}}"),
                      (f"sum by (task) (increase(meridian_hub_task_restarts_total{{{of}}}[5m]))", "restart: {{task}}")),
            ]),
        ])


def jobs():
    of = 'region=~"$region"'
    return dashboard(
        "jobs", "Meridian / Jobs", "Durable jobs of the regions with a queue.",
        [variable("region", "Region", "meridian_jobs_queued")],
        [
            ("Queue", [
                panel("Oldest job", "Age of the oldest unfinished job.", "s",
                      (f"max by (region) (meridian_jobs_oldest_seconds{{{of}}})", "{{region}}"), regions=True),
                panel("Queued jobs", "Jobs that wait. With NATS every spoke of a region shows the same queue, so the largest is shown.",
                      "none", (f"max by (region) (meridian_jobs_queued{{{of}}})", "{{region}}"), regions=True, stacked=True),
                panel("Running jobs", "Jobs that are computed, or whose worker has ended.", "none",
                      (f"max by (region) (meridian_jobs_running{{{of}}})", "{{region}}"), regions=True, stacked=True),
                panel("Accepted jobs", "Jobs that are durable and confirmed, per second. A repeated submission counts again.", "ops",
                      (rate("meridian_jobs_accepted_total", "region", of), "{{region}}"), regions=True, stacked=True),
                panel("Finished jobs", "Jobs that are kept until the end of their retention.", "none",
                      (f"max by (region) (meridian_jobs_finished{{{of}}})", "{{region}}"), regions=True, stacked=True),
            ]),
            ("Attempts and faults", [
                panel("Attempts by outcome", "Ended attempts. `no_capacity` does not count as an attempt of the job.", "ops",
                      (rate("meridian_jobs_attempts_total", "outcome", of), "{{outcome}}"), stacked=True),
                panel("Log cannot be read", "1 while the job log cannot be read, and jobs fail.", "none",
                      (f"max by (region) (meridian_jobs_failing{{{of}}})", "{{region}}"), regions=True, maximum=1),
                panel("Failures of the log and the store", "In five minutes: failures that stopped the queue, and operations that failed.",
                      "none",
                      (f"sum by (region) (increase(meridian_jobs_log_failures_total{{{of}}}[5m]))", "{{region}} log"),
                      (f"sum by (region) (increase(meridian_jobs_store_failures_total{{{of}}}[5m]))", "{{region}} operations"),
                      regions=True),
            ]),
        ])


DASHBOARDS = {
    "global": global_, "region": region, "deployment": deployment, "gateway": gateway, "replica": replica,
    "control-plane": control_plane, "jobs": jobs,
}


def render(name):
    return json.dumps(DASHBOARDS[name](), indent=1, ensure_ascii=False) + "\n"


def main(arguments):
    if arguments == ["--list"]:
        print("\n".join(DASHBOARDS))
    elif not arguments:
        for name in DASHBOARDS:
            Path(__file__).with_name(f"{name}.json").write_text(render(name), encoding="utf-8")
    elif len(arguments) == 1 and arguments[0] in DASHBOARDS:
        sys.stdout.buffer.write(render(arguments[0]).encode())
    else:
        sys.exit(f"unknown dashboard {' '.join(arguments)}; write one of: {', '.join(DASHBOARDS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
