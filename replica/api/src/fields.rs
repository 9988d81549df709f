//! Parsers of the fields of untrusted request bodies.
//!
//! A body is first split into raw fields without parsing their values, then each field is parsed by itself. So an error
//! names its field and not a byte offset, unknown fields cost nothing, and a list that is too long is counted, not
//! stored. `null` is an absent field everywhere, as the stock clients use it. This is serde's parser and no scanner of its own:
//! an error must name its field, which the scanners of gateway and bulk client need not.
//!
//! Types are strict: `"3"` is not a number and `1` is not a boolean. A client that confuses them gets an error at once
//! and not when it meets a stricter server.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::input::{Input, Truncation, TruncationSide};
use crate::prompt::{PromptChoice, Role};
use crate::refusal::{ListLimit, Refusal};

/// Valid types of a list of inputs.
pub(super) const INPUT_EXPECTED: &str =
    "a text, a list of texts, a list of token ids, or a list of such lists";
const TEXT_EXPECTED: &str = "a text";
const LIST_EXPECTED: &str = "a list";

/// Splits a body into the raw fields of `T`.
pub(super) fn split<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    // serde's derive would accept a JSON list, field by field; the API does not.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|first| *first == b'[') {
        return Err(Refusal::not_json("it is a list"));
    }
    serde_json::from_slice(body).map_err(Refusal::not_json)
}

/// Splits the object in a field; `path` names it.
pub(super) fn split_field<'a, T: Deserialize<'a>>(
    field: &'static str,
    path: &str,
    raw: &'a RawValue,
) -> Result<T, Refusal> {
    let object = if raw.get().starts_with('{') { serde_json::from_str(raw.get()).ok() } else { None };
    object.ok_or_else(|| Refusal::invalid(field, path, "is not an object", "an object"))
}

/// Returns the field, which is required.
pub(super) fn required<'a>(
    field: &'static str,
    raw: Option<&'a RawValue>,
    expected: &str,
) -> Result<&'a RawValue, Refusal> {
    raw.ok_or_else(|| Refusal::missing(field, expected))
}

/// Parses a text; `path` is the field or an element of it.
pub(super) fn text(field: &'static str, path: &str, raw: &RawValue) -> Result<String, Refusal> {
    let raw = raw.get();
    if kind_of(raw) != Kind::Text {
        return Err(wrong_type(field, path, TEXT_EXPECTED));
    }
    // An unpaired surrogate is the only escape that a JSON string may contain and a Rust string cannot.
    serde_json::from_str(raw).map_err(|_| {
        Refusal::invalid(field, path, "contains an unpaired surrogate", "complete surrogate pairs")
    })
}

/// Parses an optional text.
pub(super) fn optional_text(field: &'static str, raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    raw.map(|raw| text(field, field, raw)).transpose()
}

/// Parses the name of a deployment.
pub(super) fn model(raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    let name = |raw: &RawValue| {
        serde_json::from_str(raw.get())
            .map_err(|_| Refusal::invalid("model", "model", "is not a string", "the name of a deployment"))
    };
    raw.map(name).transpose()
}

/// Parses a boolean with a default.
pub(super) fn flag(field: &'static str, raw: Option<&RawValue>, default: bool) -> Result<bool, Refusal> {
    match raw.map(RawValue::get) {
        None => Ok(default),
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(Refusal::invalid(field, field, "is not a boolean", "true or false")),
    }
}

/// Parses a positive integer.
pub(super) fn count(field: &'static str, raw: Option<&RawValue>) -> Result<Option<u64>, Refusal> {
    let read = |raw: &RawValue| {
        serde_json::from_str::<u64>(raw.get()).ok().filter(|n| *n > 0).ok_or_else(|| {
            Refusal::invalid(field, field, "is not a positive integer", "one, or leave it out")
        })
    };
    raw.map(read).transpose()
}

/// Parses one of several names, with a default. `expected` lists them.
pub(super) fn choice<T: Copy>(
    field: &'static str,
    raw: Option<&RawValue>,
    default: T,
    words: &[(&str, T)],
    expected: &str,
) -> Result<T, Refusal> {
    let Some(raw) = raw else { return Ok(default) };
    let given = serde_json::from_str::<String>(raw.get()).ok();
    let known = words.iter().find(|(word, _)| given.as_deref() == Some(*word));
    known
        .map(|(_, meaning)| *meaning)
        .ok_or_else(|| Refusal::invalid(field, field, "is not supported", expected))
}

