//! `/metrics` of an edge: what it has counted, and what is so at this moment, asked of whoever holds it.

use super::explain::health_word;
use super::operator_state::Operations;
use super::scatter::{AT_ONCE_MAX, PIECES_BYTES_MAX};
use crate::circuits;
use crate::metrics::{Kind, ListenerMetricNames, MetricsText, render_panics};
use gateway_core::targets::TargetStatus;
use regions::health::Health;
use regions::set::RegionIndex;
use std::time::{Duration, Instant};

/// One of the numbers of a circuit.
type InFlight = fn(&TargetStatus<RegionIndex>) -> u32;

/// A region as this edge sees it at the moment.
struct Seen {
    region: String,
    health: Health,
    report_age: Option<Duration>,
    round_trip: Duration,
    evacuations_left: u32,
}

/// Everything, in Prometheus' text format.
pub(super) fn text(operations: &Operations) -> String {
    let Operations {
        config,
        views,
        router,
        metrics,
        body_reader,
        connections,
        receipts,
        scattering,
        listener,
        ..
    } = operations;
    let mut text = MetricsText::default();
    metrics.render(&mut text, &config.catalogue);

    let generation = views.borrow().as_ref().map(|view| view.generation);
    let (epoch, number) = generation.map_or((0, 0), |generation| (generation.epoch, generation.number));
    let plan = router.planned.borrow().clone();
    let (plan_epoch, plan_number) =
        plan.as_ref().map_or((0, 0), |plan| (plan.generation.epoch, plan.generation.number));
    let open = operations.connections_max - connections.available_permits();
    let (taken, largest_tenant, bodies) = body_reader.used();
    for (name, help, value) in [
        ("meridian_gateway_route_epoch", "Epoch of the route table in hand; 0 before the first.", epoch),
        ("meridian_gateway_route_generation", "Its generation within the epoch.", number),
        ("meridian_gateway_plan_epoch", "Epoch of the plan in hand; 0 before the first.", plan_epoch),
        ("meridian_gateway_plan_generation", "Its generation within the epoch.", plan_number),
        (
            "meridian_gateway_plan_rows",
            "Its rows: classes and origins that it divides.",
            plan.map_or(0, |plan| plan.rows() as u64),
        ),
        ("meridian_gateway_connections", "Connections of clients that are open.", open as u64),
        ("meridian_gateway_connections_max", "How many may be.", operations.connections_max as u64),
        (
            "meridian_gateway_bodies_bytes",
            "Memory that the request bodies under way have taken.",
            taken as u64,
        ),
        ("meridian_gateway_bodies_bytes_max", "How much they may take.", bodies.total as u64),
        (
            "meridian_gateway_bodies_tenant_bytes",
            "Memory that the request bodies of the tenant with most of them have taken.",
            largest_tenant as u64,
        ),
        (
            "meridian_gateway_bodies_tenant_bytes_max",
            "How much those of one tenant may take.",
            bodies.per_tenant as u64,
        ),
        (
            "meridian_gateway_bodies_connection_bytes_max",
            "How much those of one connection may take.",
            bodies.per_connection as u64,
        ),
        (
            "meridian_gateway_split_requests",
            "Requests that are computed in pieces now.",
            scattering.requests() as u64,
        ),
        ("meridian_gateway_split_requests_max", "How many may be.", AT_ONCE_MAX as u64),
        ("meridian_gateway_pieces_bytes", "Room that the bodies of pieces take.", scattering.bytes() as u64),
        (
            "meridian_gateway_pieces_bytes_max",
            "All the room that there is for them.",
            PIECES_BYTES_MAX as u64,
        ),
    ] {
        text.single(name, Kind::Gauge, help, value);
    }
    for (name, help, count) in [
        (
            "meridian_gateway_plans_refused_total",
            "Plans of the hub that could not be read or were not newer; the one in hand stayed.",
            operations.plan_counts.refused.get(),
        ),
        (
            "meridian_gateway_demand_missed_total",
            "Requests that no plan knows of, because there were too many classes.",
            operations.router.demands.missed(),
        ),
    ] {
        text.single(name, Kind::Counter, help, count);
    }
    let age = operations.policy_clock.age().as_secs_f64();
    let name = "meridian_gateway_policy_age_seconds";
    text.single(name, Kind::Gauge, "Time since a hub last confirmed the route table in hand.", age);
    let max = operations.policy_clock.max().as_secs();
    let help = "The age past which requests of locked deployments are rejected.";
    text.single("meridian_gateway_policy_max_age_seconds", Kind::Gauge, help, max);
    let help = "RequestTimes that a region could not be talked to over TLS, by what was the matter.";
    operations.upstream.hop_failures().render(&mut text, "meridian_gateway_hop_failures_total", help);
    if let Some((events, (open, requests))) = operations.upstream.connections() {
        let help = "HTTP/2 connections to regions, by what became of them.";
        events.render(&mut text, "meridian_gateway_region_connections_total", help, "event");
        let help = "HTTP/2 connections to regions that are open.";
        text.single("meridian_gateway_region_connections", Kind::Gauge, help, open as u64);
        let help = "Requests under way on them.";
        text.single("meridian_gateway_region_connections_requests", Kind::Gauge, help, requests as u64);
    }
    let help = "Connections of clients that were not taken, by what was the matter.";
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
    let (retries_left, hedges_left, seen) = look(operations);
    let name = "meridian_gateway_retry_budget";
    text.single(name, Kind::Gauge, "Retries that could be paid for now.", retries_left);
    let name = "meridian_gateway_hedge_budget";
    text.single(name, Kind::Gauge, "Hedges that could be paid for now.", hedges_left);
    let name = "meridian_gateway_region_health";
    text.head(name, Kind::Gauge, "1 for the state in which this gateway sees a region.");
    for Seen { region, health, .. } in &seen {
        for state in [Health::Healthy, Health::Unknown, Health::Suspect, Health::Down] {
            let state_word = health_word(state);
            text.sample(name, &[("region", region), ("state", state_word)], u8::from(state == *health));
        }
    }
    let name = "meridian_gateway_region_report_age_seconds";
    text.head(name, Kind::Gauge, "Time since a region was last heard of; absent before the first time.");
    for Seen { region, report_age, .. } in &seen {
        if let Some(age) = report_age {
            text.sample(name, &[("region", region)], age.as_secs_f64());
        }
    }
    let name = "meridian_gateway_region_rtt_seconds";
    text.head(name, Kind::Gauge, "Estimated round trip to a region.");
    for Seen { region, round_trip, .. } in &seen {
        text.sample(name, &[("region", region)], round_trip.as_secs_f64());
    }
    let name = "meridian_gateway_evacuation_budget";
    text.head(name, Kind::Gauge, "Requests that may still leave a region that was lost.");
    for Seen { region, evacuations_left, .. } in &seen {
        text.sample(name, &[("region", region)], evacuations_left);
    }
}

