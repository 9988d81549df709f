//! Error messages with which the replica rejects a request.
//!
//! Each message names the field, states the limit and the given value, and says what to do. All messages are in this
//! file, so that they can be reviewed together and tested against that rule.

use std::time::Duration;

use crate::error::ErrorCode;

/// Maximum length of a list, and its key in `replica.toml`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListLimit {
    /// The limit.
    pub count: usize,
    /// Key of the limit.
    pub key: &'static str,
}

/// Rejection of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Error code, which determines the status and the remedy.
    pub code: ErrorCode,
    /// One sentence for a person.
    pub message: String,
    /// Field or header that is invalid, if any.
    pub param: Option<&'static str>,
    /// Time to wait, where waiting helps.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    fn new(code: ErrorCode, param: Option<&'static str>, message: String) -> Refusal {
        Refusal { code, message, param, retry_after: None }
    }

    /// The body is not a JSON object.
    pub fn not_json(what: impl std::fmt::Display) -> Refusal {
        Refusal::new(
            ErrorCode::InvalidJson,
            None,
            format!("the body is not a JSON object: {what}; send one, in UTF-8"),
        )
    }

    /// `field` is required and absent.
    pub fn missing(field: &'static str, expected: &str) -> Refusal {
        Refusal::new(ErrorCode::MissingField, Some(field), format!("`{field}` is missing; give {expected}"))
    }

    /// `field` (at `path`, which may name an element of it) has an unsupported type or value.
    pub fn invalid(field: &'static str, path: &str, problem: &str, expected: &str) -> Refusal {
        Refusal::new(ErrorCode::InvalidValue, Some(field), format!("`{path}` {problem}; give {expected}"))
    }

    /// `header` cannot be parsed.
    pub fn invalid_header(header: &'static str, given: &str, expected: &str) -> Refusal {
        Refusal::new(
            ErrorCode::InvalidHeader,
            Some(header),
            format!("the header `{header}` is `{}`, which is not valid; give {expected}", cut(given)),
        )
    }

    /// The list at `path` is empty.
    pub fn no_inputs(field: &'static str, path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::EmptyInput,
            Some(field),
            format!("`{path}` is an empty list; give at least one element"),
        )
    }

    /// An input is empty; `path` is `field` or an element of it.
    pub fn empty_input(field: &'static str, path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::EmptyInput,
            Some(field),
            format!("`{path}` is empty; leave it out or give at least one character"),
        )
    }

    /// A list has more elements than the limit.
    pub fn too_many_inputs(field: &'static str, limit: ListLimit, given: usize) -> Refusal {
        let ListLimit { count, key } = limit;
        Refusal::new(
            ErrorCode::TooManyInputs,
            Some(field),
            format!(
                "`{field}` has {given} elements and the limit is {count} (`{key}`); split it into \
                 {} requests",
                given.div_ceil(count.max(1))
            ),
        )
    }

    /// The inputs of the request have more tokens together than the limit.
    pub fn too_many_tokens(limit: u64, given: u64) -> Refusal {
        Refusal::new(
            ErrorCode::TooManyTokens,
            None,
            format!(
                "the request has {given} tokens and the limit is {limit} (`max_request_tokens`); split it \
                 into {} requests",
                given.div_ceil(limit.max(1))
            ),
        )
    }

    /// An input has more tokens than the model reads.
    pub fn input_too_long(field: &'static str, path: &str, limit: usize, given: usize) -> Refusal {
        Refusal::new(
            ErrorCode::InputTooLong,
            Some(field),
            format!(
                "`{path}` has {given} tokens and the limit of this model is {limit}; shorten it or split it"
            ),
        )
    }

    /// The model has another task: it `is` this, and `operation` requires `required`.
    pub fn wrong_task(operation: &str, is: &str, required: &str) -> Refusal {
        Refusal::new(
            ErrorCode::WrongTask,
            None,
            format!(
                "{operation} requires {required}, and this model is {is}; use a deployment of another model"
            ),
        )
    }

    /// The model has no prompt of this name.
    pub fn no_such_prompt<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Refusal {
        let names = names.map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
        let expected = if names.is_empty() { "leave it out".to_owned() } else { format!("one of {names}") };
        Refusal::invalid(
            "prompt_name",
            "prompt_name",
            &format!("is \"{}\", which is not among the `prompts` of this model's configuration", cut(given)),
            &expected,
        )
    }

    /// The body has more bytes than the limit; `given` is its length, if known in advance.
    pub fn body_too_large(limit: usize, given: Option<u64>) -> Refusal {
        let given = given.map_or("too many bytes".to_owned(), |bytes| format!("{bytes} bytes"));
        Refusal::new(
            ErrorCode::BodyTooLarge,
            None,
            format!("the body has {given} and the limit is {limit} bytes; split it into several requests"),
        )
    }

    /// The body did not arrive in time.
    pub fn body_timeout(limit: Duration) -> Refusal {
        Refusal::new(
            ErrorCode::BodyTimeout,
            None,
            format!("the body did not arrive within {} ms; send it again", limit.as_millis()),
        )
    }

    /// The connection ended before the body was complete.
    pub fn body_broken_off() -> Refusal {
        Refusal::new(
            ErrorCode::InvalidJson,
            None,
            "the body is shorter than its declared length; send it again".to_owned(),
        )
    }

    /// No deployment has this name.
    pub fn model_not_found(given: &str, names: &[String]) -> Refusal {
        let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        Refusal::new(
            ErrorCode::ModelNotFound,
            Some("model"),
            format!("there is no deployment `{}` here; there is {names}", cut(given)),
        )
    }

    /// No operation has this path.
    pub fn not_found(path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::NotFound,
            None,
            format!(
                "{} does not exist; POST /v1/embeddings embeds, /v1/rerank ranks, /predict classifies, and GET /info \
                 describes this model",
                cut(path)
            ),
        )
    }

    /// The path exists, with another method.
    pub fn method_not_allowed(method: &str, path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::MethodNotAllowed,
            None,
            format!(
                "{path} does not support {}; the header `allow` lists the supported methods",
                cut(method)
            ),
        )
    }

    /// The queue has no capacity for this request now.
    pub fn overloaded(what: &str, limit: u64, wait: Option<Duration>) -> Refusal {
        let wait = wait.unwrap_or(MIN_RETRY_AFTER).max(MIN_RETRY_AFTER);
        Refusal {
            retry_after: Some(wait),
            ..Refusal::new(
                ErrorCode::Overloaded,
                None,
                format!(
                    "this replica is full ({what}, the limit is {limit}); retry in {:.1} s",
                    wait.as_secs_f64()
                ),
            )
        }
    }

    /// The weights are still being loaded.
    pub fn not_ready() -> Refusal {
        Refusal {
            retry_after: Some(MIN_RETRY_AFTER),
            ..Refusal::new(
                ErrorCode::NotReady,
                None,
                "this replica is still loading its model; use another one, or retry in a moment".to_owned(),
            )
        }
    }

    /// The model is being downloaded, or the start has failed and is tried again; `problem` says which, as a sentence.
    pub fn not_started(problem: &str) -> Refusal {
        Refusal {
            retry_after: Some(MIN_RETRY_AFTER),
            ..Refusal::new(ErrorCode::NotReady, None, format!("this replica is not ready: {problem}"))
        }
    }

    /// The region requires another model revision than this replica has.
    pub fn other_revision(required: &str, loaded: &str) -> Refusal {
        Refusal::new(
            ErrorCode::ModelRevisionUnavailable,
            Some(crate::headers::MODEL_REVISION),
            format!(
                "the request requires model revision {required} and this replica runs {loaded}; use another one"
            ),
        )
    }

    /// The process is unhealthy.
    pub fn unhealthy(problem: &str) -> Refusal {
        Refusal::new(
            ErrorCode::NotReady,
            None,
            format!("this replica cannot serve: {problem}; use another one"),
        )
    }

    /// The process is draining.
    pub fn draining() -> Refusal {
        Refusal::new(
            ErrorCode::Draining,
            None,
            "this replica is shutting down and accepts no new requests; use another one".to_owned(),
        )
    }

    /// The deadline passed before the response was complete.
    pub fn deadline_exceeded(timeout: Duration) -> Refusal {
        Refusal::new(
            ErrorCode::DeadlineExceeded,
            Some(crate::headers::TIMEOUT_MS),
            format!(
                "the deadline of {} ms passed; raise it, or send fewer inputs at once",
                timeout.as_millis()
            ),
        )
    }

    /// The model computed NaN or an infinity.
    pub fn not_finite() -> Refusal {
        Refusal::new(
            ErrorCode::NotFinite,
            None,
            "the model computes NaN or an infinity for one of the inputs; send the others without it, or deploy the model \
             in another precision"
                .to_owned(),
        )
    }

    /// An internal error occurred.
    pub fn internal(request_id: &str) -> Refusal {
        Refusal::new(
            ErrorCode::Internal,
            None,
            format!(
                "internal error of the replica; its log has the cause under the request identifier {request_id}"
            ),
        )
    }
}

