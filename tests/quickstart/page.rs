//! Reader of a page with commands.
//!
//! A block ` ```sh NAME… ` has commands for each of the named terminals. A block ` ```text ` after it has lines of their output, in order,
//! with `…` for any text. A block ` ```console ` has commands that are not run. There are no other blocks.

use std::process::Command;

/// Fenced block with commands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Heading of its section.
    pub heading: &'static str,
    /// Line of the page.
    pub line: usize,
    pub terminals: Vec<&'static str>,
    pub commands: Vec<String>,
    /// Lines of the output.
    pub expected: Vec<&'static str>,
}

/// Reads the blocks of a page.
pub(super) fn blocks(page: &'static str) -> Vec<Block> {
    let (mut blocks, mut heading, mut open) = (Vec::<Block>::new(), "", None);
    for (line, text) in (1..).zip(page.lines()) {
        match (text.strip_prefix("```"), &mut open) {
            (Some(""), Some(_)) => {
                let (info, begin, lines): (&str, usize, Vec<&str>) = open.take().unwrap();
                close(&mut blocks, (heading, begin), info, &lines);
            }
            (None, Some((_, _, lines))) => lines.push(text),
            (Some(info), None) => open = Some((info, line, Vec::new())),
            (None, None) => heading = text.strip_prefix("## ").unwrap_or(heading),
            (Some(_), Some(_)) => panic!("line {line}: a block in a block"),
        }
    }
    assert!(open.is_none(), "{heading}: a block that does not end");
    blocks
}

fn close(
    blocks: &mut Vec<Block>,
    (heading, line): (&'static str, usize),
    info: &'static str,
    lines: &[&'static str],
) {
    let mut words = info.split(' ');
    match words.next() {
        Some("sh") => {
            let terminals: Vec<_> = words.collect();
            assert!(!terminals.is_empty(), "line {line}: a block of commands names its terminals");
            blocks.push(Block { heading, line, terminals, commands: commands(lines), expected: Vec::new() });
        }
        Some("text") => {
            let block = blocks.last_mut().filter(|block| block.expected.is_empty());
            block.expect("output follows its commands").expected = lines.to_vec();
        }
        Some("console") => {}
        _ => panic!("line {line}: a block {info:?}, which is not run"),
    }
}

/// Splits the lines of a block into commands.
fn commands(lines: &[&str]) -> Vec<String> {
    let (mut commands, mut open) = (Vec::new(), String::new());
    for line in lines {
        if open.is_empty() && (line.trim().is_empty() || line.starts_with('#')) {
            continue;
        }
        open.push_str(line);
        open.push('\n');
        if is_complete(&open) {
            commands.push(std::mem::take(&mut open));
        }
    }
    assert!(open.is_empty(), "a command that does not end: {open}");
    commands
}

/// Returns whether a shell would run the command. It reports an open function or quote as an error, and an open here-document as
/// a warning.
fn is_complete(command: &str) -> bool {
    let mut check = Command::new("bash");
    let checked = check.args(["-n", "-c", command]).env("LC_ALL", "C").output().unwrap();
    !command.ends_with("\\\n") && checked.status.success() && checked.stderr.is_empty()
}

/// Returns the first of the expected lines that the output does not have after the previous ones.
pub(super) fn missing<'e>(expected: &[&'e str], output: &str) -> Option<&'e str> {
    let mut lines = output.lines();
    expected.iter().find(|pattern| !lines.any(|line| matches(pattern, line.trim()))).copied()
}

/// Returns whether a line has the text of a pattern, in which `…` stands for any text.
fn matches(pattern: &str, line: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('…') else { return pattern == line };
    let Some(mut line) = line.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('…').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = line.find(part) else { return false };
        line = &line[at + part.len()..];
    }
    line.ends_with(last)
}

#[test]
fn a_page_is_split_into_commands_of_terminals() {
    let page = "# Page\n\n## First\n\n```sh a b\n# a comment\none \\\n  two\n\ncat > f <<END\ntext\nEND\nf() {\nthree\n}\n```\n\n\
                ```text\nx … z\n```\n\n```console\nnot run\n```\n";
    let commands = ["one \\\n  two\n", "cat > f <<END\ntext\nEND\n", "f() {\nthree\n}\n"].map(str::to_owned);
    let expected = Block {
        heading: "First",
        line: 5,
        terminals: vec!["a", "b"],
        commands: commands.to_vec(),
        expected: vec!["x … z"],
    };
    assert_eq!(blocks(page), [expected]);
}

#[test]
#[should_panic(expected = "names its terminals")]
fn a_block_of_commands_without_a_terminal_is_rejected() {
    blocks("```sh\none\n```\n");
}

#[test]
#[should_panic(expected = "does not end")]
fn an_incomplete_command_is_rejected() {
    blocks("```sh a\ncat <<END\ntext\n```\n");
}

#[test]
fn expected_lines_are_found_in_order() {
    let output = "one\nx: y/eu-1 \n\ntwo\n";
    assert_eq!(missing(&["one", "x: …/eu…", "two"], output), None);
    assert_eq!(missing(&["x: …/us…"], output), Some("x: …/us…"));
    assert_eq!(missing(&["two", "one"], output), Some("one"));
    assert_eq!(missing(&["x: …1", "tw"], output), Some("tw"));
}
