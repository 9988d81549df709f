//! What vLLM and Infinity have beside the APIs of others: `POST /score` (pairs) and `POST /classify` (texts).

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::fields::{self, Kind};
use super::openai::response::Rows;
use crate::limits::AtMost;
use crate::refusal::Refusal;

/// `POST /score` and `POST /v1/score`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreRequest {
    /// The deployment, where the caller says so.
    pub model: Option<String>,
    /// The first texts of the pairs: one for all, or as many as there are second ones.
    pub first: Vec<String>,
    /// The second texts of the pairs.
    pub second: Vec<String>,
}

#[derive(Deserialize)]
struct RawScore<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    text_1: Option<&'a RawValue>,
    #[serde(borrow)]
    text_2: Option<&'a RawValue>,
}

impl ScoreRequest {
    /// Reads `body`, which may carry so many pairs.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<ScoreRequest, Refusal> {
        let RawScore { model, text_1, text_2 } = fields::split(body)?;
        let first = texts("text_1", text_1, limit)?;
        let second = texts("text_2", text_2, limit)?;
        if first.len() != 1 && first.len() != second.len() {
            return Err(Refusal::invalid(
                "text_1",
                "text_1",
                &format!("has {} texts and `text_2` has {}", first.len(), second.len()),
                "one text for all, or as many",
            ));
        }
        Ok(ScoreRequest { model: fields::model(model)?, first, second })
    }
}

/// `POST /classify`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassifyRequest {
    /// The deployment, where the caller says so.
    pub model: Option<String>,
    /// What to classify; at least one.
    pub input: Vec<String>,
}

#[derive(Deserialize)]
struct RawClassify<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

impl ClassifyRequest {
    /// Reads `body`, which may carry so many texts.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<ClassifyRequest, Refusal> {
        let RawClassify { model, input } = fields::split(body)?;
        Ok(ClassifyRequest { model: fields::model(model)?, input: texts("input", input, limit)? })
    }
}

fn texts(field: &'static str, raw: Option<&RawValue>, limit: AtMost) -> Result<Vec<String>, Refusal> {
    let raw = fields::needed(field, raw, "a text or a list of texts")?;
    match fields::kind_of(raw.get()) {
        Kind::Text => Ok(vec![fields::text(field, field, raw)?]),
        Kind::Number | Kind::List | Kind::Other => {
            fields::list(field, field, raw, limit, |place, raw| fields::text(field, place, raw))
        }
    }
}

#[derive(Serialize)]
struct Answer<'a, D> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<D>,
    usage: Usage,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
}

/// What stands around the data of both answers.
#[derive(Clone, Copy, Debug)]
pub struct Around<'a> {
    /// The request's identifier.
    pub id: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    /// The deployment that answered.
    pub model: &'a str,
    /// Tokens that were computed.
    pub tokens: u64,
}

impl<'a> Around<'a> {
    fn write<D: Serialize>(self, data: Vec<D>) -> Vec<u8> {
        let Around { id, created, model, tokens } = self;
        let usage = Usage { prompt_tokens: tokens, total_tokens: tokens, completion_tokens: 0 };
        let answer: Answer<'a, D> = Answer { id, object: "list", created, model, data, usage };
        serde_json::to_vec(&answer).expect("strings and numbers serialise")
    }

    /// The answer to `POST /score`: one number per pair.
    pub fn write_scores(self, scores: &[f32]) -> Vec<u8> {
        #[derive(Serialize)]
        struct Score {
            index: usize,
            object: &'static str,
            score: f32,
        }
        let score = |(index, score): (usize, &f32)| Score { index, object: "score", score: *score };
        self.write(scores.iter().enumerate().map(score).collect())
    }

    /// The answer to `POST /classify`: the best label and the probabilities of all, per text.
    pub fn write_classes(self, rows: Rows<'_>, labels: &[String]) -> Vec<u8> {
        #[derive(Serialize)]
        struct Class<'a> {
            index: usize,
            label: &'a str,
            probs: &'a [f32],
            num_classes: usize,
        }
        let class = |(index, row)| {
            let best = crate::scores::ranking(row, 1)[0];
            Class { index, label: &labels[best], probs: row, num_classes: row.len() }
        };
        self.write(rows.iter().enumerate().map(class).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    const LIMIT: AtMost = AtMost { count: 2, key: "max_pairs" };
    const AROUND: Around<'static> = Around { id: "r", created: 7, model: "m", tokens: 5 };

    #[test]
    fn one_text_is_paired_with_all_and_many_one_by_one() {
        let parse = |body: &str| ScoreRequest::parse(body.as_bytes(), LIMIT);
        let one = parse(r#"{"text_1": "a", "text_2": ["b", "c"]}"#).expect("one for all");
        assert_eq!((one.first.len(), one.second.len()), (1, 2));
        assert!(parse(r#"{"text_1": ["a", "b"], "text_2": ["b", "c"]}"#).is_ok());
        for (body, code, param) in [
            (r#"{"text_1": ["a", "b"], "text_2": "c"}"#, ErrorCode::InvalidValue, "text_1"),
            (r#"{"text_1": "a"}"#, ErrorCode::MissingField, "text_2"),
            (r#"{"text_1": "a", "text_2": ["b", "c", "d"]}"#, ErrorCode::TooManyInputs, "text_2"),
            (r#"{"text_1": 3, "text_2": "b"}"#, ErrorCode::InvalidValue, "text_1"),
        ] {
            let refusal = parse(body).expect_err(body);
            assert_eq!((refusal.code, refusal.param), (code, Some(param)), "{body}");
        }
    }

    #[test]
    fn the_answers_have_the_members_of_vllm() {
        let text = |json| String::from_utf8(json).expect("JSON is UTF-8");
        let rest = r#""usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}}"#;
        let head = r#"{"id":"r","object":"list","created":7,"model":"m","data":["#;
        assert_eq!(
            text(AROUND.write_scores(&[0.5])),
            format!(r#"{head}{{"index":0,"object":"score","score":0.5}}],{rest}"#)
        );
        let labels = ["no".to_owned(), "yes".to_owned()];
        assert_eq!(
            text(AROUND.write_classes(Rows::new(&[0.25, 0.75], 2), &labels)),
            format!(r#"{head}{{"index":0,"label":"yes","probs":[0.25,0.75],"num_classes":2}}],{rest}"#)
        );
    }
}
