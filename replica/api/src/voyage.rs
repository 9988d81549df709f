//! Voyage's `POST /v1/embeddings` and `POST /v1/rerank`, served below `/voyage`.
//!
//! The number types `int8` and `uint8` are rejected: Voyage's models are trained for them, and others are not.

use serde::Serialize;

use super::body::{BodySchema, FieldKind, RawBody as _, body};
use super::fields::{self, Kind};
use crate::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use crate::input::{Input, InputField, Truncation};
use crate::prompt::PromptChoice;
use crate::refusal::{ListLimit, Refusal};
use crate::vectors::{Encoding, RowsView, Vector};

body! {
    /// The body of `POST /voyage/v1/embeddings`.
    RawEmbeddings requires ["model", "input"] {
        /// The deployment.
        model: FieldKind::Text,
        /// Texts to embed.
        input: FieldKind::TextOrTexts,
        /// Role of the texts, which selects a prompt of the model's configuration.
        input_type: FieldKind::OneOf(&["query", "document"]),
        /// Whether to truncate texts that are longer than the model's limit. Default: true.
        truncation: FieldKind::Flag,
        /// Number of leading dimensions of each vector to return; default: all.
        output_dimension: FieldKind::Count,
        /// Type of the numbers of a vector: f32, or one bit for each.
        output_dtype: FieldKind::OneOf(&["float", "binary", "ubinary"]),
        /// `base64` for the bytes of a vector; default: JSON numbers.
        encoding_format: FieldKind::OneOf(&["base64"]),
    } rejects {
        dimensions => "`output_dimension`",
        truncate => "`truncation`",
        inputs => "`input`",
    }
}

body! {
    /// The body of `POST /voyage/v1/rerank`.
    RawRerank requires ["model", "query", "documents"] {
        /// The deployment.
        model: FieldKind::Text,
        /// The search query.
        query: FieldKind::Text,
        /// Documents to rank.
        documents: FieldKind::Texts,
        /// Number of best documents to return. Default: all.
        top_k: FieldKind::Count,
        /// Whether to return the documents with their scores.
        return_documents: FieldKind::Flag,
        /// Whether to truncate a query and a document that are together longer than the model's limit. Default: true.
        truncation: FieldKind::Flag,
    } rejects {
        top_n => "`top_k`",
    }
}

/// `POST /voyage/v1/embeddings`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VoyageEmbeddingsRequest {
    /// The deployment.
    pub model: String,
    /// Texts to embed; at least one, none empty.
    pub input: Vec<String>,
    /// Whether `input` was one text and not a list of them.
    pub single: bool,
    /// Prompt for each text.
    pub prompt: PromptChoice,
    /// Truncation of texts that are too long.
    pub truncation: Truncation,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
    /// Encoding of the vectors.
    pub encoding: Encoding,
}

fn truncation(raw: Option<&serde_json::value::RawValue>) -> Result<Truncation, Refusal> {
    Ok(Truncation { truncate: Some(fields::flag("truncation", raw, true)?), ..Truncation::END })
}

fn model(raw: Option<&serde_json::value::RawValue>) -> Result<String, Refusal> {
    fields::model(raw)?.ok_or_else(|| Refusal::missing("model", "the name of a deployment"))
}

