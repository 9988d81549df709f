//! Search for the requests whose explanation gateways keep on disk.
//!
//! A gateway serves it at its operations port, and answers the console of a hub with its traffic reports ([`super::traffic`]). The
//! filter is the same everywhere: the query of a URL, a message, and the options of `meridian get requests`.

mod query;

pub use query::{InvalidOutcome, OUTCOMES_WITHOUT_CODE, known_outcome};

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use regions::{DeploymentName, RegionId, TenantId};
use serde::{Deserialize, Serialize};

use super::{WireError, parsed};

/// Maximum number of requests of one response: what a person reads.
pub const FOUND_MAX: usize = 1000;
/// Number of requests of one response without a limit in the filter, and its maximum for the console of a hub, so that the rows
/// of all searches fit into a traffic report.
pub const FOUND_DEFAULT: usize = 100;
/// Maximum number of attempts that a row names.
pub const FOUND_ATTEMPTS_MAX: usize = 8;
/// Maximum time that a gateway needs for a search or a lookup on its disk. Its callers wait for longer, so that its response says
/// why there is no result.
pub const DISK_READ_MAX: Duration = Duration::from_secs(7);
/// Maximum length of the text that says why a result is incomplete.
pub const PROBLEM_BYTES_MAX: usize = 320;
/// Maximum length of the labels of an outcome and of a reason.
pub(crate) const LABEL_BYTES_MAX: usize = 64;

/// Reason why a gateway keeps the explanation of a request. The first one that applies is used, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptReason {
    /// It failed by no fault of the client.
    Failed,
    /// It was sent again after a failure, a timeout or the loss of a region.
    FailedOver,
    /// It took longer than the threshold.
    Slow,
    /// It was rejected by a fault of the client, or over a limit of its tenant.
    Rejected,
    /// It was sampled.
    Sampled,
}

impl KeptReason {
    /// All reasons.
    pub const ALL: [KeptReason; 5] = [
        KeptReason::Failed,
        KeptReason::FailedOver,
        KeptReason::Slow,
        KeptReason::Rejected,
        KeptReason::Sampled,
    ];

    /// Returns the name of the reason.
    pub fn as_str(self) -> &'static str {
        match self {
            KeptReason::Failed => "failed",
            KeptReason::FailedOver => "failed_over",
            KeptReason::Slow => "slow",
            KeptReason::Rejected => "rejected",
            KeptReason::Sampled => "sampled",
        }
    }

    /// Returns whether a tenant can cause any number of such requests, so that they have smaller limits than the others.
    pub fn is_at_will(self) -> bool {
        match self {
            KeptReason::Failed | KeptReason::FailedOver | KeptReason::Slow => false,
            KeptReason::Rejected | KeptReason::Sampled => true,
        }
    }
}

impl fmt::Display for KeptReason {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.as_str())
    }
}

/// Unknown reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a reason; write failed, failed_over, slow, rejected or sampled")]
pub struct InvalidReason;

impl FromStr for KeptReason {
    type Err = InvalidReason;

    fn from_str(text: &str) -> Result<KeptReason, InvalidReason> {
        KeptReason::ALL.into_iter().find(|reason| reason.as_str() == text).ok_or(InvalidReason)
    }
}

/// HTTP status or class of them: `503`, `5xx`, or `none` for requests without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusFilter {
    /// Exactly this status.
    Exact(u16),
    /// The statuses with this first digit.
    Class(u16),
    /// No response was sent.
    NoResponse,
}

/// Invalid status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not an HTTP status; write one such as 503, a class such as 5xx, or none")]
pub struct InvalidStatus;

impl StatusFilter {
    /// Returns whether a request with this status matches.
    pub fn matches(self, status: Option<u16>) -> bool {
        match self {
            StatusFilter::Exact(wanted) => status == Some(wanted),
            StatusFilter::Class(digit) => status.is_some_and(|status| status / 100 == digit),
            StatusFilter::NoResponse => status.is_none(),
        }
    }
}

impl FromStr for StatusFilter {
    type Err = InvalidStatus;

    fn from_str(text: &str) -> Result<StatusFilter, InvalidStatus> {
        if text == "none" {
            return Ok(StatusFilter::NoResponse);
        }
        if let Some(digit) = text.strip_suffix("xx") {
            let digit = digit.parse().ok().filter(|digit| (1..=5).contains(digit));
            return digit.map(StatusFilter::Class).ok_or(InvalidStatus);
        }
        let status = text.parse().ok().filter(|status| (100..600).contains(status));
        status.map(StatusFilter::Exact).ok_or(InvalidStatus)
    }
}

impl fmt::Display for StatusFilter {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatusFilter::Exact(status) => write!(to, "{status}"),
            StatusFilter::Class(digit) => write!(to, "{digit}xx"),
            StatusFilter::NoResponse => to.write_str("none"),
        }
    }
}

