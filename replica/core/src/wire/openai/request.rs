//! The body of `POST /v1/embeddings`: bytes to a request, or to the field that is wrong with it.
//!
//! The body is first split into raw fields without looking into them, then each field is read by itself. So a mistake
//! is known by the field it is in and not by a byte offset, unknown fields cost nothing, and a list that is too long
//! is counted, not stored. `null` is an absent field, as OpenAI's own clients use it.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::input::Input;
use crate::refusal::Refusal;

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsRequest {
    /// The deployment.
    pub model: String,
    /// What to embed.
    pub input: Input,
    /// How vectors are written.
    pub encoding: Encoding,
    /// How many numbers a vector should have, where the caller says so.
    pub dimensions: Option<u64>,
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

const TEXT_WANTED: &str = "a text, a list of texts, a list of token ids, or a list of such lists";

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
}

impl EmbeddingsRequest {
    /// Reads `body`, which may carry at most `max_inputs` inputs.
    pub fn parse(body: &[u8], max_inputs: usize) -> Result<EmbeddingsRequest, Refusal> {
        // A JSON list would do for serde's derive, field by field; it would not do for a reader of the API.
        if body.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|first| *first == b'[') {
            return Err(Refusal::not_json("it is a list"));
        }
        let fields: RawFields<'_> = serde_json::from_slice(body).map_err(Refusal::not_json)?;
        let RawFields { model, input, encoding_format, dimensions } = fields;
        let model = model.ok_or_else(|| Refusal::missing("model", "the name of a deployment"))?;
        let model = serde_json::from_str(model.get())
            .map_err(|_| Refusal::invalid("model", "model", "is not a string", "the name of a deployment"))?;
        let input = input.ok_or_else(|| Refusal::missing("input", TEXT_WANTED))?;
        Ok(EmbeddingsRequest {
            model,
            input: parse_input(input.get(), max_inputs)?,
            encoding: encoding_format.map_or(Ok(Encoding::default()), |raw| parse_encoding(raw.get()))?,
            dimensions: dimensions.map(|raw| parse_dimensions(raw.get())).transpose()?,
        })
    }

    /// Refuses a number of dimensions that the model does not have.
    pub fn check_dimensions(&self, model_dimensions: usize) -> Result<(), Refusal> {
        match self.dimensions {
            Some(wanted) if wanted != model_dimensions as u64 => Err(Refusal::invalid(
                "dimensions",
                "dimensions",
                &format!("is {wanted} and the vectors of this model have {model_dimensions}"),
                &format!("{model_dimensions}, or leave it out"),
            )),
            Some(_) | None => Ok(()),
        }
    }
}

fn parse_encoding(raw: &str) -> Result<Encoding, Refusal> {
    match serde_json::from_str::<String>(raw).as_deref() {
        Ok("float") => Ok(Encoding::Float),
        Ok("base64") => Ok(Encoding::Base64),
        Ok(_) | Err(_) => Err(Refusal::invalid(
            "encoding_format",
            "encoding_format",
            "is not known",
            "\"float\" or \"base64\"",
        )),
    }
}

fn parse_dimensions(raw: &str) -> Result<u64, Refusal> {
    serde_json::from_str::<u64>(raw).ok().filter(|wanted| *wanted > 0).ok_or_else(|| {
        Refusal::invalid("dimensions", "dimensions", "is not a positive whole number", "one, or leave it out")
    })
}

fn parse_input(raw: &str, max_inputs: usize) -> Result<Input, Refusal> {
    match kind_of(raw) {
        Kind::Text => Ok(Input::Texts(vec![parse_text(raw, "input")?])),
        Kind::List => match first_kind(raw) {
            None => Err(Refusal::no_inputs()),
            Some(Kind::Number) => Ok(Input::Tokens(vec![parse_tokens(raw, "input")?])),
            Some(Kind::Text) => parse_list(raw, max_inputs, parse_text).map(Input::Texts),
            Some(Kind::List) => parse_list(raw, max_inputs, parse_tokens).map(Input::Tokens),
            Some(Kind::Other) => Err(wrong_type("input[0]")),
        },
        Kind::Number | Kind::Other => Err(wrong_type("input")),
    }
}

