//! Outlier detection: evidence of one attempt about its upstream.
//!
//! A client decides how long it waits, when it disconnects and how slowly it reads. None of that is the upstream's
//! doing, so none of it may eject a region or a replica. [`evidence`] is the only function that makes an
//! [`OutlierEvidence`], and a circuit breaker accepts no other input
//! ([`Circuits::record`](crate::circuit::Circuits::record)): the caller has to state the source of the deadline, and
//! the upstream's state when the attempt ended.

/// Source of the deadline of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineSetBy {
    /// The client: by its timeout, by the default timeout, or by disconnecting. The time that a request needs is
    /// decided by its content, so the default counts as the client's as well.
    Client,
    /// This process, from measurements of the same upstream: the timeout of a first byte, or of a connection.
    Measurement,
}

/// State of the upstream when the attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamAction {
    /// It responded with this status.
    Responded {
        /// Of HTTP.
        status: u16,
    },
    /// It responded to a probe, much more slowly than usual.
    RespondedSlowlyToProbe,
    /// It responded with this status that it cannot serve the request and another upstream could.
    Declined {
        /// Of HTTP.
        status: u16,
    },
    /// It sent no byte of a response before the deadline.
    Silent,
    /// It could not be connected to, or broke off before its response was whole.
    Unreachable,
    /// Its certificate has another identity; nothing was sent.
    WrongPeer,
    /// It had closed an idle connection of the pool, and has not seen the request.
    ClosedIdleConnection,
}

/// Kinds of evidence that a circuit breaker counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttemptOutcome {
    /// A response in time.
    Success,
    /// A 5xx response of the upstream's own, in time. Counted by rate, not consecutively: one bad request sent three
    /// times must not eject an upstream.
    ServerError,
    /// No connection, or a broken one.
    ConnectionFailure,
    /// No first byte in time.
    Timeout,
}

/// Evidence of one attempt about an upstream; made by [`evidence`] alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutlierEvidence(AttemptOutcome);

impl OutlierEvidence {
    pub(crate) fn outcome(self) -> AttemptOutcome {
        self.0
    }

    /// Whether it is a failure to connect or a broken connection.
    pub fn is_failure(self) -> bool {
        self.0 == AttemptOutcome::ConnectionFailure
    }

    /// Whether it is such a failure or a missed first byte: what a lost or slow process causes.
    pub fn is_adverse(self) -> bool {
        matches!(self.0, AttemptOutcome::ConnectionFailure | AttemptOutcome::Timeout)
    }

    /// Evidence for tests of a circuit breaker.
    #[cfg(test)]
    pub(crate) fn of(outcome: AttemptOutcome) -> OutlierEvidence {
        OutlierEvidence(outcome)
    }
}

/// Returns the evidence of an attempt; `None` if its end is the client's doing, or says nothing new.
pub fn evidence(deadline: DeadlineSetBy, action: UpstreamAction) -> Option<OutlierEvidence> {
    use UpstreamAction::{
        ClosedIdleConnection, Declined, Responded, RespondedSlowlyToProbe, Silent, Unreachable, WrongPeer,
    };
    let outcome = match (deadline, action) {
        // 503 and 504 are caused by load or a deadline, not by a fault; 4xx by the request.
        (_, Responded { status: 500 | 502 } | Declined { status: 500 | 502 }) => AttemptOutcome::ServerError,
        (_, Responded { .. }) => AttemptOutcome::Success,
        (_, Declined { .. } | ClosedIdleConnection) => return None,
        (_, Unreachable | WrongPeer) => AttemptOutcome::ConnectionFailure,
        (DeadlineSetBy::Measurement, Silent) | (_, RespondedSlowlyToProbe) => AttemptOutcome::Timeout,
        (DeadlineSetBy::Client, Silent) => return None,
    };
    Some(OutlierEvidence(outcome))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DeadlineSetBy::{Client, Measurement};
    use UpstreamAction::*;

    #[test]
    fn a_deadline_of_the_client_is_never_evidence_about_the_upstream() {
        let responded = |status| Responded { status };
        let declined = |status| Declined { status };
        // State of the upstream; evidence under a deadline of the client, and under a measured one.
        let table = [
            (responded(200), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(400), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(408), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(413), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(429), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(500), Some(AttemptOutcome::ServerError), Some(AttemptOutcome::ServerError)),
            (responded(502), Some(AttemptOutcome::ServerError), Some(AttemptOutcome::ServerError)),
            (responded(503), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (responded(504), Some(AttemptOutcome::Success), Some(AttemptOutcome::Success)),
            (RespondedSlowlyToProbe, Some(AttemptOutcome::Timeout), Some(AttemptOutcome::Timeout)),
            (declined(500), Some(AttemptOutcome::ServerError), Some(AttemptOutcome::ServerError)),
            (declined(502), Some(AttemptOutcome::ServerError), Some(AttemptOutcome::ServerError)),
            (declined(503), None, None),
            (Silent, None, Some(AttemptOutcome::Timeout)),
            (Unreachable, Some(AttemptOutcome::ConnectionFailure), Some(AttemptOutcome::ConnectionFailure)),
            (WrongPeer, Some(AttemptOutcome::ConnectionFailure), Some(AttemptOutcome::ConnectionFailure)),
            (ClosedIdleConnection, None, None),
        ];
        for (action, by_client, by_measurement) in table {
            let outcome = |deadline| evidence(deadline, action).map(OutlierEvidence::outcome);
            assert_eq!((outcome(Client), outcome(Measurement)), (by_client, by_measurement), "{action:?}");
        }
    }

    #[test]
    fn only_a_broken_connection_is_a_failure() {
        let is_failure = |action| evidence(Measurement, action).is_some_and(OutlierEvidence::is_failure);
        assert!(is_failure(Unreachable) && is_failure(WrongPeer));
        assert!(!is_failure(Silent) && !is_failure(Responded { status: 500 }));
    }
}