/// Filter of a search, as a query or in a message. An absent condition holds for all requests. A condition that this version does
/// not know is an error, because a search without it would find other requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestFilterV1 {
    /// Tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deployment: Option<String>,
    /// Region of the response or of any attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// Status: `503`, `5xx` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// Outcome: an error code or one of [`OUTCOMES_WITHOUT_CODE`]. A query may have one that this version knows, a message any one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// Reason why it was kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Requests that arrived at this time or later, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Requests that arrived before this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_ms: Option<u64>,
    /// Maximum number of requests, the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// Valid filter of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFilter {
    /// Tenant.
    pub tenant: Option<TenantId>,
    /// Deployment.
    pub deployment: Option<DeploymentName>,
    /// Region of the response or of any attempt.
    pub region: Option<RegionId>,
    /// Status.
    pub status: Option<StatusFilter>,
    /// Outcome.
    pub outcome: Option<String>,
    /// Reason why it was kept.
    pub kept: Option<KeptReason>,
    /// Requests that arrived at this time or later.
    pub since_ms: u64,
    /// Requests that arrived before this time.
    pub until_ms: u64,
    /// Maximum number of requests.
    pub limit: usize,
}

impl TryFrom<RequestFilterV1> for RequestFilter {
    type Error = WireError;

    fn try_from(wire: RequestFilterV1) -> Result<RequestFilter, WireError> {
        let RequestFilterV1 { tenant, deployment, region, status, outcome, kept, since_ms, until_ms, limit } =
            wire;
        if let Some(text) = outcome.as_deref().filter(|text| text.len() > LABEL_BYTES_MAX) {
            let problem = format!("{} bytes; at most {LABEL_BYTES_MAX} are allowed", text.len());
            return Err(WireError::new("outcome", problem));
        }
        let limit = limit.unwrap_or(FOUND_DEFAULT);
        if !(1..=FOUND_MAX).contains(&limit) {
            return Err(WireError::new("limit", format!("{limit} is not from 1 to {FOUND_MAX}")));
        }
        let (since_ms, until_ms) = (since_ms.unwrap_or(0), until_ms.unwrap_or(u64::MAX));
        if since_ms >= until_ms {
            let problem =
                format!("{until_ms} is not after since_ms ({since_ms}); raise until_ms or lower since_ms");
            return Err(WireError::new("until_ms", problem));
        }
        Ok(RequestFilter {
            tenant: tenant.map(|text| parsed("tenant", &text)).transpose()?,
            deployment: deployment.map(|text| parsed("deployment", &text)).transpose()?,
            region: region.map(|text| parsed("region", &text)).transpose()?,
            status: status.map(|text| parsed("status", &text)).transpose()?,
            outcome,
            kept: kept.map(|text| parsed("kept", &text)).transpose()?,
            since_ms,
            until_ms,
            limit,
        })
    }
}

/// Request that was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoundRequestV1 {
    /// Identifier. Absent at a hub if the residency of the request is restricted, because clients choose identifiers, and hubs are
    /// in all regions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Arrival in milliseconds since 1970.
    pub at_ms: u64,
    /// Reason why it was kept: the name of a [`KeptReason`], or one that only a newer version has.
    pub kept: String,
    /// Tenant; absent if the request was not authenticated.
    pub tenant: Option<String>,
    /// Deployment; absent if the request was not parsed.
    pub deployment: Option<String>,
    /// Region whose response was sent.
    pub region: Option<String>,
    /// Status; absent without a response.
    pub status: Option<u16>,
    /// Outcome.
    pub outcome: String,
    /// Duration at the gateway.
    pub total_ms: f64,
    /// Regions of the first attempts, in their order.
    pub attempts: Vec<String>,
}

/// Requests that were found, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FoundRequestsV1 {
    /// Requests.
    pub requests: Vec<FoundRequestV1>,
    /// Whether older requests may match too: the limit was reached, or the search has read as much as one may.
    pub has_more: bool,
    /// Whether the gateway keeps explanations on disk.
    pub is_enabled: bool,
    /// Why the result is incomplete or absent; at most [`PROBLEM_BYTES_MAX`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// Returns the text of a problem, truncated to [`PROBLEM_BYTES_MAX`].
pub fn problem_text(problem: impl fmt::Display) -> String {
    let mut text = problem.to_string();
    text.truncate(text.floor_char_boundary(PROBLEM_BYTES_MAX));
    text
}

impl FoundRequestsV1 {
    /// Creates the result of a search that failed.
    pub fn failed(problem: impl fmt::Display) -> FoundRequestsV1 {
        let problem = Some(problem_text(problem));
        FoundRequestsV1 { requests: Vec::new(), has_more: true, is_enabled: true, problem }
    }

