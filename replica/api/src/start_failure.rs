//! Reason for which a replica cannot load its model, as it reports it while it is not ready.

use serde::{Deserialize, Serialize};

/// Maximum bytes of the message of a report. A longer one is cut: reports travel with every status.
const MESSAGE_BYTES_MAX: usize = 512;

/// Reason for which a replica cannot start. A reason of a later version is read as [`StartFailure::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartFailure {
    /// The source has no model of this name or revision.
    ModelMissing,
    /// The source denies access to the model.
    ModelForbidden,
    /// The source of the model does not respond, or responds with errors of its own.
    ModelUnavailable,
    /// Files of the model are incomplete, differ from their checksums, or are invalid.
    ModelCorrupt,
    /// The engine does not support the family of the model.
    UnknownFamily,
    /// The disk has no space for the model.
    DiskFull,
    /// The process ends repeatedly before it is ready.
    CrashLoop,
    /// Any other reason; the message has it.
    #[serde(other)]
    Other,
}

impl StartFailure {
    /// Every reason, in the order of the documentation.
    pub const ALL: [StartFailure; 8] = [
        StartFailure::ModelMissing,
        StartFailure::ModelForbidden,
        StartFailure::ModelUnavailable,
        StartFailure::ModelCorrupt,
        StartFailure::UnknownFamily,
        StartFailure::DiskFull,
        StartFailure::CrashLoop,
        StartFailure::Other,
    ];

    /// Returns the word in messages, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            StartFailure::ModelMissing => "model_missing",
            StartFailure::ModelForbidden => "model_forbidden",
            StartFailure::ModelUnavailable => "model_unavailable",
            StartFailure::ModelCorrupt => "model_corrupt",
            StartFailure::UnknownFamily => "unknown_family",
            StartFailure::DiskFull => "disk_full",
            StartFailure::CrashLoop => "crash_loop",
            StartFailure::Other => "other",
        }
    }
}

/// Failure of a start, with the text for an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "UnboundedReport")]
pub struct StartFailureReport {
    /// Reason.
    pub reason: StartFailure,
    /// Text with the failure and the fix; at most 512 bytes.
    pub message: String,
}

/// Report as it is read, with a message of any length.
#[derive(Deserialize)]
struct UnboundedReport {
    reason: StartFailure,
    #[serde(default)]
    message: String,
}

impl StartFailureReport {
    /// Creates a report; a longer message is cut at a character boundary.
    pub fn new(reason: StartFailure, message: impl Into<String>) -> StartFailureReport {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        StartFailureReport { reason, message }
    }
}

impl From<UnboundedReport> for StartFailureReport {
    fn from(UnboundedReport { reason, message }: UnboundedReport) -> StartFailureReport {
        StartFailureReport::new(reason, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_its_word_on_the_wire_and_an_unknown_one_is_other() {
        for reason in StartFailure::ALL {
            let text = serde_json::to_string(&reason).unwrap();
            assert_eq!(text, format!("\"{}\"", reason.as_str()));
            assert_eq!(serde_json::from_str::<StartFailure>(&text).unwrap(), reason);
        }
        let later = r#"{"reason":"licence_expired","message":"m","code":7}"#;
        let later: StartFailureReport = serde_json::from_str(later).unwrap();
        assert_eq!(later, StartFailureReport::new(StartFailure::Other, "m"));
    }

    #[test]
    fn a_message_is_cut_at_a_character_boundary() {
        let message = |text: &str| StartFailureReport::new(StartFailure::Other, text).message;
        assert_eq!(message(&"a".repeat(MESSAGE_BYTES_MAX)).len(), MESSAGE_BYTES_MAX);
        assert_eq!(message(&"a".repeat(MESSAGE_BYTES_MAX + 1)).len(), MESSAGE_BYTES_MAX);
        let wide = format!("{}é", "a".repeat(MESSAGE_BYTES_MAX - 1));
        assert_eq!(message(&wide), "a".repeat(MESSAGE_BYTES_MAX - 1));
        let read = format!(r#"{{"reason":"disk_full","message":"{}"}}"#, "b".repeat(2000));
        let read: StartFailureReport = serde_json::from_str(&read).unwrap();
        assert_eq!(read.message.len(), MESSAGE_BYTES_MAX);
    }
}
