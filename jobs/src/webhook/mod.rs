//! Webhooks: results are sent as the Standard Webhooks specification says (<https://www.standardwebhooks.com>).
//!
//! [`target`] checks the URL at the submission, [`signature`] signs, [`secrets`] reads the secrets of tenants, and [`sender`]
//! takes results from the queue and sends them. The policy for addresses and the retries are in `jobs_core`.

pub mod secrets;
pub mod sender;
pub mod signature;
pub mod target;

use jobs_core::job::UnixMillis;
use std::time::{Duration, SystemTime};

/// Returns a time as in a message: RFC 3339 with milliseconds.
pub fn timestamp(time: UnixMillis) -> String {
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + Duration::from_millis(time.0)).to_string()
}
