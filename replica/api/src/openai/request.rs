//! Parser of the body of `POST /v1/embeddings`.
//!
//! Many servers implement OpenAI's API with additional fields, and their clients are supported too. `prompt_name` (TEI)
//! names a prompt of the model's configuration; `input_type` (Cohere, Voyage, NVIDIA) and `task` (Jina) are the role of
//! the text, which selects a prompt. `truncate` (TEI, NVIDIA) and `truncate_prompt_tokens` (vLLM) truncate inputs that
//! are too long; `normalize` (vLLM) and `normalized` (Jina) select whether vectors have length one.

use serde_json::value::RawValue;

use super::response::EmbeddingsResponse;
use crate::body::{BodySchema, FieldKind, RawBody as _, body};
use crate::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use crate::fields;
use crate::input::{Input, InputField, Truncation};
use crate::prompt::{PromptChoice, Role};
use crate::refusal::{ListLimit, Refusal};
use crate::vectors::Encoding;

/// Parsed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsRequest {
    /// The deployment.
    pub model: String,
    /// Inputs to embed; no text is empty.
    pub input: Input,
    /// Whether `input` was one input and not a list of them.
    pub single: bool,
    /// Encoding of the vectors.
    pub encoding: Encoding,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
    /// Prompt for each text.
    pub prompt: PromptChoice,
    /// Truncation of inputs that are too long.
    pub truncation: Truncation,
    /// Whether vectors are scaled to length one; absent: the replica's `normalize` decides.
    pub normalize: Option<bool>,
    /// Tokenizer of the token ids in `input`, as the digest of its model.
    pub tokenizer: Option<String>,
}

body! {
    /// The body of `POST /v1/embeddings`.
    RawFields requires ["model", "input"] {
        /// The deployment.
        model: FieldKind::Text,
        /// Inputs to embed. Token ids must be of the model's own vocabulary.
        input: FieldKind::InputsOrObjects,
        /// Encoding of the vectors: JSON numbers or base64 of little-endian f32.
        encoding_format: FieldKind::OneOf(&["float", "base64"]),
        /// Same as `encoding_format` (Jina); `binary` and `ubinary` are one bit for each number.
        embedding_type: FieldKind::OneOf(&["float", "base64", "binary", "ubinary"]),
        /// Number of leading dimensions of each vector to return; 0 (Infinity) or absent: all.
        dimensions: FieldKind::Integer,
        /// Name of the prompt to prepend to each text, from the model's configuration.
        prompt_name: FieldKind::Text,
        /// Role of the texts, which selects a prompt of the model's configuration.
        input_type: FieldKind::OneOf(fields::INPUT_TYPES),
        /// Role of the texts (Jina), same as `input_type`.
        task: FieldKind::OneOf(TASKS),
        /// Whether to truncate inputs that are longer than the model's limit (TEI, Jina), or from which side (NVIDIA).
        /// Default: the replica's `auto_truncate`.
        truncate: FieldKind::FlagOr(&["NONE", "START", "END"]),
        /// Side from which tokens are removed.
        truncation_direction: FieldKind::OneOf(fields::TRUNCATION_SIDES),
        /// Truncate every input to this number of tokens, special tokens included (vLLM); -1: to the model's limit.
        truncate_prompt_tokens: FieldKind::Integer,
        /// Same as `truncation_direction` (vLLM).
        truncation_side: FieldKind::OneOf(fields::TRUNCATION_SIDES),
        /// Whether to scale vectors to length one. Default: the replica's `normalize`.
        normalize: FieldKind::Flag,
        /// Same as `normalize` (Jina).
        normalized: FieldKind::Flag,
        /// Tokenizer of the token ids in `input`: the digest of its model, `model_sha` of `/info`.
        tokenizer: FieldKind::Text,
    } rejects {
        late_chunking ["false"] => "false, or leave it out",
        return_multivector ["false"] => "false, or leave it out; POST /pooling returns a vector for each token",
        add_special_tokens ["true"] => "true, or token ids in `input`",
        embed_dtype ["\"float32\""] => "\"float32\", or `embedding_type` \"binary\" or \"ubinary\"",
        endianness ["\"native\"", "\"little\""] => "\"little\", or leave it out",
        modality ["\"text\""] => "\"text\", or leave it out",
        output_dtype ["\"float\""] => "`embedding_type`, or use /voyage/v1/embeddings",
        output_dimension => "`dimensions`, or use /voyage/v1/embeddings",
        embedding_types => "`embedding_type`, or use /v2/embed",
        messages => "`input`",
        prompt => "`prompt_name`, or the prompt in front of each input",
        instruction => "`prompt_name`, or the instruction in front of each input",
    }
}

