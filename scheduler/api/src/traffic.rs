//! Traffic of a gateway, for the console of a hub.
//!
//! A gateway sends a report to every hub of its list once a second, and at once when a region becomes less healthy. It has
//! what the gateway observes of the regions, and counts of the requests that have finished since its last report to that
//! hub. The response names requests whose routing decision a person at the console looks up, and searches for requests; the
//! gateway responds with the next report, and that one follows at once. A hub without a console asks for a report a minute.
//!
//! No decision depends on these messages: a lost report is not repeated, and the plan is computed from the
//! [demand](super::plan). A report has neither inputs nor keys.

mod histogram;

pub use histogram::LatencyHistogram;

use std::collections::BTreeMap;
use std::time::Duration;

use regions::health::Health;
use regions::set::MAX_REGIONS;
use regions::{DeploymentName, Generation, RegionId, TenantId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::plan::GatewayBoot;
use super::requests::{
    FOUND_ATTEMPTS_MAX, FOUND_DEFAULT, FoundRequestsV1, LABEL_BYTES_MAX, PROBLEM_BYTES_MAX, RequestFilter,
    RequestFilterV1,
};
use super::{MessageVersion, VERSION, WireError, entries, list, parsed, reject_too_many};

/// Interval of the reports to a hub with a console.
pub const TRAFFIC_PERIOD: Duration = Duration::from_secs(1);
/// Interval of the reports to a hub without one.
pub const TRAFFIC_IDLE_PERIOD: Duration = Duration::from_secs(60);
/// Maximum number of rows of each kind in a report, with the highest counts: what a page shows. A report has some 200 KiB then.
pub const TRAFFIC_ROWS_MAX: usize = 1024;
/// Maximum number of explanations in a report, and of requests in a response.
pub const EXPLANATIONS_MAX: usize = 16;
/// Maximum size of the explanations of a report, as JSON; a single larger one is sent alone. It is the size of one with all regions.
pub const EXPLANATION_BYTES_MAX: usize = 256 << 10;
/// Maximum number of searches of a report and of a response, of some 70 KiB each.
pub const SEARCHES_MAX: usize = 4;
/// Maximum size of a report. The limits of its rows keep it below: no report is too large for a hub.
pub const TRAFFIC_BYTES_MAX: usize = 2 << 20;
/// Maximum length of a request identifier, as gateways accept it from clients.
pub const REQUEST_ID_BYTES_MAX: usize = 128;
/// Maximum interval of a report: a longer one was interrupted, and its counts are spread over it.
const INTERVAL_MS_MAX: u64 = 24 * 3600 * 1000;

/// `POST /v1/traffic`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrafficReportV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the gateway.
    pub gateway: String,
    /// Random number drawn at its start.
    pub boot_id: u64,
    /// Generation of its route table; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// Time since the last report.
    pub interval_ms: u64,
    /// Attempts in flight.
    pub in_flight: u64,
    /// Regions of the route table as the gateway observes them.
    pub regions: Vec<ObservedRegionV1>,
    /// Finished requests by deployment and region.
    pub served: Vec<ServedV1>,
    /// Requests without success by deployment and outcome.
    pub failures: Vec<FailedV1>,
    /// Finished requests by tenant.
    pub tenants: Vec<TenantTrafficV1>,
    /// Attempts that went to another region than the one before, or than the nearest.
    pub moves: Vec<MoveV1>,
    /// Routing decisions that the hub has requested.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub explained: Vec<ExplainedV1>,
    /// Results of searches of the hub.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub searched: Vec<SearchedV1>,
}

/// Region as a gateway observes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObservedRegionV1 {
    /// Region.
    pub region: String,
    /// Health: `healthy`, `unknown`, `suspect` or `down`. Gateways of later versions may send other ones.
    pub health: String,
    /// Time since its last report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_age_ms: Option<u64>,
    /// Estimated round trip.
    pub rtt_us: u64,
    /// Attempts of this gateway in flight to it.
    pub in_flight: u32,
    /// Reported loads, without those of sleeping deployments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<ObservedLoadV1>,
}

/// Load of a deployment in a region, as the region reports it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObservedLoadV1 {
    /// Deployment.
    pub deployment: String,
    /// Ready replicas.
    pub ready: u32,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Measured speed of its replicas.
    pub tokens_per_second: u64,
    /// Time for which a new request would be held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_for_ms: Option<u64>,
}

