//! Parsers of the bodies of TEI's routes.
//!
//! An empty text is accepted, as in TEI, if the model's tokenizer produces at least one token for it.

use serde_json::value::RawValue;

use super::response::write_rows;
use crate::body::{BodySchema, FieldKind, RawBody as _, body};
use crate::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use crate::fields::{self, Kind};
use crate::input::{Input, InputField, TextOrPair, Truncation};
use crate::prompt::PromptChoice;
use crate::refusal::{ListLimit, Refusal};

/// `POST /embed` and `POST /embed_all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedRequest {
    /// Texts to embed.
    pub inputs: Input,
    /// Whether `inputs` was one input and not a list of them.
    pub single: bool,
    /// Truncation of inputs that are too long.
    pub truncation: Truncation,
    /// Prompt for each text.
    pub prompt: PromptChoice,
    /// Whether vectors are scaled to length one; absent: the replica's `normalize` decides.
    pub normalize: Option<bool>,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
}

body! {
    /// The body of `POST /embed` and `POST /embed_all`.
    RawEmbed requires ["inputs"] {
        /// Inputs to embed. Token ids must be of the model's own vocabulary.
        inputs: FieldKind::Inputs,
        /// Whether to truncate inputs that are longer than the model's limit. Default: the replica's `auto_truncate`.
        truncate: FieldKind::Flag,
        /// Side from which tokens are removed.
        truncation_direction: FieldKind::OneOf(fields::TRUNCATION_SIDES),
        /// Name of the prompt to prepend to each text, from the model's configuration.
        prompt_name: FieldKind::Text,
        /// Whether to scale vectors to length one. Default: the replica's `normalize`; ignored by `/embed_all`.
        normalize: FieldKind::Flag,
        /// Number of leading dimensions of each vector to return; default: all. `/embed` only.
        dimensions: FieldKind::Count,
    } rejects {
        input_type => "`prompt_name`",
        encoding_format ["\"float\""] => "\"float\", or use /v1/embeddings",
        parameters ["{}"] => "its members beside `inputs`",
    }
}

impl EmbedRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawEmbed::SCHEMA;

    /// Parses `body`; `limit` applies to the number of inputs.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<EmbedRequest, Refusal> {
        let RawEmbed { inputs, truncate, truncation_direction, prompt_name, normalize, dimensions, .. } =
            RawEmbed::read(body)?;
        let inputs = fields::required("inputs", inputs, fields::INPUT_EXPECTED)?;
        let (inputs, single) = fields::inputs("inputs", inputs, limit)?;
        Ok(EmbedRequest {
            inputs,
            single,
            truncation: fields::truncation(truncate, truncation_direction)?,
            prompt: fields::prompt(prompt_name, None)?,
            normalize: normalize.map(|raw| fields::flag("normalize", Some(raw), true)).transpose()?,
            dimensions: fields::count("dimensions", dimensions)?,
        })
    }
}

impl EmbeddingsDialect for EmbedRequest {
    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static) {
        let EmbedRequest { inputs: input, single, truncation, prompt, normalize, dimensions } = self;
        let field = InputField { field: "inputs", single };
        let call = EmbeddingsCall { model: None, input, field, prompt, truncation, dimensions, normalize };
        (call, |result: EmbeddingsResult<'_>| write_rows(result.rows))
    }
}

/// `POST /rerank` in TEI's format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextsRequest {
    /// The search query.
    pub query: String,
    /// Documents to rank; at least one.
    pub texts: Vec<String>,
    /// Whether to return logits and not scores from 0 to 1.
    pub raw_scores: bool,
    /// Whether to return the texts.
    pub return_text: bool,
    /// Truncation of pairs that are too long.
    pub truncation: Truncation,
}

