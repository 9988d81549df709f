//! Parser of the body of a rerank request.
//!
//! A document is a text, or an object of which `text`, or the fields in `rank_fields`, are read. An object is returned
//! unchanged, with all its members.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::body::{BodySchema, FieldKind, RawBody as _, body};
use crate::fields::{self, Kind};
use crate::refusal::{ListLimit, Refusal};

/// Parsed request.
#[derive(Clone, Debug)]
pub struct RerankRequest {
    /// The deployment, if specified: some of these APIs have no such field.
    pub model: Option<String>,
    /// The search query; not empty.
    pub query: String,
    /// Documents to rank; at least one.
    pub documents: Vec<Document>,
    /// Number of best documents to return; absent: all.
    pub top_n: Option<u64>,
    /// Whether to return the documents.
    pub return_documents: bool,
    /// Maximum tokens of a document; longer ones are truncated.
    pub max_tokens_per_doc: Option<u64>,
    /// Whether to return logits and not scores from 0 to 1.
    pub raw_scores: bool,
}

/// One document.
#[derive(Clone, Debug)]
pub struct Document {
    /// Text to rank.
    pub text: String,
    /// The original object, if it was one.
    pub object: Option<Box<RawValue>>,
}

body! {
    /// The body of a rerank.
    RawFields requires ["query", "documents"] {
        /// The deployment.
        model: FieldKind::Text,
        /// The search query.
        query: FieldKind::Text,
        /// Documents to rank. Of an object, `text` or the fields in `rank_fields` are read.
        documents: FieldKind::Documents,
        /// Number of best documents to return. Default: all.
        top_n: FieldKind::Count,
        /// Whether to return the documents with their scores.
        return_documents: FieldKind::Flag,
        /// Truncate each document to this number of tokens (Cohere).
        max_tokens_per_doc: FieldKind::Count,
        /// The fields of a document object to rank by (Cohere v1).
        rank_fields: FieldKind::Texts,
        /// Whether to return logits (Infinity) and not scores from 0 to 1.
        raw_scores: FieldKind::Flag,
    } rejects {
        top_k => "`top_n`",
        max_chunks_per_doc ["1"] => "1: a document that is too long is truncated and not divided",
        return_embeddings ["false"] => "false, or leave it out",
        truncate_prompt_tokens ["-1"] => "`max_tokens_per_doc`",
        truncate ["true", "\"END\""] => "true: a document that is too long is always truncated; shorten it before sending otherwise",
        activation ["true"] => "`raw_scores`",
        use_activation ["true"] => "`raw_scores`",
        instruction => "the instruction in front of the query",
    }
}

/// Maximum number of `rank_fields`: more than the useful columns of any table.
pub const MAX_RANK_FIELDS: usize = 64;

impl RerankRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawFields::SCHEMA;

    /// Parses `body`; `limit` applies to the number of documents.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<RerankRequest, Refusal> {
        let RawFields {
            model,
            query,
            documents,
            top_n,
            return_documents,
            max_tokens_per_doc,
            rank_fields,
            raw_scores,
            ..
        } = RawFields::read(body)?;
        let query = fields::text_or_object("query", "query", fields::required("query", query, "a text")?)?;
        if query.is_empty() {
            return Err(Refusal::empty_input("query", "query"));
        }
        let most = ListLimit { count: MAX_RANK_FIELDS, key: "MAX_RANK_FIELDS" };
        let name = |path: &str, raw| fields::text("rank_fields", path, raw);
        let rank_fields = rank_fields.map(|raw| fields::list("rank_fields", "rank_fields", raw, most, name));
        let rank_fields = rank_fields.transpose()?;
        let documents = fields::required("documents", documents, "a list of texts or objects")?;
        let read = |path: &str, raw| document(path, raw, rank_fields.as_deref());
        Ok(RerankRequest {
            model: fields::model(model)?,
            query,
            documents: fields::list("documents", "documents", documents, limit, read)?,
            top_n: fields::count("top_n", top_n)?,
            return_documents: fields::flag("return_documents", return_documents, false)?,
            max_tokens_per_doc: fields::count("max_tokens_per_doc", max_tokens_per_doc)?,
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
        })
    }

    /// Returns the number of results.
    pub fn results(&self) -> usize {
        let all = self.documents.len();
        self.top_n.map_or(all, |n| usize::try_from(n).map_or(all, |n| n.min(all)))
    }
}

