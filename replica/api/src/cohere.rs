//! Cohere's `POST /v1/embed` and `POST /v2/embed`.
//!
//! v1 returns bare vectors unless `embedding_types` is present; v2 requires `input_type` and always returns vectors by
//! type. The types `int8` and `uint8` are rejected: they scale each number by ranges that were calibrated for Cohere's
//! own models.

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::RawValue;

use super::body::{BodySchema, FieldKind, RawBody as _, body};
use super::fields;
use crate::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use crate::error::{ErrorBody, ErrorCode, ErrorObject};
use crate::input::{Input, InputField, Truncation};
use crate::prompt::PromptChoice;
use crate::refusal::{ListLimit, Refusal};
use crate::vectors::{Encoding, RowsView, Vector};

body! {
    /// The body of `POST /v1/embed`.
    RawV1 requires ["texts"] {
        /// The deployment.
        model: FieldKind::Text,
        /// Texts to embed.
        texts: FieldKind::Texts,
        /// Role of the texts, which selects a prompt of the model's configuration.
        input_type: FieldKind::OneOf(fields::INPUT_TYPES),
        /// Encodings of the vectors, each in its own list; default: one list of JSON numbers.
        embedding_types: FieldKind::ListOf(TYPES),
        /// Side from which a text that is too long is truncated; default `END`; `NONE` rejects such a text.
        truncate: FieldKind::OneOf(TRUNCATE),
    } rejects {
        images ["[]"] => "`texts`",
        inputs ["[]"] => "`texts`, or use /v2/embed",
        output_dimension => "nothing, or use /v2/embed",
    }
}

body! {
    /// The body of `POST /v2/embed`.
    RawV2 requires ["input_type"] {
        /// The deployment.
        model: FieldKind::Text,
        /// Texts to embed.
        texts: FieldKind::Texts,
        /// Texts to embed, instead of `texts`: objects with `content`, a list of one `{"type": "text", "text"}`.
        inputs: FieldKind::Objects,
        /// Role of the texts, which selects a prompt of the model's configuration.
        input_type: FieldKind::OneOf(fields::INPUT_TYPES),
        /// Encodings of the vectors, each in its own list. Default: `float`.
        embedding_types: FieldKind::ListOf(TYPES),
        /// Number of leading dimensions of each vector to return; default: all.
        output_dimension: FieldKind::Count,
        /// Truncate every text to this number of tokens, special tokens included.
        max_tokens: FieldKind::Count,
        /// Side from which a text that is too long is truncated; default `END`; `NONE` rejects such a text.
        truncate: FieldKind::OneOf(TRUNCATE),
    } rejects {
        images ["[]"] => "`texts`",
    }
}

body! {
    /// An element of `inputs`.
    RawInput requires ["content"] {
        /// One object with `type` and `text`.
        content: FieldKind::Objects,
    } rejects {
    }
}

body! {
    /// An element of `content`.
    RawContent requires ["type", "text"] {
        /// The text.
        text: FieldKind::Text,
    } rejects {
        image_url => "`text`",
        image => "`text`",
    }
}

const TYPES: &[&str] = &["float", "base64", "binary", "ubinary"];
const TRUNCATE: &[&str] = &["NONE", "START", "END"];

/// Maximum elements of one input's `content`: several would be one vector of text and images.
const CONTENT: ListLimit = ListLimit { count: 1, key: "CONTENT" };

/// `POST /v1/embed` and `POST /v2/embed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CohereEmbedRequest {
    /// `1` or `2`, by the requested path.
    pub api_version: &'static str,
    /// The deployment, if specified.
    pub model: Option<String>,
    /// Texts to embed; at least one, none empty.
    pub texts: Vec<String>,
    /// Field of the request that contains them.
    pub field: &'static str,
    /// Prompt for each text.
    pub prompt: PromptChoice,
    /// Encodings of the vectors; absent: bare, the default of v1.
    pub types: Option<Vec<Encoding>>,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
    /// Truncation of texts that are too long.
    pub truncation: Truncation,
}

impl CohereEmbedRequest {
    /// Schema of the v1 body.
    pub const SCHEMA_V1: BodySchema = RawV1::SCHEMA;
    /// Schema of the v2 body.
    pub const SCHEMA_V2: BodySchema = RawV2::SCHEMA;

