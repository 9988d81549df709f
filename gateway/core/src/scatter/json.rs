//! Positions of members and elements in JSON, found without building a tree.
//!
//! Splitting and joining move bytes, so they need only the start and end of a value. A [`JsonCursor`] skips values: in
//! strings it searches for the closing quote, in flat lists for the closing bracket, many bytes at a time.
//!
//! It is strict about what it relies on (commas, colons and brackets of the levels that are split, the ends of strings
//! and nested values) and returns `None` for anything else. The *content* of a value is not checked: it is passed on
//! byte for byte to a reader that parses in full. Valid JSON is never misread. This is not the scanner of
//! [`crate::body`], which counts everything in one pass and keeps no positions; here nearly nothing is counted.

use crate::body::NESTING_MAX;
use std::ops::Range;

/// Maximum members of an object that is split or joined: a body, a response, or an element of one. No API has half as
/// many.
pub(super) const MEMBERS_MAX: usize = 64;

/// Position of a value.
pub(super) type ByteSpan = Range<usize>;

/// Kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    List,
    Object,
    /// A number, a truth, or null.
    Bare,
}

/// Skipped value, with its statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) span: ByteSpan,
    pub(super) kind: Kind,
    /// Bytes of text in it, keys included.
    pub(super) text_bytes: usize,
    /// Number of values in it that are neither text nor list nor object: the length of a list of token ids.
    pub(super) bare: usize,
}

/// Member of an object: the position of its key, without quotes, and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JsonMember {
    key: ByteSpan,
    pub(super) value: Value,
}

impl JsonMember {
    /// Returns whether it has this name, in any escaping.
    pub(super) fn is(&self, json: &[u8], name: &str) -> bool {
        let key = &json[self.key.clone()];
        let quoted = || [b"\"", key, b"\""].concat();
        key == name.as_bytes()
            || key.contains(&b'\\')
                && serde_json::from_slice::<String>(&quoted()).is_ok_and(|key| key == name)
    }

    /// Returns its name as written.
    pub(super) fn key<'a>(&self, json: &'a [u8]) -> &'a [u8] {
        &json[self.key.clone()]
    }
}

/// Returns the members of the object at `json[span]`, at most `max` of them.
pub(super) fn members(json: &[u8], span: &ByteSpan, max: usize) -> Option<Vec<JsonMember>> {
    let mut cursor = JsonCursor { json: json.get(..span.end)?, at: span.start };
    let mut members = Vec::new();
    cursor.each(b'{', b'}', |cursor| {
        let key = cursor.string()?;
        cursor.space();
        cursor.take(b':')?;
        cursor.space();
        let value = cursor.value()?;
        members.push(JsonMember { key: key.start + 1..key.end - 1, value });
        (members.len() <= max).then_some(())
    })?;
    Some(members)
}

/// Returns the members of `json` as an object with nothing but whitespace around it.
pub(super) fn object(json: &[u8], max: usize) -> Option<Vec<JsonMember>> {
    members(json, &whole(json)?, max)
}

/// Calls `visit` with each element of the list at `json[span]`.
pub(super) fn elements(json: &[u8], span: &ByteSpan, mut visit: impl FnMut(Value)) -> Option<()> {
    let mut cursor = JsonCursor { json: json.get(..span.end)?, at: span.start };
    cursor.each(b'[', b']', |cursor| {
        visit(cursor.value()?);
        Some(())
    })
}

/// Returns the span of the only value of `json`.
pub(super) fn whole(json: &[u8]) -> Option<ByteSpan> {
    let mut cursor = JsonCursor { json, at: 0 };
    cursor.space();
    let value = cursor.value()?;
    cursor.space();
    (cursor.at == json.len()).then_some(value.span)
}

/// Position in JSON.
struct JsonCursor<'a> {
    json: &'a [u8],
    at: usize,
}

