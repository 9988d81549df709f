//! Fuzzer of the body scanner: `cargo run --release -p gateway-core --example fuzz_body -- --seconds 600`.
//!
//! It generates bodies of the APIs, damages them in critical positions (quotes, escapes, brackets, keys, numbers, bytes
//! that are not UTF-8, parts of other bodies) and compares the scanner with serde_json. The oracle is serde's parser
//! with a tree that keeps every key, including duplicates, because a map would hide exactly the bodies that two readers
//! interpret differently.
//!
//! * No bytes make the scanner panic.
//! * An object that serde accepts is accepted by the scanner: same `model`, same number of inputs, and where no escape
//!   makes a text shorter than its bytes the same estimate of tokens; or the scanner reports, correctly, that `model`
//!   is duplicate, or no text, or that the body is too deep.
//! * Bytes that the scanner rejects as JSON are rejected by serde.
//!
//! The reverse is not required: the scanner routes and does not validate, so it may accept a body that a replica will
//! reject.
//!
//! It stops at the first wrong body and prints it with its seed; `--seed N --from N` repeats it. The same seed gives
//! the same bodies: on stable Rust, without instrumentation, it makes some 300,000 bodies a second, which for a parser
//! of this size reaches every branch within the first one.

#![expect(clippy::disallowed_methods, reason = "a program has a clock")]

use gateway_core::body::{self, BodyProblem, NESTING_MAX};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::time::{Duration, Instant};

fn main() {
    let (mut seconds, mut seed, mut from) = (60, None, 0);
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let number = given.next().and_then(|text| text.parse::<u64>().ok());
        match (name.as_str(), number) {
            ("--seconds", Some(number)) => seconds = number,
            ("--seed", Some(number)) => seed = Some(number),
            ("--from", Some(number)) => from = number,
            _ => {
                eprintln!("unknown option '{name}'; use --seconds N, --seed N or --from N");
                std::process::exit(2);
            }
        }
    }
    let began = Instant::now();
    let seed = seed
        .unwrap_or_else(|| (u64::from(std::process::id()) << 32) | u64::from(began.elapsed().subsec_nanos()));
    println!("seed {seed}");
    let mut tally = FuzzCounts::default();
    let mut number = from;
    while number % 1024 != 0 || began.elapsed() < Duration::from_secs(seconds) {
        let body = BodyGenerator { random: Random(mix(seed ^ mix(number))) }.body();
        if let Err(failure) = check(&body, &mut tally) {
            println!(
                "failure: {failure}\nbody: {}\nrepeat with: --seed {seed} --from {number}",
                body.escape_ascii()
            );
            std::process::exit(1);
        }
        number += 1;
    }
    let FuzzCounts { accepted, rejected, lenient, twice, not_text, deep, longest } = tally;
    println!(
        "{} bodies in {} s, no failure: {accepted} accepted by both, {rejected} by neither, {lenient} by the scanner only, \
         {twice} with two models, {not_text} with a model that is not a text, {deep} too deep; the longest had {longest} bytes",
        number - from,
        began.elapsed().as_secs()
    );
}

/// Number of bodies by result.
#[derive(Default)]
struct FuzzCounts {
    accepted: u64,
    rejected: u64,
    lenient: u64,
    twice: u64,
    not_text: u64,
    deep: u64,
    longest: usize,
}

