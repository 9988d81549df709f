//! Response of a rerank request.

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::value::RawValue;

use super::request::Document;

/// Documents per search unit of Cohere's billing. Meridian bills nothing; Cohere's clients show the number.
const DOCUMENTS_PER_SEARCH_UNIT: usize = 100;

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
struct Answer<'a> {
    id: &'a str,
    model: &'a str,
    results: Vec<RankedDocument<'a>>,
    meta: Meta,
    usage: Usage,
}

#[derive(Serialize)]
struct RankedDocument<'a> {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Returned<'a>>,
}

enum Returned<'a> {
    Bare(&'a str),
    Text(&'a str),
    Object(&'a RawValue),
}

impl Serialize for Returned<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Returned::Bare(text) => serializer.serialize_str(text),
            Returned::Object(object) => object.serialize(serializer),
            Returned::Text(text) => {
                let mut object = serializer.serialize_map(Some(1))?;
                object.serialize_entry("text", text)?;
                object.end()
            }
        }
    }
}

#[derive(Serialize)]
struct Meta {
    api_version: ApiVersion,
    billed_units: BilledUnits,
}

#[derive(Serialize)]
struct ApiVersion {
    version: &'static str,
}

#[derive(Serialize)]
struct BilledUnits {
    search_units: usize,
}

#[derive(Serialize)]
struct Usage {
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
                Document { text, object: _ } if bare_documents => Returned::Bare(text),
                Document { object: Some(object), .. } => Returned::Object(object),
                Document { text, object: None } => Returned::Text(text),
            }),
        };
        let search_units = scores.len().div_ceil(DOCUMENTS_PER_SEARCH_UNIT);
        let answer = Answer {
            id,
            model,
            results: order.iter().map(ranked).collect(),
            meta: Meta {
                api_version: ApiVersion { version: api_version },
                billed_units: BilledUnits { search_units },
            },
            usage: Usage { prompt_tokens: tokens, total_tokens: tokens },
        };
        serde_json::to_vec(&answer).expect("strings and numbers serialise")
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
        let mut answer = RerankResponse {
            id: "r1",
            api_version: "2",
            model: "m",
            order: &[1, 0],
            scores: &[0.25, 0.5],
            documents: Some(&documents),
            bare_documents: false,
            tokens: 9,
        };
        let text = |answer: &RerankResponse<'_>| String::from_utf8(answer.write()).expect("JSON is UTF-8");
        let rest = concat!(
            r#""meta":{"api_version":{"version":"2"},"billed_units":{"search_units":1}},"#,
            r#""usage":{"prompt_tokens":9,"total_tokens":9}}"#
        );
        let results = concat!(
            r#"{"id":"r1","model":"m","results":[{"index":1,"relevance_score":0.5,"document":{"text":"b","id":7}},"#,
            r#"{"index":0,"relevance_score":0.25,"document":{"text":"a"}}],"#
        );
        assert_eq!(text(&answer), format!("{results}{rest}"));
        answer.bare_documents = true;
        assert!(
            text(&answer).contains(r#""document":"b"},{"index":0,"relevance_score":0.25,"document":"a"}]"#)
        );
        answer.documents = None;
        answer.order = &[1];
        let results = r#"{"id":"r1","model":"m","results":[{"index":1,"relevance_score":0.5}],"#;
        assert_eq!(text(&answer), format!("{results}{rest}"));
    }
}
