//! APIs that only vLLM and Infinity define: `POST /score` (pairs), `POST /classify` (texts) and `POST /pooling` (output
//! of the model's pooler).
//!
//! vLLM and Infinity differ in the responses of `/classify`, and Infinity and Cohere in those of `/rerank`: therefore
//! Infinity's API is served below `/infinity`.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use super::body::{BodySchema, FieldKind, RawBody as _, body};
use super::fields::{self, Kind};
use crate::input::{Input, Truncation};
use crate::refusal::{ListLimit, Refusal};
use crate::vectors::{Encoding, RowsView, Vector};

/// `POST /score` and `POST /v1/score`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreRequest {
    /// The deployment, if specified.
    pub model: Option<String>,
    /// First texts of the pairs: one for all, or one for each second text.
    pub first: Vec<String>,
    /// Second texts of the pairs.
    pub second: Vec<String>,
    /// Truncation of pairs that are too long.
    pub truncation: Truncation,
}

body! {
    /// The body of `POST /score`.
    RawScore requires ["text_1", "text_2"] {
        /// The deployment.
        model: FieldKind::Text,
        /// First texts of the pairs: one for all, or one for each second text.
        text_1: FieldKind::TextOrTexts,
        /// Second texts of the pairs.
        text_2: FieldKind::TextOrTexts,
        /// Truncate every pair to the model's limit: only -1 is supported.
        truncate_prompt_tokens: FieldKind::Integer,
    } rejects {
        activation ["true"] => "true, or leave it out",
        use_activation ["true"] => "true, or leave it out",
        queries => "`text_1`",
        documents => "`text_2`",
        data_1 => "`text_1`",
        data_2 => "`text_2`",
        instruction => "the instruction in front of `text_1`",
    }
}

impl ScoreRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawScore::SCHEMA;

    /// Parses `body`; `limit` applies to the number of pairs.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<ScoreRequest, Refusal> {
        let RawScore { model, text_1, text_2, truncate_prompt_tokens, .. } = RawScore::read(body)?;
        let first = texts("text_1", text_1, limit)?;
        let second = texts("text_2", text_2, limit)?;
        if first.len() != 1 && first.len() != second.len() {
            return Err(Refusal::invalid(
                "text_1",
                "text_1",
                &format!("has {} texts and `text_2` has {}", first.len(), second.len()),
                "one text for all, or the same number",
            ));
        }
        let truncation = fields::truncate_prompt_tokens(truncate_prompt_tokens, None, Truncation::default())?;
        if truncation.max_tokens.is_some() {
            return Err(Refusal::invalid(
                fields::TRUNCATE_PROMPT_TOKENS,
                fields::TRUNCATE_PROMPT_TOKENS,
                "is not -1, the only supported value for pairs",
                "-1",
            ));
        }
        Ok(ScoreRequest { model: fields::model(model)?, first, second, truncation })
    }
}

/// `POST /classify`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassifyRequest {
    /// The deployment, if specified.
    pub model: Option<String>,
    /// Inputs to classify; at least one.
    pub input: Vec<String>,
    /// Whether `input` was one text and not a list of them.
    pub single: bool,
    /// Whether to return logits and not probabilities.
    pub raw_scores: bool,
    /// Truncation of texts that are too long.
    pub truncation: Truncation,
}

body! {
    /// The body of `POST /classify`.
    RawClassify requires ["input"] {
        /// The deployment.
        model: FieldKind::Text,
        /// Inputs to classify.
        input: FieldKind::TextOrTexts,
        /// Whether to return logits and not probabilities (Infinity).
        raw_scores: FieldKind::Flag,
        /// Truncate every text to this number of tokens, special tokens included (vLLM); -1: to the model's limit.
        truncate_prompt_tokens: FieldKind::Integer,
        /// Side from which tokens are removed.
        truncation_side: FieldKind::OneOf(fields::TRUNCATION_SIDES),
    } rejects {
        activation ["true"] => "`raw_scores`",
        use_activation ["true"] => "`raw_scores`",
        messages => "`input`",
        labels => "nothing: the labels are those of the model",
        add_special_tokens ["true"] => "true, or leave it out",
    }
}

