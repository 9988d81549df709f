//! A request whose panic costs that request only.

use crate::panics::{self, Scope};
use futures_util::FutureExt;
use std::future::Future;
use std::panic::AssertUnwindSafe;

/// A request panicked; it says what was the matter, for the log and never for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked(pub String);

/// Drives `request` to its end, or to its panic.
///
/// What the request shared with others is behind locks, which decide for themselves what a panic means for them
/// ([`crate::lock`]); what it had for itself is dropped.
pub async fn contain<T>(request: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(request).catch_unwind().await.map_err(|payload| {
        panics::count(Scope::Request);
        Panicked(panics::message(&*payload).to_owned())
    })
}
