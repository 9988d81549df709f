//! Amazon Bedrock's `InvokeModel` for Titan Text Embeddings: `POST /bedrock/model/{deployment}/invoke`.
//!
//! The base URL for Amazon's SDKs is `…/bedrock`, and a Bedrock API key, which they send as a bearer token, is a key of
//! Meridian. Fields and responses are those of Titan Text Embeddings V2
//! (<https://docs.aws.amazon.com/bedrock/latest/userguide/model-parameters-titan-embed-text.html>); V1 has `inputText`
//! only.

use serde::Serialize;

use crate::body::{BodySchema, FieldKind, RawBody as _, body};
use crate::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use crate::error::{ErrorCode, Fault};
use crate::fields;
use crate::input::{Input, InputField, Truncation};
use crate::prompt::PromptChoice;
use crate::refusal::{ListLimit, Refusal};
use crate::vectors::{Encoding, Vector};

body! {
    /// The body of `InvokeModel`.
    #[expect(non_snake_case, reason = "the names are Amazon's")]
    RawInvoke requires ["inputText"] {
        /// The deployment, where the path does not name one.
        model: FieldKind::Text,
        /// Text to embed.
        inputText: FieldKind::Text,
        /// Number of leading dimensions of the vector to return; default: all.
        dimensions: FieldKind::Count,
        /// Whether to scale the vector to length one. Default: true.
        normalize: FieldKind::Flag,
        /// Types of the vector to return in `embeddingsByType`, beside `embedding`.
        embeddingTypes: FieldKind::ListOf(&["float"]),
    } rejects {
        inputImage => "`inputText`",
        inputTexts => "one request for each text, or `/v1/embeddings`",
    }
}

/// `POST /bedrock/model/{deployment}/invoke`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvokeRequest {
    /// The deployment, if the body names one.
    pub model: Option<String>,
    /// Text to embed; not empty.
    pub text: String,
    /// Requested dimensions of the vector, if specified.
    pub dimensions: Option<u64>,
    /// Whether the vector is scaled to length one.
    pub normalize: bool,
    /// Whether the response has `embeddingsByType`.
    pub by_type: bool,
}

impl InvokeRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawInvoke::SCHEMA;

    /// Parses `body`. The limit of inputs does not matter for one text.
    pub fn parse(body: &[u8], _limit: ListLimit) -> Result<InvokeRequest, Refusal> {
        let RawInvoke { model, inputText, dimensions, normalize, embeddingTypes, .. } =
            RawInvoke::read(body)?;
        let text = fields::required("inputText", inputText, "a text")?;
        let text = fields::text("inputText", "inputText", text)?;
        if text.is_empty() {
            return Err(Refusal::empty_input("inputText", "inputText"));
        }
        let expected = "\"float\" (\"binary\" needs a model that was trained for it)";
        let float =
            |_: &str, raw| fields::choice("embeddingTypes", Some(raw), (), &[("float", ())], expected);
        let most = ListLimit { count: 1, key: "embedding types" };
        let types = embeddingTypes
            .map(|raw| fields::list("embeddingTypes", "embeddingTypes", raw, most, float))
            .transpose()?;
        Ok(InvokeRequest {
            model: fields::model(model)?,
            text,
            dimensions: fields::count("dimensions", dimensions)?,
            normalize: fields::flag("normalize", normalize, true)?,
            by_type: types.is_some(),
        })
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InvokeResponse<'a> {
    embedding: Vector<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    embeddings_by_type: Option<InvokeVectors<'a>>,
    input_text_token_count: u64,
}

#[derive(Serialize)]
struct InvokeVectors<'a> {
    float: Vector<'a>,
}

impl EmbeddingsDialect for InvokeRequest {
    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static) {
        let InvokeRequest { model, text, dimensions, normalize, by_type } = self;
        let call = EmbeddingsCall {
            model,
            input: Input::Texts(vec![text]),
            field: InputField { field: "inputText", single: true },
            prompt: PromptChoice::Default,
            truncation: Truncation::default(),
            dimensions,
            normalize: Some(normalize),
        };
        let write = move |EmbeddingsResult { rows, tokens, .. }: EmbeddingsResult<'_>| {
            let row = rows.iter().next().unwrap_or_default();
            let vector = || Vector { row, encoding: Encoding::Float };
            let response = InvokeResponse {
                embedding: vector(),
                embeddings_by_type: by_type.then(|| InvokeVectors { float: vector() }),
                input_text_token_count: tokens,
            };
            serde_json::to_vec(&response).expect("numbers serialise to JSON")
        };
        (call, write)
    }
}