body! {
    /// The body of `POST /pooling`.
    RawPooling requires ["input"] {
        /// The deployment.
        model: FieldKind::Text,
        /// The inputs. Token ids must be of the model's own vocabulary.
        input: FieldKind::Inputs,
        /// Output for each input: a vector (`embed`), one for each token (`token_embed`, the default of an embedding
        /// model), or the probabilities of the labels (`classify`, the default of a classifier).
        task: FieldKind::OneOf(&["embed", "token_embed", "classify"]),
        /// Encoding of the vectors.
        encoding_format: FieldKind::OneOf(&["float", "base64"]),
        /// Number of leading dimensions of each vector to return; default: all.
        dimensions: FieldKind::Integer,
        /// Whether to scale vectors to length one. Default: true.
        normalize: FieldKind::Flag,
        /// Truncate every input to this number of tokens, special tokens included; -1: to the model's limit.
        truncate_prompt_tokens: FieldKind::Integer,
        /// Side from which tokens are removed.
        truncation_side: FieldKind::OneOf(fields::TRUNCATION_SIDES),
    } rejects {
        activation ["true"] => "true, or leave it out",
        use_activation ["true"] => "`normalize`",
        softmax ["true"] => "true, or leave it out",
        messages => "`input`",
        data => "`input`",
        add_special_tokens ["true"] => "true, or token ids in `input`",
        embed_dtype ["\"float32\""] => "\"float32\", or leave it out",
        endianness ["\"native\"", "\"little\""] => "\"little\", or leave it out",
    }
}

/// Output of `POST /pooling` for each input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingTask {
    /// One vector.
    Embed,
    /// A vector for each token.
    TokenEmbed,
    /// The probabilities of the labels.
    Classify,
}

/// `POST /pooling`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolingRequest {
    /// The deployment, if specified.
    pub model: Option<String>,
    /// The inputs.
    pub input: Input,
    /// Whether `input` was one input and not a list of them.
    pub single: bool,
    /// Output for each input; absent: by the task of the model.
    pub task: Option<PoolingTask>,
    /// Encoding of the vectors.
    pub encoding: Encoding,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
    /// Whether vectors are scaled to length one.
    pub normalize: bool,
    /// Truncation of inputs that are too long.
    pub truncation: Truncation,
}

impl PoolingRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawPooling::SCHEMA;

    /// Parses `body`; `limit` applies to the number of inputs.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<PoolingRequest, Refusal> {
        let RawPooling {
            model,
            input,
            task,
            encoding_format,
            dimensions,
            normalize,
            truncate_prompt_tokens,
            truncation_side,
            ..
        } = RawPooling::read(body)?;
        let input = fields::required("input", input, fields::INPUT_EXPECTED)?;
        let (input, single) = fields::inputs("input", input, limit)?;
        let tasks = [
            ("embed", Some(PoolingTask::Embed)),
            ("token_embed", Some(PoolingTask::TokenEmbed)),
            ("classify", Some(PoolingTask::Classify)),
        ];
        let expected = "\"embed\", \"token_embed\" or \"classify\"";
        let encodings = [("float", Encoding::Float), ("base64", Encoding::Base64)];
        let formats = "\"float\" or \"base64\"";
        Ok(PoolingRequest {
            model: fields::model(model)?,
            input,
            single,
            task: fields::choice("task", task, None, &tasks, expected)?,
            encoding: fields::choice(
                "encoding_format",
                encoding_format,
                Encoding::Float,
                &encodings,
                formats,
            )?,
            dimensions: fields::count("dimensions", dimensions)?,
            normalize: fields::flag("normalize", normalize, true)?,
            truncation: fields::truncate_prompt_tokens(
                truncate_prompt_tokens,
                truncation_side,
                Truncation::default(),
            )?,
        })
    }
}

impl ClassifyRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawClassify::SCHEMA;

    /// Parses `body`; `limit` applies to the number of texts.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<ClassifyRequest, Refusal> {
        let RawClassify { model, input, raw_scores, truncate_prompt_tokens, truncation_side, .. } =
            RawClassify::read(body)?;
        Ok(ClassifyRequest {
            model: fields::model(model)?,
            input: texts("input", input, limit)?,
            single: input.is_some_and(|input| fields::kind_of(input.get()) == Kind::Text),
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
            truncation: fields::truncate_prompt_tokens(
                truncate_prompt_tokens,
                truncation_side,
                Truncation::default(),
            )?,
        })
    }
}

fn texts(field: &'static str, raw: Option<&RawValue>, limit: ListLimit) -> Result<Vec<String>, Refusal> {
    let raw = fields::required(field, raw, "a text or a list of texts")?;
    match fields::kind_of(raw.get()) {
        Kind::Text => Ok(vec![fields::text(field, field, raw)?]),
        Kind::Number | Kind::List | Kind::Other => {
            fields::list(field, field, raw, limit, |path, raw| fields::text(field, path, raw))
        }
    }
}

