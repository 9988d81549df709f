//! `docs/events.md`: every log event and every error text of every role, extracted from the sources.
//!
//! An event is a call of a `tracing` macro with a message. Its meaning is the comment directly above the call, or the doc comment
//! of the event's struct, and warnings and errors must have one: an operator reads the page and not the code. An error text is the
//! `#[error("…")]` of a type, and its meaning is the doc comment of the variant.

use crate::tree::{File, files, is_source, root};
use std::collections::{BTreeMap, BTreeSet};

/// Sections of the page, with the paths of their sources. The first path that matches decides.
const ROLES: &[(&str, &[&str])] = &[
    (
        "Gateway",
        &["gateway/src/edge/", "gateway/src/events/re", "gateway/src/handover.rs", "gateway/src/tokens.rs"],
    ),
    (
        "Spoke",
        &[
            "gateway/src/events/arrival",
            "gateway/src/events/deployment",
            "gateway/src/events/job",
            "gateway/src/events/model",
            "gateway/src/events/peer",
            "gateway/src/ingress/",
            "scheduler/src/",
        ],
    ),
    ("Gateway and spoke", &["gateway/", "resolver/", "scheduler/client/"]),
    ("Hub", &["scheduler/src/events.rs", "scheduler/src/hub/", "scheduler/core/", "scheduler/store/"]),
    ("Replica", &["replica/"]),
    ("Durable jobs", &["jobs/"]),
    ("Buckets of durable jobs and of models", &["buckets/"]),
    (
        "All processes",
        &["supervision/", "identity/", "src/roles.rs", "regions/", "scheduler/api/", "telemetry/"],
    ),
    ("Command line", &["src/", "embed/", "loadtest/"]),
];

const INTRODUCTION: &str = "# Log events and error texts

This page is generated from the sources by `MERIDIAN_WRITE_DOCS=1 cargo test --test tidy`; a test verifies that it is up to
date.

A role logs to stderr, at level `info` and above; `MERIDIAN_LOG=debug` and `MERIDIAN_LOG=info,access=off` set other levels, and
`MERIDIAN_LOG_FORMAT=json` writes one JSON object per line. Names of regions, deployments and tenants are in fields, so that a
message is always the same text and can be searched for. A role that cannot start prints an error text and exits with status 1, or
with status 2 if its configuration is invalid: then each problem is printed with its file, its line and the fix, as by `meridian check
FILE`. Errors of requests are in [errors.md](errors.md).

`…` in an error text stands for a value or for the text of the error that caused it.
";

/// Level of a log event, the most severe first.
const LEVELS: [&str; 4] = ["error", "warn", "info", "debug"];

/// Log event, or error text if it has no level.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    role: usize,
    /// Index in [`LEVELS`].
    level: Option<usize>,
    message: String,
}

/// Fields and meanings of the events with one message, in one role.
#[derive(Default)]
struct Details {
    fields: BTreeSet<String>,
    meanings: BTreeSet<String>,
    /// First occurrence.
    place: String,
}

type Catalogue = BTreeMap<Event, Details>;

/// Role of a source file: the one with the longest prefix.
fn role_of(path: &str) -> Option<usize> {
    let prefixes =
        ROLES.iter().enumerate().flat_map(|(role, (_, paths))| paths.iter().map(move |path| (path, role)));
    let matching = prefixes.filter(|(prefix, _)| path.starts_with(**prefix));
    matching.max_by_key(|(prefix, _)| prefix.len()).map(|(_, role)| role)
}

/// Positions and messages of the events of a file.
pub(crate) fn messages(code: &str) -> impl Iterator<Item = (usize, String)> {
    let calls = LEVELS.into_iter().flat_map(|level| calls(code, &format!("{level}!(")));
    calls.map(|(at, arguments)| (at, parse_event(arguments).0))
}

