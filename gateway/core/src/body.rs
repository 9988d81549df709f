//! Finds `model` in a JSON body without parsing the inputs.
//!
//! The edge must know the deployment before it may send a single byte on, and must not pay for the inputs, which are
//! nearly all of the body. So one pass walks the bytes: inside strings it looks for nothing but the closing quote,
//! between them it keeps the nesting in a bit stack, and only keys of the top-level object are compared with `model`.
//! No tree is built and nothing is allocated until the value is found.
//!
//! The walk checks what it relies on (balanced nesting, terminated strings, a string key before each `:`), not all of
//! RFC 8259: a bad number or escape inside an input passes here and is refused by the replica, which parses in full.
//! It never reports a `model` that a full parser would not: a name that appears twice is refused, because two readers
//! may then disagree on which one is meant, and the law of a request hangs on it.

/// How deep a body may nest. An embeddings request needs three levels; a bound keeps the bit stack in one word.
pub const NESTING_MAX: u32 = 64;

/// Why no model was read from a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BodyProblem {
    /// Not JSON, or not a JSON object; at this byte.
    NotJson {
        /// Offset of the first byte that does not fit.
        at: usize,
        /// What was expected there.
        expected: &'static str,
    },
    /// Nested deeper than [`NESTING_MAX`].
    TooDeep,
    /// The top-level object has no `model`.
    NoModel,
    /// `model` is there and is not a string.
    ModelNotText,
    /// `model` is there more than once.
    ModelTwice,
}

/// The top-level `model` of the JSON object in `body`.
pub fn model(body: &[u8]) -> Result<String, BodyProblem> {
    let mut walk = Walk { body, at: 0 };
    walk.space();
    walk.take(b'{', "an object")?;
    let mut found = None;
    walk.space();
    if walk.peek() == Some(b'}') {
        walk.at += 1;
        return walk.end(found);
    }
    loop {
        walk.space();
        let key = walk.string("a key in double quotes")?;
        walk.space();
        walk.take(b':', "':' after a key")?;
        walk.space();
        if is_model(key) {
            if found.is_some() {
                return Err(BodyProblem::ModelTwice);
            }
            if walk.peek() != Some(b'"') {
                walk.value()?;
                return Err(BodyProblem::ModelNotText);
            }
            let start = walk.at;
            walk.string("a string")?;
            found = Some(&body[start..walk.at]);
        } else {
            walk.value()?;
        }
        walk.space();
        match walk.next() {
            Some(b',') => {}
            Some(b'}') => return walk.end(found),
            _ => return Err(walk.wanted_before("',' or '}'")),
        }
    }
}

/// Whether the raw key between the quotes spells `model`, escapes included.
fn is_model(raw: &[u8]) -> bool {
    if raw == b"model" {
        return true;
    }
    raw.contains(&b'\\') && unescape_quoted(&[b"\"", raw, b"\""].concat()).is_some_and(|key| key == "model")
}

/// The text of a JSON string that still has its quotes.
fn unescape_quoted(quoted: &[u8]) -> Option<String> {
    serde_json::from_slice(quoted).ok()
}