#[derive(Serialize)]
struct VllmResponseBody<'a, D> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<D>,
    usage: VllmUsage,
}

#[derive(Serialize)]
struct VllmUsage {
    prompt_tokens: u64,
    total_tokens: u64,
    completion_tokens: u64,
}

/// Metadata of a response.
#[derive(Clone, Copy, Debug)]
pub struct ResponseMetadata<'a> {
    /// Identifier of the request.
    pub id: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the deployment.
    pub model: &'a str,
    /// Number of computed tokens.
    pub tokens: u64,
}

impl<'a> ResponseMetadata<'a> {
    fn write<D: Serialize>(self, data: Vec<D>) -> Vec<u8> {
        self.write_as("list", data)
    }

    fn write_as<D: Serialize>(self, object: &'static str, data: Vec<D>) -> Vec<u8> {
        let ResponseMetadata { id, created, model, tokens } = self;
        let usage = VllmUsage { prompt_tokens: tokens, total_tokens: tokens, completion_tokens: 0 };
        let response: VllmResponseBody<'a, D> = VllmResponseBody { id, object, created, model, data, usage };
        serde_json::to_vec(&response).expect("strings and numbers serialise")
    }

    /// Writes the response of `POST /score`: one number per pair.
    pub fn write_scores(self, scores: &[f32]) -> Vec<u8> {
        #[derive(Serialize)]
        struct ScoreItem {
            index: usize,
            object: &'static str,
            score: f32,
        }
        let score = |(index, score): (usize, &f32)| ScoreItem { index, object: "score", score: *score };
        self.write(scores.iter().enumerate().map(score).collect())
    }

    /// Writes the response of `POST /classify` in Infinity's format: all labels with their scores, the best first, per
    /// text.
    pub fn write_labels(self, rows: RowsView<'_>, labels: &[String]) -> Vec<u8> {
        #[derive(Serialize)]
        struct LabelItem<'a> {
            score: f32,
            label: &'a str,
        }
        let of = |row: &[f32]| -> Vec<LabelItem<'_>> {
            let order = crate::ranking::ranking(row, row.len());
            order.into_iter().map(|i| LabelItem { score: row[i], label: &labels[i] }).collect()
        };
        self.write_as("classify", rows.iter().map(of).collect())
    }

    /// Writes the response of `POST /pooling`: one vector per input, or, with `counts`, that number of vectors for
    /// each.
    pub fn write_pooled(self, rows: RowsView<'_>, counts: Option<&[u32]>, encoding: Encoding) -> Vec<u8> {
        #[derive(Serialize)]
        struct PooledItem<D> {
            index: usize,
            object: &'static str,
            data: D,
        }
        let vector = |row| Vector { row, encoding };
        let mut all = rows.iter();
        match counts {
            None => {
                let pooled = |(index, row)| PooledItem { index, object: "pooling", data: vector(row) };
                self.write(all.enumerate().map(pooled).collect())
            }
            Some(counts) => {
                let mut pooled = Vec::with_capacity(counts.len());
                for (index, count) in counts.iter().enumerate() {
                    let data: Vec<_> = all.by_ref().take(*count as usize).map(vector).collect();
                    // In base64 the rows of an input are one string, as in vLLM, which writes the bytes of the tensor.
                    pooled.push(PooledItem { index, object: "pooling", data: TokenVectors(data, encoding) });
                }
                self.write(pooled)
            }
        }
    }

    /// Writes the response of `POST /classify`: the best label and the probabilities of all, per text.
    pub fn write_classes(self, rows: RowsView<'_>, labels: &[String]) -> Vec<u8> {
        #[derive(Serialize)]
        struct ClassItem<'a> {
            index: usize,
            label: &'a str,
            probs: &'a [f32],
            num_classes: usize,
        }
        let class = |(index, row)| {
            let best = crate::ranking::ranking(row, 1)[0];
            ClassItem { index, label: &labels[best], probs: row, num_classes: row.len() }
        };
        self.write(rows.iter().enumerate().map(class).collect())
    }
}

/// Token vectors of one input.
struct TokenVectors<'a>(Vec<Vector<'a>>, Encoding);

impl Serialize for TokenVectors<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let TokenVectors(vectors, encoding) = self;
        if *encoding == Encoding::Float {
            return vectors.serialize(serializer);
        }
        let all: Vec<f32> = vectors.iter().flat_map(|vector| vector.row.iter().copied()).collect();
        Vector { row: &all, encoding: *encoding }.serialize(serializer)
    }
}