    /// Parses the v1 body; `limit` applies to the number of texts.
    pub fn parse_v1(body: &[u8], limit: ListLimit) -> Result<CohereEmbedRequest, Refusal> {
        let RawV1 { model, texts, input_type, embedding_types, truncate, .. } = RawV1::read(body)?;
        let texts = fields::required("texts", texts, "a list of texts")?;
        Ok(CohereEmbedRequest {
            api_version: "1",
            model: fields::model(model)?,
            texts: read_texts(texts, limit)?,
            field: "texts",
            prompt: fields::prompt(None, input_type)?,
            types: embedding_types.map(types).transpose()?,
            dimensions: None,
            truncation: fields::truncate_keyword(truncate, Truncation::END)?,
        })
    }

    /// Parses the v2 body; `limit` applies to the number of texts.
    pub fn parse_v2(body: &[u8], limit: ListLimit) -> Result<CohereEmbedRequest, Refusal> {
        let RawV2 {
            model,
            texts,
            inputs,
            input_type,
            embedding_types,
            output_dimension,
            max_tokens,
            truncate,
            ..
        } = RawV2::read(body)?;
        let input_type =
            fields::required("input_type", input_type, "the role of the texts, such as \"search_document\"")?;
        let (texts, field) = match (texts, inputs) {
            (Some(_), Some(_)) => {
                let problem = "conflicts with `texts`";
                return Err(Refusal::invalid("inputs", "inputs", problem, "one of them"));
            }
            (None, Some(inputs)) => (fields::list("inputs", "inputs", inputs, limit, content)?, "inputs"),
            (texts, None) => {
                (read_texts(fields::required("texts", texts, "a list of texts")?, limit)?, "texts")
            }
        };
        let truncation = fields::truncate_keyword(truncate, Truncation::END)?;
        Ok(CohereEmbedRequest {
            api_version: "2",
            model: fields::model(model)?,
            texts,
            field,
            prompt: fields::prompt(None, Some(input_type))?,
            types: Some(embedding_types.map_or(Ok(vec![Encoding::Float]), types)?),
            dimensions: fields::count("output_dimension", output_dimension)?,
            truncation: Truncation { max_tokens: fields::count("max_tokens", max_tokens)?, ..truncation },
        })
    }
}

impl EmbeddingsDialect for CohereEmbedRequest {
    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static) {
        let CohereEmbedRequest { api_version, model, texts, field, prompt, types, dimensions, truncation } =
            self;
        let call = EmbeddingsCall {
            model,
            input: Input::Texts(texts.clone()),
            field: InputField { field, single: false },
            prompt,
            truncation,
            dimensions,
            normalize: None,
        };
        let write = move |EmbeddingsResult { id, rows, tokens, .. }: EmbeddingsResult<'_>| {
            let types = types.as_deref();
            CohereEmbedResponse { id, api_version, rows, types, texts: &texts, tokens }.write()
        };
        (call, write)
    }
}

fn read_texts(raw: &RawValue, limit: ListLimit) -> Result<Vec<String>, Refusal> {
    fields::list("texts", "texts", raw, limit, |path, raw| not_empty("texts", path, raw))
}

fn not_empty(field: &'static str, path: &str, raw: &RawValue) -> Result<String, Refusal> {
    let text = fields::text(field, path, raw)?;
    if text.is_empty() { Err(Refusal::empty_input(field, path)) } else { Ok(text) }
}

/// Returns the text of an element of `inputs`.
fn content(path: &str, raw: &RawValue) -> Result<String, Refusal> {
    let RawInput { content } = fields::split_field::<RawInput<'_>>("inputs", path, raw)?.checked()?;
    let path = format!("{path}.content");
    let content =
        content.ok_or_else(|| Refusal::invalid("inputs", &path, "is missing", "a list of one text"))?;
    let text = |path: &str, raw| {
        let RawContent { text, .. } =
            fields::split_field::<RawContent<'_>>("inputs", path, raw)?.checked()?;
        let path = format!("{path}.text");
        let text = text.ok_or_else(|| Refusal::invalid("inputs", &path, "is missing", "a text"))?;
        not_empty("inputs", &path, text)
    };
    let texts = fields::list("inputs", &path, content, CONTENT, text)?;
    Ok(texts.concat())
}

