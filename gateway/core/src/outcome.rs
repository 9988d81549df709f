//! What an attempt can come to, and the two questions that it raises.
//!
//! *May this be tried again?* depends on how far the attempt got: before the first byte of an answer, a second attempt
//! cannot give the client two answers, and everything that the edge forwards today computes and changes nothing.
//! *Is my picture of the region wrong?* is another question with its own answer: a stale pooled connection says nothing
//! about a region, a refused one does.

use crate::outlier::{DeadlineSetBy, Evidence, UpstreamAction, evidence};

/// How an attempt ended without an answer that the client could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A pooled connection turned out to be closed: the region let go of it while it was idle, and has not seen the
    /// request.
    StaleConnection,
    /// The region could not be reached, or broke off before the first byte of an answer.
    Unreachable,
    /// Who answered at the region's address proved to be somebody else; not a byte of the request was sent.
    WrongPeer,
    /// The region answered that it cannot, and that another could.
    Elsewhere,
    /// Nothing came within the time in which this region answers such requests, and somebody else could take over.
    Late,
    /// Nothing came, and meanwhile the region was found to be lost.
    Lost,
    /// Nothing came before the deadline of the request.
    DeadlinePassed,
    /// The receipt of the attempt is required and could not be made durable; not a byte of the request was sent.
    ReceiptUnavailable,
}

impl Failure {
    /// Returns the evidence about the upstream; `status` is that of the response, if there was one.
    pub fn evidence(self, status: Option<u16>) -> Option<Evidence> {
        match self {
            Failure::StaleConnection => {
                evidence(DeadlineSetBy::Measurement, UpstreamAction::ClosedIdleConnection)
            }
            Failure::Unreachable => evidence(DeadlineSetBy::Measurement, UpstreamAction::Unreachable),
            Failure::WrongPeer => evidence(DeadlineSetBy::Measurement, UpstreamAction::WrongPeer),
            Failure::Elsewhere => {
                evidence(DeadlineSetBy::Measurement, UpstreamAction::Declined { status: status? })
            }
            Failure::Late => evidence(DeadlineSetBy::Measurement, UpstreamAction::Silent),
            Failure::DeadlinePassed => evidence(DeadlineSetBy::Client, UpstreamAction::Silent),
            // Whoever found the loss has counted it; and a receipt that cannot be written is this process's problem.
            Failure::Lost | Failure::ReceiptUnavailable => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outlier::Seen;

    #[test]
    fn a_deadline_of_the_client_says_nothing_about_a_region() {
        let seen = |failure: Failure, status| failure.evidence(status).map(Evidence::seen);
        assert_eq!(seen(Failure::DeadlinePassed, None), None);
        assert_eq!(seen(Failure::Late, None), Some(Seen::Missed));
        assert_eq!(seen(Failure::Unreachable, None), Some(Seen::Failed));
        assert_eq!(seen(Failure::WrongPeer, None), Some(Seen::Failed));
        assert_eq!(seen(Failure::Elsewhere, Some(502)), Some(Seen::Faulted));
        assert_eq!(seen(Failure::Elsewhere, Some(503)), None);
        assert_eq!(seen(Failure::StaleConnection, None), None);
        assert_eq!(seen(Failure::Lost, None), None);
    }
}
