//! The bodies of TEI's routes: bytes to a request, or to the field that is wrong with it.
//!
//! An empty text is taken here, as TEI takes it, if the model's tokenizer makes at least one token of it.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::input::{Input, Overlong, Sequence};
use crate::limits::AtMost;
use crate::prompt::PromptChoice;
use crate::refusal::Refusal;
use crate::wire::fields::{self, Kind};

/// `POST /embed` and `POST /embed_all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedRequest {
    /// What to embed.
    pub inputs: Input,
    /// Whether `inputs` was one input and not a list of them.
    pub single: bool,
    /// What becomes of inputs that are too long.
    pub overlong: Overlong,
    /// What stands before each text.
    pub prompt: PromptChoice,
    /// Whether vectors are brought to length one.
    pub normalize: bool,
    /// How many numbers a vector should have, where the caller says so.
    pub dimensions: Option<u64>,
}

#[derive(Deserialize)]
struct RawEmbed<'a> {
    #[serde(borrow)]
    inputs: Option<&'a RawValue>,
    #[serde(borrow)]
    truncate: Option<&'a RawValue>,
    #[serde(borrow)]
    truncation_direction: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_name: Option<&'a RawValue>,
    #[serde(borrow)]
    normalize: Option<&'a RawValue>,
    #[serde(borrow)]
    dimensions: Option<&'a RawValue>,
}

impl EmbedRequest {
    /// Reads `body`, which may carry so many inputs.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<EmbedRequest, Refusal> {
        let RawEmbed { inputs, truncate, truncation_direction, prompt_name, normalize, dimensions } =
            fields::split(body)?;
        let inputs = fields::needed("inputs", inputs, fields::INPUT_WANTED)?;
        let (inputs, single) = fields::inputs("inputs", inputs, limit)?;
        Ok(EmbedRequest {
            inputs,
            single,
            overlong: fields::overlong(truncate, truncation_direction)?,
            prompt: fields::prompt(prompt_name, None)?,
            normalize: fields::flag("normalize", normalize, true)?,
            dimensions: fields::count("dimensions", dimensions)?,
        })
    }
}

/// `POST /rerank`, in TEI's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextsRequest {
    /// What is searched for.
    pub query: String,
    /// What is found; at least one.
    pub texts: Vec<String>,
    /// Whether the model's own numbers are wanted, and not scores from 0 to 1.
    pub raw_scores: bool,
    /// Whether the texts come back.
    pub return_text: bool,
    /// What becomes of pairs that are too long.
    pub overlong: Overlong,
}

#[derive(Deserialize)]
struct RawTexts<'a> {
    #[serde(borrow)]
    query: Option<&'a RawValue>,
    #[serde(borrow)]
    texts: Option<&'a RawValue>,
    #[serde(borrow)]
    documents: Option<&'a RawValue>,
    #[serde(borrow)]
    raw_scores: Option<&'a RawValue>,
    #[serde(borrow)]
    return_text: Option<&'a RawValue>,
    #[serde(borrow)]
    truncate: Option<&'a RawValue>,
    #[serde(borrow)]
    truncation_direction: Option<&'a RawValue>,
}

impl TextsRequest {
    /// Reads `body`, which may carry so many texts; `None` if it has `documents` instead, in the words of Cohere, Jina
    /// and vLLM, whose clients meet this path too.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<Option<TextsRequest>, Refusal> {
        let RawTexts { query, texts, documents, raw_scores, return_text, truncate, truncation_direction } =
            fields::split(body)?;
        let texts = match (texts, documents) {
            (None, Some(_)) => return Ok(None),
            (texts, _) => fields::needed("texts", texts, "a list of texts")?,
        };
        let query = fields::text("query", "query", fields::needed("query", query, "a text")?)?;
        let text = |place: &str, raw| fields::text("texts", place, raw);
        Ok(Some(TextsRequest {
            query,
            texts: fields::list("texts", "texts", texts, limit, text)?,
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
            return_text: fields::flag("return_text", return_text, false)?,
            overlong: fields::overlong(truncate, truncation_direction)?,
        }))
    }
}

/// `POST /predict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictRequest {
    /// What to classify; at least one.
    pub inputs: Vec<Sequence>,
    /// Whether `inputs` was one text or pair and not a list of them.
    pub single: bool,
    /// Whether the model's own numbers are wanted, and not what its configuration makes of them.
    pub raw_scores: bool,
    /// What becomes of inputs that are too long.
    pub overlong: Overlong,
}

