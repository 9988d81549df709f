//! Request options from headers: timeout, location of the client, residency, priority.
//!
//! The four differ in their trust. The timeout is the client's own decision. The priority is checked against the
//! tenant's permissions (see `priority`). The location is a hint for region selection, accepted from trusted peers
//! only, and nothing else depends on it. Residency can only *narrow*: it is intersected with the deployment's own
//! policy, so no header adds a region.

use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::residency::ResidencyPolicy;
use replica_api::priority::{self, Priority};
use std::time::Duration;

/// Default timeout. The `openai` client gives up after ten minutes by default; a person in front of a search box after
/// one second. Thirty seconds keep a backfill's large request alive.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Maximum timeout, the `openai` client's own default.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// Values of the option headers as received.
#[derive(Clone, Copy, Debug, Default)]
pub struct OptionHeaders<'a> {
    /// `x-meridian-timeout-ms`.
    pub timeout_ms: Option<&'a [u8]>,
    /// `x-meridian-residency`.
    pub residency: Option<&'a [u8]>,
    /// `x-meridian-priority`.
    pub priority: Option<&'a [u8]>,
    /// `x-meridian-client-geo`; absent unless the peer is trusted to set it.
    pub client_geo: Option<&'a [u8]>,
}

/// Options of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOptions {
    /// Time from the arrival of the head to the first byte of the response.
    pub timeout: Duration,
    /// Policy that narrows the deployment's own residency.
    pub residency: ResidencyPolicy,
    /// Requested priority.
    pub priority: Option<Priority>,
    /// Location of the client.
    pub client: Option<GeoPoint>,
}

/// Invalid header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeaderProblem {
    /// Not a whole number of milliseconds from 1 to [`TIMEOUT_MAX`].
    Timeout,
    /// Not a list of areas, or one that the catalogue does not have.
    Residency(String),
    /// Not the name of a priority.
    Priority,
    /// Not `lat,lon` on the globe.
    ClientGeo(String),
}

impl RequestOptions {
    /// Parses the headers.
    pub fn read(headers: OptionHeaders<'_>, catalogue: &Catalogue) -> Result<RequestOptions, HeaderProblem> {
        Ok(RequestOptions {
            timeout: headers.timeout_ms.map_or(Ok(TIMEOUT_DEFAULT), timeout)?,
            residency: headers
                .residency
                .map_or(Ok(ResidencyPolicy::Anywhere), |value| residency(value, catalogue))?,
            priority: headers
                .priority
                .map(|priority| priority::parse(priority).ok_or(HeaderProblem::Priority))
                .transpose()?,
            client: headers.client_geo.map(client_geo).transpose()?,
        })
    }
}

fn timeout(value: &[u8]) -> Result<Duration, HeaderProblem> {
    let millis = text(value).and_then(|value| value.parse::<u64>().ok()).ok_or(HeaderProblem::Timeout)?;
    let timeout = Duration::from_millis(millis);
    if timeout.is_zero() || timeout > TIMEOUT_MAX { Err(HeaderProblem::Timeout) } else { Ok(timeout) }
}

fn residency(value: &[u8], catalogue: &Catalogue) -> Result<ResidencyPolicy, HeaderProblem> {
    let text = text(value).ok_or_else(|| HeaderProblem::Residency("it is not UTF-8".to_owned()))?;
    let policy: ResidencyPolicy =
        text.parse().map_err(|error| HeaderProblem::Residency(format!("{error}")))?;
    match policy.check(catalogue).into_iter().next() {
        Some(problem) => Err(HeaderProblem::Residency(problem)),
        None => Ok(policy),
    }
}

fn client_geo(value: &[u8]) -> Result<GeoPoint, HeaderProblem> {
    let text = text(value).ok_or_else(|| HeaderProblem::ClientGeo("it is not UTF-8".to_owned()))?;
    text.parse().map_err(|error| HeaderProblem::ClientGeo(format!("{error}")))
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: OptionHeaders<'_>) -> Result<RequestOptions, HeaderProblem> {
        RequestOptions::read(headers, &Catalogue::builtin())
    }

    #[test]
    fn a_request_without_options_gets_the_defaults() {
        let options = read(OptionHeaders::default()).unwrap();
        assert_eq!(
            options,
            RequestOptions {
                timeout: TIMEOUT_DEFAULT,
                residency: ResidencyPolicy::Anywhere,
                priority: None,
                client: None
            }
        );
    }

    #[test]
    fn a_timeout_is_accepted_at_its_limits_and_rejected_past_them() {
        let check = |value: &str, expected: Option<u64>| {
            let options =
                read(OptionHeaders { timeout_ms: Some(value.as_bytes()), ..OptionHeaders::default() });
            assert_eq!(options.ok().map(|options| options.timeout.as_millis() as u64), expected, "{value}");
        };
        check("1", Some(1));
        check("600000", Some(600_000));
        check("0", None);
        check("600001", None);
        check("-5", None);
        check("1.5", None);
        check("soon", None);
    }

    #[test]
    fn an_unknown_area_is_rejected_rather_than_ignored() {
        let check = |value: &str, ok: bool| {
            let options =
                read(OptionHeaders { residency: Some(value.as_bytes()), ..OptionHeaders::default() });
            assert_eq!(options.is_ok(), ok, "{value}: {options:?}");
        };
        check("eu", true);
        check("eu, us", true);
        check("gcp/europe-west4", true);
        check("atlantis", false);
        check("", false);
        check("eu,,us", false);
    }

    #[test]
    fn an_unknown_priority_is_rejected_rather_than_ignored() {
        let check = |value: &str, expected: Result<Option<Priority>, HeaderProblem>| {
            let options =
                read(OptionHeaders { priority: Some(value.as_bytes()), ..OptionHeaders::default() });
            assert_eq!(options.map(|options| options.priority), expected, "{value}");
        };
        check("interactive", Ok(Some(Priority::Interactive)));
        check("bulk", Ok(Some(Priority::Bulk)));
        check("batch", Err(HeaderProblem::Priority));
    }

    #[test]
    fn a_location_is_on_the_globe() {
        let check = |value: &str, ok: bool| {
            let options =
                read(OptionHeaders { client_geo: Some(value.as_bytes()), ..OptionHeaders::default() });
            assert_eq!(options.is_ok(), ok, "{value}: {options:?}");
        };
        check("50.11,8.68", true);
        check("34.69, 135.50", true);
        check("91,0", false);
        check("0,181", false);
        check("NaN,0", false);
        check("here", false);
    }
}