/// Roles of texts in Jina's API.
const TASKS: &[&str] =
    &["retrieval.query", "retrieval.passage", "text-matching", "classification", "separation", "clustering"];

impl EmbeddingsRequest {
    /// Schema of the body.
    pub const SCHEMA: BodySchema = RawFields::SCHEMA;

    /// Parses `body`; `limit` applies to the number of inputs.
    pub fn parse(body: &[u8], limit: ListLimit) -> Result<EmbeddingsRequest, Refusal> {
        let RawFields {
            model,
            input,
            encoding_format,
            embedding_type,
            dimensions,
            prompt_name,
            input_type,
            task,
            truncate,
            truncation_direction,
            truncate_prompt_tokens,
            truncation_side,
            normalize,
            normalized,
            tokenizer,
            ..
        } = RawFields::read(body)?;
        let model =
            fields::model(model)?.ok_or_else(|| Refusal::missing("model", "the name of a deployment"))?;
        let (input, single) = fields::inputs_or_objects(
            "input",
            fields::required("input", input, fields::INPUT_EXPECTED)?,
            limit,
        )?;
        let truncation = match truncate {
            Some(word) if word.get().starts_with('"') => fields::truncate_keyword(truncate, Truncation::END)?,
            _ => fields::truncation(truncate, truncation_direction)?,
        };
        let request = EmbeddingsRequest {
            model,
            input,
            single,
            encoding: encoding(encoding_format, embedding_type)?,
            dimensions: dimensions_or_all(dimensions)?,
            prompt: prompt(prompt_name, input_type, task)?,
            truncation: fields::truncate_prompt_tokens(truncate_prompt_tokens, truncation_side, truncation)?,
            normalize: fields::one_of_two("normalize", normalize, "normalized", normalized)?
                .map(|(field, raw)| fields::flag(field, Some(raw), true))
                .transpose()?,
            tokenizer: fields::optional_text("tokenizer", tokenizer)?,
        };
        request.check_texts()?;
        Ok(request)
    }

    /// Rejects empty texts, as OpenAI does.
    fn check_texts(&self) -> Result<(), Refusal> {
        let Input::Texts(texts) = &self.input else { return Ok(()) };
        match texts.iter().position(String::is_empty) {
            Some(_) if self.single => Err(Refusal::empty_input("input", "input")),
            Some(i) => Err(Refusal::empty_input("input", &format!("input[{i}]"))),
            None => Ok(()),
        }
    }
}