body! {
    /// The body of `POST /rerank` in TEI's format.
    RawTexts requires ["query", "texts"] {
        /// The search query.
        query: FieldKind::Text,
        /// Documents to rank.
        texts: FieldKind::Texts,
        /// Documents to rank, in the format of `/v1/rerank`, whose other fields then apply.
        documents: FieldKind::Documents,
        /// Whether to return logits and not scores from 0 to 1.
        raw_scores: FieldKind::Flag,
        /// Whether to return the texts with their scores.
        return_text: FieldKind::Flag,
        /// Whether to truncate inputs that are longer than the model's limit. Default: the replica's `auto_truncate`.
        truncate: FieldKind::Flag,
        /// Side from which tokens are removed.
        truncation_direction: FieldKind::OneOf(fields::TRUNCATION_SIDES),
    } rejects {
    }
}

impl TextsRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawTexts::SCHEMA;

    /// Parses `body`; `limit` applies to the number of texts. `None` if it has `documents` instead, the format of
    /// Cohere, Jina and vLLM, whose clients use this path too.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<Option<TextsRequest>, Refusal> {
        let RawTexts { query, texts, documents, raw_scores, return_text, truncate, truncation_direction } =
            RawTexts::read(body)?;
        let texts = match (texts, documents) {
            (None, Some(_)) => return Ok(None),
            (texts, _) => fields::required("texts", texts, "a list of texts")?,
        };
        let query = fields::text("query", "query", fields::required("query", query, "a text")?)?;
        let text = |path: &str, raw| fields::text("texts", path, raw);
        Ok(Some(TextsRequest {
            query,
            texts: fields::list("texts", "texts", texts, limit, text)?,
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
            return_text: fields::flag("return_text", return_text, false)?,
            truncation: fields::truncation(truncate, truncation_direction)?,
        }))
    }
}

/// `POST /predict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictRequest {
    /// Inputs to classify; at least one.
    pub inputs: Vec<TextOrPair>,
    /// Whether `inputs` was one text or pair and not a list of them.
    pub single: bool,
    /// Whether to return logits without the activation of the model's configuration.
    pub raw_scores: bool,
    /// Truncation of inputs that are too long.
    pub truncation: Truncation,
    /// Parameters of Hugging Face's clients, which expect the labels of one text as a list in a list.
    pub parameters: Option<Classification>,
}

/// `parameters` of Hugging Face's text classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classification {
    /// Activation of the logits; absent: that of the model's configuration.
    pub function: Option<ActivationFunction>,
    /// Number of best labels to return; absent: all.
    pub top_k: Option<u64>,
}

/// Activation of the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFunction {
    /// Each label independently, from 0 to 1.
    Sigmoid,
    /// All labels together sum to 1.
    Softmax,
    /// Logits without activation.
    None,
}

body! {
    /// The body of `POST /predict`.
    RawPredict requires ["inputs"] {
        /// Inputs to classify.
        inputs: FieldKind::TextsOrPairs,
        /// Whether to return logits and not probabilities.
        raw_scores: FieldKind::Flag,
        /// Whether to truncate inputs that are longer than the model's limit. Default: the replica's `auto_truncate`.
        truncate: FieldKind::Flag,
        /// Side from which tokens are removed.
        truncation_direction: FieldKind::OneOf(fields::TRUNCATION_SIDES),
        /// Hugging Face's `function_to_apply` and `top_k`; with it the labels of one text are a list in a list.
        parameters: FieldKind::Object,
    } rejects {
        function_to_apply => "`raw_scores`, or `parameters.function_to_apply`",
        top_k => "`parameters.top_k`",
    }
}

body! {
    /// `parameters` of Hugging Face's text classification.
    RawClassification requires [] {
        /// Activation of the logits. Default: that of the model's configuration.
        function_to_apply: FieldKind::OneOf(&["sigmoid", "softmax", "none"]),
        /// Number of best labels to return. Default: all.
        top_k: FieldKind::Count,
        /// Same as `truncate` beside `inputs`.
        truncation: FieldKind::Flag,
    } rejects {
        max_length => "`truncate` beside `inputs`",
        padding => "nothing: batches are not padded",
    }
}

const PREDICT_EXPECTED: &str =
    "a text, a pair [text, text], or a list of [text] and [text, text] (one list per input)";

