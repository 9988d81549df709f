//! Response of a rerank request.

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::RawValue;

use super::request::Document;

/// Documents per search unit of Cohere's billing. Meridian bills nothing; Cohere's clients show the number.
pub const DOCUMENTS_PER_SEARCH_UNIT: usize = 100;

/// Response to write.
#[derive(Debug)]
pub struct RerankResponse<'a> {
    /// Identifier of the request.
    pub id: &'a str,
    /// `1` or `2`, by the requested path.
    pub api_version: &'static str,
    /// Name of the deployment.
    pub model: &'a str,
    /// Indices of the documents, the best first.
    pub order: &'a [usize],
    /// The score of each document, 0 to 1, in the order of the request.
    pub scores: &'a [f32],
    /// The documents, if they are returned.
    pub documents: Option<&'a [Document]>,
    /// Whether a document is returned as its bare text, as in Infinity's API.
    pub bare_documents: bool,
    /// Number of computed tokens.
    pub tokens: u64,
}

#[derive(Serialize)]
struct RerankResponseBody<'a> {
    id: &'a str,
    model: &'a str,
    results: Vec<RankedDocument<'a>>,
    meta: RerankMeta,
    usage: RerankUsage,
}

#[derive(Serialize)]
struct RankedDocument<'a> {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<ReturnedDocument<'a>>,
}

enum ReturnedDocument<'a> {
    Bare(&'a str),
    Text(&'a str),
    Object(&'a RawValue),
}

impl Serialize for ReturnedDocument<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ReturnedDocument::Bare(text) => serializer.serialize_str(text),
            ReturnedDocument::Object(object) => object.serialize(serializer),
            ReturnedDocument::Text(text) => {
                let mut object = serializer.serialize_map(Some(1))?;
                object.serialize_entry("text", text)?;
                object.end()
            }
        }
    }
}

#[derive(Serialize)]
struct RerankMeta {
    api_version: RerankApiVersion,
    billed_units: SearchUnits,
}

#[derive(Serialize)]
struct RerankApiVersion {
    version: &'static str,
}

#[derive(Serialize)]
struct SearchUnits {
    search_units: usize,
}

#[derive(Serialize)]
struct RerankUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

impl RerankResponse<'_> {
    /// Returns the response as JSON.
    pub fn write(&self) -> Vec<u8> {
        let RerankResponse { id, api_version, model, order, scores, documents, bare_documents, tokens } =
            *self;
        let ranked = |index: &usize| RankedDocument {
            index: *index,
            relevance_score: scores[*index],
            document: documents.map(|documents| match &documents[*index] {
                Document { text, object: _ } if bare_documents => ReturnedDocument::Bare(text),
                Document { object: Some(object), .. } => ReturnedDocument::Object(object),
                Document { text, object: None } => ReturnedDocument::Text(text),
            }),
        };
        let search_units = scores.len().div_ceil(DOCUMENTS_PER_SEARCH_UNIT);
        let response = RerankResponseBody {
            id,
            model,
            results: order.iter().map(ranked).collect(),
            meta: RerankMeta {
                api_version: RerankApiVersion { version: api_version },
                billed_units: SearchUnits { search_units },
            },
            usage: RerankUsage { prompt_tokens: tokens, total_tokens: tokens },
        };
        serde_json::to_vec(&response).expect("strings and numbers serialise")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_has_the_members_that_stock_clients_read() {
        let documents = [
            Document { text: "a".to_owned(), object: None },
            Document {
                text: "b".to_owned(),
                object: Some(RawValue::from_string(r#"{"text":"b","id":7}"#.to_owned()).expect("JSON")),
            },
        ];
        let mut response = RerankResponse {
            id: "r1",
            api_version: "2",
            model: "m",
            order: &[1, 0],
            scores: &[0.25, 0.5],
            documents: Some(&documents),
            bare_documents: false,
            tokens: 9,
        };
        let text =
            |response: &RerankResponse<'_>| String::from_utf8(response.write()).expect("JSON is UTF-8");
        let rest = concat!(
            r#""meta":{"api_version":{"version":"2"},"billed_units":{"search_units":1}},"#,
            r#""usage":{"prompt_tokens":9,"total_tokens":9}}"#
        );
        let results = concat!(
            r#"{"id":"r1","model":"m","results":[{"index":1,"relevance_score":0.5,"document":{"text":"b","id":7}},"#,
            r#"{"index":0,"relevance_score":0.25,"document":{"text":"a"}}],"#
        );
        assert_eq!(text(&response), format!("{results}{rest}"));
        response.bare_documents = true;
        assert!(
            text(&response).contains(r#""document":"b"},{"index":0,"relevance_score":0.25,"document":"a"}]"#)
        );
        response.documents = None;
        response.order = &[1];
        let results = r#"{"id":"r1","model":"m","results":[{"index":1,"relevance_score":0.5}],"#;
        assert_eq!(text(&response), format!("{results}{rest}"));
    }
}
