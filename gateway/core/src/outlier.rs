//! Outlier detection: what one attempt says for or against the upstream that was asked.
//!
//! A client decides how long it waits, when it disconnects and how slowly it reads. None of that is the upstream's doing, so
//! none of it may eject a region or a replica for everybody else. [`evidence`] is the only function that makes an
//! [`Evidence`], and a circuit breaker takes nothing else ([`Circuits::saw`](crate::circuit::Circuits::saw)): whoever reports
//! an outcome has to say who had set the deadline, and what the upstream did until then.

/// Source of the deadline of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineSetBy {
    /// The client: by its timeout, by the default that stands for a client which does not say, or by disconnecting. How long a
    /// request needs is decided by what the client sends, so the default counts as the client's as well.
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
    /// It responded on trial, and much more slowly than usual.
    RespondedSlowlyOnTrial,
    /// It responded with this status that it cannot serve the request and another upstream could.
    Declined {
        /// Of HTTP.
        status: u16,
    },
    /// It sent no byte of a response before the deadline.
    Silent,
    /// It could not be connected to, or broke off before its response was whole.
    Unreachable,
    /// Its certificate names somebody else; nothing was sent.
    WrongPeer,
    /// It had closed an idle connection of the pool, and has not seen the request.
    ClosedIdleConnection,
}

/// Kinds of evidence that a circuit breaker counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// A response in time.
    Answered,
    /// A response in time with an error of the upstream's own. Such responses count together, not in a row: one bad request
    /// sent three times must not take an upstream from everybody.
    Faulted,
    /// No connection, or a broken one.
    Failed,
    /// No first byte in time.
    Missed,
}

/// Evidence of one attempt about an upstream; made by [`evidence`] alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence(Seen);

impl Evidence {
    pub(crate) fn seen(self) -> Seen {
        self.0
    }

    /// Whether it is a failure to connect or a broken connection.
    pub fn is_failure(self) -> bool {
        self.0 == Seen::Failed
    }

    /// For tests that tell a circuit breaker what it sees.
    #[cfg(test)]
    pub(crate) fn of(seen: Seen) -> Evidence {
        Evidence(seen)
    }
}

/// Returns what an attempt says about the upstream; nothing where its end is the client's doing, or says nothing new.
pub fn evidence(deadline: DeadlineSetBy, action: UpstreamAction) -> Option<Evidence> {
    use UpstreamAction::{
        ClosedIdleConnection, Declined, Responded, RespondedSlowlyOnTrial, Silent, Unreachable, WrongPeer,
    };
    let seen = match (deadline, action) {
        // 503 and 504 are said of a load or a deadline, not of a fault; 4xx of the request.
        (_, Responded { status: 500 | 502 } | Declined { status: 500 | 502 }) => Seen::Faulted,
        (_, Responded { .. }) => Seen::Answered,
        (_, Declined { .. } | ClosedIdleConnection) => return None,
        (_, Unreachable | WrongPeer) => Seen::Failed,
        (DeadlineSetBy::Measurement, Silent) | (_, RespondedSlowlyOnTrial) => Seen::Missed,
        (DeadlineSetBy::Client, Silent) => return None,
    };
    Some(Evidence(seen))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DeadlineSetBy::{Client, Measurement};
    use UpstreamAction::*;

    #[test]
    fn an_upstream_is_blamed_for_what_it_did_and_never_for_a_deadline_of_the_client() {
        let responded = |status| Responded { status };
        let declined = |status| Declined { status };
        // What the upstream did; what that says under a deadline of the client's, and under a measured one.
        let table = [
            (responded(200), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(400), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(408), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(413), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(429), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(500), Some(Seen::Faulted), Some(Seen::Faulted)),
            (responded(502), Some(Seen::Faulted), Some(Seen::Faulted)),
            (responded(503), Some(Seen::Answered), Some(Seen::Answered)),
            (responded(504), Some(Seen::Answered), Some(Seen::Answered)),
            (RespondedSlowlyOnTrial, Some(Seen::Missed), Some(Seen::Missed)),
            (declined(500), Some(Seen::Faulted), Some(Seen::Faulted)),
            (declined(502), Some(Seen::Faulted), Some(Seen::Faulted)),
            (declined(503), None, None),
            (Silent, None, Some(Seen::Missed)),
            (Unreachable, Some(Seen::Failed), Some(Seen::Failed)),
            (WrongPeer, Some(Seen::Failed), Some(Seen::Failed)),
            (ClosedIdleConnection, None, None),
        ];
        for (action, by_client, by_measurement) in table {
            let seen = |deadline| evidence(deadline, action).map(Evidence::seen);
            assert_eq!((seen(Client), seen(Measurement)), (by_client, by_measurement), "{action:?}");
        }
    }

    #[test]
    fn a_failure_is_a_broken_connection_and_nothing_else() {
        let is_failure = |action| evidence(Measurement, action).is_some_and(Evidence::is_failure);
        assert!(is_failure(Unreachable) && is_failure(WrongPeer));
        assert!(!is_failure(Silent) && !is_failure(Responded { status: 500 }));
    }
}