impl VoyageEmbeddingsRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawEmbeddings::SCHEMA;

    /// Parses `body`; `limit` applies to the number of texts.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<VoyageEmbeddingsRequest, Refusal> {
        let RawEmbeddings {
            model: named,
            input,
            input_type,
            truncation: truncate,
            output_dimension,
            output_dtype,
            encoding_format,
            ..
        } = RawEmbeddings::read(body)?;
        let input = fields::required("input", input, "a text or a list of texts")?;
        let text = |path: &str, raw| {
            let text = fields::text("input", path, raw)?;
            if text.is_empty() { Err(Refusal::empty_input("input", path)) } else { Ok(text) }
        };
        let single = fields::kind_of(input.get()) == Kind::Text;
        let base64 =
            fields::choice("encoding_format", encoding_format, false, &[("base64", true)], "\"base64\"")?;
        let types = [
            ("float", if base64 { Encoding::Base64 } else { Encoding::Float }),
            ("binary", if base64 { Encoding::BinaryBase64 } else { Encoding::Binary }),
            ("ubinary", if base64 { Encoding::UbinaryBase64 } else { Encoding::Ubinary }),
        ];
        let expected = "\"float\", \"binary\" or \"ubinary\" (\"int8\" and \"uint8\" need a model that was trained for them)";
        Ok(VoyageEmbeddingsRequest {
            model: model(named)?,
            input: if single {
                vec![text("input", input)?]
            } else {
                fields::list("input", "input", input, limit, text)?
            },
            single,
            prompt: fields::prompt(None, input_type)?,
            truncation: truncation(truncate)?,
            dimensions: fields::count("output_dimension", output_dimension)?,
            encoding: fields::choice("output_dtype", output_dtype, types[0].1, &types, expected)?,
        })
    }
}

impl EmbeddingsDialect for VoyageEmbeddingsRequest {
    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static) {
        let VoyageEmbeddingsRequest { model, input, single, prompt, truncation, dimensions, encoding } = self;
        let call = EmbeddingsCall {
            model: Some(model),
            input: Input::Texts(input),
            field: InputField { field: "input", single },
            prompt,
            truncation,
            dimensions,
            normalize: None,
        };
        let write = move |result: EmbeddingsResult<'_>| {
            write_embeddings(result.model, result.rows, encoding, result.tokens)
        };
        (call, write)
    }
}

/// `POST /voyage/v1/rerank`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VoyageRerankRequest {
    /// The deployment.
    pub model: String,
    /// The search query; not empty.
    pub query: String,
    /// Documents to rank; at least one.
    pub documents: Vec<String>,
    /// Number of best documents to return; absent: all.
    pub top_k: Option<u64>,
    /// Whether to return the documents.
    pub return_documents: bool,
    /// Truncation of pairs that are too long.
    pub truncation: Truncation,
}

impl VoyageRerankRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawRerank::SCHEMA;

    /// Parses `body`; `limit` applies to the number of documents.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<VoyageRerankRequest, Refusal> {
        let RawRerank {
            model: named, query, documents, top_k, return_documents, truncation: truncate, ..
        } = RawRerank::read(body)?;
        let query = fields::text("query", "query", fields::required("query", query, "a text")?)?;
        if query.is_empty() {
            return Err(Refusal::empty_input("query", "query"));
        }
        let documents = fields::required("documents", documents, "a list of texts")?;
        let text = |path: &str, raw| fields::text("documents", path, raw);
        Ok(VoyageRerankRequest {
            model: model(named)?,
            query,
            documents: fields::list("documents", "documents", documents, limit, text)?,
            top_k: fields::count("top_k", top_k)?,
            return_documents: fields::flag("return_documents", return_documents, false)?,
            truncation: truncation(truncate)?,
        })
    }

    /// Returns the number of results.
    pub fn results(&self) -> usize {
        let all = self.documents.len();
        self.top_k.map_or(all, |most| usize::try_from(most).map_or(all, |most| most.min(all)))
    }
}

#[derive(Serialize)]
struct VoyageResponseBody<'a, D> {
    object: &'static str,
    data: Vec<D>,
    model: &'a str,
    usage: VoyageUsage,
}

#[derive(Serialize)]
struct VoyageUsage {
    total_tokens: u64,
}

fn write<D: Serialize>(model: &str, data: Vec<D>, tokens: u64) -> Vec<u8> {
    let response =
        VoyageResponseBody { object: "list", data, model, usage: VoyageUsage { total_tokens: tokens } };
    serde_json::to_vec(&response).expect("strings and numbers serialise")
}

fn write_embeddings(model: &str, rows: RowsView<'_>, encoding: Encoding, tokens: u64) -> Vec<u8> {
    #[derive(Serialize)]
    struct VoyageEmbeddingItem<'a> {
        object: &'static str,
        embedding: Vector<'a>,
        index: usize,
    }
    let object = |(index, row)| VoyageEmbeddingItem {
        object: "embedding",
        embedding: Vector { row, encoding },
        index,
    };
    write(model, rows.iter().enumerate().map(object).collect(), tokens)
}

