//! Exchange between a gateway and a region, five times a second, at the gateway's request.
//!
//! The exchange is direct, without hub or store. Its requests and responses are messages of one long stream in both
//! directions ([`stream`]), and contain what has changed ([`delta`]), so idle deployments add nothing to them. The response
//! repeats the sequence number of its request, so that a gateway recognizes outdated responses.

pub mod delta;
pub mod stream;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{MessageVersion, VERSION, WireError, entries, parsed};
use regions::deployment::MAX_DEPLOYMENTS;
use regions::{DeploymentName, InstanceName, RegionId};
use replica_api::start_failure::StartFailure;

/// Interval of the exchanges of a gateway with a region. A grant is sized for it, and a region's health is judged by the
/// reports that are missing.
pub const EXCHANGE_PERIOD: Duration = Duration::from_millis(200);
/// Maximum number of gateways: those with grants at one region, and those in the plan.
pub const GATEWAYS_MAX: usize = 1024;
/// Work that a replica is given from the hold queue, beside its backlog, as computing time: enough that it never idles,
/// and little enough that a more urgent request does not wait long behind it. A held request waits longer than
/// [`DeploymentLoad::ready_in`] by up to this time.
pub const DISPATCH_AHEAD: Duration = Duration::from_millis(500);
/// Maximum length of a gateway's location in bytes.
const GATEWAY_BYTES_MAX: usize = 128;
/// Maximum time to readiness, a day: larger values are invalid, and times are added to it.
const READY_IN_MS_MAX: u64 = 24 * 3600 * 1000;

/// Identity of a gateway at a region: its location and boot id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gateway {
    /// Location that it reports.
    pub location: String,
    /// Random number drawn at its start; also distinguishes gateways at one location.
    pub boot_id: u64,
}

/// Request of a gateway for a region's report, sent five times a second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeRequest {
    /// The gateway.
    pub gateway: Gateway,
    /// Sequence number of this gateway's requests to this region.
    pub sequence: u64,
    /// State of the spoke's loads that the gateway has. `None`: the response has all loads.
    pub known: Option<KnownState>,
    /// Overflow of the gateway in the last period, in tokens; absent deployments have none.
    pub requested: BTreeMap<DeploymentName, u64>,
}

/// State of the loads of one process of a spoke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownState {
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Number of the state; later states have higher ones.
    pub number: u64,
    /// Number of the grants that the gateway has. Absent: the response has all grants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants: Option<u64>,
}

/// Report of a spoke instance to a gateway. The instances of a region serve the same replicas, and each reports its
/// share of their load, so that the sum of the reports is the load of the region.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Region of the instance.
    pub region: RegionId,
    /// Name of the reporting instance.
    pub instance: InstanceName,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Sequence number of the request.
    pub sequence: u64,
    /// Load of every deployment that this region serves, or would serve on demand.
    pub deployments: BTreeMap<DeploymentName, DeploymentLoad>,
    /// Whether the instance is draining.
    pub draining: bool,
    /// Whether the instance has a queue of jobs.
    pub has_jobs: bool,
}

/// Report of a spoke instance to one gateway, without the loads, which are the same for all gateways.
#[derive(Clone, Debug, PartialEq)]
pub struct SpokeReport {
    /// Region of the instance.
    pub region: RegionId,
    /// Name of the reporting instance.
    pub instance: InstanceName,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Sequence number of the request.
    pub sequence: u64,
    /// Whether the instance is draining.
    pub draining: bool,
    /// Whether the instance has a queue of jobs.
    pub has_jobs: bool,
    /// Spillover tokens by deployment that the gateway may send until its next request; absent deployments have none.
    pub grants: BTreeMap<DeploymentName, u64>,
}

/// Load of one deployment in a region, summed over its ready replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DeploymentLoad {
    /// Number of ready replicas.
    pub ready: u32,
    /// Time for which a new request would be held (see `scheduler_core::spoke::hold`); `None` if it would not be held.
    pub ready_in: Option<Duration>,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Queued tokens of interactive requests, by the last statuses; `None` if a replica does not report them.
    pub interactive_tokens: Option<u64>,
    /// Total measured speed.
    pub tokens_per_second: f64,
    /// Spillover tokens that the gateway may send until its next request.
    pub granted_tokens: u64,
    /// Reason for which no replica can start; `None` if one is ready or may become ready. Gateways send no requests to a
    /// region in which the deployment has failed.
    pub failed: Option<StartFailure>,
}