/// Writes the response of `POST /tokenize` in vLLM's format.
pub fn write_tokens(
    tokens: &[super::tei::SimpleToken],
    max_input_tokens: usize,
    with_texts: bool,
) -> Vec<u8> {
    #[derive(Serialize)]
    struct TokenizeResponseBody<'a> {
        count: usize,
        max_model_len: usize,
        tokens: Vec<u32>,
        token_strs: Option<Vec<&'a str>>,
    }
    let response = TokenizeResponseBody {
        count: tokens.len(),
        max_model_len: max_input_tokens,
        tokens: tokens.iter().map(|token| token.id).collect(),
        token_strs: with_texts.then(|| tokens.iter().map(|token| token.text.as_str()).collect()),
    };
    serde_json::to_vec(&response).expect("strings and numbers serialise")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    const LIMIT: ListLimit = ListLimit { count: 2, key: "max_pairs" };
    const METADATA: ResponseMetadata<'static> =
        ResponseMetadata { id: "r", created: 7, model: "m", tokens: 5 };

    #[test]
    fn one_text_is_paired_with_all_and_several_one_by_one() {
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
    fn pooling_and_classification_parse_the_fields_of_their_clients() {
        let pooling =
            |rest: &str| PoolingRequest::parse(format!(r#"{{"input": "a"{rest}}}"#).as_bytes(), LIMIT);
        let request = pooling(r#", "task": "embed", "truncate_prompt_tokens": 5"#).expect("a body");
        assert_eq!((request.task, request.truncation.max_tokens), (Some(PoolingTask::Embed), Some(5)));
        assert!(pooling("").expect("a body").normalize);
        assert_eq!(pooling(r#", "task": "plugin""#).expect_err("a task").param, Some("task"));
        let classify =
            |rest: &str| ClassifyRequest::parse(format!(r#"{{"input": "a"{rest}}}"#).as_bytes(), LIMIT);
        assert!(!classify("").expect("a body").raw_scores);
        assert!(classify(r#", "raw_scores": true"#).expect("Infinity").raw_scores);
        assert_eq!(classify(r#", "labels": ["x"]"#).expect_err("labels").param, Some("labels"));
        let score = br#"{"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9}"#;
        let refusal = ScoreRequest::parse(score, LIMIT).expect_err("a length");
        assert_eq!(refusal.param, Some("truncate_prompt_tokens"));
    }

    #[test]
    fn responses_have_the_members_of_infinity_and_of_pooling() {
        let text = |json| String::from_utf8(json).expect("JSON is UTF-8");
        let labels = ["no".to_owned(), "yes".to_owned()];
        let labelled = text(METADATA.write_labels(RowsView::new(&[0.25, 0.75], 2), &labels));
        assert!(labelled.contains(r#""object":"classify""#), "{labelled}");
        assert!(labelled.contains(r#""data":[[{"score":0.75,"label":"yes"},{"score":0.25,"#), "{labelled}");
        let rows = RowsView::new(&[1.0, 2.0, 3.0, 4.0], 2);
        let pooled = text(METADATA.write_pooled(rows, None, Encoding::Float));
        assert!(pooled.contains(r#"{"index":1,"object":"pooling","data":[3.0,4.0]}"#), "{pooled}");
        let tokens = text(METADATA.write_pooled(rows, Some(&[2]), Encoding::Float));
        assert!(tokens.contains(r#""data":[{"index":0,"object":"pooling","data":[[1.0,2.0],[3.0,4.0]]}]"#));
        let base64 = text(METADATA.write_pooled(rows, Some(&[2]), Encoding::Base64));
        assert!(base64.contains(r#""data":"AACAPwAAAEAAAEBAAACAQA==""#), "{base64}");
    }

    #[test]
    fn responses_have_the_members_of_vllm() {
        let text = |json| String::from_utf8(json).expect("JSON is UTF-8");
        let rest = r#""usage":{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0}}"#;
        let head = r#"{"id":"r","object":"list","created":7,"model":"m","data":["#;
        assert_eq!(
            text(METADATA.write_scores(&[0.5])),
            format!(r#"{head}{{"index":0,"object":"score","score":0.5}}],{rest}"#)
        );
        let labels = ["no".to_owned(), "yes".to_owned()];
        assert_eq!(
            text(METADATA.write_classes(RowsView::new(&[0.25, 0.75], 2), &labels)),
            format!(r#"{head}{{"index":0,"label":"yes","probs":[0.25,0.75],"num_classes":2}}],{rest}"#)
        );
    }
}