impl EmbeddingsDialect for EmbeddingsRequest {
    /// Rejects token ids that may be of another tokenizer: any id below the size of the vocabulary has a vector, so the
    /// response would be plausible and wrong, and the error would go unnoticed. They are accepted where the deployment
    /// `accepts` them, or where the request names their tokenizer by the `digest` of this model.
    ///
    /// # Errors
    ///
    /// The message lists the options of the caller: send texts, name the tokenizer, or have the deployment accept token
    /// ids.
    fn check_token_ids(&self, accepts: bool, digest: &str) -> Result<(), Refusal> {
        let Input::Tokens(_) = &self.input else { return Ok(()) };
        match self.tokenizer.as_deref() {
            Some(named) if named == digest => Ok(()),
            Some(_) => Err(Refusal::invalid(
                "tokenizer",
                "tokenizer",
                "is the tokenizer of another model, so the token ids in `input` have another meaning here",
                &format!("texts, or ids of this model's own tokenizer and \"tokenizer\": \"{digest}\""),
            )),
            None if accepts => Ok(()),
            None => Err(Refusal::invalid(
                "input",
                "input",
                "contains token ids, and their tokenizer is unknown",
                &format!(
                    "texts (with LangChain: check_embedding_ctx_length=False), or ids of this model's own tokenizer with \
                     \"tokenizer\": \"{digest}\" (`model_sha` of /info); the setting token_inputs = true of the replica accepts \
                     token ids without that"
                ),
            )),
        }
    }

    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static) {
        let EmbeddingsRequest {
            model,
            input,
            single,
            encoding,
            dimensions,
            prompt,
            truncation,
            normalize,
            tokenizer: _,
        } = self;
        let field = InputField { field: "input", single };
        let call =
            EmbeddingsCall { model: Some(model), input, field, prompt, truncation, dimensions, normalize };
        let write = move |result: EmbeddingsResult<'_>| {
            EmbeddingsResponse::write(result.model, result.rows, encoding, result.tokens)
        };
        (call, write)
    }
}

/// Parses the encoding, from OpenAI's field or Jina's.
fn encoding(
    encoding_format: Option<&RawValue>,
    embedding_type: Option<&RawValue>,
) -> Result<Encoding, Refusal> {
    let encodings = [
        ("float", Encoding::Float),
        ("base64", Encoding::Base64),
        ("binary", Encoding::Binary),
        ("ubinary", Encoding::Ubinary),
    ];
    if embedding_type.is_some() {
        // Clients that are built on OpenAI's send its field as well; Jina's field is more specific.
        fields::choice(
            "encoding_format",
            encoding_format,
            Encoding::Float,
            &encodings[..2],
            FLOAT_OR_BASE64,
        )?;
        let expected = "\"float\", \"base64\", \"binary\" or \"ubinary\"";
        return fields::choice("embedding_type", embedding_type, Encoding::Float, &encodings, expected);
    }
    fields::choice("encoding_format", encoding_format, Encoding::Float, &encodings[..2], FLOAT_OR_BASE64)
}

const FLOAT_OR_BASE64: &str = "\"float\" or \"base64\"";

/// Parses the number of dimensions. Infinity's client sends 0 for all.
fn dimensions_or_all(raw: Option<&RawValue>) -> Result<Option<u64>, Refusal> {
    fields::count("dimensions", raw.filter(|raw| raw.get() != "0"))
}

/// Parses the prompt: its name, or the role of the texts in one of two fields.
fn prompt(
    prompt_name: Option<&RawValue>,
    input_type: Option<&RawValue>,
    task: Option<&RawValue>,
) -> Result<PromptChoice, Refusal> {
    let Some(task) = task else { return fields::prompt(prompt_name, input_type) };
    if prompt_name.is_some() || input_type.is_some() {
        let problem = "conflicts with `prompt_name` or `input_type`, which also select the prompt";
        return Err(Refusal::invalid("task", "task", problem, "one of them"));
    }
    let roles = [
        ("retrieval.query", Role::Query),
        ("retrieval.passage", Role::Document),
        ("text-matching", Role::Similarity),
        ("classification", Role::Classification),
        ("separation", Role::Clustering),
        ("clustering", Role::Clustering),
    ];
    let expected = TASKS.join(", ");
    fields::choice("task", Some(task), Role::Query, &roles, &expected).map(PromptChoice::For)
}