/// Writes the response of `POST /voyage/v1/rerank`: `order` contains indices of documents, the best first; `scores` and
/// `documents` are in the order of the request.
pub fn write_ranks(
    model: &str,
    order: &[usize],
    scores: &[f32],
    documents: Option<&[String]>,
    tokens: u64,
) -> Vec<u8> {
    #[derive(Serialize)]
    struct VoyageRankItem<'a> {
        relevance_score: f32,
        index: usize,
        #[serde(skip_serializing_if = "Option::is_none")]
        document: Option<&'a str>,
    }
    let rank = |index: &usize| {
        let document = documents.map(|documents| documents[*index].as_str());
        VoyageRankItem { relevance_score: scores[*index], index: *index, document }
    };
    write(model, order.iter().map(rank).collect(), tokens)
}

/// Returns the body of an error.
pub(crate) fn error_body(message: &str) -> Vec<u8> {
    #[derive(Serialize)]
    struct VoyageErrorBody<'a> {
        detail: &'a str,
    }
    serde_json::to_vec(&VoyageErrorBody { detail: message }).expect("strings serialise to JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use crate::prompt::Role;

    const LIMIT: ListLimit = ListLimit { count: 2, key: "max_inputs" };

    #[test]
    fn fields_of_voyage_are_parsed_and_those_of_other_apis_rejected() {
        let parse = |rest: &str| {
            let body = format!(r#"{{"model": "m", "input": "a"{rest}}}"#);
            VoyageEmbeddingsRequest::parse(body.as_bytes(), LIMIT)
        };
        let request = parse("").expect("a body");
        assert_eq!(
            (request.encoding, request.truncation, request.single),
            (Encoding::Float, Truncation::END, true)
        );
        let rest = r#", "input_type": "query", "truncation": false, "output_dimension": 8, "output_dtype": "binary", "encoding_format": "base64""#;
        let request = parse(rest).expect("all fields");
        assert_eq!((request.prompt, request.dimensions), (PromptChoice::For(Role::Query), Some(8)));
        assert_eq!((request.encoding, request.truncation.truncate), (Encoding::BinaryBase64, Some(false)));
        for (rest, param) in [
            (r#", "output_dtype": "int8""#, "output_dtype"),
            (r#", "dimensions": 8"#, "dimensions"),
            (r#", "truncation": 1"#, "truncation"),
            (r#", "input_type": "image""#, "input_type"),
        ] {
            let refusal = parse(rest).expect_err(rest);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some(param)), "{rest}");
        }
        let none = VoyageEmbeddingsRequest::parse(br#"{"input": "a"}"#, LIMIT).expect_err("no model");
        assert_eq!((none.code, none.param), (ErrorCode::MissingField, Some("model")));
    }

    #[test]
    fn a_rerank_has_the_fields_and_the_response_of_voyage() {
        let parse = |rest: &str| {
            let body = format!(r#"{{"model": "m", "query": "q", "documents": ["a", "b"]{rest}}}"#);
            VoyageRerankRequest::parse(body.as_bytes(), LIMIT)
        };
        assert_eq!(parse(r#", "top_k": 1"#).expect("a body").results(), 1);
        assert_eq!(parse(r#", "top_k": 9"#).expect("a body").results(), 2);
        assert_eq!(parse(r#", "top_n": 1"#).expect_err("Cohere's").param, Some("top_n"));
        let documents = ["a".to_owned(), "b".to_owned()];
        let written = write_ranks("m", &[1, 0], &[0.25, 0.5], Some(&documents), 7);
        assert_eq!(
            String::from_utf8(written).expect("JSON is UTF-8"),
            concat!(
                r#"{"object":"list","data":[{"relevance_score":0.5,"index":1,"document":"b"},"#,
                r#"{"relevance_score":0.25,"index":0,"document":"a"}],"model":"m","usage":{"total_tokens":7}}"#
            )
        );
    }
}