impl JsonCursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.json.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// Reads everything between `open` and `close`, with one call of `read` for each part between commas.
    fn each(&mut self, open: u8, close: u8, mut read: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.take(open)?;
        self.space();
        if self.take(close).is_some() {
            return Some(());
        }
        loop {
            read(self)?;
            self.space();
            if self.take(close).is_some() {
                return Some(());
            }
            self.take(b',')?;
            self.space();
        }
    }

    /// Skips a string; its span includes the quotes.
    fn string(&mut self) -> Option<ByteSpan> {
        let start = self.at;
        self.take(b'"')?;
        loop {
            self.at += memchr::memchr2(b'"', b'\\', self.json.get(self.at..)?)? + 1;
            match self.json[self.at - 1] {
                b'"' => return Some(start..self.at),
                _ => self.at += 1,
            }
        }
    }

    /// Skips any value.
    fn value(&mut self) -> Option<Value> {
        let start = self.at;
        let (kind, text_bytes, bare) = match self.peek()? {
            b'"' => (Kind::Text, self.string()?.len() - 2, 0),
            b'[' => {
                let (text_bytes, bare) = self.nested()?;
                (Kind::List, text_bytes, bare)
            }
            b'{' => {
                let (text_bytes, bare) = self.nested()?;
                (Kind::Object, text_bytes, bare)
            }
            _ => {
                self.bare()?;
                (Kind::Bare, 0, 1)
            }
        };
        Some(Value { span: start..self.at, kind, text_bytes, bare })
    }

    fn bare(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'+' | b'-' | b'.')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    /// Skips a list or an object; returns its bytes of text and its number of bare values.
    fn nested(&mut self) -> Option<(usize, usize)> {
        let mut open: u64 = 0; // one bit a level: 1 = object
        let mut depth = 0;
        let (mut text_bytes, mut bare) = (0, 0);
        loop {
            match self.peek()? {
                b'[' if let Some(numbers) = self.flat() => bare += numbers,
                byte @ (b'{' | b'[') => {
                    if depth == NESTING_MAX {
                        return None;
                    }
                    open = open << 1 | u64::from(byte == b'{');
                    depth += 1;
                    self.at += 1;
                }
                byte @ (b'}' | b']') => {
                    if depth == 0 || open & 1 != u64::from(byte == b'}') {
                        return None;
                    }
                    open >>= 1;
                    depth -= 1;
                    self.at += 1;
                }
                b'"' => text_bytes += self.string()?.len() - 2,
                b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' => self.at += 1,
                _ => {
                    self.bare()?;
                    bare += 1;
                }
            }
            if depth == 0 {
                return Some((text_bytes, bare));
            }
        }
    }

    /// Skips a list without texts, lists or objects, such as a vector or an input of token ids; returns its number of
    /// elements. Otherwise it stays at the same position.
    fn flat(&mut self) -> Option<usize> {
        let inside = self.json.get(self.at + 1..)?;
        // A check of the first byte avoids searching for the end of other lists.
        if !matches!(inside.first()?, b'0'..=b'9' | b'-' | b' ' | b']') {
            return None;
        }
        let inside = &inside[..memchr::memchr(b']', inside)?];
        if memchr::memchr3(b'"', b'[', b'{', inside).is_some() || memchr::memchr(b'}', inside).is_some() {
            return None;
        }
        self.at += inside.len() + 2;
        let empty = inside.iter().all(u8::is_ascii_whitespace);
        Some(if empty { 0 } else { memchr::memchr_iter(b',', inside).count() + 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_value_ends_where_it_ends() {
        let check = |json: &str, expected: Option<ByteSpan>| {
            assert_eq!(whole(json.as_bytes()), expected, "{json}");
        };
        check(r#" "a\"]" "#, Some(1..7));
        check("[1, [2], {\"a\": \"]\"}]", Some(0..20));
        check("[]", Some(0..2));
        check("-1.5e3", Some(0..6));
        for cut in ["", "[", "\"a", "\"a\\", "[1", "[\"a]", "{\"a\":1", "[1}", "{]", "[1] 2", "[{]}", ","] {
            check(cut, None);
        }
    }

    #[test]
    fn nesting_is_bounded_at_its_limit_and_not_before() {
        let nested = |levels: usize| format!("{}\"x\"{}", "[".repeat(levels), "]".repeat(levels));
        assert!(whole(nested(NESTING_MAX as usize).as_bytes()).is_some());
        assert_eq!(whole(nested(NESTING_MAX as usize + 1).as_bytes()), None);
        assert_eq!(whole(nested(100_000).as_bytes()), None);
    }

    #[test]
    fn members_are_bounded_and_found_by_name_in_any_escaping() {
        let json = br#"{"a": 1, "\u0062\"": [2]}"#;
        let found = object(json, 2).unwrap();
        assert!(found[0].is(json, "a") && !found[0].is(json, "b\""));
        assert!(found[1].is(json, "b\"") && !found[1].is(json, "b"));
        assert_eq!(found[1].value.span, 21..24);
        assert_eq!(object(json, 1), None);
        for wrong in ["[]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{a:1}", "{\"a\":1 \"b\":2}", "{} x"] {
            assert_eq!(object(wrong.as_bytes(), 9), None, "{wrong}");
        }
    }

    #[test]
    fn the_content_of_a_value_is_counted() {
        let check = |json: &str, text_bytes: usize, bare: usize| {
            let mut visited = Vec::new();
            elements(json.as_bytes(), &(0..json.len()), |value| visited.push((value.text_bytes, value.bare)));
            assert_eq!(visited, [(text_bytes, bare)], "{json}");
        };
        check(r#"["four"]"#, 4, 0);
        check("[[1, 2,3]]", 0, 3);
        check("[[ ]]", 0, 0);
        check(r#"[["four", "four", 7]]"#, 8, 1);
        check(r#"[[[1], [2, 3]]]"#, 0, 3);
        check(r#"[{"text": "four", "n": null}]"#, 9, 1);
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i32>().prop_map(|n| (f64::from(n) / 4.0).into()),
            r#"[\[\]{}",:\\a-z ]{0,8}"#.prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::btree_map(".*", inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn elements_and_members_are_those_of_the_full_parser(values in prop::collection::vec(json(), 0..6), pretty: bool) {
            let write = |value: &serde_json::Value| {
                if pretty { serde_json::to_vec_pretty(value) } else { serde_json::to_vec(value) }.unwrap()
            };
            let text = write(&values.clone().into());
            let mut visited: Vec<serde_json::Value> = Vec::new();
            elements(&text, &whole(&text).unwrap(), |value| {
                visited.push(serde_json::from_slice(&text[value.span]).unwrap());
            }).unwrap();
            prop_assert_eq!(&visited, &values);
            let named: serde_json::Map<String, serde_json::Value> =
                values.into_iter().enumerate().map(|(n, value)| (format!("\"{n}"), value)).collect();
            let text = write(&named.clone().into());
            let found = object(&text, 9).unwrap();
            prop_assert_eq!(found.len(), named.len());
            for member in found {
                let value: serde_json::Value = serde_json::from_slice(&text[member.value.span.clone()]).unwrap();
                let name = named.keys().find(|name| member.is(&text, name)).unwrap();
                prop_assert_eq!(&value, &named[name]);
            }
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(prop::sample::select(br#"[]{}",:\ 1a"#.to_vec()), 0..32)) {
            let _ = (whole(&bytes), object(&bytes, 9));
        }
    }
}