impl DeploymentLoad {
    /// Returns whether it has no replica, no work and no grant, so that it stays as it is until a report changes it.
    pub fn is_asleep(&self) -> bool {
        let DeploymentLoad {
            ready,
            ready_in: _,
            pending_tokens,
            interactive_tokens,
            tokens_per_second,
            granted_tokens,
            failed: _,
        } = self;
        *ready == 0
            && [*pending_tokens, interactive_tokens.unwrap_or(0), *granted_tokens] == [0; 3]
            && *tokens_per_second == 0.0
    }
}

/// Request of the exchange, `POST /spoke/v1/exchange`: the state of one direction of a [`stream`], and its first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExchangeRequestV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Location of the gateway.
    pub gateway: String,
    /// Random number drawn at each start of the gateway.
    #[serde(default)]
    pub boot_id: u64,
    /// Sequence number of this gateway's requests to this region.
    pub sequence: u64,
    /// State of the spoke's loads that the gateway has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<KnownState>,
    /// Overflow of the gateway by deployment, without those that have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requested: Vec<OverflowV1>,
}

/// Overflow of one deployment at a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverflowV1 {
    /// Name of the deployment.
    pub name: String,
    /// Tokens of the last period.
    pub tokens: u64,
}

/// Response: the state of the other direction, and its first message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReportV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region that responds.
    pub region: String,
    /// Name of its instance that responds.
    pub instance: String,
    /// Random number drawn at each start of the spoke.
    pub boot_id: u64,
    /// Sequence number of the request.
    pub sequence: u64,
    /// Deployments that the region serves, or would serve on demand: all, or those that have changed since the base of
    /// `state`, and those whose grant has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deployments: Vec<DeploymentReportV1>,
    /// Whether the instance is draining.
    pub draining: bool,
    /// Whether the instance has a queue of jobs. Absent from spokes without one, and from older ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub jobs: bool,
    /// State of the loads. Absent from spokes that always send all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<ReportStateV1>,
}

/// State of a spoke's loads in a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportStateV1 {
    /// Number of the state.
    pub number: u64,
    /// State since which the report has the changes. Absent: it has all loads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Deployments that have been removed since the base.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    /// Checksum of all loads of the state, without grants.
    pub checksum: u64,
    /// Number of the grants of this report; it increases when one of them changes. Absent from spokes that always send all
    /// grants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants: Option<u64>,
    /// Number of the grants since which the report has the changes; the other grants are renewed as they are. Absent:
    /// it has all grants, and a deployment that is not listed has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants_base: Option<u64>,
    /// Checksum of all grants of the gateway. Absent from older spokes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grants_checksum: Option<u64>,
}

/// Report of one deployment in a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeploymentReportV1 {
    /// Name of the deployment.
    pub name: String,
    /// Number of ready replicas.
    pub ready: u32,
    /// Time for which a new request would be held, until a replica is ready and the requests before it are sent. Absent
    /// if it would not be held: if a replica is ready and the queue is empty, or if nothing starts a replica.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_in_ms: Option<u64>,
    /// Tokens that are queued or being computed.
    pub pending_tokens: u64,
    /// Queued tokens of interactive requests, for which a new interactive request waits. Absent from regions that do
    /// not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interactive_tokens: Option<u64>,
    /// Total speed; 0 while unknown.
    pub tokens_per_second: f64,
    /// Spillover tokens that the gateway may send until its next request. Absent from regions that accept none.
    #[serde(default)]
    pub granted_tokens: u64,
    /// Reason for which no replica can start. Absent if one is ready or may become ready, and from regions that do not report
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<StartFailure>,
}

impl From<ExchangeRequest> for ExchangeRequestV1 {
    fn from(request: ExchangeRequest) -> ExchangeRequestV1 {
        let ExchangeRequest { gateway: Gateway { location, boot_id }, sequence, known, requested } = request;
        let requested =
            requested.into_iter().map(|(name, tokens)| OverflowV1 { name: name.to_string(), tokens });
        ExchangeRequestV1 {
            version: VERSION,
            gateway: location,
            boot_id,
            sequence,
            known,
            requested: requested.collect(),
        }
    }
}

impl TryFrom<ExchangeRequestV1> for ExchangeRequest {
    type Error = WireError;

