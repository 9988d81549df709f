//! `/metrics` of a gateway: its counters, and gauges read from the components at the time of the scrape.

use super::explain::health_name;
use super::operator_state::Operations;
use super::scatter::{PART_BODIES_BYTES_MAX, SPLIT_REQUESTS_MAX};
use crate::circuits;
use crate::metrics::{Kind, ListenerMetricNames, MetricsText, render_panics};
use gateway_core::targets::TargetStatus;
use regions::health::Health;
use regions::set::RegionIndex;
use std::time::{Duration, Instant};

/// Gauge of a circuit breaker.
type CircuitGauge = fn(&TargetStatus<RegionIndex>) -> u32;

/// State of a region as this gateway observes it.
struct RegionGauges {
    region: String,
    health: Health,
    report_age: Option<Duration>,
    round_trip: Duration,
    evacuations_left: u32,
}

/// Renders all metrics in the text format of Prometheus.
pub(super) fn text(operations: &Operations) -> String {
    let Operations {
        config,
        views,
        router,
        metrics,
        body_reader,
        connections,
        receipts,
        split_capacity,
        listener,
        ..
    } = operations;
    let mut text = MetricsText::default();
    metrics.render(&mut text, &config.catalogue);

    let generation = views.borrow().as_ref().map(|view| view.generation);
    let (epoch, number) = generation.map_or((0, 0), |generation| (generation.epoch, generation.number));
    let plan = router.current_weights.borrow().clone();
    let (plan_epoch, plan_number) =
        plan.as_ref().map_or((0, 0), |plan| (plan.generation.epoch, plan.generation.number));
    let open = operations.connections_max - connections.available_permits();
    let (taken, largest_tenant, bodies) = body_reader.used();
    for (name, help, value) in [
        ("meridian_gateway_route_epoch", "Epoch of the current route table; 0 before the first.", epoch),
        (
            "meridian_gateway_route_generation",
            "Generation of the current route table within its epoch.",
            number,
        ),
        ("meridian_gateway_plan_epoch", "Epoch of the current traffic plan; 0 before the first.", plan_epoch),
        (
            "meridian_gateway_plan_generation",
            "Generation of the current traffic plan within its epoch.",
            plan_number,
        ),
        (
            "meridian_gateway_plan_rows",
            "Rows of the current traffic plan, one for each class and origin.",
            plan.map_or(0, |plan| plan.rows() as u64),
        ),
        ("meridian_gateway_connections", "Open client connections.", open as u64),
        (
            "meridian_gateway_connections_max",
            "Limit on open client connections.",
            operations.connections_max as u64,
        ),
        ("meridian_gateway_bodies_bytes", "Memory reserved for the request bodies in flight.", taken as u64),
        (
            "meridian_gateway_bodies_bytes_max",
            "Limit on the memory reserved for request bodies.",
            bodies.total as u64,
        ),
        (
            "meridian_gateway_bodies_tenant_bytes",
            "Memory reserved for the request bodies of the tenant with the largest reservation.",
            largest_tenant as u64,
        ),
        (
            "meridian_gateway_bodies_tenant_bytes_max",
            "Limit on the memory reserved for the request bodies of one tenant.",
            bodies.per_tenant as u64,
        ),
        (
            "meridian_gateway_bodies_connection_bytes_max",
            "Limit on the memory reserved for the request bodies of one connection.",
            bodies.per_connection as u64,
        ),
        ("meridian_gateway_split_requests", "Split requests in flight.", split_capacity.requests() as u64),
        (
            "meridian_gateway_split_requests_max",
            "Limit on split requests in flight.",
            SPLIT_REQUESTS_MAX as u64,
        ),
        (
            "meridian_gateway_pieces_bytes",
            "Memory reserved for the bodies of parts.",
            split_capacity.bytes() as u64,
        ),
        (
            "meridian_gateway_pieces_bytes_max",
            "Limit on the memory reserved for the bodies of parts.",
            PART_BODIES_BYTES_MAX as u64,
        ),
    ] {
        text.single(name, Kind::Gauge, help, value);
    }
    for (name, help, count) in [
        (
            "meridian_gateway_plans_refused_total",
            "Traffic plans of the hub that were rejected because they were invalid or not newer.",
            operations.plan_counts.refused.get(),
        ),
        (
            "meridian_gateway_demand_missed_total",
            "Requests missing from the reported demand because the limit on classes was reached.",
            operations.router.demand_recorder.untracked(),
        ),
    ] {
        text.single(name, Kind::Counter, help, count);
    }
    let age = operations.policy_clock.age().as_secs_f64();
    let name = "meridian_gateway_policy_age_seconds";
    text.single(name, Kind::Gauge, "Time since a hub last confirmed the current route table.", age);
    let max = operations.policy_clock.max().as_secs();
    let help = "Age of the route table above which requests of locked deployments are rejected.";
    text.single("meridian_gateway_policy_max_age_seconds", Kind::Gauge, help, max);
    let help = "Failed TLS connections to regions, by cause.";
    operations.upstream.hop_failures().render(&mut text, "meridian_gateway_hop_failures_total", help);
    if let Some((events, (open, requests))) = operations.upstream.connections() {
        let help = "HTTP/2 connections to regions, by event.";
        events.render(&mut text, "meridian_gateway_region_connections_total", help, "event");
        let help = "Open HTTP/2 connections to regions.";
        text.single("meridian_gateway_region_connections", Kind::Gauge, help, open as u64);
        let help = "Requests in flight on HTTP/2 connections to regions.";
        text.single("meridian_gateway_region_connections_requests", Kind::Gauge, help, requests as u64);
    }
    let help = "Rejected client connections, by cause.";
    operations.refused.render(&mut text, "meridian_gateway_connections_refused_total", help);
    ListenerMetricNames::EDGE.render(&mut text, listener, &body_reader.rejections);
    render_panics(&mut text, "meridian_gateway");
    render_regions(&mut text, operations);
    render_circuits(&mut text, operations);
    if let Some(receipts) = receipts {
        receipts.render(&mut text);
    }
    text.finish()
}

