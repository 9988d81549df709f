//! State that the handlers of the console share.

use std::sync::Arc;
use std::time::Instant;

use ::console::sessions::Visitor;

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

/// Person who has sent a request.
#[derive(Clone)]
pub(super) struct Admitted {
    pub(super) visitor: Visitor,
    /// Secret of the session; `None` of the owner of a certificate or of a token.
    pub(super) session: Option<String>,
}

impl<S> ConsoleApi<S> {
    /// Returns whether a person is still admitted: the session has not ended, and the certificate or the token is valid.
    pub(super) fn is_admitted(&self, admitted: &Admitted) -> bool {
        let Admitted { visitor, session } = admitted;
        let now = Instant::now();
        let has_session = session
            .as_deref()
            .is_none_or(|session| self.console.sessions.lock().find(session, now).is_some());
        has_session && visitor.is_admitted(|serial| self.is_revoked(serial), now)
    }

    fn is_revoked(&self, serial: &str) -> bool {
        let revocations = self.hub.transport.identity().map(|identity| identity.revocations());
        let contains = |serial| revocations.is_some_and(|revocations| revocations.contains(&serial));
        // It was written by the same type, so it can be read.
        serial.parse().map_or(true, contains)
    }
}