/// Finished requests of a deployment whose response came from one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedV1 {
    /// Deployment.
    pub deployment: String,
    /// Region; absent if no region has responded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Requests.
    pub requests: u64,
    /// Requests that failed by no fault of the client.
    pub failed: u64,
    /// Computed tokens.
    pub tokens: u64,
    /// Latencies of the requests: bucket and count of those that are not empty.
    pub latencies: Vec<[u64; 2]>,
}

/// Requests of a deployment without success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedV1 {
    /// Deployment.
    pub deployment: String,
    /// Outcome: an error code, or an incomplete response.
    pub outcome: String,
    /// Requests.
    pub requests: u64,
}

/// Finished requests of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantTrafficV1 {
    /// Tenant.
    pub tenant: String,
    /// Requests.
    pub requests: u64,
    /// Requests that failed by no fault of the client.
    pub failed: u64,
    /// Requests that its limits rejected.
    pub limited: u64,
    /// Inputs.
    pub inputs: u64,
    /// Computed tokens.
    pub tokens: u64,
}

/// Attempts of requests that went to another region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveV1 {
    /// Region of the attempt before, or the preferred region of a spillover.
    pub from: String,
    /// Region of the attempt.
    pub to: String,
    /// Cause: [`MoveCause::as_str`]. Gateways of later versions may send other ones.
    pub cause: String,
    /// Attempts.
    pub requests: u64,
    /// Identifier of one of the requests; empty if the residency of all is restricted, because clients choose identifiers, and
    /// hubs are in all regions.
    pub example: String,
}

/// Why an attempt went to another region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MoveCause {
    /// The preferred region was overloaded, and this one had granted credits.
    Spillover,
    /// The attempt before failed.
    Retry,
    /// The attempt before missed its first-byte deadline.
    FirstByteTimeout,
    /// The region of the attempt before is down.
    Evacuation,
    /// The attempt before was slow, and this one races it.
    Hedge,
    /// A cause that only a later version knows.
    Other,
}

/// Routing decision of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExplainedV1 {
    /// Identifier of the request.
    pub id: String,
    /// The decision, as `GET /explain` of the gateway has it; absent if the gateway does not know the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Value>,
    /// Why it is not known whether the gateway has the request; at most [`PROBLEM_BYTES_MAX`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Search of a hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchV1 {
    /// Number of the search at this hub.
    pub search: u64,
    /// Filter: a [`RequestFilterV1`]. It is read when the search begins, so that a condition of a newer version is a problem of this
    /// search only.
    pub filter: Value,
}

impl SearchV1 {
    /// Creates a search.
    pub fn new(search: u64, filter: &RequestFilterV1) -> SearchV1 {
        SearchV1 { search, filter: serde_json::to_value(filter).unwrap_or_default() }
    }

    /// Returns the filter.
    ///
    /// # Errors
    ///
    /// When a condition is invalid or unknown: the search would find other requests without it.
    pub fn into_filter(self) -> Result<RequestFilter, WireError> {
        let wire = serde_json::from_value::<RequestFilterV1>(self.filter);
        wire.map_err(|error| WireError::new("filter", error))?.try_into()
    }
}

/// Result of a search at one gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SearchedV1 {
    /// Number of the search.
    pub search: u64,
    /// Requests.
    #[serde(flatten)]
    pub found: FoundRequestsV1,
}

/// Response to [`TrafficReportV1`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficResponseV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Time until the next report.
    pub next_ms: u64,
    /// Requests whose routing decision the next report should have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub explain: Vec<String>,
    /// Searches whose result the next report should have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<SearchV1>,
}

/// Response to `POST /v1/console-logins`: a link that signs a browser in once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleLoginV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// The link.
    pub url: String,
    /// Time for which it is valid.
    pub expires_s: u64,
}