/// Parses a list of at least one element and at most `limit`; `read` gets the path of each element.
pub(super) fn list<'a, T>(
    field: &'static str,
    path: &str,
    raw: &'a RawValue,
    limit: ListLimit,
    mut read: impl FnMut(&str, &'a RawValue) -> Result<T, Refusal>,
) -> Result<Vec<T>, Refusal> {
    if kind_of(raw.get()) != Kind::List {
        return Err(wrong_type(field, path, LIST_EXPECTED));
    }
    let BoundedList { elements, given } = bounded_list(raw.get(), limit.count)?;
    if given > limit.count {
        return Err(Refusal::too_many_inputs(field, limit, given));
    }
    if given == 0 {
        return Err(Refusal::no_inputs(field, path));
    }
    elements.iter().enumerate().map(|(i, element)| read(&format!("{path}[{i}]"), element)).collect()
}

/// Parses inputs: one text or list of token ids, or a list of those. Returns whether it is a single input.
pub(super) fn inputs(
    field: &'static str,
    raw: &RawValue,
    limit: ListLimit,
) -> Result<(Input, bool), Refusal> {
    let wrong = |path: &str| wrong_type(field, path, INPUT_EXPECTED);
    match kind_of(raw.get()) {
        Kind::Text => Ok((Input::Texts(vec![text(field, field, raw)?]), true)),
        Kind::List => match first_kind(raw.get()) {
            None => Err(Refusal::no_inputs(field, field)),
            Some(Kind::Number) => Ok((Input::Tokens(vec![tokens(field, field, raw)?]), true)),
            Some(Kind::Text) => {
                let texts = list(field, field, raw, limit, |path, raw| match kind_of(raw.get()) {
                    Kind::Text => text(field, path, raw),
                    Kind::Number | Kind::List | Kind::Other => Err(wrong(path)),
                });
                Ok((Input::Texts(texts?), false))
            }
            Some(Kind::List) => {
                let tokens = list(field, field, raw, limit, |path, raw| tokens(field, path, raw));
                Ok((Input::Tokens(tokens?), false))
            }
            Some(Kind::Other) => Err(wrong(&format!("{field}[0]"))),
        },
        Kind::Number | Kind::Other => Err(wrong(field)),
    }
}

/// Parses inputs as [`inputs`] does; a text may also be the `text` of an object, as Jina's clients send it.
pub(super) fn inputs_or_objects(
    field: &'static str,
    raw: &RawValue,
    limit: ListLimit,
) -> Result<(Input, bool), Refusal> {
    if raw.get().starts_with('{') {
        return Ok((Input::Texts(vec![text_or_object(field, field, raw)?]), true));
    }
    match first_kind(raw.get()) {
        Some(Kind::Text | Kind::Other) if kind_of(raw.get()) == Kind::List => {
            let texts = list(field, field, raw, limit, |path, raw| text_or_object(field, path, raw))?;
            Ok((Input::Texts(texts), false))
        }
        _ => inputs(field, raw, limit),
    }
}

/// Parses a text, or an object with the only member `text`.
pub(super) fn text_or_object(field: &'static str, path: &str, raw: &RawValue) -> Result<String, Refusal> {
    if kind_of(raw.get()) == Kind::Text {
        return text(field, path, raw);
    }
    if !raw.get().starts_with('{') {
        return Err(wrong_type(field, path, "a text, or an object with `text`"));
    }
    let object: BTreeMap<String, &RawValue> = split_field(field, path, raw)?;
    match (object.len(), object.get("text")) {
        (1, Some(value)) => text(field, &format!("{path}.text"), value),
        _ => {
            Err(Refusal::invalid(field, path, "is an object with other members than `text`", "`text` alone"))
        }
    }
}

/// Parses the prompt of each text.
pub(super) fn prompt(
    prompt_name: Option<&RawValue>,
    input_type: Option<&RawValue>,
) -> Result<PromptChoice, Refusal> {
    let name = optional_text("prompt_name", prompt_name)?;
    let roles = [
        ("query", Role::Query),
        ("search_query", Role::Query),
        ("document", Role::Document),
        ("passage", Role::Document),
        ("search_document", Role::Document),
        ("classification", Role::Classification),
        ("clustering", Role::Clustering),
    ];
    let expected = "\"query\", \"document\", \"classification\" or \"clustering\"";
    match (name, input_type) {
        (Some(_), Some(_)) => Err(Refusal::invalid(
            "input_type",
            "input_type",
            "conflicts with `prompt_name`, which also selects the prompt",
            "one of them",
        )),
        (Some(name), None) => Ok(PromptChoice::Named(name)),
        (None, None) => Ok(PromptChoice::Default),
        (None, given) => Ok(PromptChoice::For(choice("input_type", given, Role::Query, &roles, expected)?)),
    }
}

