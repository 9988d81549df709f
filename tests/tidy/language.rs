//! Language rules that a machine can check (docs/glossary.md has the terms).
//!
//! In sources, tests and benches:
//! - The first word of a doc comment's line is a noun or a verb, not a relative pronoun.
//! - Some words are not used: those that stand for a missing noun, and metaphors.
//! - Log messages are statements in lower case without punctuation at their end.
//! - Names of types and functions are terms of the field; some private words are not, and a single letter is not.
//!
//! In sources:
//! - A type name is defined once, except names that are common for private types of a module.

use crate::events;
use crate::tree::{File, files, is_source};
use std::collections::BTreeMap;

/// Words with which no line of a doc comment begins.
const OPENINGS: &[&str] =
    &["What", "How", "Who", "Whom", "Whose", "Whoever", "Whatever", "Nothing", "Nobody", "Somebody"];

/// Words that are not used, put together from halves so that this file does not contain them.
const WORDS: &[&str] = &[
    concat!("who", "ever"),
    concat!("whom", "ever"),
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("any", "body"),
    concat!("every", "body"),
    concat!("to", "ld"),
    concat!("ask", "ed"),
    concat!("law", "ful"),
    concat!("court", "yard"),
    concat!("co", "urt"),
    concat!("weat", "her"),
    concat!("de", "sk"),
    concat!("do", "or"),
    concat!("door", "keeper"),
];

/// Files with natural language as input data, which may contain any word.
const TEXTS: &[&str] = &[
    "loadtest/benches/generator/peers.rs",
    "loadtest/src/workload/words.rs",
    "replica/src/tune/texts.rs",
    "replica/tests/quality_int8.rs",
];

/// Words that are no names of types and modules, in lower case.
const TYPES: &[&str] = &[
    "admits",
    "asked",
    "awaited",
    "bell",
    "beside",
    "came",
    "comes",
    "court",
    "crossed",
    "desk",
    "door",
    "doorkeeper",
    "fate",
    "former",
    "front",
    "goes",
    "happens",
    "here",
    "home",
    "judged",
    "kept",
    "liar",
    "meaning",
    "meanwhile",
    "middle",
    "rope",
    "said",
    "seen",
    "sight",
    "through",
    "told",
    "underway",
    "way",
    "weather",
    "whole",
    "whose",
    "worse",
];

/// Words that are no names of functions.
const FUNCTIONS: &[&str] = &[
    "answer", "answered", "answers", "ask", "asked", "asks", "came", "comes", "goes", "happens", "said",
    "say", "says", "tell", "tells", "told", "until",
];

/// Folder of the DNS client: DNS messages are questions and answers.
const DNS: &str = "resolver/";

/// Type names that may be defined in several modules.
const COMMON: &[&str] = &[
    "Batch",
    "Client",
    "Connection",
    "Counters",
    "Embedding",
    "Entry",
    "Event",
    "File",
    "Format",
    "Gateway",
    "Guard",
    "Inner",
    "Kind",
    "Limits",
    "Line",
    "Options",
    "Outcome",
    "Part",
    "Priority",
    "Problem",
    "Problems",
    "Profile",
    "Reader",
    "Receipts",
    "Record",
    "Report",
    "Request",
    "Role",
    "Row",
    "Shared",
    "Source",
    "State",
    "Statistics",
    "Step",
    "Task",
    "Tenants",
    "Token",
    "Tokens",
    "Watch",
    "Window",
    "Writer",
];

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|sign: char| !sign.is_alphanumeric() && sign != '_').filter(|word| !word.is_empty())
}

/// Keyword and name of the type, module or function that a line defines.
fn definition(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let visible = line.strip_prefix("pub").map_or(line, |rest| {
        rest.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(rest, |(_, rest)| rest)
    });
    let mut words = visible.split_whitespace();
    let keyword = words.find(|word| !matches!(*word, "async" | "const" | "unsafe" | "extern"))?;
    let name = words.next()?.split(|sign: char| !sign.is_alphanumeric() && sign != '_').next()?;
    let is_definition = matches!(keyword, "struct" | "enum" | "trait" | "type" | "union" | "mod" | "fn");
    (is_definition && !name.is_empty()).then_some((keyword, name))
}

/// Returns whether a definition has one of these words, or a letter, as its name. A `type` of one letter is allowed: it may be
/// an item of a foreign trait. So is `mod rope`, rotary position embeddings.
fn is_private_word(path: &str, keyword: &str, name: &str) -> bool {
    match keyword {
        "fn" => FUNCTIONS.contains(&name) && !path.starts_with(DNS),
        "mod" => TYPES.contains(&name) && name != "rope",
        "type" => TYPES.contains(&&*name.to_lowercase()),
        _ => {
            TYPES.contains(&&*name.to_lowercase())
                || name.len() == 1
                || name == "Answer" && !path.starts_with(DNS)
        }
    }
}

