//! Words that must not be committed: unfinished work, disabled tests, and paths of personal machines.
//!
//! Each word is concatenated from halves, so that this file does not contain it.

use crate::tree::{File, files};

/// In Rust sources.
const UNFINISHED: &[&str] = &[
    concat!("to", "do!"),
    concat!("unimple", "mented!"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("#[ig", "nore"),
];

/// In every file: directories of personal machines.
const PRIVATE: &[&str] = &[concat!("/ho", "me/"), concat!("/Us", "ers/"), concat!("/ro", "ot/")];

fn complaints(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for File { path, text } in files {
        let unfinished = if path.ends_with(".rs") { UNFINISHED } else { &[] };
        for (number, line) in text.lines().enumerate() {
            for word in unfinished.iter().chain(PRIVATE).filter(|word| line.contains(**word)) {
                complaints.push(format!("{path}:{}: {word}", number + 1));
            }
        }
    }
    complaints
}

#[test]
fn no_unfinished_work_and_no_private_path_is_committed() {
    let complaints = complaints(&files(|_| true));
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn an_unfinished_line_and_a_private_path_are_found() {
    let file = |path: &str, text: String| File { path: path.to_owned(), text };
    let files = [
        file("a.rs", format!("fn a() {{\n    {}()\n}}", UNFINISHED[0])),
        file("b.md", format!("see {}someone", PRIVATE[0])),
        file("c.md", UNFINISHED[2].to_owned()),
    ];
    assert_eq!(complaints(&files), [format!("a.rs:2: {}", UNFINISHED[0]), format!("b.md:1: {}", PRIVATE[0])]);
}
