//! State that the handlers of the console share.

use std::sync::Arc;

use super::state::Console;
use crate::hub::api::HubApi;

/// State of the handlers.
#[derive(Clone)]
pub(super) struct ConsoleApi<S> {
    pub(super) hub: HubApi<S>,
    pub(super) console: Arc<Console>,
    /// Whether the hub has an identity; without one it serves this machine only.
    pub(super) has_identity: bool,
}