fn complaints(all: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for File { path, text } in all {
        let is_text = TEXTS.contains(&path.as_str());
        for (number, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", number + 1);
            let doc = line.trim_start();
            let doc = doc.strip_prefix("/// ").or_else(|| doc.strip_prefix("//! "));
            if let Some(first) =
                doc.and_then(|doc| doc.split(' ').next()).filter(|first| OPENINGS.contains(first))
            {
                complaints.push(format!("{place}: begins with {first}"));
            }
            let banned = |word: &&str| WORDS.iter().any(|banned| word.eq_ignore_ascii_case(banned));
            for word in words(line).filter(banned).filter(|_| !is_text) {
                complaints.push(format!("{place}: {word}"));
            }
            if let Some((keyword, name)) =
                definition(line).filter(|(keyword, name)| is_private_word(path, keyword, name))
            {
                complaints.push(format!("{place}: {keyword} {name}"));
            }
        }
        for (at, message) in events::messages(text).filter(|(_, message)| !is_statement(message)) {
            let line = text[..at].matches('\n').count() + 1;
            complaints.push(format!("{path}:{line}: log message {message:?}"));
        }
    }
    complaints
}

fn is_statement(message: &str) -> bool {
    let first = message.split(' ').next().unwrap_or_default();
    let is_lower = first.chars().next().is_some_and(|sign| !sign.is_uppercase())
        || first.chars().nth(1).is_some_and(char::is_uppercase);
    is_lower && !message.ends_with(['.', '!', ':'])
}

/// Type names that are defined more than once, with their files.
fn duplicates(all: &[File]) -> BTreeMap<String, Vec<&str>> {
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for File { path, text } in all {
        for line in text.lines() {
            let words: Vec<&str> = words(line).collect();
            let line = line.trim_start();
            let is_definition = ["struct ", "enum ", "trait "].into_iter().any(|kind| {
                line.starts_with(kind) || line.starts_with("pub") && line.contains(&format!(" {kind}"))
            });
            if !is_definition {
                continue;
            }
            let kind = words.iter().position(|word| matches!(*word, "struct" | "enum" | "trait"));
            if let Some(name) =
                kind.and_then(|kind| words.get(kind + 1)).filter(|name| name.starts_with(char::is_uppercase))
            {
                found.entry((*name).to_owned()).or_default().push(path);
            }
        }
    }
    found.retain(|name, files| files.len() > 1 && !COMMON.contains(&name.as_str()));
    found
}

/// Returns whether the rules apply to a file: every Rust file except those with the lists and made-up violations.
fn is_checked(path: &str) -> bool {
    path.ends_with(".rs") && !path.starts_with("tests/tidy/")
}

#[test]
fn comments_and_log_messages_use_plain_statements() {
    let complaints = complaints(&files(is_checked));
    assert!(complaints.is_empty(), "{} lines: {complaints:#?}", complaints.len());
}

#[test]
fn a_type_name_is_defined_once() {
    let all = files(is_source);
    let duplicates = duplicates(&all);
    assert!(duplicates.is_empty(), "{} names: {duplicates:#?}", duplicates.len());
}

#[test]
fn a_line_against_each_rule_is_found() {
    let file = |text: &str| File { path: "src/a.rs".to_owned(), text: text.to_owned() };
    let text = format!(
        "/// What a region does.\n// is for {}\nfn f() {{\n    tracing::warn!(region, \"Region ejected.\");\n    \
         tracing::info!(\"region ejected\");\n}}\n",
        WORDS[0]
    );
    let expected = [
        "src/a.rs:1: begins with What".to_owned(),
        format!("src/a.rs:2: {}", WORDS[0]),
        "src/a.rs:4: log message \"Region ejected.\"".to_owned(),
    ];
    assert_eq!(complaints(&[file(&text)]), expected);
    let twice = [
        file("struct Budget;\npub(crate) enum Plan {}\n"),
        file("pub struct Budget {\nstruct State;"),
        file("struct State;"),
    ];
    assert_eq!(duplicates(&twice).into_keys().collect::<Vec<_>>(), ["Budget"]);
}

#[test]
fn a_private_word_is_found_in_tests_and_benches() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    for path in ["a/tests/b.rs", "a/benches/b.rs", "a/src/b/tests.rs"] {
        let lines = [
            "/// Who is served.".to_owned(),
            format!("// a {} is open", WORDS[WORDS.len() - 2]),
            "pub(crate) struct Came {".to_owned(),
            "    pub(super) async fn ask(&self) {}".to_owned(),
            "enum E {}".to_owned(),
            "struct Answer;".to_owned(),
            "mod seen;".to_owned(),
            "type Way = u8;".to_owned(),
            "fn response() { self.wait_until(|it| it.answer()) }".to_owned(),
        ];
        let expected = [
            "1: begins with Who".to_owned(),
            format!("2: {}", WORDS[WORDS.len() - 2]),
            "3: struct Came".to_owned(),
            "4: fn ask".to_owned(),
            "5: enum E".to_owned(),
            "6: struct Answer".to_owned(),
            "7: mod seen".to_owned(),
            "8: type Way".to_owned(),
        ];
        let found = complaints(&[file(path, &lines.join("\n"))]);
        assert_eq!(found, expected.map(|complaint| format!("{path}:{complaint}")));
    }
    let excepted = [
        file("resolver/src/a.rs", "struct Answer;\nfn answer() {}"),
        file(TEXTS[0], WORDS[0]),
        file("a/tests/b.rs", "trait Engine {\n    type E;\n}"),
    ];
    assert_eq!(complaints(&excepted), Vec::<String>::new());
}