/// Traffic of a gateway since its last report.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayTraffic {
    /// The gateway.
    pub gateway: GatewayBoot,
    /// Generation of its route table.
    pub generation: Option<Generation>,
    /// Time since its last report.
    pub interval: Duration,
    /// Attempts in flight.
    pub in_flight: u64,
    /// Regions as it observes them.
    pub regions: BTreeMap<RegionId, ObservedRegion>,
    /// Finished requests by deployment and region.
    pub served: BTreeMap<(DeploymentName, Option<RegionId>), ServedTraffic>,
    /// Requests without success by deployment and outcome.
    pub failures: BTreeMap<(DeploymentName, String), u64>,
    /// Finished requests by tenant.
    pub tenants: BTreeMap<TenantId, TenantTraffic>,
    /// Attempts that went to another region.
    pub moves: Vec<Move>,
    /// Routing decisions that the hub has requested, by request.
    pub explained: BTreeMap<String, ExplainedRequest>,
    /// Results of searches of the hub, by the number of the search.
    pub searched: BTreeMap<u64, FoundRequestsV1>,
}

/// Routing decision of a request at one gateway: `None` if the gateway does not know the request, and an error with the reason if it
/// could not read its disk.
pub type ExplainedRequest = Result<Option<Value>, String>;

/// Region as a gateway observes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedRegion {
    /// Health.
    pub health: Health,
    /// Time since its last report.
    pub report_age: Option<Duration>,
    /// Estimated round trip.
    pub rtt: Duration,
    /// Attempts of the gateway in flight to it.
    pub in_flight: u32,
    /// Reported loads.
    pub loads: BTreeMap<DeploymentName, ObservedLoad>,
}

/// Load of a deployment in a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ObservedLoad {
    /// Ready replicas.
    pub ready: u32,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Measured speed of its replicas.
    pub tokens_per_second: u64,
    /// Time for which a new request would be held.
    pub held_for: Option<Duration>,
}

/// Finished requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedTraffic {
    /// Requests.
    pub requests: u64,
    /// Requests that failed by no fault of the client.
    pub failed: u64,
    /// Computed tokens.
    pub tokens: u64,
    /// Their latencies.
    pub latencies: LatencyHistogram,
}

/// Finished requests of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantTraffic {
    /// Requests.
    pub requests: u64,
    /// Requests that failed by no fault of the client.
    pub failed: u64,
    /// Requests that its limits rejected.
    pub limited: u64,
    /// Inputs.
    pub inputs: u64,
    /// Computed tokens.
    pub tokens: u64,
}

/// Attempts of requests that went to another region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Region of the attempt before, or the preferred region of a spillover.
    pub from: RegionId,
    /// Region of the attempt.
    pub to: RegionId,
    /// Cause.
    pub cause: MoveCause,
    /// Attempts.
    pub requests: u64,
    /// Identifier of one of the requests; empty if the residency of all is restricted.
    pub example: String,
}

impl MoveCause {
    /// All causes.
    pub const ALL: [MoveCause; 6] = [
        MoveCause::Spillover,
        MoveCause::Retry,
        MoveCause::FirstByteTimeout,
        MoveCause::Evacuation,
        MoveCause::Hedge,
        MoveCause::Other,
    ];

    /// Returns the cause with this label. A gateway may be of a later version than the hub: its report is not rejected for a
    /// cause that is new.
    fn of_label(label: &str) -> MoveCause {
        MoveCause::ALL.into_iter().find(|cause| cause.as_str() == label).unwrap_or(MoveCause::Other)
    }

    /// Returns the label.
    pub fn as_str(self) -> &'static str {
        match self {
            MoveCause::Spillover => "spillover",
            MoveCause::Retry => "retry",
            MoveCause::FirstByteTimeout => "first_byte_timeout",
            MoveCause::Evacuation => "evacuation",
            MoveCause::Hedge => "hedge",
            MoveCause::Other => "other",
        }
    }
}