/// Returns the number of dimensions of a vector, where the model has `model_dimensions` and the request may specify
/// fewer: then the leading ones are returned, for which Matryoshka models are trained.
pub fn check_dimensions(expected: Option<u64>, model_dimensions: usize) -> Result<usize, Refusal> {
    match expected {
        None => Ok(model_dimensions),
        Some(expected @ 1..) if expected <= model_dimensions as u64 => Ok(expected as usize),
        Some(expected) => Err(Refusal::invalid(
            "dimensions",
            "dimensions",
            &format!("is {expected} and the vectors of this model have {model_dimensions}"),
            &format!("1 to {model_dimensions}, or leave it out"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;
    use crate::input::TruncationSide;

    const LIMIT: ListLimit = ListLimit { count: 3, key: "max_inputs" };

    fn parse(body: &str) -> Result<EmbeddingsRequest, Refusal> {
        EmbeddingsRequest::parse(body.as_bytes(), LIMIT)
    }

    fn check(body: &str, code: ErrorCode, param: Option<&str>, says: &str) {
        let refusal = parse(body).expect_err(body);
        assert_eq!((refusal.code, refusal.param), (code, param), "{body}: {}", refusal.message);
        assert!(refusal.message.contains(says), "{body}: {}", refusal.message);
    }

    fn texts(texts: &[&str]) -> Input {
        Input::Texts(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    #[test]
    fn every_form_of_input_is_parsed() {
        let check = |input: &str, expected: Input| {
            let parsed = parse(&format!(r#"{{"model": "m", "input": {input}}}"#)).expect(input);
            assert_eq!(parsed.input, expected, "{input}");
        };
        check(r#""a""#, texts(&["a"]));
        check(r#"["a", "b\u00e9\n"]"#, texts(&["a", "bé\n"]));
        check(r#" [ "a" ] "#, texts(&["a"]));
        check("[1, 2]", Input::Tokens(vec![vec![1, 2]]));
        check("[[1, 2], [3]]", Input::Tokens(vec![vec![1, 2], vec![3]]));
        check(r#""\ud83d\ude00""#, texts(&["😀"]));
        check(r#""\u0000 ""#, texts(&["\0 "]));
    }

    #[test]
    fn token_ids_are_accepted_with_their_tokenizer_or_by_configuration() {
        let check = |input: &str, more: &str, accepts: bool, param: Option<&str>| {
            let request = parse(&format!(r#"{{"model": "m", "input": {input}{more}}}"#)).expect(input);
            let refusal = request.check_token_ids(accepts, "d1gest").err();
            assert_eq!(refusal.as_ref().and_then(|it| it.param), param, "{input} {more} {accepts}");
            if let Some(refusal) = refusal {
                assert_eq!(refusal.code, ErrorCode::InvalidValue);
                assert!(refusal.message.contains("\"tokenizer\": \"d1gest\""), "{}", refusal.message);
            }
        };
        let (right, wrong) = (r#", "tokenizer": "d1gest""#, r#", "tokenizer": "cl100k_base""#);
        for input in ["[1, 2]", "[[1, 2], [3]]"] {
            check(input, "", false, Some("input"));
            check(input, "", true, None);
            check(input, right, false, None);
            check(input, right, true, None);
            check(input, wrong, false, Some("tokenizer"));
            check(input, wrong, true, Some("tokenizer"));
        }
        check(r#""text""#, "", false, None);
        check(r#""text""#, wrong, false, None);
    }

    #[test]
    fn a_token_list_may_be_longer_than_a_list_of_inputs() {
        let parsed = parse(r#"{"model": "m", "input": [1, 2, 3, 4, 5]}"#).expect("five tokens of one input");
        assert_eq!(parsed.input.count(), 1);
    }

    #[test]
    fn texts_may_be_objects_with_the_only_member_text() {
        let input = |input: &str| parse(&format!(r#"{{"model": "m", "input": {input}}}"#));
        assert_eq!(input(r#"[{"text": "a"}, "b"]"#).expect("objects").input, texts(&["a", "b"]));
        let one = input(r#"{"text": "a"}"#).expect("an object");
        assert_eq!((one.input, one.single), (texts(&["a"]), true));
        for wrong in [r#"[{"image": "x"}]"#, r#"[{"text": "a", "image": "x"}]"#, r#"["a", {}]"#] {
            assert_eq!(input(wrong).expect_err(wrong).param, Some("input"));
        }
    }

    #[test]
    fn a_field_that_would_change_the_result_is_parsed_or_rejected() {
        let with = |rest: &str| parse(&format!(r#"{{"model": "m", "input": "a", {rest}}}"#));
        let cut = |side, max_tokens| Truncation { truncate: Some(true), side, max_tokens };
        for (rest, expected) in [
            (r#""truncate": true"#, cut(TruncationSide::Right, None)),
            (r#""truncate": true, "truncation_direction": "left""#, cut(TruncationSide::Left, None)),
            (r#""truncate": "START""#, cut(TruncationSide::Left, None)),
            (r#""truncate": "NONE""#, Truncation { truncate: Some(false), ..Truncation::default() }),
            (r#""truncate_prompt_tokens": -1"#, cut(TruncationSide::Right, None)),
            (r#""truncate_prompt_tokens": 7, "truncation_side": "left""#, cut(TruncationSide::Left, Some(7))),
            (r#""user": "u""#, Truncation::default()),
        ] {
            assert_eq!(with(rest).expect(rest).truncation, expected, "{rest}");
        }
        for (rest, expected) in [
            (r#""task": "retrieval.query""#, Role::Query),
            (r#""task": "separation""#, Role::Clustering),
            (r#""input_type": "classification""#, Role::Classification),
        ] {
            assert_eq!(with(rest).expect(rest).prompt, PromptChoice::For(expected), "{rest}");
        }
        assert_eq!(with(r#""normalized": false"#).expect("a flag").normalize, Some(false));
        assert_eq!(with(r#""dimensions": 0"#).expect("Infinity's default").dimensions, None);
        assert_eq!(with(r#""embedding_type": "ubinary""#).expect("bits").encoding, Encoding::Ubinary);
        for neutral in [r#""late_chunking": false"#, r#""modality":"text""#, r#""late_chunking": null"#] {
            assert!(with(neutral).is_ok(), "{neutral}");
        }
        for (rest, param) in [
            (r#""late_chunking": true"#, "late_chunking"),
            (r#""messages": []"#, "messages"),
            (r#""output_dimension": 8"#, "output_dimension"),
            (r#""truncate_prompt_tokens": 0"#, "truncate_prompt_tokens"),
            (r#""truncate": "MIDDLE""#, "truncate"),
            (r#""truncation_side": "up""#, "truncation_side"),
            (r#""task": "dance""#, "task"),
            (r#""task": "separation", "input_type": "query""#, "task"),
            (r#""normalize": true, "normalized": false"#, "normalized"),
            (r#""embedding_type": "int8""#, "embedding_type"),
        ] {
            let refusal = with(rest).expect_err(rest);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some(param)), "{rest}");
        }
    }

    #[test]
    fn other_fields_have_defaults_and_unknown_fields_are_ignored() {
        let parsed = parse(r#"{"user": 3, "x": [{}], "input": "a", "model": "m", "dimensions": null}"#)
            .expect("a body");
        assert_eq!((parsed.encoding, parsed.dimensions), (Encoding::Float, None));
        let parsed = parse(r#"{"input": "a", "model": "m", "dimensions": 384, "encoding_format": "base64"}"#);
        let parsed = parsed.expect("a body");
        assert_eq!((parsed.encoding, parsed.dimensions), (Encoding::Base64, Some(384)));
        assert_eq!(parsed.prompt, PromptChoice::Default);
        let parsed = parse(r#"{"input": "a", "model": "m", "prompt_name": "query"}"#).expect("a body");
        assert_eq!(parsed.prompt, PromptChoice::Named("query".to_owned()));
        let parsed = parse(r#"{"input": "a", "model": "m", "input_type": "passage"}"#).expect("a body");
        assert_eq!(parsed.prompt, PromptChoice::For(Role::Document));
    }

    #[test]
    fn the_limits_of_dimensions_hold_at_the_limit_and_one_past_it() {
        assert_eq!(check_dimensions(None, 384), Ok(384));
        assert_eq!(check_dimensions(Some(384), 384), Ok(384));
        assert_eq!(check_dimensions(Some(1), 384), Ok(1));
        for wrong in [0, 385] {
            let refusal = check_dimensions(Some(wrong), 384).expect_err("out of range");
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("dimensions")));
            assert!(refusal.message.contains("1 to 384"), "{}", refusal.message);
        }
    }

    #[test]
    fn a_body_that_is_not_a_json_object_is_rejected() {
        for body in ["", "{", "nonsense", r#"["m", "a"]"#, "[", "3", "null", r#"{"model": "m" "input": "a"}"#]
        {
            check(body, ErrorCode::InvalidJson, None, "not a JSON object");
        }
        check(r#"{"model": "m", "model": "m"}"#, ErrorCode::InvalidJson, None, "duplicate field");
        let refusal = EmbeddingsRequest::parse(b"{\"model\": \"\xff\"}", LIMIT).expect_err("not UTF-8");
        assert_eq!(refusal.code, ErrorCode::InvalidJson);
    }

    #[test]
    fn a_field_that_is_absent_is_named() {
        check(r#"{"model": "m"}"#, ErrorCode::MissingField, Some("input"), "`input` is missing");
        check(r#"{"model": "m", "input": null}"#, ErrorCode::MissingField, Some("input"), "");
        check(r#"{"input": "a"}"#, ErrorCode::MissingField, Some("model"), "`model` is missing");
    }

    #[test]
    fn a_field_of_another_type_is_named() {
        let input = |input: &str| format!(r#"{{"model": "m", "input": {input}}}"#);
        for (wrong, path) in [
            ("3", "`input`"),
            ("true", "`input`"),
            ("{}", "`input`"),
            ("[null]", "`input[0]`"),
            (r#"["a", 1]"#, "`input[1]`"),
            (r#"["a", ["b"]]"#, "`input[1]`"),
            (r#"[[1], "a"]"#, "`input[1]`"),
            (r#"[["a"]]"#, "`input[0]`"),
            ("[1, -1]", "`input`"),
            ("[[1], [1.5]]", "`input[1]`"),
            (r#"["a", "\ud800"]"#, "`input[1]`"),
        ] {
            check(&input(wrong), ErrorCode::InvalidValue, Some("input"), path);
        }
        check(r#"{"model": 3, "input": "a"}"#, ErrorCode::InvalidValue, Some("model"), "`model`");
        for dimensions in ["-1", "1.5", "\"384\""] {
            let body = format!(r#"{{"model": "m", "input": "a", "dimensions": {dimensions}}}"#);
            check(&body, ErrorCode::InvalidValue, Some("dimensions"), "positive integer");
        }
        let both = r#"{"model": "m", "input": "a", "prompt_name": "q", "input_type": "query"}"#;
        check(both, ErrorCode::InvalidValue, Some("input_type"), "prompt_name");
        let kind = r#"{"model": "m", "input": "a", "input_type": "image"}"#;
        check(kind, ErrorCode::InvalidValue, Some("input_type"), "document");
        for format in ["\"int8\"", "3"] {
            let body = format!(r#"{{"model": "m", "input": "a", "encoding_format": {format}}}"#);
            check(&body, ErrorCode::InvalidValue, Some("encoding_format"), "base64");
        }
    }

    #[test]
    fn an_empty_input_is_named_by_its_index() {
        check(r#"{"model": "m", "input": ""}"#, ErrorCode::EmptyInput, Some("input"), "`input` is empty");
        check(r#"{"model": "m", "input": []}"#, ErrorCode::EmptyInput, Some("input"), "empty list");
        check(r#"{"model": "m", "input": ["a", ""]}"#, ErrorCode::EmptyInput, Some("input"), "`input[1]`");
        check(r#"{"model": "m", "input": [[1], []]}"#, ErrorCode::EmptyInput, Some("input"), "`input[1]`");
    }

    #[test]
    fn the_limit_of_inputs_holds_at_the_limit_and_one_past_it() {
        let body = |n: usize| format!(r#"{{"model": "m", "input": [{}]}}"#, vec!["\"a\""; n].join(","));
        assert_eq!(parse(&body(3)).expect("at the limit").input.count(), 3);
        check(&body(4), ErrorCode::TooManyInputs, Some("input"), "has 4 elements and the limit is 3");
        check(&body(70), ErrorCode::TooManyInputs, Some("input"), "has 70 elements");
    }
}