impl PredictRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawPredict::SCHEMA;

    /// Parses `body`; `limit` applies to the number of texts and pairs.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<PredictRequest, Refusal> {
        let RawPredict { inputs, raw_scores, truncate, truncation_direction, parameters, .. } =
            RawPredict::read(body)?;
        let raw = fields::required("inputs", inputs, PREDICT_EXPECTED)?;
        let wrong = || fields::wrong_type("inputs", "inputs", PREDICT_EXPECTED);
        let (inputs, single) = match fields::kind_of(raw.get()) {
            Kind::Text => (vec![TextOrPair::One(fields::text("inputs", "inputs", raw)?)], true),
            Kind::List => match fields::first_kind(raw.get()) {
                None => return Err(Refusal::no_inputs("inputs", "inputs")),
                // One list is one input: two texts are a pair, as in TEI.
                Some(Kind::Text) => (vec![sequence("inputs", raw)?], true),
                Some(Kind::List) => (fields::list("inputs", "inputs", raw, limit, sequence)?, false),
                Some(Kind::Number | Kind::Other) => return Err(wrong()),
            },
            Kind::Number | Kind::Other => return Err(wrong()),
        };
        let parameters = parameters.map(|raw| fields::split_field("parameters", "parameters", raw));
        let parameters = parameters.transpose()?.map(RawClassification::checked).transpose()?;
        let truncate = truncate.or(parameters.as_ref().and_then(|parameters| parameters.truncation));
        let request = PredictRequest {
            inputs,
            single,
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
            truncation: fields::truncation(truncate, truncation_direction)?,
            parameters: parameters.map(classification).transpose()?,
        };
        let function = request.parameters.and_then(|parameters| parameters.function);
        if request.raw_scores && function.is_some_and(|function| function != ActivationFunction::None) {
            let problem = "conflicts with `parameters.function_to_apply`";
            return Err(Refusal::invalid("raw_scores", "raw_scores", problem, "one of them"));
        }
        Ok(request)
    }
}

fn classification(raw: RawClassification<'_>) -> Result<Classification, Refusal> {
    const FUNCTION: &str = "parameters.function_to_apply";
    let functions = [
        ("sigmoid", Some(ActivationFunction::Sigmoid)),
        ("softmax", Some(ActivationFunction::Softmax)),
        ("none", Some(ActivationFunction::None)),
    ];
    let expected = "\"sigmoid\", \"softmax\" or \"none\"";
    Ok(Classification {
        function: fields::choice(FUNCTION, raw.function_to_apply, None, &functions, expected)?,
        top_k: fields::count("parameters.top_k", raw.top_k)?,
    })
}

/// Maximum texts of one input: one text, or the two of a pair.
const TEXTS_PER_INPUT: ListLimit = ListLimit { count: 2, key: "TEXTS_PER_INPUT" };

fn sequence(path: &str, raw: &RawValue) -> Result<TextOrPair, Refusal> {
    let text = |path: &str, raw| fields::text("inputs", path, raw);
    if fields::kind_of(raw.get()) != Kind::List {
        return Err(fields::wrong_type("inputs", path, PREDICT_EXPECTED));
    }
    let wrong =
        || Refusal::invalid("inputs", path, "is a list of neither one text nor two", PREDICT_EXPECTED);
    let elements: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(Refusal::not_json)?;
    if elements.len() > TEXTS_PER_INPUT.count {
        return Err(wrong());
    }
    let texts = fields::list("inputs", path, raw, TEXTS_PER_INPUT, text)?;
    match <[String; 2]>::try_from(texts) {
        Ok([first, second]) => Ok(TextOrPair::Pair(first, second)),
        Err(texts) => texts.into_iter().next().map(TextOrPair::One).ok_or_else(wrong),
    }
}

/// `POST /similarity`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimilarityRequest {
    /// Text that the others are compared with.
    pub source: String,
    /// Other texts; at least one.
    pub sentences: Vec<String>,
    /// Truncation of texts that are too long.
    pub truncation: Truncation,
    /// Prompt for each text.
    pub prompt: PromptChoice,
}

