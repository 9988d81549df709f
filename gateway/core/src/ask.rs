//! What a request's headers ask for, read once: how long it may take, where the client is, where it may go, how urgent
//! it is.
//!
//! The four differ in what they can do. Time is the client's own to give. Urgency is a wish that what its tenant may do
//! is held against (see `priority`). Place is a hint for choosing and believed
//! from trusted peers only, because nothing but the choice hangs on it. Residency can only *narrow*: it is intersected
//! with the deployment's own policy, so no header adds a region.

use crate::priority::Priority;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::residency::ResidencyPolicy;
use std::time::Duration;

/// How long a request may take when it does not say. The `openai` client gives up after ten minutes by default; a
/// person in front of a search box after one second. Thirty keep a backfill's large request alive.
pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// The longest time that a request may ask for, the `openai` client's own default.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// The values of the headers that ask for something, as they came.
#[derive(Clone, Copy, Debug, Default)]
pub struct Headers<'a> {
    /// `x-meridian-timeout-ms`.
    pub timeout_ms: Option<&'a [u8]>,
    /// `x-meridian-residency`.
    pub residency: Option<&'a [u8]>,
    /// `x-meridian-priority`.
    pub priority: Option<&'a [u8]>,
    /// `x-meridian-client-geo`; absent unless the peer is trusted to say it.
    pub client_geo: Option<&'a [u8]>,
}

/// What the headers ask for.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// From the arrival of the head to the first byte of the answer.
    pub timeout: Duration,
    /// Narrows the deployment's own residency.
    pub residency: ResidencyPolicy,
    /// How urgent it says it is.
    pub priority: Option<Priority>,
    /// Where the client says it is.
    pub client: Option<GeoPoint>,
}

/// Which header cannot be read, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AskProblem {
    /// Not a whole number of milliseconds from 1 to [`TIMEOUT_MAX`].
    Timeout,
    /// Not a list of areas, or one that no catalogue knows.
    Residency(String),
    /// No priority's name.
    Priority,
    /// Not `lat,lon` on the globe.
    ClientGeo(String),
}

impl Ask {
    /// Reads the headers.
    pub fn read(headers: Headers<'_>, catalogue: &Catalogue) -> Result<Ask, AskProblem> {
        Ok(Ask {
            timeout: headers.timeout_ms.map_or(Ok(TIMEOUT_DEFAULT), timeout)?,
            residency: headers
                .residency
                .map_or(Ok(ResidencyPolicy::Anywhere), |value| residency(value, catalogue))?,
            priority: headers
                .priority
                .map(|priority| Priority::parse(priority).ok_or(AskProblem::Priority))
                .transpose()?,
            client: headers.client_geo.map(client_geo).transpose()?,
        })
    }
}

fn timeout(value: &[u8]) -> Result<Duration, AskProblem> {
    let millis = text(value).and_then(|value| value.parse::<u64>().ok()).ok_or(AskProblem::Timeout)?;
    let timeout = Duration::from_millis(millis);
    if timeout.is_zero() || timeout > TIMEOUT_MAX { Err(AskProblem::Timeout) } else { Ok(timeout) }
}

fn residency(value: &[u8], catalogue: &Catalogue) -> Result<ResidencyPolicy, AskProblem> {
    let text = text(value).ok_or_else(|| AskProblem::Residency("it is not text".to_owned()))?;
    let policy: ResidencyPolicy = text.parse().map_err(|error| AskProblem::Residency(format!("{error}")))?;
    match policy.check(catalogue).into_iter().next() {
        Some(problem) => Err(AskProblem::Residency(problem)),
        None => Ok(policy),
    }
}

fn client_geo(value: &[u8]) -> Result<GeoPoint, AskProblem> {
    let text = text(value).ok_or_else(|| AskProblem::ClientGeo("it is not text".to_owned()))?;
    text.parse().map_err(|error| AskProblem::ClientGeo(format!("{error}")))
}

fn text(value: &[u8]) -> Option<&str> {
    std::str::from_utf8(value).ok().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: Headers<'_>) -> Result<Ask, AskProblem> {
        Ask::read(headers, &Catalogue::builtin())
    }

    #[test]
    fn a_request_that_asks_for_nothing_gets_the_defaults() {
        let ask = read(Headers::default()).unwrap();
        assert_eq!(
            ask,
            Ask {
                timeout: TIMEOUT_DEFAULT,
                residency: ResidencyPolicy::Anywhere,
                priority: None,
                client: None
            }
        );
    }

    #[test]
    fn a_timeout_is_taken_at_its_limits_and_refused_past_them() {
        let check = |value: &str, expected: Option<u64>| {
            let ask = read(Headers { timeout_ms: Some(value.as_bytes()), ..Headers::default() });
            assert_eq!(ask.ok().map(|ask| ask.timeout.as_millis() as u64), expected, "{value}");
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
    fn an_area_that_nobody_knows_is_refused_rather_than_ignored() {
        let check = |value: &str, ok: bool| {
            let ask = read(Headers { residency: Some(value.as_bytes()), ..Headers::default() });
            assert_eq!(ask.is_ok(), ok, "{value}: {ask:?}");
        };
        check("eu", true);
        check("eu, us", true);
        check("gcp/europe-west4", true);
        check("atlantis", false);
        check("", false);
        check("eu,,us", false);
    }

    #[test]
    fn a_priority_that_does_not_exist_is_refused_rather_than_ignored() {
        let check = |value: &str, expected: Result<Option<Priority>, AskProblem>| {
            let ask = read(Headers { priority: Some(value.as_bytes()), ..Headers::default() });
            assert_eq!(ask.map(|ask| ask.priority), expected, "{value}");
        };
        check("interactive", Ok(Some(Priority::Interactive)));
        check("bulk", Ok(Some(Priority::Bulk)));
        check("batch", Err(AskProblem::Priority));
    }

    #[test]
    fn a_place_is_on_the_globe() {
        let check = |value: &str, ok: bool| {
            let ask = read(Headers { client_geo: Some(value.as_bytes()), ..Headers::default() });
            assert_eq!(ask.is_ok(), ok, "{value}: {ask:?}");
        };
        check("50.11,8.68", true);
        check("34.69, 135.50", true);
        check("91,0", false);
        check("0,181", false);
        check("NaN,0", false);
        check("here", false);
    }
}