struct Walk<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn wanted(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at, expected }
    }

    /// As [`Walk::wanted`], about the byte that was taken last.
    fn wanted_before(&self, expected: &'static str) -> BodyProblem {
        BodyProblem::NotJson { at: self.at.saturating_sub(1), expected }
    }

    fn take(&mut self, byte: u8, expected: &'static str) -> Result<(), BodyProblem> {
        if self.peek() != Some(byte) {
            return Err(self.wanted(expected));
        }
        self.at += 1;
        Ok(())
    }

    /// Walks over a string and returns what stands between its quotes.
    fn string(&mut self, expected: &'static str) -> Result<&'a [u8], BodyProblem> {
        self.take(b'"', expected)?;
        let start = self.at;
        loop {
            let rest = &self.body[self.at..];
            let stop = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'));
            let Some(stop) = stop else {
                return Err(BodyProblem::NotJson { at: self.body.len(), expected: "'\"'" });
            };
            self.at += stop + 1;
            if rest[stop] == b'"' {
                return Ok(&self.body[start..self.at - 1]);
            }
            if self.next().is_none() {
                return Err(self.wanted("an escaped character"));
            }
        }
    }

    /// Walks over any value.
    fn value(&mut self) -> Result<(), BodyProblem> {
        match self.peek() {
            Some(b'"') => self.string("a string").map(|_| ()),
            Some(b'{' | b'[') => self.nested(),
            _ => self.bare(),
        }
    }

    /// Walks over a number, `true`, `false` or `null`.
    fn bare(&mut self) -> Result<(), BodyProblem> {
        let start = self.at;
        while matches!(self.peek(), Some(b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'+' | b'-' | b'.')) {
            self.at += 1;
        }
        if self.at == start { Err(self.wanted("a value")) } else { Ok(()) }
    }

    /// Walks over an object or an array, its contents included.
    fn nested(&mut self) -> Result<(), BodyProblem> {
        let mut open: u64 = 0; // one bit a level: 1 = object
        let mut depth: u32 = 1; // the top-level object is open around us
        loop {
            match self.peek() {
                Some(opening @ (b'{' | b'[')) => {
                    if depth == NESTING_MAX {
                        return Err(BodyProblem::TooDeep);
                    }
                    open = open << 1 | u64::from(opening == b'{');
                    depth += 1;
                    self.at += 1;
                }
                Some(closing @ (b'}' | b']')) => {
                    if open & 1 != u64::from(closing == b'}') {
                        return Err(self.wanted("the bracket that closes the open one"));
                    }
                    open >>= 1;
                    depth -= 1;
                    self.at += 1;
                    if depth == 1 {
                        return Ok(());
                    }
                }
                Some(b'"') => {
                    self.string("a string")?;
                }
                Some(b',' | b':' | b' ' | b'\t' | b'\n' | b'\r') => self.at += 1,
                Some(_) => self.bare()?,
                None => return Err(self.wanted("']' or '}'")),
            }
        }
    }

    /// Nothing but space may follow the object; then the quoted value, read.
    fn end(mut self, found: Option<&[u8]>) -> Result<String, BodyProblem> {
        self.space();
        if self.at < self.body.len() {
            return Err(self.wanted("the end of the body"));
        }
        let quoted = found.ok_or(BodyProblem::NoModel)?;
        unescape_quoted(quoted)
            .ok_or(BodyProblem::NotJson { at: 0, expected: "a readable string as 'model'" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(body: &str, expected: Result<&str, BodyProblem>) {
        assert_eq!(model(body.as_bytes()), expected.map(str::to_owned), "{body}");
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
        check(r#"{"model":"\u0061\"b"}"#, Ok("a\"b"));
        check(r#"{"input":"\"model\":\"forged\"","model":"true"}"#, Ok("true"));
        check(r#"{"input":"\\","model":"a"}"#, Ok("a"));
        check(r#"{"input":{"model":"nested"}}"#, Err(BodyProblem::NoModel));
        check(r#"{"input":[{"model":"nested"}],"model":"a"}"#, Ok("a"));
    }

    #[test]
    fn a_model_that_two_readers_could_read_differently_is_refused() {
        check(r#"{"model":"a","model":"b"}"#, Err(BodyProblem::ModelTwice));
        check(r#"{"model":"a","mod\u0065l":"b"}"#, Err(BodyProblem::ModelTwice));
        check(r#"{"model":7}"#, Err(BodyProblem::ModelNotText));
        check(r#"{"model":["a"]}"#, Err(BodyProblem::ModelNotText));
        check(r#"{}"#, Err(BodyProblem::NoModel));
    }

    #[test]
    fn what_is_not_an_object_is_refused_where_it_stops_being_one() {
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
            prop_assert_eq!(model(&body), Ok(name));
        }

        #[test]
        fn no_bytes_make_it_panic_or_read_what_the_full_parser_does_not(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(parsed) = serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(&bytes)
                && let Ok(name) = model(&bytes)
            {
                prop_assert_eq!(parsed.get("model").and_then(|value| value.as_str()), Some(name.as_str()));
            }
        }
    }
}
