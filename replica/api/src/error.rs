//! Error codes of Meridian, as one closed list.
//!
//! An error has three readers. A *program* needs a stable code and a status; an *operator* needs to know the side at
//! fault; and the holder of the request (a client library, or the gateway between two attempts) needs to know the
//! remedy: none, wait, or use another region. [`ErrorCode`] serves all three, and both the gateway and the replica use
//! it, so a code has the same meaning everywhere. `docs/errors.md` is rendered from it
//! ([`crate::error_page`]).
//!
//! The body has the format of the ecosystem that defines the requested path ([`crate::api::Dialect`]), because its stock
//! clients parse it; the default is OpenAI's error object (<https://platform.openai.com/docs/guides/error-codes>). The
//! code is also in the header `x-meridian-error`, so that a proxy need not read a body.

use serde::{Deserialize, Serialize};

/// Side at fault for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The request itself; no server can serve it.
    Caller,
    /// The caller exceeds its permissions or its limits.
    Quota,
    /// There is not enough capacity.
    Capacity,
    /// A replica failed.
    Replica,
    /// A machine between the client and the replica could not be reached.
    Network,
    /// A policy forbids the request.
    Policy,
}

/// Remedy for the holder of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// The same request will fail again, everywhere.
    Nothing,
    /// The same request may succeed later; `retry-after` says when.
    Wait,
    /// The same request may succeed in another region, now.
    Elsewhere,
}

macro_rules! error_codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $status:literal, $fault:ident, $remedy:ident;)+) => {
        /// Stable error code. The text form is part of the API: codes are added, never changed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ErrorCode {
            $($(#[doc = $doc])+ $name,)+
        }

        impl ErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)+];

            /// Returns the code as clients see it, in `error.code` and in `x-meridian-error`.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)+ }
            }

            /// Returns the HTTP status of this code.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)+ }
            }

            /// Returns the side at fault.
            pub fn fault(self) -> Fault {
                match self { $(ErrorCode::$name => Fault::$fault,)+ }
            }

            /// Returns the remedy.
            pub fn remedy(self) -> Remedy {
                match self { $(ErrorCode::$name => Remedy::$remedy,)+ }
            }

            pub(crate) fn meaning(self) -> &'static str {
                match self { $(ErrorCode::$name => concat!($($doc),+),)+ }
            }
        }
    };
}

