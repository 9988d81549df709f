//! `docs/deploy/quickstart.md`, executed: each command of the page runs in the terminal that its block names, with the program under
//! test and real weights. The hosts are loopback addresses of this test, so the ports are those of the page.

mod page;
mod terminal;

use crate::deploy::{skip, succeeds};
use crate::local_fleet;
use page::Block;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Instant;
use terminal::Terminal;

const PAGE: &str = include_str!("../../docs/deploy/quickstart.md");

/// Returns the variables with which the page names its hosts. Another process that runs this test has other addresses.
fn hosts() -> Vec<(&'static str, String)> {
    let id = std::process::id();
    let (second, third) = (64 + id % 128, id / 128 % 256);
    let address = |number| format!("127.{second}.{third}.{number}");
    ["HOST_1", "HOST_2", "HOST_3"].into_iter().zip((1..).map(address)).collect()
}

/// Returns the ends of all logs of processes below a folder.
fn logs(folder: &Path) -> String {
    let mut found = String::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found += &logs(&path);
        } else if path.extension().is_some_and(|extension| extension == "log") {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let end = lines[lines.len().saturating_sub(20)..].join("\n");
            found += &format!("\n== {}\n{end}\n", path.display());
        }
    }
    found
}

/// Runs the commands of a block in each of its terminals; returns their number.
fn run(block: &Block, terminals: &mut BTreeMap<&'static str, Terminal>, folder: &Path) -> usize {
    for name in &block.terminals {
        let terminal = terminals.entry(*name).or_insert_with(|| Terminal::open(name, folder, &hosts()));
        let mut output = String::new();
        for command in &block.commands {
            let place = format!("{}, line {}: {name}: {command}", block.heading, block.line);
            match terminal.run(command) {
                Ok(text) => output += &text,
                Err(problem) => panic!("{place}{problem}{}", logs(folder)),
            }
        }
        if let Some(missing) = page::missing(&block.expected, &output) {
            panic!("{}, line {}: {name}: no line {missing:?} in: {output}", block.heading, block.line);
        }
    }
    block.commands.len() * block.terminals.len()
}

#[test]
fn every_command_of_the_quick_start_runs() {
    for program in ["bash", "curl"] {
        if !succeeds(Command::new(program).arg("--version")) {
            return skip(&format!(
                "no {program} on this machine: the commands of the quick start are not run"
            ));
        }
    }
    let _turn = local_fleet::turn();
    let (folder, begun) = (tempfile::tempdir().unwrap(), Instant::now());
    let mut terminals = BTreeMap::new();
    let blocks = page::blocks(PAGE);
    let commands: usize = blocks.iter().map(|block| run(block, &mut terminals, folder.path())).sum();
    assert!(commands > 50 && terminals.len() == 4, "{commands} commands in {} terminals", terminals.len());
    println!("{commands} commands in {} terminals, {:.1?}", terminals.len(), begun.elapsed());
}
