//! `/log` of the operations ports: shows the filter of the log of this process, and changes it.
//!
//! | request | response |
//! |---|---|
//! | `GET /log` | filter, filter at the start of the process, seconds until that is restored |
//! | `PUT /log` with `{"filter": "info,gateway::edge=debug", "for_s": 600}` | the same, after the change |
//!
//! A change ends by itself, so that a forgotten one does not fill a disk with details. Every role has these paths; a spoke, whose
//! server is not axum, uses [`get`] and [`put`].

use super::filter::LogControl;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use configuration::did_you_mean;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};
use telemetry_core::log_filter::{FilterLevel, LogFilter};

/// Path of the filter of the log.
pub const PATH: &str = "/log";
/// Maximum bytes of a change.
pub const BODY_BYTES_MAX: usize = 4 << 10;
/// Timeout of the body of a change.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time of a changed filter by default.
pub const FOR_DEFAULT: Duration = Duration::from_secs(600);
/// Maximum time of a changed filter that ends.
pub const FOR_MAX: Duration = Duration::from_secs(86_400);

/// Fields of a change.
const FIELDS: [&str; 2] = ["filter", "for_s"];

/// Response: its status, and its body as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogResponse {
    /// Status code.
    pub status: u16,
    /// Body.
    pub body: String,
}

impl LogResponse {
    /// Creates the response to a request with a problem.
    fn problem(status: u16, problem: &str) -> LogResponse {
        LogResponse { status, body: json!({"error": problem}).to_string() }
    }

    /// Creates the response to a change whose body is too large or incomplete, or did not arrive within [`BODY_TIMEOUT`].
    pub fn unreadable() -> LogResponse {
        let limit = format!("at most {BODY_BYTES_MAX} bytes within {} s", BODY_TIMEOUT.as_secs());
        LogResponse::problem(400, &format!("the body is too large or incomplete; send {limit}"))
    }

    fn of(control: &LogControl, now: Instant) -> LogResponse {
        let state = control.state();
        let body = json!({
            "filter": state.current().to_string(),
            "filter_at_start": state.at_start().to_string(),
            "restored_in_s": state.time_left(now).map(|left| left.as_secs()),
        });
        LogResponse { status: 200, body: body.to_string() }
    }
}

impl IntoResponse for LogResponse {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, [(header::CONTENT_TYPE, "application/json")], self.body).into_response()
    }
}

/// Returns the routes of the filter, for the operations port of a role.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let read = async || get(Instant::now());
    let change =
        async |body: Body| match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, BODY_BYTES_MAX)).await {
            Ok(Ok(body)) => put(&body, Instant::now()),
            Ok(Err(_)) | Err(_) => LogResponse::unreadable(),
        };
    Router::new().route(PATH, MethodRouter::new().get(read).put(change))
}

/// Responds with the filter of this process.
pub fn get(now: Instant) -> LogResponse {
    with_control(|control| LogResponse::of(control, now))
}

/// Changes the filter of this process as the body of a request states.
pub fn put(body: &[u8], now: Instant) -> LogResponse {
    with_control(|control| match LogChange::parse(body, control.state().at_start().default_level()) {
        Ok(LogChange { filter, lasts }) => {
            control.change(filter, lasts, now);
            LogResponse::of(control, now)
        }
        Err(problem) => LogResponse::problem(400, &problem),
    })
}

fn with_control(respond: impl FnOnce(&LogControl) -> LogResponse) -> LogResponse {
    let none = || LogResponse::problem(404, "the log of this process has no filter that can be changed");
    LogControl::of_process().map_or_else(none, respond)
}

/// Change of the filter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LogChange {
    filter: LogFilter,
    /// Time after which the filter at the start is restored; never if absent.
    lasts: Option<Duration>,
}