error_codes! {
    /// The body is not JSON, or does not have the structure that this path requires.
    InvalidJson = "invalid_json", 400, Caller, Nothing;
    /// A field that this path requires is absent; `param` names it.
    MissingField = "missing_field", 400, Caller, Nothing;
    /// A field has a type or a value that this path does not support; `param` names it.
    InvalidValue = "invalid_value", 400, Caller, Nothing;
    /// The request is not HTTP/1.1 according to RFC 9112, or is ambiguous; the connection is closed.
    MalformedRequest = "malformed_request", 400, Caller, Nothing;
    /// The head of the request exceeds the limit of bytes or fields; the connection is closed.
    HeadTooLarge = "head_too_large", 431, Caller, Nothing;
    /// The head of the request did not arrive within the time limit; the connection is closed.
    HeadTimeout = "head_timeout", 408, Caller, Nothing;
    /// The body has a transfer coding other than `chunked`; the connection is closed.
    UnknownTransferCoding = "unknown_transfer_coding", 501, Caller, Nothing;
    /// The body has an unsupported content coding; gzip is supported.
    UnsupportedEncoding = "unsupported_encoding", 415, Caller, Nothing;
    /// A header that Meridian reads has an invalid value; `param` names it.
    InvalidHeader = "invalid_header", 400, Caller, Nothing;
    /// An input is empty.
    EmptyInput = "empty_input", 400, Caller, Nothing;
    /// An input has more tokens than the model reads.
    InputTooLong = "input_too_long", 400, Caller, Nothing;
    /// The request has more inputs than the limit.
    TooManyInputs = "too_many_inputs", 400, Caller, Nothing;
    /// The inputs of the request have more tokens together than the limit.
    TooManyTokens = "too_many_tokens", 400, Caller, Nothing;
    /// The path requires another task than that of this model, such as a classification with an embedding model.
    WrongTask = "wrong_task", 400, Caller, Nothing;
    /// The body has more bytes than the limit.
    BodyTooLarge = "body_too_large", 413, Caller, Nothing;
    /// The body did not arrive within the time limit.
    BodyTimeout = "body_timeout", 408, Caller, Nothing;
    /// The API key is absent or unknown.
    InvalidApiKey = "invalid_api_key", 401, Quota, Nothing;
    /// The bearer token is invalid; the message has the reason.
    InvalidToken = "invalid_token", 401, Quota, Nothing;
    /// The caller has reached its rate limit; `retry-after` says when it may continue.
    RateLimited = "rate_limit_exceeded", 429, Quota, Wait;
    /// No deployment of this name exists; the message lists those that do.
    ModelNotFound = "model_not_found", 404, Caller, Nothing;
    /// The path does not exist.
    NotFound = "not_found", 404, Caller, Nothing;
    /// The tenant has no job with this identifier, or its retention time has passed.
    JobNotFound = "job_not_found", 404, Caller, Nothing;
    /// The job cannot be cancelled any more: it is finished, or its result is being delivered.
    JobFinished = "job_finished", 409, Caller, Nothing;
    /// The idempotency key was used for another request; the message names its job, file or batch.
    IdempotencyConflict = "idempotency_conflict", 422, Caller, Nothing;
    /// The job has nothing to send to a webhook: it has none, is not finished, or was cancelled.
    NothingToSend = "nothing_to_send", 409, Caller, Nothing;
    /// The target of the webhook has no address to which results may be sent: it is not public, or not over `http`.
    WebhookNotPermitted = "webhook_not_permitted", 403, Policy, Nothing;
    /// The tenant has no webhook secret in the region of its job, so no message could be signed.
    NoWebhookSecret = "no_webhook_secret", 403, Policy, Nothing;
    /// The unfinished jobs of the tenant have reached a limit, by number or by bytes.
    TooManyJobs = "too_many_jobs", 429, Quota, Wait;
    /// The tenant has no file with this identifier, or its retention time has passed.
    FileNotFound = "file_not_found", 404, Caller, Nothing;
    /// A batch that has not ended reads the file; cancel the batch first.
    FileInUse = "file_in_use", 409, Caller, Nothing;
    /// The files or batches of the tenant have reached a limit, by number or by bytes; delete files.
    TooManyFiles = "too_many_files", 429, Quota, Wait;
    /// The tenant has no batch with this identifier, or its retention time has passed.
    BatchNotFound = "batch_not_found", 404, Caller, Nothing;
    /// The batch cannot be cancelled any more: it has ended.
    BatchFinished = "batch_finished", 409, Caller, Nothing;
    /// No allowed region that serves this deployment has a queue of jobs.
    NoJobQueue = "no_job_queue", 503, Capacity, Elsewhere;
    /// The queue of jobs cannot be read or written at the moment; accepted jobs are kept.
    JobsUnavailable = "jobs_unavailable", 503, Capacity, Wait;
    /// The disk or the bucket of the queue of jobs is full; accepted jobs are kept.
    StorageFull = "storage_full", 507, Capacity, Wait;
    /// The path exists, with another method.
    MethodNotAllowed = "method_not_allowed", 405, Caller, Nothing;
    /// The residency policies of the deployment and of the request together allow no region, or not that of this gateway.
    RegionNotPermitted = "region_not_permitted", 403, Policy, Nothing;
    /// The residency policy does not allow the region of this gateway to return the content; `location` is the same path at a
    /// gateway in an allowed region.
    ReadElsewhere = "read_elsewhere", 307, Policy, Nothing;
    /// The tenant may not use the requested priority.
    PriorityNotPermitted = "priority_not_permitted", 403, Policy, Nothing;
    /// The region is not allowed to see the request, and rejected it.
    NotResidentHere = "not_resident_here", 403, Policy, Elsewhere;
    /// Every region that is allowed to see the request is unreachable; no other region was tried.
    NoCapacityInAllowedRegions = "no_capacity_in_allowed_regions", 503, Capacity, Wait;
    /// The deployment is locked, each of its requests requires a receipt, and none can be written at the moment.
    ReceiptUnavailable = "receipt_unavailable", 503, Capacity, Wait;
    /// The deployment is locked, and this process has had no contact with a hub for longer than `policy_max_age`, so
    /// its residency policy may be out of date.
    PolicyTooOld = "policy_too_old", 503, Policy, Elsewhere;
    /// The queue is full, or the caller exceeds its fair share of it.
    Overloaded = "overloaded", 429, Capacity, Wait;
    /// There is not enough capacity to serve the request in time, and it was not started; `retry-after` says when there
    /// should be capacity.
    Saturated = "saturated", 503, Capacity, Wait;
    /// No replica of this deployment is ready in this region.
    NotReady = "not_ready", 503, Capacity, Elsewhere;
    /// No replica of this deployment is ready; one is being started, and will not be ready before the request's
    /// deadline: `retry-after` says when it is.
    ColdStart = "cold_start", 503, Capacity, Wait;
    /// The deployment has failed: no replica of it can start in any allowed region. The message has the reason and the
    /// regions; an operator must correct the deployment or its model.
    DeploymentFailed = "deployment_failed", 503, Replica, Elsewhere;
    /// No replica of this region has the model revision that the request must be computed with.
    ModelRevisionUnavailable = "model_revision_unavailable", 503, Capacity, Elsewhere;
    /// The model of the deployment changed while the parts of the request were computed, and vectors of two models are
    /// never returned together; send the request again.
    ModelChanged = "model_changed", 503, Capacity, Wait;
    /// The process is draining and accepts no new requests.
    Draining = "draining", 503, Capacity, Elsewhere;
    /// The deadline passed before the response was complete.
    DeadlineExceeded = "deadline_exceeded", 504, Capacity, Nothing;
    /// The region could not be reached, or reset the connection before its response.
    RegionUnreachable = "region_unreachable", 502, Network, Elsewhere;
    /// The replica could not be reached by its region, or reset the connection before its response.
    ReplicaUnreachable = "replica_unreachable", 502, Replica, Elsewhere;
    /// The model computed NaN or an infinity for an input of the request; the same request fails again everywhere.
    NotFinite = "not_finite", 500, Replica, Nothing;
    /// An internal error occurred; the logs have its cause under the request identifier.
    Internal = "internal", 500, Replica, Elsewhere;
}