    fn try_from(wire: ExchangeRequestV1) -> Result<ExchangeRequest, WireError> {
        let ExchangeRequestV1 { version: _, gateway, boot_id, sequence, known, requested } = wire;
        if gateway.len() > GATEWAY_BYTES_MAX {
            let problem = format!("it has {} bytes; at most {GATEWAY_BYTES_MAX} are allowed", gateway.len());
            return Err(WireError::new("gateway".to_owned(), problem));
        }
        let requested = entries("requested", ".name", requested, MAX_DEPLOYMENTS, |at, overflow| {
            let OverflowV1 { name, tokens } = overflow;
            Ok((parsed(format!("{at}.name"), &name)?, tokens))
        })?;
        let gateway = Gateway { location: gateway, boot_id };
        Ok(ExchangeRequest { gateway, sequence, known, requested })
    }
}

impl From<Report> for ReportV1 {
    fn from(report: Report) -> ReportV1 {
        let Report { region, instance, boot_id, sequence, deployments, draining, has_jobs } = report;
        let each = deployments.into_iter().map(|(name, load)| {
            let DeploymentLoad {
                ready,
                ready_in,
                pending_tokens,
                interactive_tokens,
                tokens_per_second,
                granted_tokens,
                failed,
            } = load;
            let name = name.to_string();
            let ready_in_ms = ready_in.map(ready_in_ms);
            DeploymentReportV1 {
                name,
                ready,
                ready_in_ms,
                pending_tokens,
                interactive_tokens,
                tokens_per_second,
                granted_tokens,
                failed,
            }
        });
        let (region, instance) = (region.to_string(), instance.to_string());
        ReportV1 {
            version: VERSION,
            region,
            instance,
            boot_id,
            sequence,
            deployments: each.collect(),
            draining,
            jobs: has_jobs,
            state: None,
        }
    }
}

/// Returns a time to readiness in milliseconds, within its limit.
fn ready_in_ms(left: Duration) -> u64 {
    u64::try_from(left.as_millis()).unwrap_or(u64::MAX).min(READY_IN_MS_MAX)
}

/// Converts a report with all loads; [`delta::ReportDecoder`] converts one with changes.
impl TryFrom<ReportV1> for Report {
    type Error = WireError;

    fn try_from(wire: ReportV1) -> Result<Report, WireError> {
        let ReportV1 {
            version: _,
            region,
            instance,
            boot_id,
            sequence,
            deployments,
            draining,
            jobs: has_jobs,
            state: _,
        } = wire;
        let deployments = entries("deployments", ".name", deployments, MAX_DEPLOYMENTS, |at, deployment| {
            let DeploymentReportV1 {
                name,
                ready,
                ready_in_ms,
                pending_tokens,
                interactive_tokens,
                tokens_per_second,
                granted_tokens,
                failed,
            } = deployment;
            let at = |field: &str| format!("{at}.{field}");
            if !(tokens_per_second.is_finite() && tokens_per_second >= 0.0) {
                let problem = format!("{tokens_per_second} is not a speed; send a number of at least 0");
                return Err(WireError::new(at("tokens_per_second"), problem));
            }
            if let Some(given) = ready_in_ms.filter(|given| *given > READY_IN_MS_MAX) {
                let problem = format!("{given} exceeds the maximum start time of {READY_IN_MS_MAX} ms");
                return Err(WireError::new(at("ready_in_ms"), problem));
            }
            let ready_in = ready_in_ms.map(Duration::from_millis);
            let load = DeploymentLoad {
                ready,
                ready_in,
                pending_tokens,
                interactive_tokens,
                tokens_per_second,
                granted_tokens,
                failed,
            };
            Ok((parsed(at("name"), &name)?, load))
        })?;
        let (region, instance) = (parsed("region", &region)?, parsed("instance", &instance)?);
        Ok(Report { region, instance, boot_id, sequence, deployments, draining, has_jobs })
    }
}

#[cfg(test)]
mod tests {
    use super::super::any;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    prop_compose! {
        // Quarters, because serde_json parses longer fractions only to within one unit in the last place.
        fn load()(
            ready: u32, ready_in in proptest::option::of(0..=READY_IN_MS_MAX), pending_tokens: u64,
            interactive_tokens: Option<u64>, quarters: u32, granted_tokens: u64,
            failed in proptest::option::of(proptest::sample::select(StartFailure::ALL.as_slice())),
        ) -> DeploymentLoad {
            let tokens_per_second = f64::from(quarters) / 4.0;
            let ready_in = ready_in.map(Duration::from_millis);
            DeploymentLoad {
                ready, ready_in, pending_tokens, interactive_tokens, tokens_per_second, granted_tokens, failed,
            }
        }
    }

    prop_compose! {
        fn report()(
            region in any::region(),
            instance in any::instance(),
            boot_id: u64,
            sequence: u64,
            deployments in proptest::collection::btree_map(any::name(), load(), 0..4),
            draining: bool,
            has_jobs: bool,
        ) -> Report {
            Report { region, instance, boot_id, sequence, deployments, draining, has_jobs }
        }
    }

