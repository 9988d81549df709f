//! Every sentence with which the replica says no.
//!
//! A refusal is an answer: it names the field, states the limit and the given value, and says what to do. The
//! sentences stand together here so that they can be read as a whole, and so that a test can hold each of them to
//! that rule; whoever refuses calls the one that fits.

use std::time::Duration;

use crate::limits::AtMost;
use crate::wire::error::{Dialect, ErrorCode};

/// A request that is not served, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The code, which carries the status and what would help.
    pub code: ErrorCode,
    /// One sentence for a person.
    pub message: String,
    /// The field or header that is wrong, where there is one.
    pub param: Option<&'static str>,
    /// How long to wait, where waiting helps.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    fn new(code: ErrorCode, param: Option<&'static str>, message: String) -> Refusal {
        Refusal { code, message, param, retry_after: None }
    }

    /// The body that says it, in the words of an ecosystem.
    pub fn body(&self, dialect: Dialect) -> Vec<u8> {
        let Refusal { code, message, param, retry_after: _ } = self;
        dialect.body(*code, message, *param)
    }

    /// The body is not a JSON object.
    pub fn not_json(what: impl std::fmt::Display) -> Refusal {
        Refusal::new(
            ErrorCode::InvalidJson,
            None,
            format!("the body is not a JSON object: {what}; send one, in UTF-8"),
        )
    }

    /// `field` is needed and absent.
    pub fn missing(field: &'static str, wanted: &str) -> Refusal {
        Refusal::new(ErrorCode::MissingField, Some(field), format!("`{field}` is missing; give {wanted}"))
    }

    /// `field` (at `place`, which may name an element of it) has a type or a value that is not taken.
    pub fn invalid(field: &'static str, place: &str, problem: &str, wanted: &str) -> Refusal {
        Refusal::new(ErrorCode::InvalidValue, Some(field), format!("`{place}` {problem}; give {wanted}"))
    }

    /// `header` cannot be read.
    pub fn invalid_header(header: &'static str, given: &str, wanted: &str) -> Refusal {
        Refusal::new(
            ErrorCode::InvalidHeader,
            Some(header),
            format!("the header `{header}` is `{}`, which cannot be read; give {wanted}", cut(given)),
        )
    }

    /// The list at `place` is empty.
    pub fn no_inputs(field: &'static str, place: &str) -> Refusal {
        Refusal::new(
            ErrorCode::EmptyInput,
            Some(field),
            format!("`{place}` is an empty list; give at least one element"),
        )
    }

    /// An input is empty; `place` is `field` or an element of it.
    pub fn empty_input(field: &'static str, place: &str) -> Refusal {
        Refusal::new(
            ErrorCode::EmptyInput,
            Some(field),
            format!(
                "`{place}` is empty, there is nothing to compute; leave it out or give at least one character"
            ),
        )
    }

    /// More elements than a list may have.
    pub fn too_many_inputs(field: &'static str, limit: AtMost, given: usize) -> Refusal {
        let AtMost { count, key } = limit;
        Refusal::new(
            ErrorCode::TooManyInputs,
            Some(field),
            format!(
                "`{field}` has {given} elements and one request may carry {count} (the limit `{key}`); split it into \
                 {} requests",
                given.div_ceil(count.max(1))
            ),
        )
    }

    /// More tokens, all inputs together, than one request may have.
    pub fn too_many_tokens(limit: u64, given: u64) -> Refusal {
        Refusal::new(
            ErrorCode::TooManyTokens,
            None,
            format!(
                "the request has {given} tokens and one may carry {limit} (the limit `max_request_tokens`); split it \
                 into {} requests",
                given.div_ceil(limit.max(1))
            ),
        )
    }

    /// An input has more tokens than the model reads.
    pub fn input_too_long(field: &'static str, place: &str, limit: usize, given: usize) -> Refusal {
        Refusal::new(
            ErrorCode::InputTooLong,
            Some(field),
            format!("`{place}` has {given} tokens and this model reads {limit}; shorten it or split it"),
        )
    }

    /// The model does something else: it `is` this, and `asked` needs what is `wanted`.
    pub fn wrong_task(asked: &str, is: &str, wanted: &str) -> Refusal {
        Refusal::new(
            ErrorCode::WrongTask,
            None,
            format!("{asked} needs {wanted}, and this model is {is}; ask a deployment of another model"),
        )
    }

    /// The model has no prompt of this name.
    pub fn no_such_prompt<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Refusal {
        let names = names.map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
        let wanted = if names.is_empty() { "leave it out".to_owned() } else { format!("one of {names}") };
        Refusal::invalid(
            "prompt_name",
            "prompt_name",
            &format!("is \"{}\", which is not among the `prompts` of this model's configuration", cut(given)),
            &wanted,
        )
    }

    /// More bytes than one body may have; `given` where the length was announced.
    pub fn body_too_large(limit: usize, given: Option<u64>) -> Refusal {
        let given = given.map_or("more".to_owned(), |bytes| format!("{bytes} bytes"));
        Refusal::new(
            ErrorCode::BodyTooLarge,
            None,
            format!(
                "the body has {given} and one request may have {limit} bytes; split it into several requests"
            ),
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

    /// The body broke off.
    pub fn body_broken_off() -> Refusal {
        Refusal::new(
            ErrorCode::InvalidJson,
            None,
            "the body ended before the length that it announced; send it again".to_owned(),
        )
    }

    /// No deployment of this name.
    pub fn model_not_found(given: &str, names: &[String]) -> Refusal {
        let names = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        Refusal::new(
            ErrorCode::ModelNotFound,
            Some("model"),
            format!("there is no deployment `{}` here; there is {names}", cut(given)),
        )
    }

    /// No such path.
    pub fn not_found(path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::NotFound,
            None,
            format!(
                "there is nothing at {}; POST /v1/embeddings embeds, /v1/rerank ranks, /predict classifies, and GET /info \
                 says what this model does",
                cut(path)
            ),
        )
    }

    /// The path exists, with another method.
    pub fn method_not_allowed(method: &str, path: &str) -> Refusal {
        Refusal::new(
            ErrorCode::MethodNotAllowed,
            None,
            format!("{path} does not take {}; the header `allow` says what it takes", cut(method)),
        )
    }

    /// The queue cannot take this request now.
    pub fn overloaded(what: &str, limit: u64, wait: Option<Duration>) -> Refusal {
        let wait = wait.unwrap_or(LEAST_WAIT).max(LEAST_WAIT);
        Refusal {
            retry_after: Some(wait),
            ..Refusal::new(
                ErrorCode::Overloaded,
                None,
                format!(
                    "this replica is full ({what}, the limit is {limit}); try again in {:.1} s",
                    wait.as_secs_f64()
                ),
            )
        }
    }

    /// The weights are still being loaded.
    pub fn not_ready() -> Refusal {
        Refusal {
            retry_after: Some(LEAST_WAIT),
            ..Refusal::new(
                ErrorCode::NotReady,
                None,
                "this replica is still loading its model; ask another one, or again in a moment".to_owned(),
            )
        }
    }

    /// The region requires another model revision than this replica has.
    pub fn other_revision(required: &str, loaded: &str) -> Refusal {
        Refusal::new(
            ErrorCode::ModelRevisionUnavailable,
            Some(crate::wire::headers::MODEL_REVISION),
            format!(
                "the request requires model revision {required} and this replica runs {loaded}; ask another one"
            ),
        )
    }

    /// The process does not find itself well.
    pub fn unhealthy(problem: &str) -> Refusal {
        Refusal::new(
            ErrorCode::NotReady,
            None,
            format!("this replica cannot serve: {problem}; ask another one"),
        )
    }

    /// The process is going away.
    pub fn draining() -> Refusal {
        Refusal::new(
            ErrorCode::Draining,
            None,
            "this replica is shutting down and takes no new work; ask another one".to_owned(),
        )
    }

    /// The deadline passed before there was an answer.
    pub fn deadline_exceeded(timeout: Duration) -> Refusal {
        Refusal::new(
            ErrorCode::DeadlineExceeded,
            Some(crate::wire::headers::TIMEOUT_MS),
            format!(
                "there was no answer within the {} ms that the request allowed; allow more, or send less at once",
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

    /// Something that cannot happen did.
    pub fn internal(request_id: &str) -> Refusal {
        Refusal::new(
            ErrorCode::Internal,
            None,
            format!("the replica failed; its log says why under the request identifier {request_id}"),
        )
    }
}

/// As much of a stranger's text as helps to find the mistake in it.
fn cut(text: &str) -> &str {
    text.char_indices().nth(80).map_or(text, |(end, _)| &text[..end])
}

/// Whoever is told to wait is told to wait at least this long: below it a refusal costs more than the wait.
pub const LEAST_WAIT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::Remedy;

    #[test]
    fn a_refusal_for_which_waiting_helps_says_how_long() {
        assert_eq!(ErrorCode::Overloaded.remedy(), Remedy::Wait);
        let refusal = Refusal::overloaded("the queue", 5, Some(Duration::from_millis(2_340)));
        assert_eq!(refusal.retry_after, Some(Duration::from_millis(2_340)));
        assert!(refusal.message.contains("2.3 s"), "{}", refusal.message);
        assert_eq!(Refusal::overloaded("the queue", 5, None).retry_after, Some(LEAST_WAIT));
    }

    #[test]
    fn a_limit_is_told_with_the_value_that_broke_it() {
        let check = |refusal: Refusal, parts: &[&str]| {
            for part in parts {
                assert!(refusal.message.contains(part), "{:?} in {}", part, refusal.message);
            }
        };
        let limit = AtMost { count: 2048, key: "max_inputs" };
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
    fn what_a_stranger_sent_is_not_sent_back_at_length() {
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
