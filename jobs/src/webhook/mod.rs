//! Webhooks: results are sent as the Standard Webhooks specification says (<https://www.standardwebhooks.com>).
//!
//! [`target`] checks the URL at the submission, [`signature`] signs, and [`sender`] takes results from the queue and sends
//! them. The policy for addresses and the retries are in `jobs_core`.

pub mod sender;
pub mod signature;
pub mod target;