/// Returns the beginning of text from a request, enough to recognize it in an error message.
fn cut(text: &str) -> &str {
    text.char_indices().nth(80).map_or(text, |(end, _)| &text[..end])
}

/// Minimum of `retry-after`: below it a rejection costs more than the wait.
pub const MIN_RETRY_AFTER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Remedy;

    #[test]
    fn a_rejection_for_which_waiting_helps_has_retry_after() {
        assert_eq!(ErrorCode::Overloaded.remedy(), Remedy::Wait);
        let refusal = Refusal::overloaded("the queue", 5, Some(Duration::from_millis(2_340)));
        assert_eq!(refusal.retry_after, Some(Duration::from_millis(2_340)));
        assert!(refusal.message.contains("2.3 s"), "{}", refusal.message);
        assert_eq!(Refusal::overloaded("the queue", 5, None).retry_after, Some(MIN_RETRY_AFTER));
    }

    #[test]
    fn a_message_has_the_limit_and_the_value_that_exceeds_it() {
        let check = |refusal: Refusal, parts: &[&str]| {
            for part in parts {
                assert!(refusal.message.contains(part), "{:?} in {}", part, refusal.message);
            }
        };
        let limit = ListLimit { count: 2048, key: "max_inputs" };
        check(Refusal::too_many_inputs("input", limit, 2049), &["2049", "2048", "max_inputs", "2 requests"]);
        check(Refusal::too_many_tokens(10, 25), &["25 tokens", "10", "max_request_tokens", "3 requests"]);
        check(Refusal::input_too_long("input", "input[7]", 256, 300), &["input[7]", "300", "256"]);
        check(Refusal::no_such_prompt("q", ["query"].into_iter()), &["\"q\"", "\"query\""]);
        check(Refusal::no_such_prompt("q", std::iter::empty()), &["leave it out"]);
        check(Refusal::body_too_large(100, Some(101)), &["101 bytes", "100 bytes"]);
        check(Refusal::body_too_large(100, None), &["100 bytes"]);
        check(Refusal::model_not_found("x", &["a".into(), "b".into()]), &["`x`", "`a`, `b`"]);
    }

    #[test]
    fn long_values_of_a_request_are_shortened_in_messages() {
        let long = "é".repeat(10_000);
        for refusal in [
            Refusal::model_not_found(&long, &["a".into()]),
            Refusal::not_found(&long),
            Refusal::method_not_allowed(&long, "/v1/models"),
            Refusal::invalid_header("x", &long, "y"),
            Refusal::no_such_prompt(&long, std::iter::empty()),
        ] {
            assert!(refusal.message.contains("é") && refusal.message.len() < 400, "{}", refusal.message);
        }
    }
}
