//! Errors of TEI.

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;

/// Error types of TEI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TeiErrorType {
    /// The server is not available.
    Unhealthy,
    /// The model failed, or has another task.
    Backend,
    /// The queue is full.
    Overloaded,
    /// The input is too long, too large, or has too many elements.
    Validation,
    /// The text or the body cannot be parsed.
    Tokenizer,
    /// The input is empty.
    Empty,
}

/// `{"error", "error_type"}`, as TEI's clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiErrorBody {
    /// One sentence for a person.
    pub error: String,
    /// Type of the error.
    pub error_type: TeiErrorType,
}

/// Returns TEI's error type, and the status that TEI uses for it. Server errors keep their own status (TEI uses 424
/// for a failed model as well), because generic proxies count 5xx; so do errors for which TEI has no type.
pub fn type_and_status(code: ErrorCode) -> (TeiErrorType, u16) {
    use ErrorCode::*;
    match code {
        InvalidJson | MissingField | InvalidValue => (TeiErrorType::Tokenizer, 422),
        EmptyInput => (TeiErrorType::Empty, 400),
        InputTooLong | TooManyInputs | TooManyTokens | BodyTooLarge => (TeiErrorType::Validation, 413),
        WrongTask => (TeiErrorType::Backend, 424),
        Overloaded | RateLimited | TooManyJobs | TooManyFiles => (TeiErrorType::Overloaded, 429),
        MalformedRequest | HeadTooLarge | HeadTimeout | UnknownTransferCoding | UnsupportedEncoding => {
            (TeiErrorType::Validation, code.status())
        }
        InvalidHeader | BodyTimeout | InvalidApiKey | InvalidToken | ModelNotFound | NotFound
        | JobNotFound | FileNotFound | FileInUse | BatchNotFound | BatchFinished | JobFinished
        | NothingToSend | IdempotencyConflict | WebhookNotPermitted | NoWebhookSecret | MethodNotAllowed
        | RegionNotPermitted | ReadElsewhere | PriorityNotPermitted | NotResidentHere => {
            (TeiErrorType::Validation, code.status())
        }
        NoCapacityInAllowedRegions
        | NoJobQueue
        | JobsUnavailable
        | StorageFull
        | ReceiptUnavailable
        | PolicyTooOld
        | Saturated
        | NotReady
        | ColdStart
        | DeploymentFailed
        | ModelRevisionUnavailable
        | ModelChanged
        | Draining
        | RegionUnreachable
        | ReplicaUnreachable => (TeiErrorType::Unhealthy, code.status()),
        DeadlineExceeded | NotFinite | Internal => (TeiErrorType::Backend, code.status()),
    }
}

/// Returns the body for `code`.
pub(crate) fn body(code: ErrorCode, message: &str) -> Vec<u8> {
    let body = TeiErrorBody { error: message.to_owned(), error_type: type_and_status(code).0 };
    serde_json::to_vec(&body).expect("strings serialise to JSON")
}