    /// Returns the same requests as a hub may have them: at most [`FOUND_DEFAULT`]. `is_restricted` says of each whether its residency
    /// is restricted.
    #[must_use]
    pub fn for_hub(mut self, is_restricted: &[bool]) -> FoundRequestsV1 {
        for (request, is_restricted) in self.requests.iter_mut().zip(is_restricted) {
            if *is_restricted {
                request.id = None;
            }
        }
        self.has_more |= self.requests.len() > FOUND_DEFAULT;
        self.requests.truncate(FOUND_DEFAULT);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_status_is_a_number_a_class_or_none() {
        let parse = |text: &str| text.parse::<StatusFilter>();
        assert_eq!(parse("503"), Ok(StatusFilter::Exact(503)));
        assert_eq!(parse("5xx"), Ok(StatusFilter::Class(5)));
        assert_eq!(parse("none"), Ok(StatusFilter::NoResponse));
        for wrong in ["", "xx", "6xx", "99", "600", "ok", "50x"] {
            assert_eq!(parse(wrong), Err(InvalidStatus), "{wrong}");
        }
        for text in ["503", "5xx", "none"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert!(StatusFilter::Class(5).matches(Some(504)) && !StatusFilter::Class(5).matches(Some(429)));
        assert!(StatusFilter::NoResponse.matches(None) && !StatusFilter::Exact(503).matches(None));
    }

    #[test]
    fn an_invalid_condition_is_named() {
        let check = |field: &str, filter: RequestFilterV1| {
            assert_eq!(RequestFilter::try_from(filter).map_err(|error| error.field), Err(field.to_owned()));
        };
        let text = |text: &str| Some(text.to_owned());
        check("tenant", RequestFilterV1 { tenant: text("a b"), ..RequestFilterV1::default() });
        check("region", RequestFilterV1 { region: text("europe"), ..RequestFilterV1::default() });
        check("status", RequestFilterV1 { status: text("bad"), ..RequestFilterV1::default() });
        check("kept", RequestFilterV1 { kept: text("lost"), ..RequestFilterV1::default() });
        check("outcome", RequestFilterV1 { outcome: text(&"x".repeat(65)), ..RequestFilterV1::default() });
        check("limit", RequestFilterV1 { limit: Some(FOUND_MAX + 1), ..RequestFilterV1::default() });
        let time = |since, until| RequestFilterV1 {
            since_ms: Some(since),
            until_ms: Some(until),
            ..RequestFilterV1::default()
        };
        check("until_ms", time(7, 7));
        assert!(RequestFilter::try_from(time(7, 8)).is_ok());
        let all = RequestFilter::try_from(RequestFilterV1::default()).unwrap();
        assert_eq!((all.since_ms, all.until_ms, all.limit), (0, u64::MAX, FOUND_DEFAULT));
    }

    #[test]
    fn a_hub_gets_no_identifier_of_a_restricted_request_and_no_more_rows_than_fit() {
        let row = |number: usize| FoundRequestV1 {
            id: Some(number.to_string()),
            at_ms: 0,
            kept: KeptReason::Failed.to_string(),
            tenant: None,
            deployment: None,
            region: None,
            status: None,
            outcome: "ok".to_owned(),
            total_ms: 0.0,
            attempts: Vec::new(),
        };
        let requests = (0..=FOUND_DEFAULT).map(row).collect();
        let found = FoundRequestsV1 { requests, has_more: false, is_enabled: true, problem: None };
        let mut restricted = vec![false; FOUND_DEFAULT + 1];
        restricted[0] = true;
        let at_hub = found.for_hub(&restricted);
        assert_eq!((at_hub.requests.len(), at_hub.has_more), (FOUND_DEFAULT, true));
        assert_eq!(at_hub.requests[0].id, None);
        assert_eq!(at_hub.requests[1].id.as_deref(), Some("1"));
    }

    #[test]
    fn a_reason_and_a_field_of_a_newer_version_are_read() {
        let row = json!({"id": "one", "at_ms": 1, "kept": "throttled", "tenant": null, "deployment": null, "region": null,
                         "status": 503, "outcome": "overloaded", "total_ms": 1.5, "attempts": [], "queue": 7});
        let found = json!({"requests": [row], "has_more": false, "is_enabled": true, "read_bytes": 7});
        let found: FoundRequestsV1 = serde_json::from_value(found).unwrap();
        assert_eq!(found.requests[0].kept, "throttled");
        assert_eq!(found.problem, None);
        assert!(!serde_json::to_string(&found).unwrap().contains("problem"));
    }

    #[test]
    fn the_text_of_a_problem_is_truncated_between_characters() {
        let failed = FoundRequestsV1::failed("é".repeat(PROBLEM_BYTES_MAX));
        assert_eq!(failed.problem, Some("é".repeat(PROBLEM_BYTES_MAX / 2)));
        assert!(failed.has_more && failed.is_enabled);
        assert_eq!(problem_text("full"), "full");
    }
}