fn document(path: &str, raw: &RawValue, rank_fields: Option<&[String]>) -> Result<Document, Refusal> {
    match fields::kind_of(raw.get()) {
        Kind::Text => Ok(Document { text: fields::text("documents", path, raw)?, object: None }),
        Kind::Other if raw.get().starts_with('{') => {
            let object: BTreeMap<String, &RawValue> = fields::split_field("documents", path, raw)?;
            let text = match rank_fields {
                None | Some([_]) => {
                    let field = rank_fields.and_then(<[String]>::first).map_or("text", String::as_str);
                    let value = object.get(field).ok_or_else(|| no_field(path, &[field]))?;
                    fields::text("documents", &format!("{path}.{field}"), value)?
                }
                Some(names) => join(path, &object, names)?,
            };
            Ok(Document { text, object: Some(raw.to_owned()) })
        }
        Kind::Number | Kind::List | Kind::Other => {
            Err(fields::wrong_type("documents", path, "a text, or an object with `text`"))
        }
    }
}

/// Joins the named fields of a document, one per line with their names, as Cohere does for its models. A document need
/// not have all of them.
fn join(path: &str, object: &BTreeMap<String, &RawValue>, names: &[String]) -> Result<String, Refusal> {
    let mut lines = Vec::new();
    for name in names {
        let Some(value) = object.get(name) else { continue };
        let value = match fields::kind_of(value.get()) {
            Kind::Text => fields::text("documents", &format!("{path}.{name}"), value)?,
            Kind::Number | Kind::List | Kind::Other => value.get().to_owned(),
        };
        lines.push(format!("{name}: {value}"));
    }
    if lines.is_empty() {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        return Err(no_field(path, &names));
    }
    Ok(lines.join("\n"))
}

