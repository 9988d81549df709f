//! The words for why an attempt was made and how it ended.
//!
//! Logs, metrics, receipts and explanations all tell of attempts, in two processes and years apart; they use these words
//! and no others, so that what one of them says can be looked up in the next.

use crate::outcome::Failure;
use crate::trail::{Cause, End};

/// How a region's door says that it must not see a request: `replica_core::wire::error::ErrorCode::NotResidentHere`.
pub const NOT_RESIDENT_HERE: &str = "not_resident_here";
/// How it says that it cannot read a header: `replica_core::wire::error::ErrorCode::InvalidHeader`.
pub const INVALID_HEADER: &str = "invalid_header";

impl Cause {
    /// Every cause.
    pub const ALL: [Cause; 7] = [
        Cause::First,
        Cause::Overflow,
        Cause::Replay,
        Cause::Retry,
        Cause::Late,
        Cause::Evacuation,
        Cause::Hedge,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::First => "first",
            Cause::Overflow => "overflow",
            Cause::Replay => "replay",
            Cause::Retry => "retry",
            Cause::Late => "late",
            Cause::Evacuation => "evacuation",
            Cause::Hedge => "hedge",
        }
    }

    /// The cause that this word stands for.
    pub fn parse(word: &str) -> Option<Cause> {
        Cause::ALL.into_iter().find(|cause| cause.as_str() == word)
    }
}

/// How an attempt ended, with statuses by their class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ended {
    /// Answered, and not with an error.
    Ok,
    /// Answered with 4xx.
    ClientError,
    /// Answered with 5xx.
    ServerError,
    /// [`Failure::StaleConnection`].
    StaleConnection,
    /// [`Failure::Unreachable`].
    Unreachable,
    /// [`Failure::WrongPeer`].
    WrongPeer,
    /// [`Failure::Elsewhere`].
    Elsewhere,
    /// [`Failure::Late`].
    Late,
    /// [`Failure::Lost`].
    Lost,
    /// [`Failure::DeadlinePassed`].
    DeadlinePassed,
    /// [`Failure::ReceiptUnavailable`].
    ReceiptUnavailable,
    /// [`End::Abandoned`].
    Abandoned,
}

impl Ended {
    /// Every way in which an attempt ends.
    pub const ALL: [Ended; 12] = [
        Ended::Ok,
        Ended::ClientError,
        Ended::ServerError,
        Ended::StaleConnection,
        Ended::Unreachable,
        Ended::WrongPeer,
        Ended::Elsewhere,
        Ended::Late,
        Ended::Lost,
        Ended::DeadlinePassed,
        Ended::ReceiptUnavailable,
        Ended::Abandoned,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Ended::Ok => "ok",
            Ended::ClientError => "client_error",
            Ended::ServerError => "server_error",
            Ended::StaleConnection => "stale_connection",
            Ended::Unreachable => "unreachable",
            Ended::WrongPeer => "wrong_peer",
            Ended::Elsewhere => "elsewhere",
            Ended::Late => "late",
            Ended::Lost => "lost",
            Ended::DeadlinePassed => "deadline_passed",
            Ended::ReceiptUnavailable => "receipt_unavailable",
            Ended::Abandoned => "abandoned",
        }
    }

    /// The end that this word stands for.
    pub fn parse(word: &str) -> Option<Ended> {
        Ended::ALL.into_iter().find(|ended| ended.as_str() == word)
    }

    /// Whether the region is known to have seen the request: it answered.
    pub fn was_answered(self) -> bool {
        match self {
            Ended::Ok | Ended::ClientError | Ended::ServerError | Ended::Elsewhere => true,
            Ended::StaleConnection
            | Ended::Unreachable
            | Ended::WrongPeer
            | Ended::Late
            | Ended::Lost
            | Ended::DeadlinePassed
            | Ended::ReceiptUnavailable
            | Ended::Abandoned => false,
        }
    }
}

impl From<End> for Ended {
    fn from(end: End) -> Ended {
        match end {
            End::Answered { status: 500.. } => Ended::ServerError,
            End::Answered { status: 400..500 } => Ended::ClientError,
            End::Answered { .. } => Ended::Ok,
            End::Failed(Failure::StaleConnection) => Ended::StaleConnection,
            End::Failed(Failure::Unreachable) => Ended::Unreachable,
            End::Failed(Failure::WrongPeer) => Ended::WrongPeer,
            End::Failed(Failure::Elsewhere) => Ended::Elsewhere,
            End::Failed(Failure::Late) => Ended::Late,
            End::Failed(Failure::Lost) => Ended::Lost,
            End::Failed(Failure::DeadlinePassed) => Ended::DeadlinePassed,
            End::Failed(Failure::ReceiptUnavailable) => Ended::ReceiptUnavailable,
            End::Abandoned => Ended::Abandoned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_leads_back_to_what_it_stands_for() {
        for (place, cause) in Cause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, place, "the order of the list is that of the enum");
            assert_eq!(Cause::parse(cause.as_str()), Some(cause));
        }
        for (place, ended) in Ended::ALL.into_iter().enumerate() {
            assert_eq!(Ended::parse(ended.as_str()), Some(ended));
            assert_eq!(ended as usize, place, "the order of the list is that of the enum");
        }
        assert_eq!((Cause::parse("whim"), Ended::parse("")), (None, None));
    }

    #[test]
    fn a_status_ends_an_attempt_by_its_class() {
        let check =
            |status, expected| assert_eq!(Ended::from(End::Answered { status }), expected, "{status}");
        check(200, Ended::Ok);
        check(399, Ended::Ok);
        check(400, Ended::ClientError);
        check(499, Ended::ClientError);
        check(500, Ended::ServerError);
        check(599, Ended::ServerError);
    }
}