fn check(body: &[u8], tally: &mut FuzzCounts) -> Result<(), String> {
    let ours = std::panic::catch_unwind(|| body::read(body)).map_err(|_| "the scanner panics".to_owned())?;
    let parsed = serde_json::from_slice::<Tree>(body);
    tally.longest = tally.longest.max(body.len());
    let fields = match parsed {
        Ok(Tree::Object(fields)) => fields,
        // serde_json stops at 127 levels, which is deeper than the scanner's limit.
        Err(_) | Ok(_) if ours.is_err() => {
            tally.rejected += 1;
            return Ok(());
        }
        Ok(_) => return Err(format!("it is not an object, and the scanner returns {ours:?}")),
        Err(_) => {
            tally.lenient += 1;
            return Ok(());
        }
    };
    let models: Vec<&Tree> =
        fields.iter().filter(|(key, _)| key == "model").map(|(_, value)| value).collect();
    let depth = 1 + fields.iter().map(|(_, value)| value.depth()).max().unwrap_or(0);
    match ours {
        Ok(summary) => {
            let expected = match models.as_slice() {
                [] => None,
                [Tree::Text(name)] => Some(name.clone()),
                _ => {
                    return Err(format!(
                        "its models are {models:?}, and the scanner returns {:?}",
                        summary.model
                    ));
                }
            };
            if depth > NESTING_MAX {
                return Err(format!("its depth is {depth}, and the scanner accepts it"));
            }
            let inputs = inputs(&fields);
            if (&summary.model, summary.inputs) != (&expected, inputs) {
                return Err(format!(
                    "it has {expected:?} and {inputs} inputs, and the scanner returns {summary:?}"
                ));
            }
            let tokens = tokens(&fields).max(inputs);
            let is_exact = !body.contains(&b'\\');
            if summary.tokens < tokens || is_exact && summary.tokens != tokens {
                return Err(format!("it has {tokens} tokens, and the scanner returns {summary:?}"));
            }
            tally.accepted += 1;
        }
        Err(BodyProblem::ModelTwice) if models.len() > 1 => tally.twice += 1,
        Err(BodyProblem::ModelNotText) if models.iter().any(|model| !matches!(model, Tree::Text(_))) => {
            tally.not_text += 1
        }
        Err(BodyProblem::TooDeep) if depth > NESTING_MAX => tally.deep += 1,
        Err(problem) => return Err(format!("it is a valid body, and the scanner returns {problem:?}")),
    }
    Ok(())
}

/// Returns the number of elements, other than numbers and literals, of the longest list in the object or in an object
/// there; at least 1.
fn inputs(fields: &[(String, Tree)]) -> u64 {
    let of = |value: &Tree| match value {
        Tree::List(elements) => elements.iter().filter(|element| !matches!(element, Tree::Other)).count(),
        Tree::Object(_) | Tree::Text(_) | Tree::Other => 0,
    };
    let each = fields.iter().filter(|(key, _)| key != "model").map(|(_, value)| match value {
        Tree::Object(inner) => inner.iter().map(|(_, value)| of(value)).max().unwrap_or(0),
        value => of(value),
    });
    each.max().unwrap_or(0).max(1) as u64
}

/// Returns a fourth of the bytes of string values except `model`, plus the numbers and literals in lists.
fn tokens(fields: &[(String, Tree)]) -> u64 {
    /// Returns bytes and numbers.
    fn of(value: &Tree, in_a_list: bool) -> (u64, u64) {
        let sum = |all: &mut dyn Iterator<Item = (u64, u64)>| {
            all.fold((0, 0), |(bytes, numbers), (more, other)| (bytes + more, numbers + other))
        };
        match value {
            Tree::Object(fields) => sum(&mut fields.iter().map(|(_, value)| of(value, false))),
            Tree::List(elements) => sum(&mut elements.iter().map(|value| of(value, true))),
            Tree::Text(text) => (text.len() as u64, 0),
            Tree::Other => (0, u64::from(in_a_list)),
        }
    }
    let each = fields.iter().filter(|(key, _)| key != "model").map(|(_, value)| of(value, false));
    let (bytes, numbers) = each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    bytes / 4 + numbers
}

/// JSON with all its keys.
#[derive(Debug)]
enum Tree {
    Object(Vec<(String, Tree)>),
    List(Vec<Tree>),
    Text(String),
    Other,
}

