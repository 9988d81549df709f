//! Reading what strangers send, field by field.
//!
//! A body is first split into raw fields without looking into them, then each field is read by itself. So a mistake is
//! known by the field that it is in and not by a byte offset, unknown fields cost nothing, and a list that is too long
//! is counted, not stored. `null` is an absent field everywhere, as the stock clients use it.
//!
//! Types are taken strictly: `"3"` is not a number and `1` is not true. A client that mixes them up finds out at once
//! and not when it meets a stricter server.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::input::{End, Input, Truncation};
use crate::limits::AtMost;
use crate::prompt::{PromptChoice, Role};
use crate::refusal::Refusal;

/// What a list of inputs may be.
pub(super) const INPUT_WANTED: &str = "a text, a list of texts, a list of token ids, or a list of such lists";
const TEXT_WANTED: &str = "a text";
const LIST_WANTED: &str = "a list";

/// Splits a body into the raw fields of `T`.
pub(super) fn split<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    // A JSON list would do for serde's derive, field by field; it would not do for a reader of the API.
    if body.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|first| *first == b'[') {
        return Err(Refusal::not_json("it is a list"));
    }
    serde_json::from_slice(body).map_err(Refusal::not_json)
}

/// Splits the object in a field; `place` names it.
pub(super) fn split_field<'a, T: Deserialize<'a>>(
    field: &'static str,
    place: &str,
    raw: &'a RawValue,
) -> Result<T, Refusal> {
    let object = if raw.get().starts_with('{') { serde_json::from_str(raw.get()).ok() } else { None };
    object.ok_or_else(|| Refusal::invalid(field, place, "is not an object", "an object"))
}

/// The field, which has to be there.
pub(super) fn needed<'a>(
    field: &'static str,
    raw: Option<&'a RawValue>,
    wanted: &str,
) -> Result<&'a RawValue, Refusal> {
    raw.ok_or_else(|| Refusal::missing(field, wanted))
}

/// A text; `place` is the field or an element of it.
pub(super) fn text(field: &'static str, place: &str, raw: &RawValue) -> Result<String, Refusal> {
    let raw = raw.get();
    if kind_of(raw) != Kind::Text {
        return Err(wrong_type(field, place, TEXT_WANTED));
    }
    // Half of a surrogate pair is the one thing that a JSON string may escape and a text cannot contain.
    serde_json::from_str(raw)
        .map_err(|_| Refusal::invalid(field, place, "escapes half of a surrogate pair", "whole characters"))
}

/// A text that may be absent.
pub(super) fn optional_text(field: &'static str, raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    raw.map(|raw| text(field, field, raw)).transpose()
}

/// The name of a deployment.
pub(super) fn model(raw: Option<&RawValue>) -> Result<Option<String>, Refusal> {
    let name = |raw: &RawValue| {
        serde_json::from_str(raw.get())
            .map_err(|_| Refusal::invalid("model", "model", "is not a string", "the name of a deployment"))
    };
    raw.map(name).transpose()
}

/// A truth, with what is true without it.
pub(super) fn flag(field: &'static str, raw: Option<&RawValue>, otherwise: bool) -> Result<bool, Refusal> {
    match raw.map(RawValue::get) {
        None => Ok(otherwise),
        Some("true") => Ok(true),
        Some("false") => Ok(false),
        Some(_) => Err(Refusal::invalid(field, field, "is not a truth value", "true or false")),
    }
}

/// A whole number from 1 on.
pub(super) fn count(field: &'static str, raw: Option<&RawValue>) -> Result<Option<u64>, Refusal> {
    let read = |raw: &RawValue| {
        serde_json::from_str::<u64>(raw.get()).ok().filter(|n| *n > 0).ok_or_else(|| {
            Refusal::invalid(field, field, "is not a positive whole number", "one, or leave it out")
        })
    };
    raw.map(read).transpose()
}

/// One of a few words, with what is meant without it. `wanted` lists them.
pub(super) fn choice<T: Copy>(
    field: &'static str,
    raw: Option<&RawValue>,
    otherwise: T,
    words: &[(&str, T)],
    wanted: &str,
) -> Result<T, Refusal> {
    let Some(raw) = raw else { return Ok(otherwise) };
    let given = serde_json::from_str::<String>(raw.get()).ok();
    let known = words.iter().find(|(word, _)| given.as_deref() == Some(*word));
    known.map(|(_, meaning)| *meaning).ok_or_else(|| Refusal::invalid(field, field, "is not known", wanted))
}

/// A list of at least one element and at most `limit`; each element is read with its place.
pub(super) fn list<'a, T>(
    field: &'static str,
    place: &str,
    raw: &'a RawValue,
    limit: AtMost,
    mut read: impl FnMut(&str, &'a RawValue) -> Result<T, Refusal>,
) -> Result<Vec<T>, Refusal> {
    if kind_of(raw.get()) != Kind::List {
        return Err(wrong_type(field, place, LIST_WANTED));
    }
    let Capped { elements, given } = capped(raw.get(), limit.count)?;
    if given > limit.count {
        return Err(Refusal::too_many_inputs(field, limit, given));
    }
    if given == 0 {
        return Err(Refusal::no_inputs(field, place));
    }
    elements.iter().enumerate().map(|(i, element)| read(&format!("{place}[{i}]"), element)).collect()
}