/// Returns the health with this name. One that only a later version knows is unknown, and the rest of the report is used.
fn health_of_name(name: &str) -> Health {
    Health::ALL.into_iter().find(|health| health.as_str() == name).unwrap_or(Health::Unknown)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl From<&GatewayTraffic> for TrafficReportV1 {
    fn from(traffic: &GatewayTraffic) -> TrafficReportV1 {
        let GatewayTraffic {
            gateway: GatewayBoot { region, boot_id },
            generation,
            interval,
            in_flight,
            regions,
            served,
            failures,
            tenants,
            moves,
            explained,
            searched,
        } = traffic;
        let served = served.iter().map(|((deployment, region), served)| {
            let ServedTraffic { requests, failed, tokens, latencies } = served;
            ServedV1 {
                deployment: deployment.to_string(),
                region: region.as_ref().map(RegionId::to_string),
                requests: *requests,
                failed: *failed,
                tokens: *tokens,
                latencies: latencies.to_wire(),
            }
        });
        let failures = failures.iter().map(|((deployment, outcome), requests)| FailedV1 {
            deployment: deployment.to_string(),
            outcome: outcome.clone(),
            requests: *requests,
        });
        let tenants = tenants.iter().map(|(tenant, traffic)| {
            let TenantTraffic { requests, failed, limited, inputs, tokens } = *traffic;
            TenantTrafficV1 { tenant: tenant.to_string(), requests, failed, limited, inputs, tokens }
        });
        let moves = moves.iter().map(|Move { from, to, cause, requests, example }| MoveV1 {
            from: from.to_string(),
            to: to.to_string(),
            cause: cause.as_str().to_owned(),
            requests: *requests,
            example: example.clone(),
        });
        let explained = explained.iter().map(|(id, explained)| {
            let (explanation, problem) = match explained {
                Ok(explanation) => (explanation.clone(), None),
                Err(problem) => (None, Some(problem.clone())),
            };
            ExplainedV1 { id: id.clone(), explanation, problem }
        });
        let searched =
            searched.iter().map(|(search, found)| SearchedV1 { search: *search, found: found.clone() });
        TrafficReportV1 {
            version: VERSION,
            gateway: region.to_string(),
            boot_id: *boot_id,
            generation: generation.map(|generation| generation.to_string()),
            interval_ms: millis(*interval),
            in_flight: *in_flight,
            regions: regions.iter().map(|(region, observed)| observed_v1(region, observed)).collect(),
            served: served.collect(),
            failures: failures.collect(),
            tenants: tenants.collect(),
            moves: moves.collect(),
            explained: explained.collect(),
            searched: searched.collect(),
        }
    }
}

fn observed_v1(region: &RegionId, observed: &ObservedRegion) -> ObservedRegionV1 {
    let ObservedRegion { health, report_age, rtt, in_flight, loads } = observed;
    let loads = loads.iter().map(|(deployment, load)| {
        let ObservedLoad { ready, pending_tokens, tokens_per_second, held_for } = *load;
        ObservedLoadV1 {
            deployment: deployment.to_string(),
            ready,
            pending_tokens,
            tokens_per_second,
            held_for_ms: held_for.map(millis),
        }
    });
    ObservedRegionV1 {
        region: region.to_string(),
        health: health.as_str().to_owned(),
        report_age_ms: report_age.map(millis),
        rtt_us: u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX),
        in_flight: *in_flight,
        loads: loads.collect(),
    }
}

impl TryFrom<TrafficReportV1> for GatewayTraffic {
    type Error = WireError;

    fn try_from(wire: TrafficReportV1) -> Result<GatewayTraffic, WireError> {
        let TrafficReportV1 {
            version: _,
            gateway,
            boot_id,
            generation,
            interval_ms,
            in_flight,
            regions,
            served,
            failures,
            tenants,
            moves,
            explained,
            searched,
        } = wire;
        reject_too_many("moves", moves.len(), TRAFFIC_ROWS_MAX)?;
        let explained = entries("explained", ".id", explained, EXPLANATIONS_MAX, |at, explained| {
            let ExplainedV1 { id, explanation, problem } = explained;
            let problem = problem.map(|text| short(&format!("{at}.problem"), text, PROBLEM_BYTES_MAX));
            let explained = problem.transpose()?.map_or(Ok(explanation), Err);
            Ok((short(&format!("{at}.id"), id, REQUEST_ID_BYTES_MAX)?, explained))
        })?;
        reject_too_many("searched", searched.len(), SEARCHES_MAX)?;
        let searched = list("searched", searched, |at, SearchedV1 { search, found }| {
            reject_too_many(&format!("{at}.requests"), found.requests.len(), FOUND_DEFAULT)?;
            for found in &found.requests {
                reject_too_many(&format!("{at}.attempts"), found.attempts.len(), FOUND_ATTEMPTS_MAX)?;
                reject_too_long(&format!("{at}.kept"), &found.kept, LABEL_BYTES_MAX)?;
            }
            let problem = found.problem.as_deref().unwrap_or_default();
            reject_too_long(&format!("{at}.problem"), problem, PROBLEM_BYTES_MAX)?;
            Ok((search, found))
        })?;
        Ok(GatewayTraffic {
            gateway: GatewayBoot { region: parsed("gateway", &gateway)?, boot_id },
            generation: generation.map(|text| parsed("generation", &text)).transpose()?,
            interval: Duration::from_millis(interval_ms.min(INTERVAL_MS_MAX)),
            in_flight,
            regions: read_regions(regions)?,
            served: read_served(served)?,
            failures: read_failures(failures)?,
            tenants: entries("tenants", ".tenant", tenants, TRAFFIC_ROWS_MAX, |at, traffic| {
                let TenantTrafficV1 { tenant, requests, failed, limited, inputs, tokens } = traffic;
                let traffic = TenantTraffic { requests, failed, limited, inputs, tokens };
                Ok((parsed(format!("{at}.tenant"), &tenant)?, traffic))
            })?,
            moves: list("moves", moves, |at, moved| {
                let MoveV1 { from, to, cause, requests, example } = moved;
                Ok(Move {
                    from: parsed(format!("{at}.from"), &from)?,
                    to: parsed(format!("{at}.to"), &to)?,
                    cause: MoveCause::of_label(&cause),
                    requests,
                    example: short(&format!("{at}.example"), example, REQUEST_ID_BYTES_MAX)?,
                })
            })?,
            explained,
            searched: searched.into_iter().collect(),
        })
    }
}