/// Returns the body of an error. Amazon's SDKs choose the exception that they raise by `__type`.
pub(crate) fn error_body(code: ErrorCode, message: &str) -> Vec<u8> {
    #[derive(Serialize)]
    struct BedrockErrorBody<'a> {
        message: &'a str,
        __type: &'static str,
    }
    let exception = match (code.status(), code.fault()) {
        (401 | 403, _) => "AccessDeniedException",
        (404, _) => "ResourceNotFoundException",
        (408 | 504, _) => "ModelTimeoutException",
        (429, _) => "ThrottlingException",
        (_, Fault::Caller | Fault::Quota) => "ValidationException",
        (500, _) => "InternalServerException",
        (_, Fault::Capacity | Fault::Replica | Fault::Network | Fault::Policy) => {
            "ServiceUnavailableException"
        }
    };
    serde_json::to_vec(&BedrockErrorBody { message, __type: exception }).expect("strings serialise to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::RowsView;

    const LIMIT: ListLimit = ListLimit { count: 1, key: "max_inputs" };

    fn written(body: &str) -> String {
        let (call, write) = InvokeRequest::parse(body.as_bytes(), LIMIT).expect(body).into_call();
        assert_eq!(call.input, Input::Texts(vec!["a".to_owned()]));
        let rows = RowsView::new(&[0.6, 0.8], 2);
        String::from_utf8(write(EmbeddingsResult { id: "r", model: "m", rows, tokens: 3 })).expect("UTF-8")
    }

    #[test]
    fn a_response_has_the_vector_and_the_requested_types() {
        assert_eq!(written(r#"{"inputText":"a"}"#), r#"{"embedding":[0.6,0.8],"inputTextTokenCount":3}"#);
        assert_eq!(
            written(r#"{"inputText":"a","embeddingTypes":["float"],"dimensions":2,"normalize":false}"#),
            r#"{"embedding":[0.6,0.8],"embeddingsByType":{"float":[0.6,0.8]},"inputTextTokenCount":3}"#
        );
    }

    #[test]
    fn an_invalid_field_is_named() {
        for (body, field) in [
            (r#"{}"#, "inputText"),
            (r#"{"inputText":""}"#, "inputText"),
            (r#"{"inputText":["a"]}"#, "inputText"),
            (r#"{"inputText":"a","embeddingTypes":["binary"]}"#, "embeddingTypes"),
            (r#"{"inputText":"a","embeddingTypes":["float","float"]}"#, "embeddingTypes"),
            (r#"{"inputText":"a","dimensions":0}"#, "dimensions"),
            (r#"{"inputText":"a","normalize":1}"#, "normalize"),
            (r#"{"inputText":"a","inputImage":"x"}"#, "inputImage"),
        ] {
            let refusal = InvokeRequest::parse(body.as_bytes(), LIMIT).expect_err(body);
            assert_eq!(refusal.param, Some(field), "{body}: {}", refusal.message);
        }
    }

    #[test]
    fn an_error_has_the_exception_that_sdks_raise() {
        let exception = |code| {
            let body: serde_json::Value = serde_json::from_slice(&error_body(code, "m")).expect("JSON");
            body["__type"].as_str().expect("a text").to_owned()
        };
        assert_eq!(exception(ErrorCode::InputTooLong), "ValidationException");
        assert_eq!(exception(ErrorCode::InvalidApiKey), "AccessDeniedException");
        assert_eq!(exception(ErrorCode::ModelNotFound), "ResourceNotFoundException");
        assert_eq!(exception(ErrorCode::Overloaded), "ThrottlingException");
        assert_eq!(exception(ErrorCode::DeadlineExceeded), "ModelTimeoutException");
        assert_eq!(exception(ErrorCode::Internal), "InternalServerException");
        assert_eq!(exception(ErrorCode::NotReady), "ServiceUnavailableException");
    }
}
