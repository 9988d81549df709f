//! Containment of a panic in a request.

use crate::panics::{self, Scope};
use futures_util::FutureExt;
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A request panicked. The message is for the log, never for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panicked(pub String);

/// Runs `request` to completion or to its panic.
///
/// State that the request shares with others is behind locks, which define the consequence of a panic
/// ([`crate::lock`]); its own state is dropped.
///
/// The future is as large as `request`. An `async fn` would have a second copy of it: its argument.
pub fn contain<T>(request: impl Future<Output = T>) -> impl Future<Output = Result<T, Panicked>> {
    AssertUnwindSafe(request).catch_unwind().map(|result| result.map_err(panicked))
}

/// Like [`contain`], for a part of a request that runs on another thread, such as the computation of its batch.
pub fn contain_work<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(work)).map_err(panicked)
}

fn panicked(payload: Box<dyn Any + Send>) -> Panicked {
    panics::count(Scope::Request);
    Panicked(panics::message(&*payload).to_owned())
}