body! {
    /// The body of `POST /similarity`.
    RawSimilarity requires ["inputs"] {
        /// A text (`source_sentence`) and the texts to compare it with (`sentences`).
        inputs: FieldKind::Sentences,
        /// `truncate`, `truncation_direction` and `prompt_name`.
        parameters: FieldKind::Object,
    } rejects {
        truncate => "`parameters.truncate`",
        truncation_direction => "`parameters.truncation_direction`",
        prompt_name => "`parameters.prompt_name`",
    }
}

body! {
    /// `inputs` of `POST /similarity`.
    RawSentences requires ["source_sentence", "sentences"] {
        /// Text that the others are compared with.
        source_sentence: FieldKind::Text,
        /// Other texts.
        sentences: FieldKind::Texts,
    } rejects {
    }
}

body! {
    /// `parameters` of `POST /similarity`.
    RawParameters requires [] {
        /// Whether to truncate inputs that are longer than the model's limit. Default: the replica's `auto_truncate`.
        truncate: FieldKind::Flag,
        /// Side from which tokens are removed.
        truncation_direction: FieldKind::OneOf(fields::TRUNCATION_SIDES),
        /// Name of the prompt to prepend to each text.
        prompt_name: FieldKind::Text,
    } rejects {
    }
}

impl SimilarityRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawSimilarity::SCHEMA;

    /// JSON paths of [`SimilarityRequest::source`] and [`SimilarityRequest::sentences`].
    pub const FIELDS: [&'static str; 2] = ["inputs.source_sentence", "inputs.sentences"];

    /// Returns whether `body` is a similarity request and not an embedding request: its `inputs` are an object.
    pub fn is_one(body: &[u8]) -> bool {
        let inputs = fields::split::<RawSimilarity<'_>>(body).ok().and_then(|fields| fields.inputs);
        inputs.is_some_and(|inputs| inputs.get().starts_with('{'))
    }

    /// Parses `body`; `limit` applies to the number of sentences.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<SimilarityRequest, Refusal> {
        let [source_field, sentences_field] = SimilarityRequest::FIELDS;
        let RawSimilarity { inputs, parameters, .. } = RawSimilarity::read(body)?;
        let inputs = fields::required("inputs", inputs, "an object with `source_sentence` and `sentences`")?;
        let RawSentences { source_sentence, sentences } =
            fields::split_field::<RawSentences<'_>>("inputs", "inputs", inputs)?.checked()?;
        let parameters = parameters.map(|raw| fields::split_field("parameters", "parameters", raw));
        let RawParameters { truncate, truncation_direction, prompt_name } =
            parameters.transpose()?.unwrap_or_else(RawParameters::default).checked()?;
        let source = fields::required(source_field, source_sentence, "a text")?;
        let sentences = fields::required(sentences_field, sentences, "a list of texts")?;
        let text = |path: &str, raw| fields::text(sentences_field, path, raw);
        Ok(SimilarityRequest {
            source: fields::text(source_field, source_field, source)?,
            sentences: fields::list(sentences_field, sentences_field, sentences, limit, text)?,
            truncation: fields::truncation(truncate, truncation_direction)?,
            prompt: fields::prompt(prompt_name, None)?,
        })
    }
}

/// Format of a response of `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizeFormat {
    /// A list of tokens for each text.
    Tei {
        /// Whether `inputs` was one text and not a list of them.
        single: bool,
    },
    /// An object with the tokens of the one text.
    Vllm(VllmTokenizeOptions),
}

/// Options of vLLM's clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VllmTokenizeOptions {
    /// The deployment, if specified.
    pub model: Option<String>,
    /// Whether to return the text of each token.
    pub with_texts: bool,
}

/// `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizeRequest {
    /// The texts; at least one.
    pub texts: Vec<String>,
    /// Format of the response.
    pub format: TokenizeFormat,
    /// Whether to add the model's special tokens.
    pub add_special_tokens: bool,
    /// Prompt for each text.
    pub prompt: PromptChoice,
}