fn parse_list<T>(
    raw: &str,
    max_inputs: usize,
    parse: fn(&str, &str) -> Result<T, Refusal>,
) -> Result<Vec<T>, Refusal> {
    let Capped { elements, given } = capped(raw, max_inputs)?;
    if given > max_inputs {
        return Err(Refusal::too_many_inputs(max_inputs, given));
    }
    elements.iter().enumerate().map(|(i, element)| parse(element.get(), &format!("input[{i}]"))).collect()
}

fn parse_text(raw: &str, place: &str) -> Result<String, Refusal> {
    if kind_of(raw) != Kind::Text {
        return Err(wrong_type(place));
    }
    // Half of a surrogate pair is the one thing that a JSON string may escape and a text cannot contain.
    let text: String = serde_json::from_str(raw).map_err(|_| {
        Refusal::invalid("input", place, "escapes half of a surrogate pair", "whole characters")
    })?;
    if text.is_empty() { Err(Refusal::empty_input(place)) } else { Ok(text) }
}

fn parse_tokens(raw: &str, place: &str) -> Result<Vec<u32>, Refusal> {
    if kind_of(raw) != Kind::List {
        return Err(wrong_type(place));
    }
    let tokens: Vec<u32> = serde_json::from_str(raw).map_err(|_| {
        Refusal::invalid("input", place, "is not a list of token ids", "whole numbers from 0 on")
    })?;
    if tokens.is_empty() { Err(Refusal::empty_input(place)) } else { Ok(tokens) }
}

fn wrong_type(place: &str) -> Refusal {
    Refusal::invalid("input", place, "is of a type that is not taken here", TEXT_WANTED)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    List,
    Other,
}

/// What a JSON value is, by its first byte: the first pass over the body has checked that it is one.
fn kind_of(raw: &str) -> Kind {
    match raw.bytes().next() {
        Some(b'"') => Kind::Text,
        Some(b'[') => Kind::List,
        Some(b'-' | b'0'..=b'9') => Kind::Number,
        Some(_) | None => Kind::Other,
    }
}

/// What the first element of a JSON list is; `None` when it has none.
fn first_kind(list: &str) -> Option<Kind> {
    let inside = list.strip_prefix('[')?.trim_start();
    (!inside.starts_with(']')).then(|| kind_of(inside))
}

/// The first elements of a list, and how many it has.
struct Capped<'a> {
    elements: Vec<&'a RawValue>,
    given: usize,
}

fn capped(raw: &str, max: usize) -> Result<Capped<'_>, Refusal> {
    struct Cap(usize);
    impl<'de> DeserializeSeed<'de> for Cap {
        type Value = Capped<'de>;
        fn deserialize<D: serde::Deserializer<'de>>(self, list: D) -> Result<Capped<'de>, D::Error> {
            list.deserialize_seq(self)
        }
    }
    impl<'de> Visitor<'de> for Cap {
        type Value = Capped<'de>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Capped<'de>, A::Error> {
            let mut elements = Vec::new();
            while elements.len() < self.0 {
                match list.next_element::<&RawValue>()? {
                    Some(element) => elements.push(element),
                    None => {
                        return Ok(Capped { given: elements.len(), elements });
                    }
                }
            }
            let mut given = elements.len();
            while list.next_element::<IgnoredAny>()?.is_some() {
                given += 1;
            }
            Ok(Capped { elements, given })
        }
    }
    Cap(max).deserialize(&mut serde_json::Deserializer::from_str(raw)).map_err(Refusal::not_json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    fn parse(body: &str) -> Result<EmbeddingsRequest, Refusal> {
        EmbeddingsRequest::parse(body.as_bytes(), 3)
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
        assert_eq!(parsed.check_dimensions(384), Ok(()));
        let refusal = parsed.check_dimensions(383).expect_err("another number of dimensions");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("dimensions")));
        assert!(refusal.message.contains("384") && refusal.message.contains("383"));
    }

    #[test]
    fn a_body_that_is_not_a_json_object_is_told_where() {
        for body in ["", "{", "nonsense", r#"["m", "a"]"#, "[", "3", "null", r#"{"model": "m" "input": "a"}"#]
        {
            check(body, ErrorCode::InvalidJson, None, "not a JSON object");
        }
        check(r#"{"model": "m", "model": "m"}"#, ErrorCode::InvalidJson, None, "duplicate field");
        let refusal = EmbeddingsRequest::parse(b"{\"model\": \"\xff\"}", 3).expect_err("not UTF-8");
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
