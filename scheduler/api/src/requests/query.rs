//! Reader of the filter of a search from the query of a URL, and the outcomes that it may name.

use super::{FOUND_MAX, LABEL_BYTES_MAX, RequestFilterV1};
use crate::WireError;
use replica_api::error::ErrorCode;
use std::str::FromStr;

/// Outcomes of requests whose response has no error code. The others are the [`ErrorCode`]s.
pub const OUTCOMES_WITHOUT_CODE: [&str; 6] =
    ["ok", "other_status", "truncated", "client_disconnected", "shutdown", "other_server_error"];

/// Unknown outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not an outcome that this version knows; write one of: {}", outcomes())]
pub struct InvalidOutcome;

/// Returns the names of all outcomes.
fn outcomes() -> String {
    let codes = ErrorCode::ALL.iter().map(|code| code.as_str());
    OUTCOMES_WITHOUT_CODE.into_iter().chain(codes).collect::<Vec<_>>().join(", ")
}

/// Returns the name of an outcome of this version.
pub fn known_outcome(text: &str) -> Result<String, InvalidOutcome> {
    let is_known = OUTCOMES_WITHOUT_CODE.contains(&text) || ErrorCode::parse(text).is_some();
    is_known.then(|| text.to_owned()).ok_or(InvalidOutcome)
}

impl RequestFilterV1 {
    /// Reads the parameters of a query. One that is not a condition is an error, and so is one that occurs twice, and an outcome that
    /// this version does not know: a person has written it, and no request would be found.
    ///
    /// A filter in a message is not read by this function, and may have an outcome that only the later version of its sender knows.
    pub fn from_query(
        query: impl IntoIterator<Item = (String, String)>,
    ) -> Result<RequestFilterV1, WireError> {
        let mut filter = RequestFilterV1::default();
        for (name, value) in query {
            let is_repeated = match name.as_str() {
                "tenant" => filter.tenant.replace(value).is_some(),
                "deployment" => filter.deployment.replace(value).is_some(),
                "region" => filter.region.replace(value).is_some(),
                "status" => filter.status.replace(value).is_some(),
                "outcome" => filter.outcome.replace(outcome(value)?).is_some(),
                "kept" => filter.kept.replace(value).is_some(),
                "since_ms" => filter.since_ms.replace(time(&name, &value)?).is_some(),
                "until_ms" => filter.until_ms.replace(time(&name, &value)?).is_some(),
                "limit" => {
                    let range = format!("from 1 to {FOUND_MAX}");
                    filter.limit.replace(number(&name, &value, &range)?).is_some()
                }
                _ => {
                    let problem = "is not a condition of a search; use tenant, deployment, region, status, outcome, kept, since_ms, \
                                   until_ms or limit";
                    return Err(WireError::new(excerpt(&name), problem));
                }
            };
            if is_repeated {
                return Err(WireError::new(name, "occurs more than once; write it once"));
            }
        }
        Ok(filter)
    }
}

fn outcome(value: String) -> Result<String, WireError> {
    known_outcome(&value)
        .map_err(|InvalidOutcome| WireError::new("outcome", format!("{} {InvalidOutcome}", excerpt(&value))))
}

fn time(name: &str, value: &str) -> Result<u64, WireError> {
    number(name, value, &format!("from 0 to {}, in milliseconds since 1970", u64::MAX))
}

fn number<N: FromStr>(name: &str, value: &str, range: &str) -> Result<N, WireError> {
    let invalid = |_| WireError::new(name, format!("{:?} is not a whole number {range}", excerpt(value)));
    value.parse().map_err(invalid)
}

/// Returns the begin of a text of a client, for an error.
fn excerpt(text: &str) -> &str {
    text.get(..text.floor_char_boundary(LABEL_BYTES_MAX)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::RequestFilter;
    use serde_json::Value;

    fn read(query: &[(&str, &str)]) -> Result<RequestFilterV1, WireError> {
        RequestFilterV1::from_query(query.iter().map(|(name, value)| (name.to_string(), value.to_string())))
    }

    #[test]
    fn a_query_has_the_conditions_of_a_message() {
        let text = |text: &str| Some(text.to_owned());
        let filter = RequestFilterV1 {
            tenant: text("docs"),
            deployment: text("minilm"),
            region: text("gcp/europe-west4"),
            status: text("5xx"),
            outcome: text("overloaded"),
            kept: text("failed"),
            since_ms: Some(0),
            until_ms: Some(u64::MAX),
            limit: Some(7),
        };
        let Ok(Value::Object(fields)) = serde_json::to_value(&filter) else { panic!("a map of fields") };
        let text = |value: Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let query = fields.into_iter().map(|(name, value)| (name, text(value)));
        assert_eq!(RequestFilterV1::from_query(query), Ok(filter));
        assert_eq!(read(&[]), Ok(RequestFilterV1::default()));
    }

    #[test]
    fn an_invalid_parameter_is_named_with_its_value_and_the_valid_ones() {
        let check = |query: &[(&str, &str)], field: &str, parts: &[&str]| {
            let error = read(query).unwrap_err();
            assert_eq!(error.field, field);
            for part in parts {
                assert!(error.problem.contains(part), "{part} in {error}");
            }
        };
        check(&[("since_ms", "yesterday")], "since_ms", &["\"yesterday\"", "from 0 to 18446744073709551615"]);
        check(&[("since_ms", "18446744073709551616")], "since_ms", &["\"18446744073709551616\""]);
        check(&[("until_ms", "-1")], "until_ms", &["\"-1\"", "milliseconds since 1970"]);
        check(&[("limit", "")], "limit", &["\"\"", "from 1 to 1000"]);
        check(&[("tenant", "a"), ("tenant", "b")], "tenant", &["more than once"]);
        check(&[("unknown", "1")], "unknown", &["use tenant, deployment", "or limit"]);
        check(
            &[("outcome", "bogus")],
            "outcome",
            &["bogus is not an outcome", " ok, other_status", ", overloaded"],
        );
        let long = "é".repeat(1000);
        for query in [(&long[..], "1"), ("outcome", &long), ("since_ms", &long)] {
            let error = read(&[query]).unwrap_err();
            assert!(!error.to_string().contains(&"é".repeat(33)), "{error}");
        }
    }

    #[test]
    fn a_message_of_a_later_version_may_have_an_outcome_that_only_that_version_knows() {
        let filter =
            RequestFilterV1 { outcome: Some("of_a_later_version".to_owned()), ..RequestFilterV1::default() };
        assert!(RequestFilter::try_from(filter).is_ok());
    }

    #[test]
    fn every_outcome_of_a_request_is_known() {
        for outcome in
            OUTCOMES_WITHOUT_CODE.into_iter().chain(ErrorCode::ALL.iter().map(|code| code.as_str()))
        {
            assert_eq!(known_outcome(outcome), Ok(outcome.to_owned()));
        }
        for outcome in ["", "OK", "bogus", "failed"] {
            assert_eq!(known_outcome(outcome), Err(InvalidOutcome), "{outcome}");
        }
    }
}