body! {
    /// The body of `POST /tokenize`, in TEI's format or vLLM's.
    RawTokenize requires [] {
        /// The texts; the response is a list of tokens for each (TEI).
        inputs: FieldKind::TextOrTexts,
        /// The text; the response is an object with `tokens` (vLLM).
        prompt: FieldKind::Text,
        /// The deployment (vLLM).
        model: FieldKind::Text,
        /// Whether to add the model's special tokens. Default: true.
        add_special_tokens: FieldKind::Flag,
        /// Name of the prompt to prepend to each text (TEI).
        prompt_name: FieldKind::Text,
        /// Whether the text of each token is returned (vLLM).
        return_token_strs: FieldKind::Flag,
    } rejects {
        messages => "`prompt`",
    }
}

impl TokenizeRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawTokenize::SCHEMA;

    /// Parses `body`; `limit` applies to the number of texts.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<TokenizeRequest, Refusal> {
        let RawTokenize { inputs, prompt, model, add_special_tokens, prompt_name, return_token_strs, .. } =
            RawTokenize::read(body)?;
        let expected = "a text or a list of texts";
        let (texts, format) = match (inputs, prompt) {
            (None, Some(prompt)) => {
                let vllm = VllmTokenizeOptions {
                    model: fields::model(model)?,
                    with_texts: fields::flag("return_token_strs", return_token_strs, false)?,
                };
                (vec![fields::text("prompt", "prompt", prompt)?], TokenizeFormat::Vllm(vllm))
            }
            (Some(_), Some(_)) => {
                let problem = "conflicts with `inputs`";
                return Err(Refusal::invalid("prompt", "prompt", problem, "one of them"));
            }
            (inputs, None) => {
                let inputs = fields::required("inputs", inputs, expected)?;
                let (Input::Texts(texts), single) = fields::inputs("inputs", inputs, limit)? else {
                    return Err(fields::wrong_type("inputs", "inputs", expected));
                };
                (texts, TokenizeFormat::Tei { single })
            }
        };
        Ok(TokenizeRequest {
            texts,
            format,
            add_special_tokens: fields::flag("add_special_tokens", add_special_tokens, true)?,
            prompt: fields::prompt(prompt_name, None)?,
        })
    }
}

/// `POST /decode`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeRequest {
    /// Lists of token ids; at least one, and none of them empty.
    pub ids: Vec<Vec<u32>>,
    /// Whether `ids` was one list of token ids and not a list of them.
    pub single: bool,
    /// Whether to omit the model's special tokens.
    pub skip_special_tokens: bool,
}

body! {
    /// The body of `POST /decode`.
    RawDecode requires ["ids"] {
        /// The tokens.
        ids: FieldKind::TokenIds,
        /// Whether to omit special tokens from the text. Default: true.
        skip_special_tokens: FieldKind::Flag,
    } rejects {
    }
}

