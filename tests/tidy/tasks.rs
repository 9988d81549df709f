//! No task or thread of a role ends silently: each is started through `supervision`, or joined by a supervised task.

use crate::none;
use crate::tree::{File, files};

const SHELLS: &[&str] = &[
    "gateway/src/",
    "jobs/src/",
    "scheduler/src/",
    "scheduler/client/src/",
    "scheduler/store/src/",
    "replica/src/",
    "telemetry/src/",
];

/// Calls that start a task or a thread.
const STARTS: &[&str] = &[".spawn(", "tokio::spawn(", "thread::Builder::new("];
/// Calls of which a started task must contain one.
const SUPERVISED: &[&str] = &["supervise", "essential(", "contained(", "contain("];
/// Length of the searched text after a start: the first lines of a closure.
const SEARCHED_CHARS: usize = 220;

/// Exceptions, with the reason why the task does not end silently.
const JOINED: &[(&str, &str)] = &[
    (
        "scheduler/src/hub/pki/signer.rs",
        "a child process that the caller waits for, and kills at its timeout",
    ),
    ("gateway/src/http2/mod.rs", "`Http2Client::spawn`, which contains its task"),
    ("replica/src/cache/bucket.rs", "a scoped thread, whose panic is that of the caller"),
    ("replica/src/cache/download.rs", "scoped threads, whose panic is that of the scope"),
    ("replica/src/engine/cpu/mod.rs", "scoped threads, whose panic is that of the scope"),
    ("replica/src/server.rs", "the role waits for it and ends with an error"),
    (
        "scheduler/src/actuator/process/mod.rs",
        "children, and their lives, which the actuator joins: it is essential",
    ),
];

fn complaints(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    let of_a_role = |path: &str| {
        let test = path.contains("/tests/") || path.ends_with("/tests.rs") || path.ends_with("/contained.rs");
        SHELLS.iter().any(|shell| path.starts_with(shell)) && !test
    };
    for File { path, text } in files.iter().filter(|file| of_a_role(&file.path)) {
        if JOINED.iter().any(|(joined, _)| joined == path) {
            continue;
        }
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for start in STARTS {
            for (at, _) in text.match_indices(start) {
                let begun: String = text[at + start.len()..].chars().take(SEARCHED_CHARS).collect();
                if !SUPERVISED.iter().any(|word| begun.contains(word)) {
                    let line = text[..at].matches('\n').count() + 1;
                    complaints.push(format!("{path}:{line}: the task started here can end unnoticed"));
                }
            }
        }
    }
    complaints
}

#[test]
fn long_running_tasks_are_supervised() {
    none(complaints(&files(|path| path.ends_with(".rs"))));
}

/// A panic that is caught outside `supervision` is resumed in the caller, so that it is counted and logged once.
#[test]
fn a_panic_that_is_caught_is_counted() {
    let catches = |file: &&File| {
        file.text.contains("catch_unwind(") && SHELLS.iter().any(|shell| file.path.starts_with(shell))
    };
    let all = files(|path| path.ends_with(".rs"));
    let silent = |file: &File| !file.text.contains("resume_unwind(");
    none(
        all.iter()
            .filter(catches)
            .filter(|file| silent(file))
            .map(|file| {
                format!("{} catches panics; supervision::request::contain_work counts them", file.path)
            })
            .collect(),
    );
}

#[test]
fn every_exception_is_still_needed() {
    let all = files(|path| path.ends_with(".rs"));
    none(
        JOINED
            .iter()
            .filter(|(path, _)| {
                let text = all.iter().find(|file| file.path == *path).map_or("", |file| &file.text);
                !STARTS.iter().any(|start| text.contains(start))
            })
            .map(|(path, reason)| format!("{path} starts no task; remove the entry: {reason}"))
            .collect(),
    );
}

#[test]
fn a_task_that_can_end_silently_is_found() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let silent = [
        file("gateway/src/a.rs", "tasks.spawn(follow());"),
        file("scheduler/src/b.rs", "let task = tokio::spawn(async move { run().await });"),
        file("replica/src/c.rs", "thread::Builder::new().name(name).spawn(work)"),
    ];
    for file in silent {
        assert!(!complaints(std::slice::from_ref(&file)).is_empty(), "{}", file.text);
    }
    let supervised = [
        file("gateway/src/a.rs", "tasks.spawn(supervise(\"routes\", move || follow()));"),
        file("scheduler/src/b.rs", "tokio::spawn(essential(\"agent\", run()))"),
        file("gateway/src/c.rs", "#[cfg(test)]\nmod tests {\n    tokio::spawn(serve());"),
        file("gateway/src/d/tests.rs", "tokio::spawn(serve());"),
        file("src/up/link.rs", "tokio::spawn(accept());"),
    ];
    assert_eq!(complaints(&supervised), [""; 0]);
}
