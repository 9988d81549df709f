//! Reason why a replica does not become ready, as it reports it in its status.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum bytes of [`StartFailureReport::message`]: a status is polled several times a second.
pub const MESSAGE_BYTES_MAX: usize = 512;

/// Reason why a replica does not become ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StartFailure {
    /// The model, its bucket or one of its files does not exist.
    ModelMissing,
    /// The origin of the model denies access.
    ModelForbidden,
    /// The origin of the model cannot be reached, or does not respond in time.
    ModelUnavailable,
    /// A file of the model does not match its digest, or cannot be verified.
    ModelCorrupt,
    /// The family or the format of the model is not supported.
    UnknownFamily,
    /// The disk of the model cache has too little space.
    DiskFull,
    /// The process ends again and again before it is ready.
    CrashLoop,
    /// Another reason, or one that this version does not know.
    Other,
}

impl StartFailure {
    /// All reasons.
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

    /// Returns the name of the reason.
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

impl Serialize for StartFailure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for StartFailure {
    /// Reads a name; an unknown one is [`StartFailure::Other`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<StartFailure, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = StartFailure::ALL.into_iter().find(|failure| failure.as_str() == name);
        Ok(known.unwrap_or(StartFailure::Other))
    }
}

/// Failure of a start, for machines and for persons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFailureReport {
    /// Reason.
    pub reason: StartFailure,
    /// Sentence with the resource, the problem and the fix; at most [`MESSAGE_BYTES_MAX`] bytes.
    pub message: String,
}

impl StartFailureReport {
    /// Creates a report; the message is cut to [`MESSAGE_BYTES_MAX`] bytes.
    pub fn new(reason: StartFailure, message: impl Into<String>) -> StartFailureReport {
        let mut message = message.into();
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
        StartFailureReport { reason, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_written_as_its_name_and_an_unknown_one_is_read_as_other() {
        for reason in StartFailure::ALL {
            let text = serde_json::to_string(&reason).unwrap();
            assert_eq!(text, format!("\"{}\"", reason.as_str()));
            assert_eq!(serde_json::from_str::<StartFailure>(&text).unwrap(), reason);
        }
        let newer: StartFailureReport =
            serde_json::from_str(r#"{"reason":"gpu_missing","message":"m","more":1}"#).unwrap();
        assert_eq!(newer, StartFailureReport::new(StartFailure::Other, "m"));
    }

    #[test]
    fn a_message_is_cut_at_the_limit_between_characters() {
        let cut = |text: String| StartFailureReport::new(StartFailure::Other, text).message;
        let longest = "a".repeat(MESSAGE_BYTES_MAX);
        assert_eq!(cut(longest.clone()), longest);
        assert_eq!(cut(format!("{longest}b")), longest);
        let wide = format!("{}é", "a".repeat(MESSAGE_BYTES_MAX - 1));
        assert_eq!(cut(wide).len(), MESSAGE_BYTES_MAX - 1);
    }
}
