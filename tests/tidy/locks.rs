//! No `std` locks in long-running code: `supervision`'s locks do not poison and define the consequence of a holder's panic.
//!
//! With poisoning, one panic under a lock causes a panic of every later request. So neither `std`'s locks nor threads that
//! end silently are used where there is a choice.

use crate::none;
use crate::tree::{File, files};

/// Sources of the roles, which use the locks, threads and tasks of `supervision`.
const SHELLS: &[&str] = &[
    "gateway/src/",
    "scheduler/src/",
    "scheduler/client/src/",
    "scheduler/store/src/",
    "replica/src/",
    "src/",
];

/// Banned items of `std`. Each word is concatenated from halves, so that this file does not contain it.
const BANNED: &[(&str, &str)] = &[
    (concat!("Poison", "Error"), "locks of `supervision` do not poison"),
    (concat!("std::sync::Mu", "tex"), "use `supervision::Mutex`"),
    (concat!("std::sync::RwL", "ock"), "use `supervision::RwLock`"),
    (concat!("std::sync::Cond", "var"), "use `supervision::Condvar`"),
    (concat!(".lock().exp", "ect("), "locks of `supervision` do not poison"),
    (concat!(".lock().unw", "rap("), "locks of `supervision` do not poison"),
    (concat!(".read().exp", "ect("), "locks of `supervision` do not poison"),
    (concat!(".write().exp", "ect("), "locks of `supervision` do not poison"),
];

/// The same items in an import list: `use std::sync::{Arc, ...}`.
const LISTED: &[&str] = &[concat!("Mu", "tex"), concat!("RwL", "ock"), concat!("Cond", "var")];

fn complaints(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    let shells = files.iter().filter(|file| SHELLS.iter().any(|shell| file.path.starts_with(shell)));
    for File { path, text } in shells {
        for (word, instead) in BANNED {
            for (at, _) in text.match_indices(word) {
                complaints.push(format!("{path}:{}: {word}: {instead}", line(text, at)));
            }
        }
        for (at, begin) in text.match_indices("use std::sync::{") {
            let list = &text[at + begin.len()..];
            let list = list.split('}').next().unwrap_or(list);
            let named = |word: &&&str| list.split(',').any(|item| item.trim().starts_with(**word));
            for word in LISTED.iter().filter(named) {
                complaints.push(format!("{path}:{}: {word}: use that of `supervision`", line(text, at)));
            }
        }
    }
    complaints
}

fn line(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

#[test]
fn long_running_code_uses_only_locks_that_do_not_poison() {
    none(complaints(&files(|path| path.ends_with(".rs"))));
}

#[test]
fn a_lock_that_poisons_is_found_in_every_form() {
    let file = |path: &str, text: String| File { path: path.to_owned(), text };
    let found = [
        format!("use std::sync::{};\n", LISTED[0]),
        format!("\nuse std::sync::{{Arc, {}Guard}};\n", LISTED[0]),
        format!("use std::sync::{{\n    Arc,\n    {},\n}};\n", LISTED[1]),
        format!("state{}\"never\")", BANNED[4].0),
    ];
    for text in found {
        let complaints = complaints(&[file("gateway/src/a.rs", text.clone())]);
        assert_eq!(complaints.len(), 1, "{text}: {complaints:?}");
        assert!(complaints[0].starts_with("gateway/src/a.rs:"), "{complaints:?}");
    }
    let elsewhere = [
        ("gateway/src/a.rs", "use std::sync::{Arc, OnceLock};\nuse supervision::Mutex;\n".to_owned()),
        ("gateway/tests/a.rs", format!("use std::sync::{};\n", LISTED[0])),
        ("supervision/src/lock.rs", format!("use std::sync::{};\n", LISTED[0])),
    ];
    for (path, text) in elsewhere {
        assert_eq!(complaints(&[file(path, text)]), [""; 0]);
    }
}
