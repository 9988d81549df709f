//! Extraction of the `model` and of a cost estimate from a JSON body, without parsing the inputs.
//!
//! The edge must know the deployment before it may forward a single byte, and must not pay for parsing the inputs,
//! which are nearly all of the body. So one pass scans the bytes: in strings it searches only for the closing quote,
//! between them it keeps the nesting in a bit stack, and only keys of the top-level object are compared with `model`.
//! It processes eight bytes or more at once. No tree is built and nothing is allocated until the value is found.
//!
//! The scan checks what it relies on (balanced nesting, terminated strings, a string key before each `:`), not all of
//! RFC 8259: an invalid number or escape inside an input passes here and is rejected by the replica, which parses in
//! full. It never reports a `model` that a full parser would not: a duplicate name is rejected, because two readers may
//! disagree on which one applies, and the residency policy of a request depends on it.
//!
//! The bulk client's scanner of responses (`loadtest`) has other rules: it returns every value in place and validates all of
//! the body, which here would cost the time that this scan saves.
//!
//! The cost is an estimate for limits, made without tokenization. Inputs are the elements of the longest list in the
//! top-level object or in an object there, which is where each API has its inputs (`input`, `inputs`, `texts`,
//! `documents`, `inputs.sentences`). Tokens are a fourth of the bytes of text, and every number in a list.

mod scanner;
mod swar;

use scanner::BodyScanner;

/// Maximum nesting of a body. An embeddings request needs three levels; a limit keeps the bit stack in one word.
pub const NESTING_MAX: u32 = 64;

/// Reason why no model was read from a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyProblem {
    /// Not JSON, or not a JSON object; at this byte.
    NotJson {
        /// Offset of the first invalid byte.
        at: usize,
        /// Expected syntax at this offset.
        expected: &'static str,
    },
    /// Nested deeper than [`NESTING_MAX`].
    TooDeep,
    /// `model` is present and is not a string.
    ModelNotText,
    /// `model` is present more than once.
    ModelTwice,
}

/// Summary of a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BodySummary {
    /// The top-level `model`.
    pub model: Option<String>,
    /// Number of texts, or of lists of token ids.
    pub inputs: u64,
    /// Estimated tokens of all inputs.
    pub tokens: u64,
    /// Whether there is a top-level `webhook` that is not null. Only a job has one.
    pub has_webhook: bool,
}

/// Estimated bytes of text per token; less for languages of long words, more for those without Latin letters.
pub const BYTES_PER_TOKEN: u64 = 4;

/// Scans the JSON object in `body`.
pub fn read(body: &[u8]) -> Result<BodySummary, BodyProblem> {
    let mut scanner = BodyScanner::new(body);
    scanner.space();
    scanner.take(b'{', "an object")?;
    let (mut model, mut has_webhook) = (None, false);
    scanner.space();
    if scanner.peek() == Some(b'}') {
        scanner.next();
        return end(scanner, model, has_webhook);
    }
    loop {
        scanner.space();
        let key = scanner.string("a key in double quotes")?;
        scanner.space();
        scanner.take(b':', "':' after a key")?;
        scanner.space();
        if is_key(key, b"model") {
            if model.is_some() {
                return Err(BodyProblem::ModelTwice);
            }
            if scanner.peek() != Some(b'"') {
                scanner.value()?;
                return Err(BodyProblem::ModelNotText);
            }
            model = Some(scanner.string("a string")?);
        } else {
            has_webhook |= is_key(key, b"webhook") && scanner.peek() != Some(b'n');
            scanner.value()?;
        }
        scanner.space();
        match scanner.next() {
            Some(b',') => {}
            Some(b'}') => return end(scanner, model, has_webhook),
            _ => return Err(scanner.unexpected_before("',' or '}'")),
        }
    }
}

