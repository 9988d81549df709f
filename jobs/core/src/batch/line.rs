//! One line of a file: a request with the identifier that the client gave it.
//!
//! A line is read in two steps. Its envelope (JSON, `custom_id`, `method`, `url`, `model`) decides which chunk has it, and is
//! checked here, with the same result whenever it is read. Its body is checked by the worker when it computes the line.

use crate::job::JobOperation;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;

/// Longest `custom_id`, bytes.
pub const CUSTOM_ID_BYTES_MAX: usize = 512;
/// Longest model, bytes: more than the longest name of a deployment. It is part of stored messages.
const MODEL_BYTES_MAX: usize = 256;

/// Request of a line.
#[derive(Debug, Clone)]
pub struct BatchLine<'a> {
    /// Identifier that the client gave it.
    pub custom_id: String,
    /// Operation of its `url`.
    pub operation: JobOperation,
    /// Name in the field `model` of its body.
    pub deployment: String,
    /// Body of the request.
    pub body: &'a RawValue,
}

/// Reason why a line is not computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineError {
    /// Code, in the words of the API.
    pub code: &'static str,
    /// Sentence for a person.
    pub message: String,
    /// Identifier of the line, if it can be read.
    pub custom_id: Option<String>,
}

#[derive(Deserialize)]
struct LineFields<'a> {
    #[serde(borrow, default)]
    custom_id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    method: Option<&'a RawValue>,
    #[serde(borrow, default)]
    url: Option<&'a RawValue>,
    #[serde(borrow, default)]
    body: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ModelOfBody<'a> {
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
}

impl JobOperation {
    /// Operations of a batch.
    pub const ALL: [JobOperation; 4] =
        [JobOperation::Embeddings, JobOperation::Rerank, JobOperation::Predict, JobOperation::Classify];

    /// Returns the path of the ordinary request, which is the `url` of a line and the `endpoint` of a batch.
    pub const fn url(self) -> &'static str {
        match self {
            JobOperation::Embeddings => "/v1/embeddings",
            JobOperation::Rerank => "/v1/rerank",
            JobOperation::Predict => "/predict",
            JobOperation::Classify => "/classify",
        }
    }

    /// Returns the operation of a path.
    pub fn of_url(url: &str) -> Option<JobOperation> {
        JobOperation::ALL.into_iter().find(|operation| operation.url() == url)
    }
}

/// Returns the names of all operations, for messages.
pub fn urls() -> String {
    JobOperation::ALL.map(JobOperation::url).join(", ")
}

fn string(value: Option<&RawValue>) -> Option<Cow<'_, str>> {
    let value = value?.get();
    match serde_json::from_str::<&str>(value) {
        Ok(text) => Some(Cow::Borrowed(text)),
        Err(_) => serde_json::from_str::<String>(value).ok().map(Cow::Owned),
    }
}

/// Returns the model that a line names, without other checks: for the residency policy of a file.
pub fn model_of(line: &[u8]) -> Option<String> {
    let fields: LineFields<'_> = serde_json::from_slice(line).ok()?;
    let body: ModelOfBody<'_> = serde_json::from_str(fields.body?.get()).ok()?;
    string(body.model).filter(|model| model.len() <= MODEL_BYTES_MAX).map(Cow::into_owned)
}