impl Tree {
    fn depth(&self) -> u32 {
        match self {
            Tree::Object(fields) => 1 + fields.iter().map(|(_, value)| value.depth()).max().unwrap_or(0),
            Tree::List(elements) => 1 + elements.iter().map(Tree::depth).max().unwrap_or(0),
            Tree::Text(_) | Tree::Other => 0,
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Tree, D::Error> {
        struct TreeVisitor;
        impl<'de> Visitor<'de> for TreeVisitor {
            type Value = Tree;
            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("JSON")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tree, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Tree::Object(fields))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tree, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    elements.push(element);
                }
                Ok(Tree::List(elements))
            }
            fn visit_str<E>(self, text: &str) -> Result<Tree, E> {
                Ok(Tree::Text(text.to_owned()))
            }
            fn visit_bool<E>(self, _: bool) -> Result<Tree, E> {
                Ok(Tree::Other)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Tree, E> {
                Ok(Tree::Other)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Tree, E> {
                Ok(Tree::Other)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Tree, E> {
                Ok(Tree::Other)
            }
            fn visit_unit<E>(self) -> Result<Tree, E> {
                Ok(Tree::Other)
            }
        }
        from.deserialize_any(TreeVisitor)
    }
}

/// SplitMix64 random generator: a body depends only on its number.
struct Random(u64);

fn mix(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((u128::from(mix(self.0)) * bound as u128) >> 64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn of<'a, T: ?Sized>(&mut self, choices: &[&'a T]) -> &'a T {
        choices[self.below(choices.len())]
    }
}

/// Bodies as sent by clients; half of the damaged bodies start with one of these.
const SEEDS: [&str; 10] = [
    r#"{"model":"docs-embed","input":"the quick brown fox"}"#,
    r#"{"input":["a","b\"c","d\\"],"model":"docs-embed","encoding_format":"base64","dimensions":256}"#,
    r#"{"model":"m","input":[[101,2054,102],[101,102]]}"#,
    r#"{"model":"rerank","query":"q","documents":["a",{"text":"b","title":"t"}],"top_n":2,"return_documents":true}"#,
    r#"{"inputs":[["a","b"],["c","d"]],"truncate":true,"raw_scores":false}"#,
    r#"{"inputs":{"source_sentence":"a","sentences":["b","c"]},"parameters":null}"#,
    r#"{"mod\u0065l":"\u0061\ud83d\ude00","input":"\u0000\n"}"#,
    "{\"model\" : \"é\u{1F600}\" ,\n\t\"input\" : [ \"x\" , \"y\" ] }",
    r#"{"model":"a","model":"b","input":{"model":"nested"}}"#,
    r#"{"model":7,"input":-1.5e+30,"x":[],"y":{},"z":[{}],"w":[[]]}"#,
];

/// Text that is inserted as damage.
const TOKENS: [&str; 40] = [
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    " ",
    "\n",
    "\t",
    "\u{feff}",
    "\"model\"",
    "\"mod\\u0065l\"",
    "\"model\":\"x\",",
    "\\u",
    "\\u0022",
    "\\\"",
    "\\\\",
    "\\/",
    "\\ud800",
    "\\udc00",
    "\\x",
    "null",
    "true",
    "fals",
    "NaN",
    "-",
    "0",
    "01",
    "1e",
    "1e999",
    "-0.0",
    "[]",
    "{}",
    "\"\"",
    "[[",
    "]]",
    "\u{1F600}",
    "/*",
];

struct BodyGenerator {
    random: Random,
}

impl BodyGenerator {
    fn body(mut self) -> Vec<u8> {
        let mut body = match self.random.below(8) {
            0..3 => self.random.of(&SEEDS).as_bytes().to_vec(),
            3 => self.deep(),
            _ => {
                let mut text = Vec::new();
                self.object(&mut text, 0);
                text
            }
        };
        for _ in 0..[0, 0, 1, 1, 2, 5][self.random.below(6)] {
            self.damage(&mut body);
        }
        body
    }

    /// Makes nested brackets around the limits of both parsers.
    fn deep(&mut self) -> Vec<u8> {
        let levels = NESTING_MAX as usize - 3 + self.random.below(6) + 60 * self.random.below(2);
        let mut text = b"{\"x\":".to_vec();
        let mut closing = Vec::new();
        for _ in 0..levels {
            if self.random.one_in(2) {
                text.push(b'[');
                closing.push(b']');
            } else {
                text.extend_from_slice(b"{\"model\":");
                closing.push(b'}');
            }
        }
        text.extend_from_slice(b"0");
        closing.reverse();
        text.extend(closing);
        text.extend_from_slice(b",\"model\":\"deep\"}");
        text
    }

