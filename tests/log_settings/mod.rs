//! Variables of the log, other variables that are not UTF-8, and changes of the filter of the log.

mod filter;

use super::meridian;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Output;

/// Runs the program with a variable to its end.
fn run(arguments: &[&str], variable: (&str, &OsStr)) -> Output {
    meridian().args(arguments).env(variable.0, variable.1).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn an_invalid_variable_of_the_log_prevents_the_start() {
    let filter = (
        "MERIDIAN_LOG",
        "warning",
        "\"warning\" is not a level; did you mean warn?; write off, error, warn, info",
    );
    let format = ("MERIDIAN_LOG_FORMAT", "jsn", "unknown format; did you mean json?; write json or text");
    for (name, value, problem) in [filter, format] {
        for (arguments, code) in [
            (&["hub", "--config", "configs/hub.toml"][..], 2),
            (&["drill", "configs/drills/surge.toml"], 2),
            (&["check", "--environment", "configs/hub.toml"], 3),
        ] {
            let output = run(arguments, (name, OsStr::new(value)));
            let expected = format!("meridian: {name}={value}: {problem}");
            assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
            assert!(stderr(&output).starts_with(&expected), "{arguments:?}: {}", stderr(&output));
        }
        let output = run(&["check", "configs/hub.toml"], (name, OsStr::new(value)));
        assert!(output.status.success(), "the variables are those of another process: {}", stderr(&output));
    }
}

#[test]
fn a_variable_that_is_not_utf_8_is_a_problem_only_where_it_is_read() {
    let broken = OsStr::from_bytes(b"text\xff");
    let check = ["check", "--environment", "configs/hub.toml"];
    let output = run(&check, ("UNRELATED", broken));
    assert!(output.status.success(), "{}", stderr(&output));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tenants.toml");
    std::fs::write(&file, "[[tenant]]\nname = \"docs\"\nkey_env = \"DOCS_KEY\"\n").unwrap();
    let output = run(&["check", "--environment", file.to_str().unwrap()], ("DOCS_KEY", broken));
    assert_eq!(output.status.code(), Some(3));
    let problem = "key_env: the variable \"DOCS_KEY\" is not UTF-8; set it to a text in UTF-8";
    assert!(stderr(&output).contains(problem), "{}", stderr(&output));
}
