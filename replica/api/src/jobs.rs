//! Durable jobs: requests that are computed later, with the same bodies and results as the ordinary paths.

use crate::fields;
use crate::limits::Limits;
use crate::openai::EmbeddingsRequest;
use crate::refusal::Refusal;
use crate::rerank::RerankRequest;
use crate::tei::PredictRequest;
use crate::vllm::ClassifyRequest;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// Path of the list of jobs, and prefix of the path of each.
pub const JOBS: &str = "/v1/async";
/// Path below that of a job, to send its result to the webhook again.
pub const WEBHOOK: &str = "/webhook";

/// Operation that a job can compute: one row of the API of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobKind {
    /// Embeddings of texts.
    Embeddings,
    /// Scores of documents for a query.
    Rerank,
    /// TEI's classification.
    Predict,
    /// vLLM's classification.
    Classify,
}

impl JobKind {
    /// Every kind.
    pub const ALL: [JobKind; 4] = [JobKind::Embeddings, JobKind::Rerank, JobKind::Predict, JobKind::Classify];

    /// Returns the path of submissions.
    pub const fn path(self) -> &'static str {
        match self {
            JobKind::Embeddings => "/v1/async/embeddings",
            JobKind::Rerank => "/v1/async/rerank",
            JobKind::Predict => "/v1/async/predict",
            JobKind::Classify => "/v1/async/classify",
        }
    }

    /// Returns the path of the same request without a job, which defines its body and its result.
    pub const fn computed_path(self) -> &'static str {
        match self {
            JobKind::Embeddings => "/v1/embeddings",
            JobKind::Rerank => "/v1/rerank",
            JobKind::Predict => "/predict",
            JobKind::Classify => "/classify",
        }
    }

    /// Returns the kind of a submission at this path.
    pub fn at(path: &str) -> Option<JobKind> {
        JobKind::ALL.into_iter().find(|kind| kind.path() == path)
    }

    /// Returns the kind that computes the same as this path of a replica.
    pub fn of_computed(path: &str) -> Option<JobKind> {
        JobKind::ALL.into_iter().find(|kind| kind.computed_path() == path)
    }

    /// Parses a body as a replica with default limits does, and returns its number of inputs. So an invalid body is
    /// rejected when it is submitted, and not hours later.
    pub fn inputs(self, body: &[u8]) -> Result<u64, Refusal> {
        let limits = Limits::default();
        let inputs = match self {
            JobKind::Embeddings => EmbeddingsRequest::parse(body, limits.inputs())?.input.count(),
            JobKind::Rerank => RerankRequest::parse(body, limits.documents())?.documents.len(),
            JobKind::Predict => PredictRequest::parse(body, limits.pairs())?.inputs.len(),
            JobKind::Classify => ClassifyRequest::parse(body, limits.pairs())?.input.len(),
        };
        Ok(inputs as u64)
    }
}

/// Field of a job beside those of the ordinary request.
#[derive(Deserialize)]
struct WebhookField<'a> {
    #[serde(borrow, default)]
    webhook: Option<&'a RawValue>,
}

/// Webhook of a submission, and the body of the ordinary request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyWebhook {
    /// URL.
    pub url: String,
    /// The body without it: the field is `null`, which is an absent field.
    pub body: Vec<u8>,
}

/// Takes the field `webhook` out of the body of a submission: `{"url": "…"}`. None if it is absent.
pub fn take_webhook(body: &[u8]) -> Result<Option<BodyWebhook>, Refusal> {
    const EXPECTED: &str = r#"`{"url": "https://…"}`"#;
    let Some(webhook) = fields::split::<WebhookField<'_>>(body)?.webhook else { return Ok(None) };
    let raw = webhook.get();
    let members: BTreeMap<String, &RawValue> = fields::split_field("webhook", "webhook", webhook)?;
    if let Some(other) = members.keys().find(|name| *name != "url") {
        let path = format!("webhook.{}", other.chars().take(NAME_CHARS_MAX).collect::<String>());
        return Err(Refusal::invalid("webhook", &path, "is not supported", EXPECTED));
    }
    let missing = || Refusal::invalid("webhook", "webhook.url", "is missing", EXPECTED);
    let url = members.get("url").ok_or_else(missing)?;
    let url = fields::text("webhook", "webhook.url", url)?;
    // The value is a part of the body, so its position follows from the addresses.
    let at = raw.as_ptr() as usize - body.as_ptr() as usize;
    let body = [&body[..at], b"null", &body[at + raw.len()..]].concat();
    Ok(Some(BodyWebhook { url, body }))
}

