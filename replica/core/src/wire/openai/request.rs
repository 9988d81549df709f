//! The body of `POST /v1/embeddings`: bytes to a request, or to the field that is wrong with it.
//!
//! Two fields are not OpenAI's. `prompt_name` names a prompt of the model's configuration, as TEI has it; `input_type`
//! says what the text is (`query` or `document`, as in Cohere's, Voyage's and NVIDIA's embedding APIs) and lets the model
//! choose. Instruction-tuned models are wrong without their prompt, and clients of OpenAI's API can send extra fields.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::input::Input;
use crate::limits::AtMost;
use crate::prompt::PromptChoice;
use crate::refusal::Refusal;
use crate::wire::fields;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsRequest {
    /// The deployment.
    pub model: String,
    /// What to embed; no text is empty.
    pub input: Input,
    /// Whether `input` was one input and not a list of them.
    pub single: bool,
    /// How vectors are written.
    pub encoding: Encoding,
    /// How many numbers a vector should have, where the caller says so.
    pub dimensions: Option<u64>,
    /// What stands before each text.
    pub prompt: PromptChoice,
}

/// How a vector is written into the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// A JSON list of numbers.
    #[default]
    Float,
    /// Base64 of the little-endian f32 numbers: a third of the bytes, and what the Python client asks for.
    Base64,
}

/// The fields that are read. Everything else is ignored, as OpenAI does; that includes `user`.
#[derive(Deserialize)]
struct RawFields<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow)]
    encoding_format: Option<&'a RawValue>,
    #[serde(borrow)]
    dimensions: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_name: Option<&'a RawValue>,
    #[serde(borrow)]
    input_type: Option<&'a RawValue>,
}

impl EmbeddingsRequest {
    /// Reads `body`, which may carry so many inputs.
    pub fn parse(body: &[u8], limit: AtMost) -> Result<EmbeddingsRequest, Refusal> {
        let RawFields { model, input, encoding_format, dimensions, prompt_name, input_type } =
            fields::split(body)?;
        let model =
            fields::model(model)?.ok_or_else(|| Refusal::missing("model", "the name of a deployment"))?;
        let (input, single) =
            fields::inputs("input", fields::needed("input", input, fields::INPUT_WANTED)?, limit)?;
        let encodings = [("float", Encoding::Float), ("base64", Encoding::Base64)];
        let wanted = "\"float\" or \"base64\"";
        let request = EmbeddingsRequest {
            model,
            input,
            single,
            encoding: fields::choice(
                "encoding_format",
                encoding_format,
                Encoding::default(),
                &encodings,
                wanted,
            )?,
            dimensions: fields::count("dimensions", dimensions)?,
            prompt: fields::prompt(prompt_name, input_type)?,
        };
        request.check_texts()?;
        Ok(request)
    }

    /// OpenAI refuses empty texts; there is nothing that a vector could say about them.
    fn check_texts(&self) -> Result<(), Refusal> {
        let Input::Texts(texts) = &self.input else { return Ok(()) };
        match texts.iter().position(String::is_empty) {
            Some(_) if self.single => Err(Refusal::empty_input("input", "input")),
            Some(i) => Err(Refusal::empty_input("input", &format!("input[{i}]"))),
            None => Ok(()),
        }
    }
}

/// How many numbers a vector of a model with so many has, if so many are `wanted`: fewer are the first ones, as
/// Matryoshka models are trained for.
pub fn check_dimensions(wanted: Option<u64>, model_dimensions: usize) -> Result<usize, Refusal> {
    match wanted {
        None => Ok(model_dimensions),
        Some(wanted @ 1..) if wanted <= model_dimensions as u64 => Ok(wanted as usize),
        Some(wanted) => Err(Refusal::invalid(
            "dimensions",
            "dimensions",
            &format!("is {wanted} and the vectors of this model have {model_dimensions}"),
            &format!("1 to {model_dimensions}, or leave it out"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Role;
    use crate::wire::error::ErrorCode;

    const LIMIT: AtMost = AtMost { count: 3, key: "max_inputs" };

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
    fn every_form_of_input_is_read() {
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
    fn a_token_list_may_be_longer_than_a_list_of_inputs() {
        let parsed = parse(r#"{"model": "m", "input": [1, 2, 3, 4, 5]}"#).expect("five tokens of one input");
        assert_eq!(parsed.input.count(), 1);
    }

    #[test]
    fn the_other_fields_have_defaults_and_strangers_are_ignored() {
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
    fn the_limits_of_dimensions_hold_at_them_and_one_past_them() {
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
    fn a_body_that_is_not_a_json_object_is_told_where() {
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
        for (wrong, place) in [
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
            check(&input(wrong), ErrorCode::InvalidValue, Some("input"), place);
        }
        check(r#"{"model": 3, "input": "a"}"#, ErrorCode::InvalidValue, Some("model"), "`model`");
        for dimensions in ["0", "-1", "1.5", "\"384\""] {
            let body = format!(r#"{{"model": "m", "input": "a", "dimensions": {dimensions}}}"#);
            check(&body, ErrorCode::InvalidValue, Some("dimensions"), "whole number");
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
    fn the_limit_of_inputs_holds_at_it_and_one_past_it() {
        let body = |n: usize| format!(r#"{{"model": "m", "input": [{}]}}"#, vec!["\"a\""; n].join(","));
        assert_eq!(parse(&body(3)).expect("at the limit").input.count(), 3);
        check(
            &body(4),
            ErrorCode::TooManyInputs,
            Some("input"),
            "has 4 elements and one request may carry 3",
        );
        check(&body(70), ErrorCode::TooManyInputs, Some("input"), "has 70 elements");
    }
}
