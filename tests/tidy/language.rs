//! Language rules that a machine can check (docs/glossary.md has the terms).
//!
//! - The first word of a doc comment's line is a noun or a verb, not a relative pronoun.
//! - Some words stand for a missing noun; they appear nowhere in the sources.
//! - Log messages are statements in lower case without punctuation at their end.
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
    concat!("to", "ld"),
    concat!("law", "ful"),
];

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

fn complaints(all: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for File { path, text } in all {
        for (number, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", number + 1);
            let doc = line.trim_start();
            let doc = doc.strip_prefix("/// ").or_else(|| doc.strip_prefix("//! "));
            if let Some(first) =
                doc.and_then(|doc| doc.split(' ').next()).filter(|first| OPENINGS.contains(first))
            {
                complaints.push(format!("{place}: begins with {first}"));
            }
            for word in
                words(line).filter(|word| WORDS.iter().any(|banned| word.eq_ignore_ascii_case(banned)))
            {
                complaints.push(format!("{place}: {word}"));
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

#[test]
fn comments_and_log_messages_use_plain_statements() {
    let complaints = complaints(&files(is_source));
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
        file("struct Door;\npub(crate) enum Way {}\n"),
        file("pub struct Door {\nstruct State;"),
        file("struct State;"),
    ];
    assert_eq!(duplicates(&twice).into_keys().collect::<Vec<_>>(), ["Door"]);
}