/// Parses the encodings: one or more, each once.
fn types(raw: &RawValue) -> Result<Vec<Encoding>, Refusal> {
    const FIELD: &str = "embedding_types";
    let known = [
        ("float", Encoding::Float),
        ("base64", Encoding::Base64),
        ("binary", Encoding::Binary),
        ("ubinary", Encoding::Ubinary),
    ];
    let expected = "\"float\", \"base64\", \"binary\" or \"ubinary\" (\"int8\" and \"uint8\" need ranges that were \
                  calibrated for the model)";
    let most = ListLimit { count: TYPES.len(), key: "embedding types" };
    let read = |_: &str, raw| fields::choice(FIELD, Some(raw), Encoding::Float, &known, expected);
    let types = fields::list(FIELD, FIELD, raw, most, read)?;
    if types.iter().enumerate().any(|(at, one)| types[..at].contains(one)) {
        return Err(Refusal::invalid(FIELD, FIELD, "names a type twice", "each once"));
    }
    Ok(types)
}

/// Response to write.
#[derive(Debug)]
struct CohereEmbedResponse<'a> {
    /// Identifier of the request.
    id: &'a str,
    /// `1` or `2`, by the requested path.
    api_version: &'static str,
    /// One vector for each text.
    rows: RowsView<'a>,
    /// Encodings of the vectors; absent: bare.
    types: Option<&'a [Encoding]>,
    /// The texts, which are returned.
    texts: &'a [String],
    /// Number of computed tokens.
    tokens: u64,
}

#[derive(Serialize)]
struct EmbedResponseBody<'a> {
    id: &'a str,
    response_type: &'static str,
    embeddings: EmbeddingsByType<'a>,
    texts: &'a [String],
    meta: EmbedMeta,
}

#[derive(Serialize)]
struct EmbedMeta {
    api_version: EmbedApiVersion,
    billed_units: EmbedBilledUnits,
}

#[derive(Serialize)]
struct EmbedApiVersion {
    version: &'static str,
}

#[derive(Serialize)]
struct EmbedBilledUnits {
    input_tokens: u64,
}

/// The vectors, in one list, or in one list for each type.
struct EmbeddingsByType<'a> {
    rows: RowsView<'a>,
    types: Option<&'a [Encoding]>,
}

/// The vectors in one encoding.
struct EncodedRows<'a>(RowsView<'a>, Encoding);

impl Serialize for EncodedRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let EncodedRows(rows, encoding) = *self;
        serializer.collect_seq(rows.iter().map(|row| Vector { row, encoding }))
    }
}

impl Serialize for EmbeddingsByType<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Some(types) = self.types else {
            return EncodedRows(self.rows, Encoding::Float).serialize(serializer);
        };
        let mut by_type = serializer.serialize_map(Some(types.len()))?;
        for encoding in types {
            let name = match encoding {
                Encoding::Float => "float",
                Encoding::Base64 | Encoding::BinaryBase64 | Encoding::UbinaryBase64 => "base64",
                Encoding::Binary => "binary",
                Encoding::Ubinary => "ubinary",
            };
            by_type.serialize_entry(name, &EncodedRows(self.rows, *encoding))?;
        }
        by_type.end()
    }
}

impl CohereEmbedResponse<'_> {
    /// Returns the response as JSON.
    fn write(&self) -> Vec<u8> {
        let CohereEmbedResponse { id, api_version, rows, types, texts, tokens } = *self;
        let response_type = if types.is_some() { "embeddings_by_type" } else { "embeddings_floats" };
        let meta = EmbedMeta {
            api_version: EmbedApiVersion { version: api_version },
            billed_units: EmbedBilledUnits { input_tokens: tokens },
        };
        let response = EmbedResponseBody {
            id,
            response_type,
            embeddings: EmbeddingsByType { rows, types },
            texts,
            meta,
        };
        serde_json::to_vec(&response).expect("strings and numbers serialise")
    }
}