    proptest! {
        #[test]
        fn a_request_survives_a_round_trip(
            boot_id: u64,
            sequence: u64,
            known: Option<(u64, u64, Option<u64>)>,
            requested in proptest::collection::btree_map(any::name(), proptest::num::u64::ANY, 0..4),
        ) {
            let gateway = Gateway { location: "50.1,8.7".to_owned(), boot_id };
            let known = known.map(|(boot_id, number, grants)| KnownState { boot_id, number, grants });
            let request = ExchangeRequest { gateway, sequence, known, requested };
            let text = serde_json::to_string(&ExchangeRequestV1::from(request.clone())).unwrap();
            let wire: ExchangeRequestV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(ExchangeRequest::try_from(wire), Ok(request));
        }

        #[test]
        fn a_report_survives_a_round_trip(report in report()) {
            let text = serde_json::to_string(&ReportV1::from(report.clone())).unwrap();
            let wire: ReportV1 = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(Report::try_from(wire), Ok(report));
        }
    }

    fn message() -> Value {
        let load =
            |name: &str| json!({"name": name, "ready": 1, "pending_tokens": 2, "tokens_per_second": 3.0});
        let deployments = [load("a"), load("b")];
        json!({"version": 1, "region": "aws/us-east-1", "instance": "a", "boot_id": 1, "sequence": 2, "deployments": deployments,
               "draining": false})
    }

    #[test]
    fn a_report_that_is_invalid_is_rejected_with_its_field() {
        let check = |pointer: &str, value: Value, field: &str| {
            let mut message = message();
            *message.pointer_mut(pointer).unwrap() = value;
            let wire: ReportV1 = serde_json::from_value(message).unwrap();
            assert_eq!(Report::try_from(wire).unwrap_err().field, field);
        };
        check("/region", json!("nowhere"), "region");
        check("/instance", json!("a b"), "instance");
        check("/deployments/1/name", json!("a"), "deployments[1].name");
        check("/deployments/1/name", json!("b c"), "deployments[1].name");
        check("/deployments/0/tokens_per_second", json!(-1.0), "deployments[0].tokens_per_second");
        let mut deployments = message()["deployments"].clone();
        deployments[1]["ready_in_ms"] = json!(READY_IN_MS_MAX);
        let mut at_the_most = message();
        at_the_most["deployments"] = deployments.clone();
        assert!(Report::try_from(serde_json::from_value::<ReportV1>(at_the_most).unwrap()).is_ok());
        deployments[1]["ready_in_ms"] = json!(READY_IN_MS_MAX + 1);
        check("/deployments", deployments, "deployments[1].ready_in_ms");
        let one = message()["deployments"][0].clone();
        check("/deployments", json!(vec![one; MAX_DEPLOYMENTS + 1]), "deployments");
    }

    #[test]
    fn a_request_that_is_invalid_is_rejected_with_its_field() {
        let check = |change: &dyn Fn(&mut ExchangeRequestV1), field: &str| {
            let one = OverflowV1 { name: "a".to_owned(), tokens: 1 };
            let gateway = "50.1,8.7".to_owned();
            let mut wire = ExchangeRequestV1 {
                version: VERSION,
                gateway,
                boot_id: 1,
                sequence: 1,
                known: None,
                requested: vec![one],
            };
            assert!(ExchangeRequest::try_from(wire.clone()).is_ok());
            change(&mut wire);
            assert_eq!(ExchangeRequest::try_from(wire).unwrap_err().field, field);
        };
        let one = |name: &str| OverflowV1 { name: name.to_owned(), tokens: 1 };
        check(&|wire| wire.requested.push(one("a")), "requested[1].name");
        check(&|wire| wire.requested.push(one("b c")), "requested[1].name");
        check(&|wire| wire.requested = vec![one("a"); MAX_DEPLOYMENTS + 1], "requested");
        check(&|wire| wire.gateway = "x".repeat(GATEWAY_BYTES_MAX + 1), "gateway");
    }

    #[test]
    fn a_message_of_another_version_is_rejected() {
        let request: Result<ExchangeRequestV1, _> =
            serde_json::from_value(json!({"version": 2, "request": "?"}));
        assert!(request.unwrap_err().to_string().starts_with("version 2 is not supported"));
        let mut report = message();
        report["version"] = json!(3);
        let error = serde_json::from_value::<ReportV1>(report).unwrap_err();
        assert!(error.to_string().contains("version 3 is not supported"), "{error}");
    }
}