fn short(field: &str, text: String, bytes_max: usize) -> Result<String, WireError> {
    reject_too_long(field, &text, bytes_max)?;
    Ok(text)
}

fn reject_too_long(field: &str, text: &str, bytes_max: usize) -> Result<(), WireError> {
    if text.len() <= bytes_max {
        return Ok(());
    }
    Err(WireError::new(field, format!("{} bytes; at most {bytes_max} are allowed", text.len())))
}

fn read_regions(wire: Vec<ObservedRegionV1>) -> Result<BTreeMap<RegionId, ObservedRegion>, WireError> {
    entries("regions", ".region", wire, MAX_REGIONS, |at, observed| {
        let ObservedRegionV1 { region, health, report_age_ms, rtt_us, in_flight, loads } = observed;
        let loads = entries(&format!("{at}.loads"), ".deployment", loads, TRAFFIC_ROWS_MAX, |at, load| {
            let ObservedLoadV1 { deployment, ready, pending_tokens, tokens_per_second, held_for_ms } = load;
            let held_for = held_for_ms.map(Duration::from_millis);
            let load = ObservedLoad { ready, pending_tokens, tokens_per_second, held_for };
            Ok((parsed(format!("{at}.deployment"), &deployment)?, load))
        })?;
        let observed = ObservedRegion {
            health: health_of_name(&health),
            report_age: report_age_ms.map(Duration::from_millis),
            rtt: Duration::from_micros(rtt_us),
            in_flight,
            loads,
        };
        Ok((parsed(format!("{at}.region"), &region)?, observed))
    })
}

fn read_served(
    wire: Vec<ServedV1>,
) -> Result<BTreeMap<(DeploymentName, Option<RegionId>), ServedTraffic>, WireError> {
    reject_too_many("served", wire.len(), TRAFFIC_ROWS_MAX)?;
    let rows = list("served", wire, |at, served| {
        let ServedV1 { deployment, region, requests, failed, tokens, latencies } = served;
        let region = region.map(|region| parsed(format!("{at}.region"), &region)).transpose()?;
        let latencies = LatencyHistogram::from_wire(&format!("{at}.latencies"), &latencies)?;
        let deployment = parsed(format!("{at}.deployment"), &deployment)?;
        Ok(((deployment, region), ServedTraffic { requests, failed, tokens, latencies }))
    })?;
    Ok(rows.into_iter().collect())
}

fn read_failures(wire: Vec<FailedV1>) -> Result<BTreeMap<(DeploymentName, String), u64>, WireError> {
    reject_too_many("failures", wire.len(), TRAFFIC_ROWS_MAX)?;
    let rows = list("failures", wire, |at, failed| {
        let FailedV1 { deployment, outcome, requests } = failed;
        let outcome = short(&format!("{at}.outcome"), outcome, LABEL_BYTES_MAX)?;
        Ok(((parsed(format!("{at}.deployment"), &deployment)?, outcome), requests))
    })?;
    Ok(rows.into_iter().collect())
}

#[cfg(test)]
mod tests;
