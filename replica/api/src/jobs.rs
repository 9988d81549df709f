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

/// Path of the list of jobs, and prefix of the path of each.
pub const JOBS: &str = "/v1/async";

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
    /// rejected when it is submitted, and not hours later. A webhook is rejected as well: a client that names one would wait
    /// for it and never fetch the result.
    pub fn inputs(self, body: &[u8]) -> Result<u64, Refusal> {
        let webhook = fields::split::<WebhookField<'_>>(body)?.webhook;
        if webhook.is_some_and(|webhook| webhook.get() != "null") {
            let expected = "a body without it, and fetch the result with GET /v1/async/ID";
            return Err(Refusal::invalid("webhook", "webhook", "is not supported", expected));
        }
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
        let webhook = r#"{"model": "m", "input": "a", "webhook": {"url": "https://example.com"}}"#;
        assert_eq!(problem(JobKind::Embeddings, webhook), Err(ErrorCode::InvalidValue));
        let no_webhook = r#"{"model": "m", "input": "a", "webhook": null}"#;
        assert_eq!(problem(JobKind::Embeddings, no_webhook), Ok(1));
        assert_eq!(problem(JobKind::Embeddings, r#"{"model": "m"}"#), Err(ErrorCode::MissingField));
        assert_eq!(
            problem(JobKind::Embeddings, r#"{"model": "m", "input": [""]}"#),
            Err(ErrorCode::EmptyInput)
        );
    }
}