/// Longest name of an unknown member that a message shows.
const NAME_CHARS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ApiOperation;
    use crate::error::ErrorCode;

    #[test]
    fn a_kind_is_found_by_either_path() {
        for kind in JobKind::ALL {
            assert_eq!(JobKind::at(kind.path()), Some(kind));
            assert_eq!(JobKind::of_computed(kind.computed_path()), Some(kind));
            assert!(kind.path().starts_with(JOBS));
            assert!(ApiOperation::at(kind.computed_path()).is_some(), "a replica serves {kind:?}");
        }
        assert_eq!(JobKind::at("/v1/embeddings"), None);
    }

    #[test]
    fn inputs_are_counted_and_an_invalid_body_is_rejected() {
        for (kind, body, inputs) in [
            (JobKind::Embeddings, r#"{"model": "m", "input": ["a", "b"]}"#, 2),
            (JobKind::Embeddings, r#"{"model": "m", "input": "a"}"#, 1),
            (JobKind::Rerank, r#"{"model": "m", "query": "q", "documents": ["a", "b", "c"]}"#, 3),
            (JobKind::Predict, r#"{"inputs": "a"}"#, 1),
            (JobKind::Classify, r#"{"model": "m", "input": ["a"]}"#, 1),
        ] {
            assert_eq!(kind.inputs(body.as_bytes()), Ok(inputs), "{body}");
        }
        let problem =
            |kind: JobKind, body: &str| kind.inputs(body.as_bytes()).map_err(|refusal| refusal.code);
        assert_eq!(problem(JobKind::Embeddings, "{"), Err(ErrorCode::InvalidJson));
        assert_eq!(problem(JobKind::Embeddings, r#"{"model": "m"}"#), Err(ErrorCode::MissingField));
        assert_eq!(
            problem(JobKind::Embeddings, r#"{"model": "m", "input": [""]}"#),
            Err(ErrorCode::EmptyInput)
        );
    }

    #[test]
    fn a_webhook_is_taken_out_of_the_body() {
        for (body, expected) in [
            (
                r#"{"model": "m", "input": "a", "webhook": {"url": "https://e.com"}}"#,
                r#"{"model": "m", "input": "a", "webhook": null}"#,
            ),
            (
                r#"{"webhoo\u006b":{"url":"https://e.com"},"model":"m","input":["{\"webhook\""]}"#,
                r#"{"webhoo\u006b":null,"model":"m","input":["{\"webhook\""]}"#,
            ),
        ] {
            let taken = take_webhook(body.as_bytes()).unwrap().unwrap();
            assert_eq!(taken, BodyWebhook { url: "https://e.com".to_owned(), body: expected.into() });
            assert_eq!(take_webhook(&taken.body), Ok(None));
            assert_eq!(JobKind::Embeddings.inputs(&taken.body), Ok(1));
        }
        for body in [r#"{"input": "a"}"#, r#"{"webhook": null}"#] {
            assert_eq!(take_webhook(body.as_bytes()), Ok(None), "{body}");
        }
    }

    #[test]
    fn another_webhook_is_rejected_with_its_path() {
        for (body, code, message) in [
            ("{", ErrorCode::InvalidJson, "the body is not a JSON object"),
            (
                r#"{"webhook": {"url": "a"}, "webhook": {"url": "b"}}"#,
                ErrorCode::InvalidJson,
                "the body is not a JSON object",
            ),
            (r#"{"webhook": "https://e.com"}"#, ErrorCode::InvalidValue, "`webhook` is not an object"),
            (r#"{"webhook": {}}"#, ErrorCode::InvalidValue, "`webhook.url` is missing"),
            (r#"{"webhook": {"url": 1}}"#, ErrorCode::InvalidValue, "`webhook.url`"),
            (
                r#"{"webhook": {"url": "a", "secret": "b"}}"#,
                ErrorCode::InvalidValue,
                "`webhook.secret` is not supported",
            ),
        ] {
            let refusal = take_webhook(body.as_bytes()).unwrap_err();
            assert!(refusal.code == code && refusal.message.starts_with(message), "{body}: {refusal:?}");
        }
    }
}