fn no_field(path: &str, names: &[&str]) -> Refusal {
    let names = names.join(", ");
    let names = names.char_indices().nth(80).map_or(names.as_str(), |(end, _)| &names[..end]);
    Refusal::invalid(
        "documents",
        path,
        &format!("is an object without {names}"),
        "it, or list the fields to read in `rank_fields`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn parse(body: &str) -> Result<RerankRequest, Refusal> {
        RerankRequest::parse(body.as_bytes(), ListLimit { count: 3, key: "max_documents" })
    }

    fn texts(rest: &str) -> Vec<String> {
        let request = parse(&format!(r#"{{"query": "q", {rest}}}"#)).expect(rest);
        request.documents.into_iter().map(|document| document.text).collect()
    }

    #[test]
    fn documents_are_texts_or_objects_with_named_fields() {
        assert_eq!(texts(r#""documents": ["a", {"text": "b", "title": "t"}]"#), ["a", "b"]);
        assert_eq!(texts(r#""documents": [{"title": "t", "n": 3}], "rank_fields": ["title"]"#), ["t"]);
        let both = r#""documents": [{"n": 3, "title": "t", "x": 1}], "rank_fields": ["title", "n", "gone"]"#;
        assert_eq!(texts(both), ["title: t\nn: 3"]);
        assert_eq!(texts(r#""documents": ["", " "]"#), ["", " "], "an empty document has a rank too");
    }

    #[test]
    fn an_object_is_kept_unchanged() {
        let request = parse(r#"{"query": "q", "documents": [{"text":"b","id": 7}]}"#).expect("a request");
        let object = request.documents[0].object.as_ref().expect("an object");
        assert_eq!(object.get(), r#"{"text":"b","id": 7}"#);
    }

    #[test]
    fn top_n_is_limited_to_the_number_of_documents() {
        for (top_n, expected) in [("1", 1), ("2", 2), ("3", 2), ("18446744073709551615", 2), ("null", 2)] {
            let body = format!(r#"{{"query": "q", "documents": ["a", "b"], "top_n": {top_n}}}"#);
            assert_eq!(parse(&body).expect("a request").results(), expected, "{top_n}");
        }
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (body, code, param, says) in [
            (r#"{"documents": ["a"]}"#, ErrorCode::MissingField, "query", "`query` is missing"),
            (r#"{"query": "", "documents": ["a"]}"#, ErrorCode::EmptyInput, "query", "`query` is empty"),
            (r#"{"query": ["q"], "documents": ["a"]}"#, ErrorCode::InvalidValue, "query", "a text"),
            (
                r#"{"query": {"text": "q", "image": "i"}, "documents": ["a"]}"#,
                ErrorCode::InvalidValue,
                "query",
                "`text` alone",
            ),
            (r#"{"query": "q"}"#, ErrorCode::MissingField, "documents", "`documents` is missing"),
            (r#"{"query": "q", "documents": []}"#, ErrorCode::EmptyInput, "documents", "empty list"),
            (r#"{"query": "q", "documents": "a"}"#, ErrorCode::InvalidValue, "documents", "a list"),
            (
                r#"{"query": "q", "documents": ["a", 3]}"#,
                ErrorCode::InvalidValue,
                "documents",
                "documents[1]",
            ),
            (
                r#"{"query": "q", "documents": [{"title": "t"}]}"#,
                ErrorCode::InvalidValue,
                "documents",
                "`documents[0]` is an object without text",
            ),
            (
                r#"{"query": "q", "documents": [{"text": 3}]}"#,
                ErrorCode::InvalidValue,
                "documents",
                "`documents[0].text`",
            ),
            (
                r#"{"query": "q", "documents": ["a", "b", "c", "d"]}"#,
                ErrorCode::TooManyInputs,
                "documents",
                "has 4 elements and the limit is 3",
            ),
            (
                r#"{"query": "q", "documents": ["a"], "top_n": 0}"#,
                ErrorCode::InvalidValue,
                "top_n",
                "positive",
            ),
            (
                r#"{"query": "q", "documents": ["a"], "return_documents": 1}"#,
                ErrorCode::InvalidValue,
                "return_documents",
                "true or false",
            ),
        ] {
            let refusal = parse(body).expect_err(body);
            assert_eq!((refusal.code, refusal.param), (code, Some(param)), "{body}: {}", refusal.message);
            assert!(refusal.message.contains(says), "{body}: {}", refusal.message);
        }
    }

    #[test]
    fn a_field_that_would_change_the_ranking_is_parsed_or_rejected() {
        let with =
            |rest: &str| parse(&format!(r#"{{"query": {{"text": "q"}}, "documents": ["a"], {rest}}}"#));
        assert!(with(r#""raw_scores": true"#).expect("a flag").raw_scores);
        for neutral in [r#""max_chunks_per_doc": 1"#, r#""priority": 3"#, r#""return_embeddings": false"#] {
            assert!(with(neutral).is_ok(), "{neutral}");
        }
        for (rest, param) in [
            (r#""top_k": 2"#, "top_k"),
            (r#""max_chunks_per_doc": 10"#, "max_chunks_per_doc"),
            (r#""truncate_prompt_tokens": 8"#, "truncate_prompt_tokens"),
            (r#""use_activation": false"#, "use_activation"),
        ] {
            let refusal = with(rest).expect_err(rest);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some(param)), "{rest}");
        }
    }

    #[test]
    fn the_limit_of_rank_fields_holds_at_the_limit_and_one_past_it() {
        let body = |n: usize| {
            let names = vec!["\"text\""; n].join(",");
            format!(r#"{{"query": "q", "documents": [{{"text": "a"}}], "rank_fields": [{names}]}}"#)
        };
        assert!(parse(&body(MAX_RANK_FIELDS)).is_ok());
        let refusal = parse(&body(MAX_RANK_FIELDS + 1)).expect_err("one past it");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::TooManyInputs, Some("rank_fields")));
    }
}