/// What to compute: one text or list of token ids, or a list of those. The truth says whether it is the first.
pub(super) fn inputs(field: &'static str, raw: &RawValue, limit: AtMost) -> Result<(Input, bool), Refusal> {
    let wrong = |place: &str| wrong_type(field, place, INPUT_WANTED);
    match kind_of(raw.get()) {
        Kind::Text => Ok((Input::Texts(vec![text(field, field, raw)?]), true)),
        Kind::List => match first_kind(raw.get()) {
            None => Err(Refusal::no_inputs(field, field)),
            Some(Kind::Number) => Ok((Input::Tokens(vec![tokens(field, field, raw)?]), true)),
            Some(Kind::Text) => {
                let texts = list(field, field, raw, limit, |place, raw| match kind_of(raw.get()) {
                    Kind::Text => text(field, place, raw),
                    Kind::Number | Kind::List | Kind::Other => Err(wrong(place)),
                });
                Ok((Input::Texts(texts?), false))
            }
            Some(Kind::List) => {
                let tokens = list(field, field, raw, limit, |place, raw| tokens(field, place, raw));
                Ok((Input::Tokens(tokens?), false))
            }
            Some(Kind::Other) => Err(wrong(&format!("{field}[0]"))),
        },
        Kind::Number | Kind::Other => Err(wrong(field)),
    }
}

/// As [`inputs`]; a text may also stand in the `text` of an object, as Jina's clients send it.
pub(super) fn inputs_or_objects(
    field: &'static str,
    raw: &RawValue,
    limit: AtMost,
) -> Result<(Input, bool), Refusal> {
    if raw.get().starts_with('{') {
        return Ok((Input::Texts(vec![text_or_object(field, field, raw)?]), true));
    }
    match first_kind(raw.get()) {
        Some(Kind::Text | Kind::Other) if kind_of(raw.get()) == Kind::List => {
            let texts = list(field, field, raw, limit, |place, raw| text_or_object(field, place, raw))?;
            Ok((Input::Texts(texts), false))
        }
        _ => inputs(field, raw, limit),
    }
}

/// A text, or an object that holds a text and nothing else.
pub(super) fn text_or_object(field: &'static str, place: &str, raw: &RawValue) -> Result<String, Refusal> {
    if kind_of(raw.get()) == Kind::Text {
        return text(field, place, raw);
    }
    if !raw.get().starts_with('{') {
        return Err(wrong_type(field, place, "a text, or an object with `text`"));
    }
    let object: BTreeMap<String, &RawValue> = split_field(field, place, raw)?;
    match (object.len(), object.get("text")) {
        (1, Some(value)) => text(field, &format!("{place}.text"), value),
        _ => {
            Err(Refusal::invalid(field, place, "is an object with other members than `text`", "`text` alone"))
        }
    }
}

/// Which prompt stands before each text.
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
    let wanted = "\"query\", \"document\", \"classification\" or \"clustering\"";
    match (name, input_type) {
        (Some(_), Some(_)) => Err(Refusal::invalid(
            "input_type",
            "input_type",
            "is given beside `prompt_name`, and both choose the prompt",
            "one of them",
        )),
        (Some(name), None) => Ok(PromptChoice::Named(name)),
        (None, None) => Ok(PromptChoice::Default),
        (None, given) => Ok(PromptChoice::For(choice("input_type", given, Role::Query, &roles, wanted)?)),
    }
}

/// The words that `input_type` has.
pub(super) const INPUT_TYPES: &[&str] =
    &["query", "document", "search_query", "search_document", "passage", "classification", "clustering"];
/// The ends that a text can lose.
pub(super) const TRUNCATION_ENDS: &[&str] = &["left", "right"];

/// The one of two fields of the same meaning that is given; both are an error.
pub(super) fn one_of_two<'a>(
    first: &'static str,
    of_first: Option<&'a RawValue>,
    second: &'static str,
    of_second: Option<&'a RawValue>,
) -> Result<Option<(&'static str, &'a RawValue)>, Refusal> {
    match (of_first, of_second) {
        (Some(_), Some(_)) => {
            let problem = format!("is given beside `{first}`, which means the same");
            Err(Refusal::invalid(second, second, &problem, "one of them"))
        }
        (of_first, of_second) => Ok(of_first.map(|raw| (first, raw)).or(of_second.map(|raw| (second, raw)))),
    }
}

/// What a request says about inputs that are too long, in the words of TEI.
pub(super) fn truncation(
    truncate: Option<&RawValue>,
    truncation_direction: Option<&RawValue>,
) -> Result<Truncation, Refusal> {
    let loses = truncation_end("truncation_direction", truncation_direction)?;
    let truncate = truncate.map(|raw| flag("truncate", Some(raw), false)).transpose()?;
    Ok(Truncation { truncate, loses, most: None })
}