fn render_circuits(text: &mut MetricsText, operations: &Operations) {
    let Operations { config, watch, .. } = operations;
    let states = watch.circuits();
    let named = |state: &TargetStatus<_>| config.catalogue.region(state.target).id.to_string();
    let name = "meridian_gateway_region_circuit";
    text.head(name, Kind::Gauge, "1 for how the circuit of a region stands.");
    for state in &states {
        for word in circuits::STATE_NAMES {
            let is = u8::from(word == circuits::state_name(state.state));
            text.sample(name, &[("region", &named(state)), ("state", word)], is);
        }
    }
    let gauges: [(&str, &str, InFlight); 2] = [
        ("meridian_gateway_region_in_flight", "Attempts that wait for a region.", |state| state.in_flight),
        ("meridian_gateway_region_in_flight_max", "How many may.", |state| state.in_flight_max),
    ];
    for (name, help, of) in gauges {
        text.head(name, Kind::Gauge, help);
        for state in &states {
            text.sample(name, &[("region", &named(state))], of(state));
        }
    }
}

/// What is known of the regions of the table, copied out so that the lock is not held while it is written.
fn look(operations: &Operations) -> (u32, u32, Vec<Seen>) {
    let Operations { config, views, watch, .. } = operations;
    let view = views.borrow().clone();
    let now = Instant::now();
    let known = watch.known();
    let evacuations: Vec<_> = known.budgets.evacuations_left(now).collect();
    let regions = view.iter().flat_map(|view| view.regions());
    let seen = regions.map(|(region, _)| {
        let (health, report_age) = known.fleet.state(region, now);
        let left = evacuations.iter().find(|(lost, _)| *lost == region);
        Seen {
            region: config.catalogue.region(region).id.to_string(),
            health,
            report_age,
            round_trip: known.latency.estimate(region, now),
            evacuations_left: left.map_or(0, |(_, left)| *left),
        }
    });
    (known.budgets.retry.left(now), known.budgets.hedge.left(), seen.collect())
}