/// Checks that only whitespace follows the object, and returns the summary.
fn end(
    mut scanner: BodyScanner<'_>,
    model: Option<&[u8]>,
    has_webhook: bool,
) -> Result<BodySummary, BodyProblem> {
    scanner.space();
    if scanner.peek().is_some() {
        return Err(scanner.unexpected("the end of the body"));
    }
    let decoded =
        |raw| unescape(raw).ok_or(BodyProblem::NotJson { at: 0, expected: "a readable string as 'model'" });
    let inputs = scanner.longest_list.max(1);
    let tokens = (scanner.text_bytes / BYTES_PER_TOKEN).saturating_add(scanner.numbers).max(inputs);
    Ok(BodySummary { model: model.map(decoded).transpose()?, inputs, tokens, has_webhook })
}

/// Returns whether the raw key between the quotes spells a name, escapes included. It stops at the first different
/// character: a body can have millions of keys, each of them written in escapes.
fn is_key(raw: &[u8], name: &[u8]) -> bool {
    let mut rest = raw;
    for letter in name {
        rest = match rest {
            [first, rest @ ..] if first == letter => rest,
            [b'\\', b'u', digits @ ..] => match digits.split_first_chunk::<4>() {
                Some((digits, rest)) if code_unit(digits) == Some(u16::from(*letter)) => rest,
                _ => return false,
            },
            _ => return false,
        };
    }
    rest.is_empty()
}

/// Returns the number in the four digits of a `\u` escape.
fn code_unit(digits: &[u8; 4]) -> Option<u16> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(number << 4 | u16::try_from(digit).ok()?)
    })
}