/// The end of a text that is cut off.
pub(super) fn truncation_end(field: &'static str, raw: Option<&RawValue>) -> Result<End, Refusal> {
    let ends = [("left", End::Left), ("Left", End::Left), ("right", End::Right), ("Right", End::Right)];
    choice(field, raw, End::Right, &ends, "\"left\" or \"right\"")
}

/// The words that Cohere and NVIDIA have for it.
pub(super) fn truncate_word(raw: Option<&RawValue>, otherwise: Truncation) -> Result<Truncation, Refusal> {
    let cut = |loses| Truncation { truncate: Some(true), loses, most: None };
    let words = [
        ("NONE", Truncation { truncate: Some(false), loses: End::Right, most: None }),
        ("START", cut(End::Left)),
        ("END", cut(End::Right)),
    ];
    choice("truncate", raw, otherwise, &words, "\"NONE\", \"START\" or \"END\"")
}

/// vLLM's `truncate_prompt_tokens`: every input is cut to so many tokens, special tokens included, and -1 cuts to what the
/// model reads. It decides over `otherwise`, which other fields said.
pub(super) fn truncate_prompt_tokens(
    raw: Option<&RawValue>,
    side: Option<&RawValue>,
    otherwise: Truncation,
) -> Result<Truncation, Refusal> {
    const FIELD: &str = "truncate_prompt_tokens";
    let loses = match side {
        Some(side) => truncation_end("truncation_side", Some(side))?,
        None => otherwise.loses,
    };
    let Some(raw) = raw else { return Ok(Truncation { loses, ..otherwise }) };
    let most = match serde_json::from_str::<i64>(raw.get()) {
        Ok(-1) => None,
        Ok(most @ 1..) => Some(most as u64),
        Ok(_) | Err(_) => {
            return Err(Refusal::invalid(
                FIELD,
                FIELD,
                "is neither -1 nor a positive whole number",
                "-1 to cut to what the model reads, or a number of tokens",
            ));
        }
    };
    Ok(Truncation { truncate: Some(true), loses, most })
}

/// Whether `given` is the JSON value `known`, which is a literal without spaces.
pub(super) fn same_json(known: &str, given: &RawValue) -> bool {
    let given = given.get();
    given == known || known == "[]" && first_kind(given).is_none() && given.starts_with('[')
}

/// Token ids: at least one.
pub(super) fn tokens(field: &'static str, place: &str, raw: &RawValue) -> Result<Vec<u32>, Refusal> {
    if kind_of(raw.get()) != Kind::List {
        return Err(wrong_type(field, place, INPUT_WANTED));
    }
    let tokens: Vec<u32> = serde_json::from_str(raw.get()).map_err(|_| {
        Refusal::invalid(field, place, "is not a list of token ids", "whole numbers from 0 on")
    })?;
    if tokens.is_empty() { Err(Refusal::empty_input(field, place)) } else { Ok(tokens) }
}

pub(super) fn wrong_type(field: &'static str, place: &str, wanted: &str) -> Refusal {
    Refusal::invalid(field, place, "is of a type that is not taken here", wanted)
}

/// What a JSON value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A string.
    Text,
    /// A number.
    Number,
    /// A list.
    List,
    /// An object, a truth, or null.
    Other,
}

/// What a JSON value is, by its first byte: the first pass over the body has checked that it is one.
pub(super) fn kind_of(raw: &str) -> Kind {
    match raw.bytes().next() {
        Some(b'"') => Kind::Text,
        Some(b'[') => Kind::List,
        Some(b'-' | b'0'..=b'9') => Kind::Number,
        Some(_) | None => Kind::Other,
    }
}

/// What the first element of a JSON list is; `None` when it has none.
pub(super) fn first_kind(list: &str) -> Option<Kind> {
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
    fn the_limit_of_a_list_holds_at_it_and_one_past_it_and_is_named() {
        let limit = AtMost { count: 2, key: "max_documents" };
        let read =
            |given: &str| list("documents", "documents", raw(given), limit, |_, raw| Ok(raw.get().len()));
        assert_eq!(read("[1, 22]"), Ok(vec![1, 2]));
        let refusal = read("[1, 22, 3]").expect_err("one past it");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::TooManyInputs, Some("documents")));
        for part in ["`documents` has 3", "carry 2", "max_documents"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
        assert_eq!(read("[]").expect_err("none").code, ErrorCode::EmptyInput);
        assert_eq!(read("3").expect_err("no list").code, ErrorCode::InvalidValue);
    }

    #[test]
    fn a_word_that_is_not_known_is_told_those_that_are() {
        let words = [("left", 1), ("right", 2)];
        let read = |given| choice("direction", given, 2, &words, "\"left\" or \"right\"");
        assert_eq!((read(None), read(Some(raw("\"left\"")))), (Ok(2), Ok(1)));
        for wrong in ["\"up\"", "3"] {
            assert!(read(Some(raw(wrong))).expect_err(wrong).message.contains("\"left\" or \"right\""));
        }
    }
}