    fn space(&mut self, text: &mut Vec<u8>) {
        while self.random.one_in(6) {
            text.extend_from_slice(self.random.of(&[" ", "\n", "\t", "\r", "  "]).as_bytes());
        }
    }

    fn object(&mut self, text: &mut Vec<u8>, level: usize) {
        text.push(b'{');
        for number in 0..self.random.below(5) {
            if number > 0 {
                text.push(b',');
            }
            self.space(text);
            match self.random.below(6) {
                0 => text.extend_from_slice(b"\"model\""),
                1 => text.extend_from_slice(b"\"input\""),
                2 => text.extend_from_slice(
                    self.random
                        .of(&["\"mode\\u006c\"", "\"\\u006dodel\"", "\"Model\"", "\"model \""])
                        .as_bytes(),
                ),
                _ => self.text(text),
            }
            self.space(text);
            text.push(b':');
            self.space(text);
            self.value(text, level + 1);
            self.space(text);
        }
        text.push(b'}');
    }

    fn value(&mut self, text: &mut Vec<u8>, level: usize) {
        match self.random.below(if level > 5 { 5 } else { 10 }) {
            0..3 => self.text(text),
            3 => text.extend_from_slice(self.random.of(&["null", "true", "false"]).as_bytes()),
            4 => text.extend_from_slice(
                self.random
                    .of(&["0", "-1", "30522", "1.5e-7", "1e308", "123456789012345678901234567890"])
                    .as_bytes(),
            ),
            5 => self.object(text, level),
            6 => self.ids(text),
            _ => {
                text.push(b'[');
                for number in 0..self.random.below(6) {
                    if number > 0 {
                        text.push(b',');
                    }
                    self.space(text);
                    self.value(text, level + 1);
                    self.space(text);
                }
                text.push(b']');
            }
        }
    }

    /// Writes token ids, which the scanner counts several at once, with an occasional other value.
    fn ids(&mut self, text: &mut Vec<u8>) {
        let between = self.random.of(&[",", ", ", " ,", ",\n"]);
        text.push(b'[');
        for number in 0..self.random.below(40) {
            if number > 0 {
                text.extend_from_slice(between.as_bytes());
            }
            match self.random.below(30) {
                0 => text
                    .extend_from_slice(self.random.of(&["-1", "0.5", "1e3", "12.5E-3", "null"]).as_bytes()),
                1 => self.text(text),
                digits => text.extend((0..1 + digits % 9).map(|_| b'1' + self.random.below(9) as u8)),
            }
        }
        text.push(b']');
    }

    fn text(&mut self, text: &mut Vec<u8>) {
        text.push(b'"');
        let parts = if self.random.one_in(8) { 40 } else { 5 };
        for _ in 0..self.random.below(parts) {
            let part = self.random.of(&[
                "a",
                "word ",
                "\\\"",
                "\\\\",
                "\\n",
                "\\u00e9",
                "\\ud83d\\ude00",
                "é",
                "\u{1F600}",
                "model",
                "{",
                "]",
                ",",
                ":",
                "\\/",
                "a long run of plain letters that a search skips at once",
            ]);
            text.extend_from_slice(part.as_bytes());
        }
        text.push(b'"');
    }

    fn damage(&mut self, body: &mut Vec<u8>) {
        let at = self.random.below(body.len() + 1);
        match self.random.below(7) {
            0 => drop(body.drain(at..(at + 1 + self.random.below(3)).min(body.len()))),
            1 => body.truncate(at),
            2 => body.insert(at, self.random.below(256) as u8),
            3 if at < body.len() => body[at] ^= 1 << self.random.below(8),
            4 => {
                // Copies a part of it to another position: duplicate keys, unbalanced brackets.
                let end = (at + self.random.below(24)).min(body.len());
                let part = body[at..end].to_vec();
                let to = self.random.below(body.len() + 1);
                body.splice(to..to, part);
            }
            5 => {
                let other = self.random.of(&SEEDS).as_bytes();
                let from = self.random.below(other.len());
                body.splice(at..at, other[from..].iter().copied());
            }
            _ => drop(body.splice(at..at, self.random.of(&TOKENS).bytes())),
        }
    }
}