/// Events and error texts of the files, with complaints about those that an operator would not understand.
fn catalogue(all: &[File]) -> (Catalogue, Vec<String>) {
    let (mut catalogue, mut complaints) = (Catalogue::new(), Vec::new());
    for file in all {
        let code = file.code();
        let events = LEVELS.iter().enumerate().flat_map(|(level, name)| {
            calls(code, &format!("{name}!("))
                .into_iter()
                .map(move |(at, arguments)| (at, arguments, Some(level)))
        });
        let errors = calls(code, "#[error(").into_iter().map(|(at, arguments)| (at, arguments, None));
        for (at, arguments, level) in events.chain(errors) {
            let place = format!("{}:{}", file.path, code[..at].matches('\n').count() + 1);
            let Some(role) = role_of(&file.path) else {
                complaints.push(format!("{place}: no section of ROLES has this file"));
                continue;
            };
            let (message, fields) = match level {
                Some(_) => parse_event(arguments),
                None => (error_text(arguments), BTreeSet::new()),
            };
            // A text of values only is that of another error.
            let has_words = || {
                message
                    .split('{')
                    .any(|rest| rest.rsplit('}').next().unwrap_or(rest).contains(char::is_alphabetic))
            };
            if level.is_none() && !has_words() {
                continue;
            }
            let meaning = match level {
                Some(_) => ["// ", "/// "]
                    .iter()
                    .find_map(|start| comment_above(code, at, start))
                    .or_else(|| doc_of_struct(&file.path, code, at)),
                None => comment_above(code, at, "/// "),
            };
            let details = catalogue.entry(Event { role, level, message }).or_default();
            details.fields.extend(fields);
            details.meanings.extend(meaning);
            if details.place.is_empty() {
                details.place = place;
            }
        }
    }
    for (event, Details { meanings, place, .. }) in &catalogue {
        let needs_meaning = matches!(event.level, Some(0 | 1));
        if needs_meaning && meanings.is_empty() {
            complaints.push(format!("{place}: `{}` has no comment with its meaning", event.message));
        }
        if event.level.is_some() && event.message.is_empty() && !place.starts_with("gateway/src/events/") {
            complaints.push(format!("{place}: an event without a message"));
        }
        if needs_meaning && meanings.len() > 1 {
            complaints.push(format!("{place}: `{}` has several meanings: {meanings:?}", event.message));
        }
    }
    (catalogue, complaints)
}

/// Positions and arguments of the calls of a macro or attribute.
fn calls<'a>(code: &'a str, name: &str) -> Vec<(usize, Vec<&'a str>)> {
    let is_call =
        |at: &usize| !code[..*at].ends_with(|sign: char| sign.is_alphanumeric() || "_\"".contains(sign));
    let starts = code.match_indices(name).map(|(at, _)| at).filter(is_call);
    starts.map(|at| (at, arguments(&code[at + name.len()..]))).collect()
}

/// Splits the arguments up to the closing parenthesis.
fn arguments(text: &str) -> Vec<&str> {
    let (mut found, mut depth, mut start, mut in_string, mut escaped) = (Vec::new(), 0, 0, false, false);
    for (at, sign) in text.char_indices() {
        if in_string {
            in_string = escaped || sign != '"';
            escaped = !escaped && sign == '\\';
            continue;
        }
        match sign {
            '"' => in_string = true,
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth == 0 => {
                found.push(text[start..at].trim());
                break;
            }
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    found.retain(|argument| !argument.is_empty());
    found
}

/// Message and fields of an event. One with a target of its own has no message but the name of the target.
fn parse_event(arguments: Vec<&str>) -> (String, BTreeSet<String>) {
    let (mut message, mut fields) = (String::new(), BTreeSet::new());
    for argument in arguments {
        if let Some(text) = literal(argument) {
            message = text;
        } else if argument.starts_with("target:") {
            message = "(target `access`, without a message)".to_owned();
        } else {
            let name = argument.split(" = ").next().unwrap_or(argument).trim_start_matches(['%', '?']);
            fields.insert(name.trim_start_matches("self.").to_owned());
        }
    }
    (message, fields)
}

/// Text of an error, with the names of its values in braces.
fn error_text(arguments: Vec<&str>) -> String {
    let mut arguments = arguments.into_iter();
    let Some(text) = arguments.next().and_then(literal) else { return String::new() };
    // Braces that are part of the text.
    let text = text.replace("{{", "\u{1}").replace("}}", "\u{2}");
    let mut positional = arguments.filter(|argument| !argument.contains(" = "));
    let mut shown = String::new();
    let mut rest = text.as_str();
    while let Some((before, (name, after))) =
        rest.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)))
    {
        shown.push_str(before);
        let name = name.split(':').next().unwrap_or_default();
        let value = if name.is_empty() { positional.next().unwrap_or_default() } else { name };
        let value = value.split(['.', '(', '[', ' ']).next().unwrap_or_default().trim_start_matches('*');
        let is_name = value.starts_with(char::is_lowercase) && !value.starts_with("if ");
        shown.push_str(&if is_name { format!("{{{value}}}") } else { "…".to_owned() });
        rest = after;
    }
    (shown + rest).replace('\u{1}', "{").replace('\u{2}', "}")
}

/// Text of a string literal, with its continuation lines joined.
fn literal(argument: &str) -> Option<String> {
    let text = argument.strip_prefix('"')?.strip_suffix('"')?;
    let lines: Vec<&str> = text
        .split("\\\n")
        .enumerate()
        .map(|(at, line)| if at == 0 { line } else { line.trim_start() })
        .collect();
    Some(lines.concat().replace("\\\"", "\"").replace("\\n", " "))
}

