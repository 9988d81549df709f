//! A request whose panic costs that request only.

use crate::panics::{self, Scope};
use futures_util::FutureExt;
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A request panicked; it says what was the matter, for the log and never for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked(pub String);

/// Drives `request` to its end, or to its panic.
///
/// What the request shared with others is behind locks, which decide for themselves what a panic means for them
/// ([`crate::lock`]); what it had for itself is dropped.
pub async fn contain<T>(request: impl Future<Output = T>) -> Result<T, Panicked> {
    AssertUnwindSafe(request).catch_unwind().await.map_err(panicked)
}

/// As [`contain`], for a part of a request's work that a thread of its own does, such as computing its batch.
pub fn contain_work<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(panicked)
}

fn panicked(payload: Box<dyn Any + Send>) -> Panicked {
    panics::count(Scope::Request);
    Panicked(panics::message(&*payload).to_owned())
}