/// Values of `input_type`.
pub(super) const INPUT_TYPES: &[&str] =
    &["query", "document", "search_query", "search_document", "passage", "classification", "clustering"];
/// Sides from which a text can be truncated.
pub(super) const TRUNCATION_SIDES: &[&str] = &["left", "right"];

/// Returns the one of two synonymous fields that is present; both are an error.
pub(super) fn one_of_two<'a>(
    first: &'static str,
    of_first: Option<&'a RawValue>,
    second: &'static str,
    of_second: Option<&'a RawValue>,
) -> Result<Option<(&'static str, &'a RawValue)>, Refusal> {
    match (of_first, of_second) {
        (Some(_), Some(_)) => {
            let problem = format!("conflicts with `{first}`, which has the same meaning");
            Err(Refusal::invalid(second, second, &problem, "one of them"))
        }
        (of_first, of_second) => Ok(of_first.map(|raw| (first, raw)).or(of_second.map(|raw| (second, raw)))),
    }
}

/// Parses the truncation options of TEI.
pub(super) fn truncation(
    truncate: Option<&RawValue>,
    truncation_direction: Option<&RawValue>,
) -> Result<Truncation, Refusal> {
    let side = truncation_side("truncation_direction", truncation_direction)?;
    let truncate = truncate.map(|raw| flag("truncate", Some(raw), false)).transpose()?;
    Ok(Truncation { truncate, side, max_tokens: None })
}

/// Parses the side from which tokens are removed.
pub(super) fn truncation_side(
    field: &'static str,
    raw: Option<&RawValue>,
) -> Result<TruncationSide, Refusal> {
    let ends = [
        ("left", TruncationSide::Left),
        ("Left", TruncationSide::Left),
        ("right", TruncationSide::Right),
        ("Right", TruncationSide::Right),
    ];
    choice(field, raw, TruncationSide::Right, &ends, "\"left\" or \"right\"")
}

/// Parses the truncation options of Cohere and NVIDIA.
pub(super) fn truncate_keyword(raw: Option<&RawValue>, default: Truncation) -> Result<Truncation, Refusal> {
    let cut = |side| Truncation { truncate: Some(true), side, max_tokens: None };
    let words = [
        ("NONE", Truncation { truncate: Some(false), side: TruncationSide::Right, max_tokens: None }),
        ("START", cut(TruncationSide::Left)),
        ("END", cut(TruncationSide::Right)),
    ];
    choice("truncate", raw, default, &words, "\"NONE\", \"START\" or \"END\"")
}

/// Name of vLLM's field for truncation.
pub(super) const TRUNCATE_PROMPT_TOKENS: &str = "truncate_prompt_tokens";

/// Parses vLLM's `truncate_prompt_tokens`: every input is truncated to this number of tokens, special tokens included;
/// -1 means the model's limit. It overrides `default`, the truncation of other fields.
pub(super) fn truncate_prompt_tokens(
    raw: Option<&RawValue>,
    side: Option<&RawValue>,
    default: Truncation,
) -> Result<Truncation, Refusal> {
    let side = match side {
        Some(side) => truncation_side("truncation_side", Some(side))?,
        None => default.side,
    };
    let Some(raw) = raw else { return Ok(Truncation { side, ..default }) };
    let max_tokens = match serde_json::from_str::<i64>(raw.get()) {
        Ok(-1) => None,
        Ok(tokens @ 1..) => Some(tokens as u64),
        Ok(_) | Err(_) => {
            return Err(Refusal::invalid(
                TRUNCATE_PROMPT_TOKENS,
                TRUNCATE_PROMPT_TOKENS,
                "is neither -1 nor a positive integer",
                "-1 to truncate to the limit of the model, or a number of tokens",
            ));
        }
    };
    Ok(Truncation { truncate: Some(true), side, max_tokens })
}

/// Returns whether `given` is the JSON value `known`, which is a literal without spaces.
pub(super) fn same_json(known: &str, given: &RawValue) -> bool {
    let given = given.get();
    given == known || known == "[]" && first_kind(given).is_none() && given.starts_with('[')
}