impl DecodeRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawDecode::SCHEMA;

    /// Parses `body`; `limit` applies to the number of lists.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<DecodeRequest, Refusal> {
        let RawDecode { ids, skip_special_tokens } = RawDecode::read(body)?;
        let expected = "a list of token ids, or a list of such lists";
        let ids = fields::required("ids", ids, expected)?;
        let (Input::Tokens(ids), single) = fields::inputs("ids", ids, limit)? else {
            return Err(fields::wrong_type("ids", "ids", expected));
        };
        let skip_special_tokens = fields::flag("skip_special_tokens", skip_special_tokens, true)?;
        Ok(DecodeRequest { ids, single, skip_special_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use crate::input::TruncationSide;

    const LIMIT: ListLimit = ListLimit { count: 3, key: "max_pairs" };

    fn one(text: &str) -> TextOrPair {
        TextOrPair::One(text.to_owned())
    }

    fn pair(first: &str, second: &str) -> TextOrPair {
        TextOrPair::Pair(first.to_owned(), second.to_owned())
    }

    #[test]
    fn texts_and_pairs_and_lists_of_both_are_classified() {
        let check = |inputs: &str, single: bool, expected: &[TextOrPair]| {
            let body = format!(r#"{{"inputs": {inputs}}}"#);
            let request = PredictRequest::parse(body.as_bytes(), LIMIT).expect(inputs);
            assert_eq!((request.single, request.inputs.as_slice()), (single, expected), "{inputs}");
        };
        check(r#""a""#, true, &[one("a")]);
        check(r#"["a"]"#, true, &[one("a")]);
        check(r#"["a", "b"]"#, true, &[pair("a", "b")]);
        check(r#"[["a"], ["b", "c"]]"#, false, &[one("a"), pair("b", "c")]);
        check(r#"[["a", ""]]"#, false, &[pair("a", "")]);
    }

    #[test]
    fn errors_name_inputs_that_are_neither_a_text_nor_a_pair() {
        for (inputs, code, says) in [
            (r#"["a", "b", "c"]"#, ErrorCode::InvalidValue, "`inputs` is a list of neither one text nor two"),
            (r#"[["a"], ["a", "b", "c"]]"#, ErrorCode::InvalidValue, "`inputs[1]` is a list of neither"),
            (r#"[["a"], []]"#, ErrorCode::EmptyInput, "`inputs[1]` is an empty list"),
            (r#"[["a"], "b"]"#, ErrorCode::InvalidValue, "`inputs[1]`"),
            (r#"[["a", 1]]"#, ErrorCode::InvalidValue, "`inputs[0][1]`"),
            ("[]", ErrorCode::EmptyInput, "empty list"),
            ("3", ErrorCode::InvalidValue, "[text, text]"),
            (r#"[["a"], ["a"], ["a"], ["a"]]"#, ErrorCode::TooManyInputs, "max_pairs"),
        ] {
            let body = format!(r#"{{"inputs": {inputs}}}"#);
            let refusal = PredictRequest::parse(body.as_bytes(), LIMIT).expect_err(inputs);
            assert_eq!((refusal.code, refusal.param), (code, Some("inputs")), "{inputs}");
            assert!(refusal.message.contains(says), "{inputs}: {}", refusal.message);
        }
    }

    #[test]
    fn truncation_is_set_by_the_request_or_by_the_replica() {
        let check = |rest: &str, truncate: Option<bool>, side: TruncationSide| {
            let body = format!(r#"{{"inputs": "a"{rest}}}"#);
            let request = EmbedRequest::parse(body.as_bytes(), LIMIT).expect(rest);
            assert_eq!(request.truncation, Truncation { truncate, side, max_tokens: None }, "{rest}");
            assert!(request.normalize.is_none() && request.single);
        };
        check("", None, TruncationSide::Right);
        check(r#", "truncate": false, "truncation_direction": "left""#, Some(false), TruncationSide::Left);
        check(r#", "truncate": true"#, Some(true), TruncationSide::Right);
        check(r#", "truncate": true, "truncation_direction": "Left""#, Some(true), TruncationSide::Left);
        let body = br#"{"inputs": "a", "truncation_direction": "up"}"#;
        let refusal = EmbedRequest::parse(body, LIMIT).expect_err("up");
        assert_eq!(refusal.param, Some("truncation_direction"));
    }

    #[test]
    fn parameters_of_a_classification_are_parsed_or_rejected() {
        let parse =
            |rest: &str| PredictRequest::parse(format!(r#"{{"inputs": "a", {rest}}}"#).as_bytes(), LIMIT);
        let read = parse(r#""parameters": {"function_to_apply": "none", "top_k": 2}"#).expect("parameters");
        assert_eq!(
            read.parameters,
            Some(Classification { function: Some(ActivationFunction::None), top_k: Some(2) })
        );
        let none = Classification { function: None, top_k: None };
        assert_eq!(parse(r#""parameters": {}"#).expect("no parameters").parameters, Some(none));
        for (rest, param) in [
            (r#""parameters": {"function_to_apply": "relu"}"#, "parameters.function_to_apply"),
            (r#""parameters": {"top_k": 0}"#, "parameters.top_k"),
            (r#""parameters": {"max_length": 8}"#, "max_length"),
            (r#""parameters": 3"#, "parameters"),
            (r#""top_k": 1"#, "top_k"),
            (r#""raw_scores": true, "parameters": {"function_to_apply": "softmax"}"#, "raw_scores"),
        ] {
            assert_eq!(parse(rest).expect_err(rest).param, Some(param), "{rest}");
        }
    }

    #[test]
    fn a_prompt_is_tokenized_in_the_format_of_vllm() {
        let parse = |body: &str| TokenizeRequest::parse(body.as_bytes(), LIMIT);
        let request = parse(r#"{"model": "m", "prompt": "a", "return_token_strs": true}"#).expect("a prompt");
        let vllm = VllmTokenizeOptions { model: Some("m".into()), with_texts: true };
        assert_eq!((request.texts, request.format), (vec!["a".to_owned()], TokenizeFormat::Vllm(vllm)));
        for (body, param) in [
            (r#"{"prompt": "a", "inputs": "b"}"#, "prompt"),
            (r#"{"messages": []}"#, "messages"),
            ("{}", "inputs"),
        ] {
            assert_eq!(parse(body).expect_err(body).param, Some(param), "{body}");
        }
    }

    #[test]
    fn a_body_in_the_format_of_cohere_is_left_to_its_parser() {
        let documents = br#"{"query": "q", "documents": ["a"]}"#;
        assert_eq!(TextsRequest::parse(documents, LIMIT), Ok(None));
        let texts = br#"{"query": "q", "texts": ["a", ""], "raw_scores": true}"#;
        let request = TextsRequest::parse(texts, LIMIT).expect("a body").expect("texts");
        assert_eq!(
            (request.texts, request.raw_scores, request.return_text),
            (vec!["a".into(), "".into()], true, false)
        );
        let refusal = TextsRequest::parse(br#"{"query": "q"}"#, LIMIT).expect_err("no texts");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::MissingField, Some("texts")));
    }

    #[test]
    fn sentences_are_named_by_their_full_path() {
        let parse = |body: &str| SimilarityRequest::parse(body.as_bytes(), LIMIT);
        let request = parse(
            r#"{"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"prompt_name": "query"}}"#,
        );
        assert_eq!(request.expect("a body").prompt, PromptChoice::Named("query".to_owned()));
        for (body, param) in [
            (r#"{"inputs": ["a"]}"#, "inputs"),
            (r#"{"inputs": {"sentences": ["b"]}}"#, "inputs.source_sentence"),
            (r#"{"inputs": {"source_sentence": "a"}}"#, "inputs.sentences"),
            (r#"{"inputs": {"source_sentence": "a", "sentences": []}}"#, "inputs.sentences"),
            (
                r#"{"inputs": {"source_sentence": "a", "sentences": ["a", "a", "a", "a"]}}"#,
                "inputs.sentences",
            ),
            (r#"{"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": 3}"#, "parameters"),
        ] {
            assert_eq!(parse(body).expect_err(body).param, Some(param), "{body}");
        }
    }

    #[test]
    fn tokenize_takes_texts_and_decode_takes_token_ids() {
        let tokenize = |body: &str| TokenizeRequest::parse(body.as_bytes(), LIMIT);
        assert!(tokenize(r#"{"inputs": ["a"]}"#).expect("texts").add_special_tokens);
        assert_eq!(tokenize(r#"{"inputs": [1]}"#).expect_err("tokens").param, Some("inputs"));
        let decode = |body: &str| DecodeRequest::parse(body.as_bytes(), LIMIT);
        assert_eq!(decode(r#"{"ids": [1, 2]}"#).expect("tokens").ids, [[1, 2]]);
        assert_eq!(decode(r#"{"ids": [[1], [2]]}"#).expect("tokens").ids, [[1], [2]]);
        assert_eq!(decode(r#"{"ids": "a"}"#).expect_err("a text").param, Some("ids"));
        assert_eq!(decode(r#"{"ids": []}"#).expect_err("none").param, Some("ids"));
    }
}