#[derive(Deserialize)]
struct RawPredict<'a> {
    #[serde(borrow)]
    inputs: Option<&'a RawValue>,
    #[serde(borrow)]
    raw_scores: Option<&'a RawValue>,
    #[serde(borrow)]
    truncate: Option<&'a RawValue>,
    #[serde(borrow)]
    truncation_direction: Option<&'a RawValue>,
}

const PREDICT_WANTED: &str =
    "a text, a pair [text, text], or a list of [text] and [text, text] (one list per input)";

impl PredictRequest {
    /// Reads `body`, which may carry so many texts and pairs.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<PredictRequest, Refusal> {
        let RawPredict { inputs, raw_scores, truncate, truncation_direction } = fields::split(body)?;
        let raw = fields::needed("inputs", inputs, PREDICT_WANTED)?;
        let wrong = || fields::wrong_type("inputs", "inputs", PREDICT_WANTED);
        let (inputs, single) = match fields::kind_of(raw.get()) {
            Kind::Text => (vec![Sequence::One(fields::text("inputs", "inputs", raw)?)], true),
            Kind::List => match fields::first_kind(raw.get()) {
                None => return Err(Refusal::no_inputs("inputs", "inputs")),
                // One list is one input: of two texts it is a pair, as TEI has it.
                Some(Kind::Text) => (vec![sequence("inputs", raw)?], true),
                Some(Kind::List) => (fields::list("inputs", "inputs", raw, limit, sequence)?, false),
                Some(Kind::Number | Kind::Other) => return Err(wrong()),
            },
            Kind::Number | Kind::Other => return Err(wrong()),
        };
        Ok(PredictRequest {
            inputs,
            single,
            raw_scores: fields::flag("raw_scores", raw_scores, false)?,
            overlong: fields::overlong(truncate, truncation_direction)?,
        })
    }
}

/// Texts of one input: itself, or the two of a pair.
const TEXTS_PER_INPUT: AtMost = AtMost { count: 2, key: "TEXTS_PER_INPUT" };

fn sequence(place: &str, raw: &RawValue) -> Result<Sequence, Refusal> {
    let text = |place: &str, raw| fields::text("inputs", place, raw);
    if fields::kind_of(raw.get()) != Kind::List {
        return Err(fields::wrong_type("inputs", place, PREDICT_WANTED));
    }
    let wrong = || Refusal::invalid("inputs", place, "is a list of neither one text nor two", PREDICT_WANTED);
    let elements: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(Refusal::not_json)?;
    if elements.len() > TEXTS_PER_INPUT.count {
        return Err(wrong());
    }
    let texts = fields::list("inputs", place, raw, TEXTS_PER_INPUT, text)?;
    match <[String; 2]>::try_from(texts) {
        Ok([first, second]) => Ok(Sequence::Pair(first, second)),
        Err(texts) => texts.into_iter().next().map(Sequence::One).ok_or_else(wrong),
    }
}

/// `POST /similarity`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimilarityRequest {
    /// What the others are compared with.
    pub source: String,
    /// The others; at least one.
    pub sentences: Vec<String>,
    /// What becomes of texts that are too long.
    pub overlong: Overlong,
    /// What stands before each text.
    pub prompt: PromptChoice,
}

#[derive(Deserialize)]
struct RawSimilarity<'a> {
    #[serde(borrow)]
    inputs: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawSentences<'a> {
    #[serde(borrow)]
    source_sentence: Option<&'a RawValue>,
    #[serde(borrow)]
    sentences: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct RawParameters<'a> {
    #[serde(borrow)]
    truncate: Option<&'a RawValue>,
    #[serde(borrow)]
    truncation_direction: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_name: Option<&'a RawValue>,
}

impl SimilarityRequest {
    /// The fields of [`SimilarityRequest::source`] and [`SimilarityRequest::sentences`].
    pub const FIELDS: [&'static str; 2] = ["inputs.source_sentence", "inputs.sentences"];

    /// Reads `body`, which may carry so many sentences.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<SimilarityRequest, Refusal> {
        let [source_field, sentences_field] = SimilarityRequest::FIELDS;
        let RawSimilarity { inputs, parameters } = fields::split(body)?;
        let inputs = fields::needed("inputs", inputs, "an object with `source_sentence` and `sentences`")?;
        let RawSentences { source_sentence, sentences } = fields::split_field("inputs", "inputs", inputs)?;
        let parameters = parameters.map(|raw| fields::split_field("parameters", "parameters", raw));
        let RawParameters { truncate, truncation_direction, prompt_name } =
            parameters.transpose()?.unwrap_or_default();
        let source = fields::needed(source_field, source_sentence, "a text")?;
        let sentences = fields::needed(sentences_field, sentences, "a list of texts")?;
        let text = |place: &str, raw| fields::text(sentences_field, place, raw);
        Ok(SimilarityRequest {
            source: fields::text(source_field, source_field, source)?,
            sentences: fields::list(sentences_field, sentences_field, sentences, limit, text)?,
            overlong: fields::overlong(truncate, truncation_direction)?,
            prompt: fields::prompt(prompt_name, None)?,
        })
    }
}

