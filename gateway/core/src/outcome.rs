//! Failures of an attempt.
//!
//! A failure answers two questions. *May the request be retried?* depends on how far the attempt got: before the first
//! byte of a response, a second attempt cannot give the client two responses, and no request that the edge forwards
//! today has side effects.
//! *Is it evidence about the region?* is independent of that: a stale pooled connection says nothing about a region, a
//! refused connection does.

use crate::outlier::{DeadlineSetBy, OutlierEvidence, UpstreamAction, evidence};

/// Failure of an attempt: it ended without a response for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptFailure {
    /// A pooled connection was closed: the region had closed it while it was idle, and has not seen the request.
    StaleConnection,
    /// The region could not be reached, or broke off before the first byte of a response.
    Unreachable,
    /// The certificate at the region's address has another identity; no byte of the request was sent.
    WrongPeer,
    /// The region responded that it cannot serve the request, and that another region could.
    Declined,
    /// No first byte came within the time that is usual for this region and request size, and another region could take
    /// over.
    FirstByteTimeout,
    /// No response came, and meanwhile the region was found to be down.
    RegionDown,
    /// No response came before the deadline of the request.
    DeadlineExceeded,
    /// The receipt of the attempt is required and could not be made durable; not a byte of the request was sent.
    ReceiptUnavailable,
}

impl AttemptFailure {
    /// Returns the evidence about the upstream; `status` is that of the response, if there was one.
    pub fn evidence(self, status: Option<u16>) -> Option<OutlierEvidence> {
        match self {
            AttemptFailure::StaleConnection => {
                evidence(DeadlineSetBy::Measurement, UpstreamAction::ClosedIdleConnection)
            }
            AttemptFailure::Unreachable => evidence(DeadlineSetBy::Measurement, UpstreamAction::Unreachable),
            AttemptFailure::WrongPeer => evidence(DeadlineSetBy::Measurement, UpstreamAction::WrongPeer),
            AttemptFailure::Declined => {
                evidence(DeadlineSetBy::Measurement, UpstreamAction::Declined { status: status? })
            }
            AttemptFailure::FirstByteTimeout => evidence(DeadlineSetBy::Measurement, UpstreamAction::Silent),
            AttemptFailure::DeadlineExceeded => evidence(DeadlineSetBy::Client, UpstreamAction::Silent),
            // The component that found the region down has counted it; a receipt that cannot be written is this
            // process's problem.
            AttemptFailure::RegionDown | AttemptFailure::ReceiptUnavailable => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outlier::AttemptOutcome;

    #[test]
    fn a_deadline_of_the_client_is_no_evidence_about_a_region() {
        let outcome =
            |failure: AttemptFailure, status| failure.evidence(status).map(OutlierEvidence::outcome);
        assert_eq!(outcome(AttemptFailure::DeadlineExceeded, None), None);
        assert_eq!(outcome(AttemptFailure::FirstByteTimeout, None), Some(AttemptOutcome::Timeout));
        assert_eq!(outcome(AttemptFailure::Unreachable, None), Some(AttemptOutcome::ConnectionFailure));
        assert_eq!(outcome(AttemptFailure::WrongPeer, None), Some(AttemptOutcome::ConnectionFailure));
        assert_eq!(outcome(AttemptFailure::Declined, Some(502)), Some(AttemptOutcome::ServerError));
        assert_eq!(outcome(AttemptFailure::Declined, Some(503)), None);
        assert_eq!(outcome(AttemptFailure::StaleConnection, None), None);
        assert_eq!(outcome(AttemptFailure::RegionDown, None), None);
    }
}
