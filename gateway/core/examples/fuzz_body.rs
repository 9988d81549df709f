//! Tries to make the body reader wrong: `cargo run --release -p gateway-core --example fuzz_body -- --seconds 600`.
//!
//! It makes bodies of the APIs, damages them where it hurts (quotes, escapes, brackets, keys, numbers, bytes that are no
//! UTF-8, pieces of other bodies) and lets serde_json judge. The oracle is serde's parser over a tree of our own that
//! keeps every key, doubles among them, since a map would hide exactly the bodies that two readers read differently.
//!
//! * No bytes make the reader panic.
//! * What serde takes as an object the reader takes: same `model`, same number of inputs, and where no escape makes a text
//!   shorter than its bytes the same estimate of tokens; or it says that `model` is there twice, or no text, or that the
//!   body is too deep, and then that is so.
//! * What the reader calls no JSON, serde calls none either.
//!
//! The reverse is not asked: the reader routes and does not judge, so it may pass on what a replica will refuse.
//!
//! It ends with the first wrong body, shown with its seed; `--seed N --from N` runs it again. Same seed, same bodies: on
//! stable Rust, with no instrumentation, it makes some 300,000 bodies a second, which for a parser of this size reaches
//! every branch within the first one.

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
                eprintln!("fuzz_body takes --seconds N, --seed N and --from N, and not '{name}'");
                std::process::exit(2);
            }
        }
    }
    let began = Instant::now();
    let seed = seed
        .unwrap_or_else(|| (u64::from(std::process::id()) << 32) | u64::from(began.elapsed().subsec_nanos()));
    println!("seed {seed}");
    let mut seen = Seen::default();
    let mut number = from;
    while number % 1024 != 0 || began.elapsed() < Duration::from_secs(seconds) {
        let body = Maker { chance: Chance(mix(seed ^ mix(number))) }.body();
        if let Err(wrong) = check(&body, &mut seen) {
            println!("wrong: {wrong}\nbody: {}\nagain: --seed {seed} --from {number}", body.escape_ascii());
            std::process::exit(1);
        }
        number += 1;
    }
    let Seen { taken, refused, lenient, twice, not_text, deep, longest } = seen;
    println!(
        "{} bodies in {} s, none read wrongly: {taken} taken by both, {refused} by neither, {lenient} by the reader alone, \
         {twice} with two models, {not_text} with a model that is no text, {deep} too deep; the longest had {longest} bytes",
        number - from,
        began.elapsed().as_secs()
    );
}

/// How many bodies there were of each kind.
#[derive(Default)]
struct Seen {
    taken: u64,
    refused: u64,
    lenient: u64,
    twice: u64,
    not_text: u64,
    deep: u64,
    longest: usize,
}

fn check(body: &[u8], seen: &mut Seen) -> Result<(), String> {
    let ours = std::panic::catch_unwind(|| body::read(body)).map_err(|_| "the reader panics".to_owned())?;
    let judged = serde_json::from_slice::<Tree>(body);
    seen.longest = seen.longest.max(body.len());
    let fields = match judged {
        Ok(Tree::Object(fields)) => fields,
        // The parser gives up 127 levels down, which is deeper than ours goes.
        Err(_) | Ok(_) if ours.is_err() => {
            seen.refused += 1;
            return Ok(());
        }
        Ok(_) => return Err(format!("it is no object, and the reader says {ours:?}")),
        Err(_) => {
            seen.lenient += 1;
            return Ok(());
        }
    };
    let models: Vec<&Tree> =
        fields.iter().filter(|(key, _)| key == "model").map(|(_, value)| value).collect();
    let depth = 1 + fields.iter().map(|(_, value)| value.depth()).max().unwrap_or(0);
    match ours {
        Ok(reading) => {
            let expected = match models.as_slice() {
                [] => None,
                [Tree::Text(name)] => Some(name.clone()),
                _ => {
                    return Err(format!(
                        "its models are {models:?}, and the reader takes {:?}",
                        reading.model
                    ));
                }
            };
            if depth > NESTING_MAX {
                return Err(format!("it is {depth} deep, and the reader takes it"));
            }
            let inputs = inputs(&fields);
            if (&reading.model, reading.inputs) != (&expected, inputs) {
                return Err(format!(
                    "it has {expected:?} and {inputs} inputs, and the reader says {reading:?}"
                ));
            }
            let tokens = tokens(&fields).max(inputs);
            let told_exactly = !body.contains(&b'\\');
            if reading.tokens < tokens || told_exactly && reading.tokens != tokens {
                return Err(format!("it has {tokens} tokens, and the reader says {reading:?}"));
            }
            seen.taken += 1;
        }
        Err(BodyProblem::ModelTwice) if models.len() > 1 => seen.twice += 1,
        Err(BodyProblem::ModelNotText) if models.iter().any(|model| !matches!(model, Tree::Text(_))) => {
            seen.not_text += 1
        }
        Err(BodyProblem::TooDeep) if depth > NESTING_MAX => seen.deep += 1,
        Err(problem) => return Err(format!("it is a good body, and the reader says {problem:?}")),
    }
    Ok(())
}

