//! Labels for the causes and results of attempts.
//!
//! Logs, metrics, receipts and explanations all describe attempts, in two processes and years apart; they share these
//! labels, so that one can be matched with the other.

use crate::outcome::AttemptFailure;
use crate::trail::{AttemptCause, AttemptEnd};

/// Error code of an ingress for a residency violation: `replica_api::error::ErrorCode::NotResidentHere`.
pub const NOT_RESIDENT_HERE: &str = "not_resident_here";
/// Error code of an ingress for a malformed header: `replica_api::error::ErrorCode::InvalidHeader`.
pub const INVALID_HEADER: &str = "invalid_header";

/// Labels of a closed set, in the order of its variants.
macro_rules! labels {
    ($type:ident, $($variant:ident = $label:literal),+ $(,)?) => {
        impl $type {
            /// All values.
            pub const ALL: [$type; [$($label),+].len()] = [$($type::$variant),+];

            /// Returns the label.
            pub fn as_str(self) -> &'static str {
                match self {
                    $($type::$variant => $label,)+
                }
            }
        }
    };
}

labels! {
    AttemptCause,
    First = "first",
    Spillover = "spillover",
    Replay = "replay",
    Retry = "retry",
    FirstByteTimeout = "first_byte_timeout",
    Evacuation = "evacuation",
    Hedge = "hedge",
}

impl AttemptCause {
    /// Parses a label.
    pub fn parse(label: &str) -> Option<AttemptCause> {
        AttemptCause::ALL.into_iter().find(|cause| cause.as_str() == label)
    }
}

/// Result of an attempt, with statuses by their class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AttemptResult {
    /// Response that is not an error.
    Ok,
    /// Response with 4xx.
    ClientError,
    /// Response with 5xx.
    ServerError,
    /// [`AttemptFailure::StaleConnection`].
    StaleConnection,
    /// [`AttemptFailure::Unreachable`].
    Unreachable,
    /// [`AttemptFailure::WrongPeer`].
    WrongPeer,
    /// [`AttemptFailure::Declined`].
    Declined,
    /// [`AttemptFailure::FirstByteTimeout`].
    FirstByteTimeout,
    /// [`AttemptFailure::RegionDown`].
    RegionDown,
    /// [`AttemptFailure::DeadlineExceeded`].
    DeadlineExceeded,
    /// [`AttemptFailure::ReceiptUnavailable`].
    ReceiptUnavailable,
    /// [`AttemptEnd::Cancelled`].
    Cancelled,
}

labels! {
    AttemptResult,
    Ok = "ok",
    ClientError = "client_error",
    ServerError = "server_error",
    StaleConnection = "stale_connection",
    Unreachable = "unreachable",
    WrongPeer = "wrong_peer",
    Declined = "declined",
    FirstByteTimeout = "first_byte_timeout",
    RegionDown = "region_down",
    DeadlineExceeded = "deadline_exceeded",
    ReceiptUnavailable = "receipt_unavailable",
    Cancelled = "cancelled",
}

impl AttemptResult {
    /// Parses a label, including the former ones that older receipts have.
    pub fn parse(label: &str) -> Option<AttemptResult> {
        let label = match label {
            "elsewhere" => "declined",
            "late" => "first_byte_timeout",
            "lost" => "region_down",
            "deadline_passed" => "deadline_exceeded",
            "abandoned" => "cancelled",
            label => label,
        };
        AttemptResult::ALL.into_iter().find(|result| result.as_str() == label)
    }

    /// Returns whether the region is known to have seen the request, because it responded.
    pub fn has_response(self) -> bool {
        match self {
            AttemptResult::Ok
            | AttemptResult::ClientError
            | AttemptResult::ServerError
            | AttemptResult::Declined => true,
            AttemptResult::StaleConnection
            | AttemptResult::Unreachable
            | AttemptResult::WrongPeer
            | AttemptResult::FirstByteTimeout
            | AttemptResult::RegionDown
            | AttemptResult::DeadlineExceeded
            | AttemptResult::ReceiptUnavailable
            | AttemptResult::Cancelled => false,
        }
    }
}

impl From<AttemptEnd> for AttemptResult {
    fn from(end: AttemptEnd) -> AttemptResult {
        match end {
            AttemptEnd::Responded { status: 500.. } => AttemptResult::ServerError,
            AttemptEnd::Responded { status: 400..500 } => AttemptResult::ClientError,
            AttemptEnd::Responded { .. } => AttemptResult::Ok,
            AttemptEnd::Failed(AttemptFailure::StaleConnection) => AttemptResult::StaleConnection,
            AttemptEnd::Failed(AttemptFailure::Unreachable) => AttemptResult::Unreachable,
            AttemptEnd::Failed(AttemptFailure::WrongPeer) => AttemptResult::WrongPeer,
            AttemptEnd::Failed(AttemptFailure::Declined) => AttemptResult::Declined,
            AttemptEnd::Failed(AttemptFailure::FirstByteTimeout) => AttemptResult::FirstByteTimeout,
            AttemptEnd::Failed(AttemptFailure::RegionDown) => AttemptResult::RegionDown,
            AttemptEnd::Failed(AttemptFailure::DeadlineExceeded) => AttemptResult::DeadlineExceeded,
            AttemptEnd::Failed(AttemptFailure::ReceiptUnavailable) => AttemptResult::ReceiptUnavailable,
            AttemptEnd::Cancelled => AttemptResult::Cancelled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_is_parsed_back() {
        for (index, cause) in AttemptCause::ALL.into_iter().enumerate() {
            assert_eq!(cause as usize, index, "the order of the list is that of the enum");
            assert_eq!(AttemptCause::parse(cause.as_str()), Some(cause));
        }
        for (index, result) in AttemptResult::ALL.into_iter().enumerate() {
            assert_eq!(AttemptResult::parse(result.as_str()), Some(result));
            assert_eq!(result as usize, index, "the order of the list is that of the enum");
        }
        assert_eq!((AttemptCause::parse("whim"), AttemptResult::parse("")), (None, None));
        assert_eq!(AttemptResult::parse("late"), Some(AttemptResult::FirstByteTimeout), "a former label");
    }

    #[test]
    fn a_status_ends_an_attempt_by_its_class() {
        let check = |status, expected| {
            assert_eq!(AttemptResult::from(AttemptEnd::Responded { status }), expected, "{status}")
        };
        check(200, AttemptResult::Ok);
        check(399, AttemptResult::Ok);
        check(400, AttemptResult::ClientError);
        check(499, AttemptResult::ClientError);
        check(500, AttemptResult::ServerError);
        check(599, AttemptResult::ServerError);
    }
}
