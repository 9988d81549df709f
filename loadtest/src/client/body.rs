//! Serialization of request bodies, by hand: all texts into one buffer.
//!
//! The bytes before and after the texts are the same in every request of an operation and are serialized once, by
//! serde. Most texts contain no character that needs escaping and are copied as they are.

use serde_json::{Map, Value};

/// Constant parts of the request bodies of an operation.
#[derive(Clone, Debug)]
pub(super) struct BodyTemplate {
    head: Vec<u8>,
    before: &'static str,
    after: &'static str,
}

impl BodyTemplate {
    /// Creates a template: an object with `members` and the list of texts under `field`; `wrapped` puts each text in a
    /// list.
    pub(super) fn new(members: Map<String, Value>, field: &str, wrapped: bool) -> BodyTemplate {
        let mut head = Value::Object(members).to_string().into_bytes();
        head.pop();
        if head.len() > 1 {
            head.push(b',');
        }
        head.extend_from_slice(format!("{}:[", Value::from(field)).as_bytes());
        let (before, after) = if wrapped { ("[", "]") } else { ("", "") };
        BodyTemplate { head, before, after }
    }

    /// Returns the body for `texts`.
    pub(super) fn body<S: AsRef<str>>(&self, texts: &[S]) -> Vec<u8> {
        let around = 3 + self.before.len() + self.after.len();
        let length: usize = texts.iter().map(|text| text.as_ref().len() + around).sum();
        let mut body = Vec::with_capacity(self.head.len() + length + 2);
        body.extend_from_slice(&self.head);
        for (index, text) in texts.iter().enumerate() {
            if index > 0 {
                body.push(b',');
            }
            body.extend_from_slice(self.before.as_bytes());
            quote(text.as_ref(), &mut body);
            body.extend_from_slice(self.after.as_bytes());
        }
        body.extend_from_slice(b"]}");
        body
    }
}

/// Appends `text` as a JSON string.
fn quote(text: &str, into: &mut Vec<u8>) {
    // `fold` and not `all`: without an early exit the loop is vectorized.
    let plain =
        text.bytes().fold(true, |plain, byte| plain & (byte >= 0x20) & (byte != b'"') & (byte != b'\\'));
    if plain {
        into.push(b'"');
        into.extend_from_slice(text.as_bytes());
        into.push(b'"');
    } else {
        serde_json::to_writer(into, text).expect("a text is JSON, and a Vec takes it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn members(value: Value) -> Map<String, Value> {
        value.as_object().expect("an object").clone()
    }

    #[test]
    fn texts_are_inserted_into_the_constant_parts() {
        let template = BodyTemplate::new(members(json!({"model": "a\"b"})), "input", false);
        assert_eq!(template.body(&["x", "y\n"]), br#"{"model":"a\"b","input":["x","y\n"]}"#);
        let template = BodyTemplate::new(Map::new(), "inputs", true);
        assert_eq!(template.body(&["x", "y"]), br#"{"inputs":[["x"],["y"]]}"#);
    }

    proptest! {
        #[test]
        fn every_text_round_trips(texts in prop::collection::vec(any::<String>(), 1..8)) {
            let body = BodyTemplate::new(members(json!({"m": 1})), "input", false).body(&texts);
            let read: Value = serde_json::from_slice(&body).expect("JSON");
            prop_assert_eq!(read, json!({"m": 1, "input": texts}));
        }
    }
}