impl LogChange {
    /// Parses the body of a request. Targets without a level have `default`.
    fn parse(body: &[u8], default: FilterLevel) -> Result<LogChange, String> {
        let example = r#"send {"filter": "info,gateway::edge=debug", "for_s": 600}"#;
        let fields: Map<String, Value> = serde_json::from_slice(body)
            .map_err(|error| format!("the body is not an object: {error}; {example}"))?;
        if let Some(unknown) = fields.keys().find(|name| !FIELDS.contains(&name.as_str())) {
            let near = did_you_mean(unknown, FIELDS);
            return Err(format!("`{unknown}`: unknown field{near}; the fields are filter, for_s"));
        }
        let filter = match fields.get("filter") {
            Some(Value::String(text)) if !text.trim().is_empty() => {
                LogFilter::parse(text, default).map_err(|error| format!("`filter`: {error}"))?
            }
            Some(Value::String(_)) => return Err(format!("`filter` is empty; {example}")),
            Some(_) => return Err(format!("`filter` is not a string; {example}")),
            None => return Err(format!("`filter` is missing; {example}")),
        };
        let max = FOR_MAX.as_secs();
        let seconds = fields.get("for_s").map_or(Some(FOR_DEFAULT.as_secs()), Value::as_u64);
        match seconds.filter(|seconds| *seconds <= max) {
            Some(0) => Ok(LogChange { filter, lasts: None }),
            Some(seconds) => Ok(LogChange { filter, lasts: Some(Duration::from_secs(seconds)) }),
            None => Err(format!(
                "`for_s` is not a number of seconds from 0 to {max}; write one, or 0 for a change until the process ends"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::filter::start_filter;
    use super::*;

    #[test]
    fn a_change_lasts_ten_minutes_by_default_and_a_day_at_most() {
        let check = |for_s: &str, seconds: Option<u64>| {
            let change =
                LogChange::parse(format!(r#"{{"filter": "a=debug"{for_s}}}"#).as_bytes(), FilterLevel::Warn);
            let filter = LogFilter::parse("warn,a=debug", FilterLevel::Info).expect("valid");
            assert_eq!(change, Ok(LogChange { filter, lasts: seconds.map(Duration::from_secs) }), "{for_s}");
        };
        check("", Some(600));
        check(r#", "for_s": 1"#, Some(1));
        check(r#", "for_s": 86400"#, Some(86_400));
        check(r#", "for_s": 0"#, None);
    }

    #[test]
    fn an_invalid_change_is_rejected_with_the_field_and_the_fix() {
        for (body, part) in [
            ("", "the body is not an object: "),
            ("[1]", "the body is not an object: "),
            ("{}", "`filter` is missing; send {\"filter\""),
            (r#"{"filter": 1}"#, "`filter` is not a string"),
            (r#"{"filter": " "}"#, "`filter` is empty"),
            (r#"{"filter": "warning"}"#, "`filter`: \"warning\" is not a level; did you mean warn?"),
            (
                r#"{"filtre": "info"}"#,
                "`filtre`: unknown field; did you mean filter?; the fields are filter, for_s",
            ),
            (r#"{"filter": "info", "for_s": "10m"}"#, "`for_s` is not a number of seconds from 0 to 86400"),
            (r#"{"filter": "info", "for_s": null}"#, "`for_s` is not a number of seconds"),
            (r#"{"filter": "info", "for_s": 1.5}"#, "`for_s` is not a number of seconds"),
            (r#"{"filter": "info", "for_s": -1}"#, "`for_s` is not a number of seconds"),
            (r#"{"filter": "info", "for_s": 86401}"#, "`for_s` is not a number of seconds"),
        ] {
            let problem = LogChange::parse(body.as_bytes(), FilterLevel::Info).expect_err(body);
            assert!(problem.contains(part), "{body}: {problem}");
        }
    }

    #[test]
    fn the_filter_of_the_process_is_shown_and_changed() {
        let now = Instant::now();
        drop(start_filter(LogFilter::new(FilterLevel::Warn)));
        let shown = |response: LogResponse| {
            let body: Value = serde_json::from_str(&response.body).expect("JSON");
            (response.status, body)
        };
        let unchanged = json!({"filter": "warn", "filter_at_start": "warn", "restored_in_s": null});
        assert_eq!(shown(get(now)), (200, unchanged.clone()));
        let changed = json!({"filter": "warn,a=debug", "filter_at_start": "warn", "restored_in_s": 60});
        assert_eq!(shown(put(br#"{"filter": "a=debug", "for_s": 60}"#, now)), (200, changed.clone()));
        assert_eq!(put(br#"{"filter": "a"}"#, now).status, 400);
        assert_eq!(shown(get(now)), (200, changed), "an invalid change has no effect");
        assert_eq!(
            shown(put(br#"{"filter": "warn"}"#, now)),
            (200, unchanged),
            "there is nothing to restore"
        );
    }
}