impl ErrorCode {
    /// Returns the code with this text, as in `x-meridian-error`.
    pub fn parse(text: &str) -> Option<ErrorCode> {
        ErrorCode::ALL.iter().copied().find(|code| code.as_str() == text)
    }

    /// Returns the remedy of the code with this text, as in `x-meridian-error`. The remedy of a code that only a later version knows
    /// is unknown here; a region of the version of this process may serve the request, so it is sent there.
    pub fn remedy_of(text: &str) -> Remedy {
        ErrorCode::parse(text).map_or(Remedy::Elsewhere, ErrorCode::remedy)
    }

    /// Returns OpenAI's coarse `error.type`, by which its clients choose the exception that they raise.
    pub fn openai_type(self) -> &'static str {
        match self.fault() {
            Fault::Caller => "invalid_request_error",
            Fault::Quota | Fault::Capacity if self.status() == 429 => "rate_limit_exceeded",
            Fault::Quota => "authentication_error",
            Fault::Policy => "permission_error",
            Fault::Capacity => "service_unavailable",
            Fault::Replica | Fault::Network => "server_error",
        }
    }
}

/// `{"error": {...}}`, as OpenAI's clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// OpenAI's error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorObject {
    /// One sentence for a person: the field, the limit, and the fix.
    pub message: String,
    /// [`ErrorCode::openai_type`].
    #[serde(rename = "type")]
    pub kind: String,
    /// [`ErrorCode::as_str`].
    pub code: String,
    /// Field or header that is invalid, if any.
    pub param: Option<String>,
}

impl ErrorBody {
    /// Creates the body for `code`, with the sentence `message` about the field `param`.
    pub fn new(code: ErrorCode, message: impl Into<String>, param: Option<&str>) -> ErrorBody {
        ErrorBody {
            error: ErrorObject {
                message: message.into(),
                kind: code.openai_type().to_owned(),
                code: code.as_str().to_owned(),
                param: param.map(str::to_owned),
            },
        }
    }

    /// Returns the body as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings serialise to JSON")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_code_round_trips_through_its_header() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(*code));
        }
        assert_eq!(ErrorCode::parse("no_such_code"), None);
    }

    #[test]
    fn an_error_of_a_later_version_may_be_avoided_in_another_region() {
        assert_eq!(ErrorCode::remedy_of("no_such_code"), Remedy::Elsewhere);
        assert_eq!(ErrorCode::remedy_of(ErrorCode::NotFinite.as_str()), Remedy::Nothing);
    }

    #[test]
    fn only_server_side_errors_have_the_remedy_elsewhere() {
        for code in ErrorCode::ALL.iter().filter(|code| code.remedy() == Remedy::Elsewhere) {
            assert!(code.fault() != Fault::Caller && code.fault() != Fault::Quota, "{code:?}");
        }
    }
}