/// Parses a list of at least one token id.
pub(super) fn tokens(field: &'static str, path: &str, raw: &RawValue) -> Result<Vec<u32>, Refusal> {
    if kind_of(raw.get()) != Kind::List {
        return Err(wrong_type(field, path, INPUT_EXPECTED));
    }
    let tokens: Vec<u32> = serde_json::from_str(raw.get())
        .map_err(|_| Refusal::invalid(field, path, "is not a list of token ids", "integers from 0"))?;
    if tokens.is_empty() { Err(Refusal::empty_input(field, path)) } else { Ok(tokens) }
}

pub(super) fn wrong_type(field: &'static str, path: &str, expected: &str) -> Refusal {
    Refusal::invalid(field, path, "has an unsupported type", expected)
}

/// Kind of a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string.
    Text,
    /// A number.
    Number,
    /// A list.
    List,
    /// An object, a boolean, or null.
    Other,
}

/// Returns the kind of a JSON value, by its first byte; the body is already known to be valid JSON.
pub(super) fn kind_of(raw: &str) -> Kind {
    match raw.bytes().next() {
        Some(b'"') => Kind::Text,
        Some(b'[') => Kind::List,
        Some(b'-' | b'0'..=b'9') => Kind::Number,
        Some(_) | None => Kind::Other,
    }
}

/// Returns the kind of the first element of a JSON list; `None` if it is empty.
pub(super) fn first_kind(list: &str) -> Option<Kind> {
    let inside = list.strip_prefix('[')?.trim_start();
    (!inside.starts_with(']')).then(|| kind_of(inside))
}

/// First elements of a list, and its length.
struct BoundedList<'a> {
    elements: Vec<&'a RawValue>,
    given: usize,
}

fn bounded_list(raw: &str, max: usize) -> Result<BoundedList<'_>, Refusal> {
    struct ListBound(usize);
    impl<'de> DeserializeSeed<'de> for ListBound {
        type Value = BoundedList<'de>;
        fn deserialize<D: serde::Deserializer<'de>>(self, list: D) -> Result<BoundedList<'de>, D::Error> {
            list.deserialize_seq(self)
        }
    }
    impl<'de> Visitor<'de> for ListBound {
        type Value = BoundedList<'de>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<BoundedList<'de>, A::Error> {
            let mut elements = Vec::new();
            while elements.len() < self.0 {
                match list.next_element::<&RawValue>()? {
                    Some(element) => elements.push(element),
                    None => {
                        return Ok(BoundedList { given: elements.len(), elements });
                    }
                }
            }
            let mut given = elements.len();
            while list.next_element::<IgnoredAny>()?.is_some() {
                given += 1;
            }
            Ok(BoundedList { elements, given })
        }
    }
    ListBound(max).deserialize(&mut serde_json::Deserializer::from_str(raw)).map_err(Refusal::not_json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    fn raw(text: &str) -> &RawValue {
        serde_json::from_str(text).expect(text)
    }

    #[test]
    fn types_are_taken_strictly() {
        assert_eq!(flag("truncate", None, true), Ok(true));
        assert_eq!(flag("truncate", Some(raw("false")), true), Ok(false));
        for wrong in ["1", "\"true\"", "[]", "{}"] {
            let refusal = flag("truncate", Some(raw(wrong)), true).expect_err(wrong);
            assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("truncate")));
        }
        assert_eq!(count("top_n", Some(raw("1"))), Ok(Some(1)));
        for wrong in ["0", "-1", "1.0", "\"1\"", "true"] {
            assert!(count("top_n", Some(raw(wrong))).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_limit_of_a_list_holds_at_the_limit_and_one_past_it_and_is_named() {
        let limit = ListLimit { count: 2, key: "max_documents" };
        let read =
            |given: &str| list("documents", "documents", raw(given), limit, |_, raw| Ok(raw.get().len()));
        assert_eq!(read("[1, 22]"), Ok(vec![1, 2]));
        let refusal = read("[1, 22, 3]").expect_err("one past it");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::TooManyInputs, Some("documents")));
        for part in ["`documents` has 3", "limit is 2", "max_documents"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
        assert_eq!(read("[]").expect_err("none").code, ErrorCode::EmptyInput);
        assert_eq!(read("3").expect_err("no list").code, ErrorCode::InvalidValue);
    }

    #[test]
    fn an_unsupported_value_is_rejected_with_the_supported_ones() {
        let words = [("left", 1), ("right", 2)];
        let read = |given| choice("direction", given, 2, &words, "\"left\" or \"right\"");
        assert_eq!((read(None), read(Some(raw("\"left\"")))), (Ok(2), Ok(1)));
        for wrong in ["\"up\"", "3"] {
            assert!(read(Some(raw(wrong))).expect_err(wrong).message.contains("\"left\" or \"right\""));
        }
    }
}