/// Lines of a comment directly above the line of a call, over attributes.
fn comment_above(code: &str, at: usize, start: &str) -> Option<String> {
    let line = code[..at].rfind('\n').unwrap_or(0);
    let above = code[..line].lines().rev().map(str::trim).skip_while(|line| line.starts_with("#["));
    let mut lines: Vec<&str> = above.map_while(|line| line.strip_prefix(start)).collect();
    lines.reverse();
    (!lines.is_empty()).then(|| lines.join(" "))
}

/// Doc comment of the struct whose implementation contains a call, in a file of events.
fn doc_of_struct(path: &str, code: &str, at: usize) -> Option<String> {
    if !path.contains("events") {
        return None;
    }
    let implementation = &code[code[..at].rfind("\nimpl")?..at];
    let name = implementation.split(['<', ' ']).find(|word| word.starts_with(char::is_uppercase))?;
    let definition = ["struct", "enum"]
        .iter()
        .find_map(|kind| [" ", "<", ";"].iter().find_map(|end| code.find(&format!("{kind} {name}{end}"))))?;
    comment_above(code, definition, "/// ")
}

/// The page.
fn markdown(catalogue: &Catalogue) -> String {
    let mut page = INTRODUCTION.to_owned();
    let cell = |text: &str| text.replace('|', "\\|");
    for (role, (title, _)) in ROLES.iter().enumerate() {
        let rows = || catalogue.iter().filter(|(event, _)| event.role == role);
        if rows().next().is_none() {
            continue;
        }
        page.push_str(&format!("\n## {title}\n"));
        if rows().any(|(event, _)| event.level.is_some()) {
            page.push_str("\n| level | message | fields | meaning and action |\n|---|---|---|---|\n");
        }
        for (Event { level, message, .. }, Details { fields, meanings, .. }) in rows() {
            let Some(level) = level else { continue };
            let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
            let meanings: Vec<&str> = meanings.iter().map(String::as_str).collect();
            let (level, fields, meaning) = (LEVELS[*level], fields.join(" "), cell(&meanings.join(" ")));
            page.push_str(&format!("| {level} | {} | {fields} | {meaning} |\n", cell(message)));
        }
        if rows().any(|(event, _)| event.level.is_none()) {
            page.push_str("\n| error text | meaning |\n|---|---|\n");
        }
        for (Event { message, .. }, Details { meanings, .. }) in
            rows().filter(|(event, _)| event.level.is_none())
        {
            let meanings: Vec<&str> = meanings.iter().map(String::as_str).collect();
            page.push_str(&format!("| {} | {} |\n", cell(message), cell(&meanings.join(" "))));
        }
    }
    page
}

#[test]
fn docs_events_md_is_up_to_date_and_every_warning_has_a_meaning() {
    let (catalogue, complaints) = catalogue(&files(is_source));
    assert!(complaints.is_empty(), "{complaints:#?}");
    let (page, path) = (markdown(&catalogue), root().join("docs/events.md"));
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(&path, &page).expect("docs/events.md is writable");
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "docs/events.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1");
}

#[test]
fn events_and_errors_are_read_with_their_fields_and_meanings() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let all = [
        file(
            "scheduler/src/hub/events.rs",
            "/// The lease ended.\n/// Check the region.\npub(crate) struct LeaseEnded<'a> {\n}\nimpl LeaseEnded<'_> {\n    fn emit(self) {\n        \
             tracing::warn!(%region, boot = self.boot(\"a, b\"), \"lease ended\");\n    }\n}\n\
             #[cfg(test)]\nmod tests {\n    tracing::warn!(\"x\");\n}\n",
        ),
        file(
            "gateway/src/edge/a.rs",
            "fn f() {\n    // Check the disk.\n    tracing::error!(?path, self.id,\n        \"failed to write\");\n    tracing::warn!(\"disk full\");\n}\n\
             enum E {\n    /// The port is taken.\n    #[error(\"cannot listen on {address}: {0}; stop \\\n             {}\", path.display())]\n    A,\n    #[error(\"{0}\")]\n    B,\n}\n",
        ),
        file("elsewhere/src/a.rs", "fn f() {\n    tracing::info!(\"started\");\n}\n"),
    ];
    let (found, complaints) = catalogue(&all);
    let page = markdown(&found);
    assert_eq!(
        page.lines().filter(|line| line.starts_with("| ") && !line.contains("| meaning")).collect::<Vec<_>>(),
        [
            "| error | failed to write | `id` `path` | Check the disk. |",
            "| warn | disk full |  |  |",
            "| cannot listen on {address}: …; stop {path} | The port is taken. |",
            "| warn | lease ended | `boot` `region` | The lease ended. Check the region. |",
        ]
    );
    assert_eq!(
        complaints,
        [
            "elsewhere/src/a.rs:2: no section of ROLES has this file",
            "gateway/src/edge/a.rs:5: `disk full` has no comment with its meaning"
        ]
    );
}