/// Returns the body of an error: a `message`, which Cohere's clients read, beside OpenAI's object.
pub(crate) fn error_body(code: ErrorCode, message: &str, param: Option<&str>) -> Vec<u8> {
    #[derive(Serialize)]
    struct CohereErrorBody<'a> {
        message: &'a str,
        error: ErrorObject,
    }
    let body = CohereErrorBody { message, error: ErrorBody::new(code, message, param).error };
    serde_json::to_vec(&body).expect("strings serialise to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::TruncationSide;
    use crate::prompt::Role;

    const LIMIT: ListLimit = ListLimit { count: 2, key: "max_inputs" };

    fn v2(rest: &str) -> Result<CohereEmbedRequest, Refusal> {
        let body = format!(r#"{{"model": "m", "input_type": "search_query", {rest}}}"#);
        CohereEmbedRequest::parse_v2(body.as_bytes(), LIMIT)
    }

    #[test]
    fn both_versions_read_their_fields() {
        let request =
            CohereEmbedRequest::parse_v1(br#"{"model": "m", "texts": ["a", "b"]}"#, LIMIT).expect("v1");
        assert_eq!((request.texts.len(), request.types, request.truncation), (2, None, Truncation::END));
        let request =
            v2(r#""texts": ["a"], "output_dimension": 8, "max_tokens": 5, "truncate": "START""#).expect("v2");
        assert_eq!(request.prompt, PromptChoice::For(Role::Query));
        assert_eq!((request.dimensions, request.types), (Some(8), Some(vec![Encoding::Float])));
        assert_eq!(
            request.truncation,
            Truncation { truncate: Some(true), side: TruncationSide::Left, max_tokens: Some(5) }
        );
        let content = r#""inputs": [{"content": [{"type": "text", "text": "a"}]}]"#;
        assert_eq!(v2(content).expect("inputs").texts, ["a"]);
    }

    #[test]
    fn errors_name_invalid_and_unsupported_fields() {
        for (rest, code, param) in [
            (r#""texts": []"#, ErrorCode::EmptyInput, "texts"),
            (r#""texts": ["a", ""]"#, ErrorCode::EmptyInput, "texts"),
            (r#""texts": ["a", "b", "c"]"#, ErrorCode::TooManyInputs, "texts"),
            (r#""images": ["x"]"#, ErrorCode::InvalidValue, "images"),
            (r#""texts": ["a"], "embedding_types": ["int8"]"#, ErrorCode::InvalidValue, "embedding_types"),
            (
                r#""texts": ["a"], "embedding_types": ["float", "float"]"#,
                ErrorCode::InvalidValue,
                "embedding_types",
            ),
            (r#""texts": ["a"], "truncate": "left""#, ErrorCode::InvalidValue, "truncate"),
            (r#""texts": ["a"], "output_dimension": 0"#, ErrorCode::InvalidValue, "output_dimension"),
            (
                r#""inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]"#,
                ErrorCode::InvalidValue,
                "image_url",
            ),
            (r#""inputs": [{"content": []}]"#, ErrorCode::EmptyInput, "inputs"),
            (r#""texts": ["a"], "inputs": []"#, ErrorCode::InvalidValue, "inputs"),
            (r#""max_tokens": 3"#, ErrorCode::MissingField, "texts"),
        ] {
            let refusal = v2(rest).expect_err(rest);
            assert_eq!((refusal.code, refusal.param), (code, Some(param)), "{rest}: {}", refusal.message);
        }
        let image = br#"{"texts": ["a"], "input_type": "image"}"#;
        assert_eq!(CohereEmbedRequest::parse_v2(image, LIMIT).expect_err("images").param, Some("input_type"));
        let without = br#"{"texts": ["a"]}"#;
        assert_eq!(
            CohereEmbedRequest::parse_v2(without, LIMIT).expect_err("no type").param,
            Some("input_type")
        );
    }

    #[test]
    fn the_response_is_bare_or_by_type() {
        let write = |types| {
            let texts = ["a".to_owned()];
            let rows = RowsView::new(&[0.5, -0.5], 2);
            let response =
                CohereEmbedResponse { id: "r", api_version: "2", rows, types, texts: &texts, tokens: 3 };
            String::from_utf8(response.write()).expect("JSON is UTF-8")
        };
        let meta =
            r#""texts":["a"],"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":3}}}"#;
        assert_eq!(
            write(None),
            format!(r#"{{"id":"r","response_type":"embeddings_floats","embeddings":[[0.5,-0.5]],{meta}"#)
        );
        let by_type = write(Some(&[Encoding::Float, Encoding::Ubinary]));
        assert!(
            by_type.contains(r#""embeddings_by_type","embeddings":{"float":[[0.5,-0.5]],"ubinary":[[128]]}"#)
        );
    }
}