/// Returns the text of a JSON string, from between its quotes.
fn unescape(raw: &[u8]) -> Option<String> {
    serde_json::from_slice(&[b"\"", raw, b"\""].concat()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(body: &[u8]) -> Result<Option<String>, BodyProblem> {
        read(body).map(|summary| summary.model)
    }

    fn check(body: &str, expected: Result<&str, BodyProblem>) {
        assert_eq!(model(body.as_bytes()), expected.map(|name| Some(name.to_owned())), "{body}");
    }

    fn check_no_model(body: &str) {
        assert_eq!(model(body.as_bytes()), Ok(None), "{body}");
    }

    #[test]
    fn the_model_is_found_wherever_it_stands() {
        check(r#"{"model":"a","input":"x"}"#, Ok("a"));
        check(r#" { "input" : [ "x" , "y" ] , "model" : "a" } "#, Ok("a"));
        check(r#"{"input":[[1,2],[3]],"user":null,"model":"a","dimensions":-1.5e3}"#, Ok("a"));
        check("{\"model\":\"a\",\"input\":\"\u{1F600} \u{5d0}\"}", Ok("a"));
    }

    #[test]
    fn escapes_do_not_hide_or_forge_it() {
        check(r#"{"mod\u0065l":"a"}"#, Ok("a"));
        check(r#"{"\u006d\u006F\u0064\u0065\u006c":"a"}"#, Ok("a"));
        check_no_model(r#"{"mod\u0065":"a"}"#);
        check_no_model(r#"{"mod\u0065ll":"a"}"#);
        check_no_model(r#"{"mod\u0165l":"a"}"#);
        check_no_model(r#"{"mod\u006":"a"}"#);
        check_no_model(r#"{"mod\/l":"a"}"#);
        check(r#"{"model":"\u0061\"b"}"#, Ok("a\"b"));
        check(r#"{"input":"\"model\":\"forged\"","model":"true"}"#, Ok("true"));
        check(r#"{"input":"\\","model":"a"}"#, Ok("a"));
        check_no_model(r#"{"input":{"model":"nested"}}"#);
        check(r#"{"input":[{"model":"nested"}],"model":"a"}"#, Ok("a"));
    }

    #[test]
    fn a_webhook_is_found_unless_it_is_null() {
        for (body, expected) in [
            (r#"{"webhook":{"url":"u"}}"#, true),
            (r#"{"input":"x", "\u0077ebhook" : 1}"#, true),
            (r#"{"webhook":null,"input":"x"}"#, false),
            (r#"{"input":{"webhook":1}}"#, false),
            (r#"{"webhooks":1,"input":"webhook"}"#, false),
        ] {
            assert_eq!(read(body.as_bytes()).unwrap().has_webhook, expected, "{body}");
        }
    }

    #[test]
    fn an_ambiguous_model_is_rejected() {
        check(r#"{"model":"a","model":"b"}"#, Err(BodyProblem::ModelTwice));
        check(r#"{"model":"a","mod\u0065l":"b"}"#, Err(BodyProblem::ModelTwice));
        check(r#"{"model":7}"#, Err(BodyProblem::ModelNotText));
        check(r#"{"model":["a"]}"#, Err(BodyProblem::ModelNotText));
        check_no_model("{}");
    }

    #[test]
    fn an_invalid_object_is_rejected_with_the_offset() {
        let not_json = |at, expected| Err(BodyProblem::NotJson { at, expected });
        check("", not_json(0, "an object"));
        check("hello", not_json(0, "an object"));
        check("[1]", not_json(0, "an object"));
        check(r#"{"model":"a""#, not_json(11, "',' or '}'"));
        check(r#"{"model":"a"} x"#, not_json(14, "the end of the body"));
        check(r#"{"input":[1},"model":"a"}"#, not_json(11, "the bracket that closes the open one"));
        check(r#"{"input":"x"#, not_json(11, "'\"'"));
        check(r#"{model:"a"}"#, not_json(1, "a key in double quotes"));
        check(r#"{"input":,"model":"a"}"#, not_json(9, "a value"));
    }

    #[test]
    fn nesting_is_bounded_at_its_limit_and_not_before() {
        let nested = |levels: usize| {
            format!(r#"{{"input":{}{},"model":"a"}}"#, "[".repeat(levels), "]".repeat(levels))
        };
        check(&nested(NESTING_MAX as usize - 1), Ok("a"));
        check(&nested(NESTING_MAX as usize), Err(BodyProblem::TooDeep));
        check(&nested(10_000), Err(BodyProblem::TooDeep));
    }

    #[test]
    fn the_work_is_estimated_where_each_api_has_its_inputs() {
        let check = |body: &str, inputs: u64, tokens: u64| {
            let summary = read(body.as_bytes()).unwrap();
            assert_eq!((summary.inputs, summary.tokens), (inputs, tokens), "{body}");
        };
        check(r#"{"model":"a name that is long and no text","input":"eight by"}"#, 1, 2);
        check(r#"{"input":["four","four","eight by"],"user":null}"#, 3, 4);
        check(r#"{"input":[1,2,3]}"#, 1, 3);
        check(r#"{"input":[[1,2],[3]]}"#, 2, 3);
        check(r#"{"inputs":{"source_sentence":"four","sentences":["four","four","four"]}}"#, 3, 4);
        check(r#"{"inputs":[["four","four"]]}"#, 1, 2);
        check(r#"{"query":"four","documents":[{"text":"four"},{"text":"eight by","title":"four"}]}"#, 2, 5);
        check(r#"{"input":["",""]}"#, 2, 2);
        check(r#"{"input":[]}"#, 1, 1);
        check("{}", 1, 1);
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            ".*".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map("(model|input|.*)", inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_object_reads_as_the_full_parser_reads_it(
            mut fields in prop::collection::btree_map("(model|input|.*)", json(), 0..5),
            name in ".*",
        ) {
            fields.insert("model".into(), name.clone().into());
            let body = serde_json::to_vec(&fields).expect("a map serialises");
            prop_assert_eq!(model(&body), Ok(Some(name)));
        }

        #[test]
        fn the_number_of_inputs_equals_that_of_the_full_parser(texts in prop::collection::vec(".*", 0..20)) {
            let body = serde_json::to_vec(&serde_json::json!({"x": 1, "input": texts, "y": ["z"]})).expect("JSON");
            prop_assert_eq!(read(&body).map(|summary| summary.inputs), Ok(texts.len().max(1) as u64));
        }

        #[test]
        fn no_bytes_make_it_panic_or_differ_from_the_full_parser(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(parsed) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&bytes)
                && let Ok(name) = model(&bytes)
            {
                prop_assert_eq!(parsed.get("model").and_then(|value| value.as_str()), name.as_deref());
            }
        }
    }
}