/// `POST /tokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizeRequest {
    /// The texts; at least one.
    pub texts: Vec<String>,
    /// Whether `inputs` was one text and not a list of them.
    pub single: bool,
    /// Whether the tokens that the model wants around a text are there.
    pub add_special_tokens: bool,
    /// What stands before each text.
    pub prompt: PromptChoice,
}

#[derive(Deserialize)]
struct RawTokenize<'a> {
    #[serde(borrow)]
    inputs: Option<&'a RawValue>,
    #[serde(borrow)]
    add_special_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_name: Option<&'a RawValue>,
}

impl TokenizeRequest {
    /// Reads `body`, which may carry so many texts.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<TokenizeRequest, Refusal> {
        let RawTokenize { inputs, add_special_tokens, prompt_name } = fields::split(body)?;
        let wanted = "a text or a list of texts";
        let inputs = fields::needed("inputs", inputs, wanted)?;
        let (Input::Texts(texts), single) = fields::inputs("inputs", inputs, limit)? else {
            return Err(fields::wrong_type("inputs", "inputs", wanted));
        };
        Ok(TokenizeRequest {
            texts,
            single,
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
    /// Whether the tokens that the model wants around a text are left out.
    pub skip_special_tokens: bool,
}

#[derive(Deserialize)]
struct RawDecode<'a> {
    #[serde(borrow)]
    ids: Option<&'a RawValue>,
    #[serde(borrow)]
    skip_special_tokens: Option<&'a RawValue>,
}

impl DecodeRequest {
    /// Reads `body`, which may carry so many lists.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<DecodeRequest, Refusal> {
        let RawDecode { ids, skip_special_tokens } = fields::split(body)?;
        let wanted = "a list of token ids, or a list of such lists";
        let ids = fields::needed("ids", ids, wanted)?;
        let (Input::Tokens(ids), single) = fields::inputs("ids", ids, limit)? else {
            return Err(fields::wrong_type("ids", "ids", wanted));
        };
        let skip_special_tokens = fields::flag("skip_special_tokens", skip_special_tokens, true)?;
        Ok(DecodeRequest { ids, single, skip_special_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::{Cut, End, PairCut};
    use crate::wire::error::ErrorCode;

    const LIMIT: AtMost = AtMost { count: 3, key: "max_pairs" };

    fn one(text: &str) -> Sequence {
        Sequence::One(text.to_owned())
    }

    fn pair(first: &str, second: &str) -> Sequence {
        Sequence::Pair(first.to_owned(), second.to_owned())
    }

    #[test]
    fn texts_and_pairs_and_lists_of_both_are_classified() {
        let check = |inputs: &str, single: bool, expected: &[Sequence]| {
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
    fn what_is_neither_a_text_nor_a_pair_is_named() {
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
    fn nothing_is_cut_unless_the_caller_says_so() {
        let check = |rest: &str, expected: Overlong| {
            let body = format!(r#"{{"inputs": "a"{rest}}}"#);
            let request = EmbedRequest::parse(body.as_bytes(), LIMIT).expect(rest);
            assert_eq!(request.overlong, expected, "{rest}");
            assert!(request.normalize && request.single);
        };
        let cut = |loses| Overlong::Cut(Cut { loses, pair: PairCut::LongestFirst });
        check("", Overlong::Refuse);
        check(r#", "truncate": false, "truncation_direction": "left""#, Overlong::Refuse);
        check(r#", "truncate": true"#, cut(End::Right));
        check(r#", "truncate": true, "truncation_direction": "Left""#, cut(End::Left));
        let body = br#"{"inputs": "a", "truncation_direction": "up"}"#;
        let refusal = EmbedRequest::parse(body, LIMIT).expect_err("up");
        assert_eq!(refusal.param, Some("truncation_direction"));
    }

    #[test]
    fn a_body_in_the_words_of_cohere_is_left_to_its_reader() {
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
    fn sentences_are_named_by_their_whole_path() {
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
    fn tokens_are_asked_for_by_texts_and_texts_by_tokens() {
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