/// Elements, other than numbers and the like, of the longest list in the object or in an object there; 1 at least.
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

/// A fourth of the bytes of texts that are values, `model` not among them, and each number or word in a list.
fn tokens(fields: &[(String, Tree)]) -> u64 {
    /// Bytes and numbers.
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

/// JSON as it was written.
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
        struct Build;
        impl<'de> Visitor<'de> for Build {
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
        from.deserialize_any(Build)
    }
}

/// SplitMix64: a body depends on its number alone.
struct Chance(u64);

fn mix(state: u64) -> u64 {
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Chance {
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

/// Bodies as clients send them; damage begins with one of these as often as with one that is made up.
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

/// What damage puts in.
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

struct Maker {
    chance: Chance,
}

impl Maker {
    fn body(mut self) -> Vec<u8> {
        let mut body = match self.chance.below(8) {
            0..3 => self.chance.of(&SEEDS).as_bytes().to_vec(),
            3 => self.deep(),
            _ => {
                let mut text = Vec::new();
                self.object(&mut text, 0);
                text
            }
        };
        for _ in 0..[0, 0, 1, 1, 2, 5][self.chance.below(6)] {
            self.damage(&mut body);
        }
        body
    }

    /// Brackets around the limits of both parsers.
    fn deep(&mut self) -> Vec<u8> {
        let levels = NESTING_MAX as usize - 3 + self.chance.below(6) + 60 * self.chance.below(2);
        let mut text = b"{\"x\":".to_vec();
        let mut closing = Vec::new();
        for _ in 0..levels {
            if self.chance.one_in(2) {
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
        while self.chance.one_in(6) {
            text.extend_from_slice(self.chance.of(&[" ", "\n", "\t", "\r", "  "]).as_bytes());
        }
    }

    fn object(&mut self, text: &mut Vec<u8>, level: usize) {
        text.push(b'{');
        for number in 0..self.chance.below(5) {
            if number > 0 {
                text.push(b',');
            }
            self.space(text);
            match self.chance.below(6) {
                0 => text.extend_from_slice(b"\"model\""),
                1 => text.extend_from_slice(b"\"input\""),
                2 => text.extend_from_slice(
                    self.chance
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
        match self.chance.below(if level > 5 { 5 } else { 10 }) {
            0..3 => self.text(text),
            3 => text.extend_from_slice(self.chance.of(&["null", "true", "false"]).as_bytes()),
            4 => text.extend_from_slice(
                self.chance
                    .of(&["0", "-1", "30522", "1.5e-7", "1e308", "123456789012345678901234567890"])
                    .as_bytes(),
            ),
            5 => self.object(text, level),
            6 => self.ids(text),
            _ => {
                text.push(b'[');
                for number in 0..self.chance.below(6) {
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

    /// Token ids, of which the reader takes many at once; now and then one that is none.
    fn ids(&mut self, text: &mut Vec<u8>) {
        let between = self.chance.of(&[",", ", ", " ,", ",\n"]);
        text.push(b'[');
        for number in 0..self.chance.below(40) {
            if number > 0 {
                text.extend_from_slice(between.as_bytes());
            }
            match self.chance.below(30) {
                0 => text
                    .extend_from_slice(self.chance.of(&["-1", "0.5", "1e3", "12.5E-3", "null"]).as_bytes()),
                1 => self.text(text),
                digits => text.extend((0..1 + digits % 9).map(|_| b'1' + self.chance.below(9) as u8)),
            }
        }
        text.push(b']');
    }

    fn text(&mut self, text: &mut Vec<u8>) {
        text.push(b'"');
        let pieces = if self.chance.one_in(8) { 40 } else { 5 };
        for _ in 0..self.chance.below(pieces) {
            let piece = self.chance.of(&[
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
                "a long run of plain letters that a search passes over at once",
            ]);
            text.extend_from_slice(piece.as_bytes());
        }
        text.push(b'"');
    }

    fn damage(&mut self, body: &mut Vec<u8>) {
        let at = self.chance.below(body.len() + 1);
        match self.chance.below(7) {
            0 => drop(body.drain(at..(at + 1 + self.chance.below(3)).min(body.len()))),
            1 => body.truncate(at),
            2 => body.insert(at, self.chance.below(256) as u8),
            3 if at < body.len() => body[at] ^= 1 << self.chance.below(8),
            4 => {
                // A piece of it once more, somewhere else: doubled keys, unbalanced brackets.
                let end = (at + self.chance.below(24)).min(body.len());
                let piece = body[at..end].to_vec();
                let to = self.chance.below(body.len() + 1);
                body.splice(to..to, piece);
            }
            5 => {
                let other = self.chance.of(&SEEDS).as_bytes();
                let from = self.chance.below(other.len());
                body.splice(at..at, other[from..].iter().copied());
            }
            _ => drop(body.splice(at..at, self.chance.of(&TOKENS).bytes())),
        }
    }
}