fn render_regions(text: &mut MetricsText, operations: &Operations) {
    let (retries_left, hedges_left, gauges_by_region) = region_gauges(operations);
    let name = "meridian_gateway_retry_budget";
    text.single(name, Kind::Gauge, "Retries that the retry budget allows now.", retries_left);
    let name = "meridian_gateway_hedge_budget";
    text.single(name, Kind::Gauge, "Hedged requests that the hedge budget allows now.", hedges_left);
    let name = "meridian_gateway_region_health";
    text.head(name, Kind::Gauge, "1 for the current health state of a region as observed by this gateway.");
    for RegionGauges { region, health, .. } in &gauges_by_region {
        for state in [Health::Healthy, Health::Unknown, Health::Suspect, Health::Down] {
            let state_name = health_name(state);
            text.sample(name, &[("region", region), ("state", state_name)], u8::from(state == *health));
        }
    }
    let name = "meridian_gateway_region_report_age_seconds";
    text.head(name, Kind::Gauge, "Time since the last report of a region; absent before the first.");
    for RegionGauges { region, report_age, .. } in &gauges_by_region {
        if let Some(age) = report_age {
            text.sample(name, &[("region", region)], age.as_secs_f64());
        }
    }
    let name = "meridian_gateway_region_rtt_seconds";
    text.head(name, Kind::Gauge, "Estimated round-trip time to a region.");
    for RegionGauges { region, round_trip, .. } in &gauges_by_region {
        text.sample(name, &[("region", region)], round_trip.as_secs_f64());
    }
    let name = "meridian_gateway_evacuation_budget";
    text.head(name, Kind::Gauge, "Requests that may still fail over from a lost region.");
    for RegionGauges { region, evacuations_left, .. } in &gauges_by_region {
        text.sample(name, &[("region", region)], evacuations_left);
    }
}

fn render_circuits(text: &mut MetricsText, operations: &Operations) {
    let Operations { config, region_monitor, .. } = operations;
    let states = region_monitor.circuit_states();
    let named = |state: &TargetStatus<_>| config.catalogue.region(state.target).id.to_string();
    let name = "meridian_gateway_region_circuit";
    text.head(name, Kind::Gauge, "1 for the current state of the circuit breaker of a region.");
    for state in &states {
        for name_of_state in circuits::STATE_NAMES {
            let is = u8::from(name_of_state == circuits::state_name(state.state));
            text.sample(name, &[("region", &named(state)), ("state", name_of_state)], is);
        }
    }
    let gauges: [(&str, &str, CircuitGauge); 2] = [
        ("meridian_gateway_region_in_flight", "Attempts in flight to a region.", |state| state.in_flight),
        ("meridian_gateway_region_in_flight_max", "Limit on attempts in flight to a region.", |state| {
            state.in_flight_max
        }),
    ];
    for (name, help, of) in gauges {
        text.head(name, Kind::Gauge, help);
        for state in &states {
            text.sample(name, &[("region", &named(state))], of(state));
        }
    }
}

/// Copies the state of the regions of the route table, so that the lock is not held while the metrics are rendered.
fn region_gauges(operations: &Operations) -> (u32, u32, Vec<RegionGauges>) {
    let Operations { config, views, region_monitor, .. } = operations;
    let view = views.borrow().clone();
    let now = Instant::now();
    let region_states = region_monitor.states();
    let evacuations: Vec<_> = region_states.budgets.evacuations_left(now).collect();
    let regions = view.iter().flat_map(|view| view.regions());
    let gauges_by_region = regions.map(|(region, _)| {
        let (health, report_age) = region_states.fleet.state(region, now);
        let left = evacuations.iter().find(|(lost, _)| *lost == region);
        RegionGauges {
            region: config.catalogue.region(region).id.to_string(),
            health,
            report_age,
            round_trip: region_states.latency.estimate(region, now),
            evacuations_left: left.map_or(0, |(_, left)| *left),
        }
    });
    (region_states.budgets.retry.left(now), region_states.budgets.hedge.left(), gauges_by_region.collect())
}