/// Reads the envelope of a line.
///
/// # Errors
///
/// When it is not a request of the API of batches.
pub fn read(line: &[u8]) -> Result<BatchLine<'_>, LineError> {
    let not_json = |problem: &dyn std::fmt::Display| LineError {
        code: "invalid_json",
        message: format!("The line is not a JSON object: {problem}."),
        custom_id: None,
    };
    // A list with the values of the fields would be read as an object as well.
    if !line.trim_ascii_start().starts_with(b"{") {
        return Err(not_json(&"it does not begin with `{`"));
    }
    let fields: LineFields<'_> = serde_json::from_slice(line).map_err(|error| not_json(&error))?;
    let custom_id = string(fields.custom_id).map(Cow::into_owned);
    let invalid = |code, message: String| LineError { code, message, custom_id: custom_id.clone() };
    let has_valid_id = custom_id.as_ref().is_some_and(|id| (1..=CUSTOM_ID_BYTES_MAX).contains(&id.len()));
    if !has_valid_id {
        let message = format!("`custom_id` is not a string of 1 to {CUSTOM_ID_BYTES_MAX} bytes.");
        return Err(LineError { code: "invalid_custom_id", message, custom_id: None });
    }
    if string(fields.method).as_deref() != Some("POST") {
        return Err(invalid("invalid_method", "`method` is not \"POST\".".to_owned()));
    }
    let operation = string(fields.url).and_then(|url| JobOperation::of_url(&url));
    let Some(operation) = operation else {
        return Err(invalid("invalid_url", format!("`url` is not one of {}.", urls())));
    };
    let body = fields.body.filter(|body| body.get().starts_with('{'));
    let Some(body) = body else {
        return Err(invalid("missing_field", "`body` is not an object: the body of the request.".to_owned()));
    };
    let model = serde_json::from_str::<ModelOfBody<'_>>(body.get());
    let model = model
        .ok()
        .and_then(|body| string(body.model))
        .filter(|model| (1..=MODEL_BYTES_MAX).contains(&model.len()));
    let Some(model) = model else {
        return Err(invalid(
            "missing_field",
            format!("`body.model` is not the name of a model, of 1 to {MODEL_BYTES_MAX} bytes."),
        ));
    };
    let deployment = model.into_owned();
    Ok(BatchLine { custom_id: custom_id.unwrap_or_default(), operation, deployment, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read() {
        let text = br#"{"custom_id": "a\u0062", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}"#;
        let line = read(text).unwrap();
        assert_eq!((line.custom_id.as_str(), line.operation), ("ab", JobOperation::Embeddings));
        assert_eq!((line.deployment.as_str(), line.body.get()), ("m", r#"{"model": "m", "input": "x"}"#));
        assert_eq!(model_of(text).as_deref(), Some("m"));
        assert_eq!(model_of(b"{"), None);
    }

    #[test]
    fn each_mistake_has_its_code_and_keeps_the_identifier() {
        let line = |method: &str, url: &str, body: &str| {
            format!(r#"{{"custom_id": "a", "method": "{method}", "url": "{url}", "body": {body}}}"#)
        };
        let body = r#"{"model": "m"}"#;
        for (text, code, has_id) in [
            ("{".to_owned(), "invalid_json", false),
            ("[]".to_owned(), "invalid_json", false),
            ("{}".to_owned(), "invalid_custom_id", false),
            (r#"{"custom_id": 7}"#.to_owned(), "invalid_custom_id", false),
            (r#"{"custom_id": ""}"#.to_owned(), "invalid_custom_id", false),
            (r#"{"custom_id": "a"}"#.to_owned(), "invalid_method", true),
            (line("GET", "/v1/embeddings", body), "invalid_method", true),
            (line("POST", "/v1/chat/completions", body), "invalid_url", true),
            (line("POST", "/v1/embeddings", "7"), "missing_field", true),
            (line("POST", "/v1/embeddings", "{}"), "missing_field", true),
            (line("POST", "/v1/embeddings", r#"{"model": ""}"#), "missing_field", true),
            (
                line(
                    "POST",
                    "/v1/embeddings",
                    &format!(r#"{{"model": "{}"}}"#, "m".repeat(MODEL_BYTES_MAX + 1)),
                ),
                "missing_field",
                true,
            ),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert_eq!((error.code, error.custom_id.is_some()), (code, has_id), "{text}");
        }
        let long = format!(r#"{{"custom_id": "{}"}}"#, "x".repeat(CUSTOM_ID_BYTES_MAX + 1));
        assert_eq!(read(long.as_bytes()).unwrap_err().code, "invalid_custom_id");
    }
}
