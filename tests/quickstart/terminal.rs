//! Terminal of a host: a shell that stays open between commands, like that of a person.

use scheduler::heartbeat::PARENT_VARIABLE;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Maximum time of a command. The longest expected one stops a gateway, in its lame-duck time of 5 s.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Line after the output of a command, with its exit status.
const END: &str = "end of the command, with status";
/// Variables of the caller that would replace what the page sets.
const VARIABLES: [&str; 7] = [
    "MERIDIAN_AUTHORITIES",
    "MERIDIAN_HUB",
    "MERIDIAN_IDENTITY",
    "MERIDIAN_JOIN_TOKEN",
    "MERIDIAN_LOG",
    "MERIDIAN_LOG_FORMAT",
    "MERIDIAN_TOKEN",
];

/// Open shell. Processes that it has started in the background end with it.
pub(super) struct Terminal {
    shell: Child,
    input: ChildStdin,
    output: Receiver<String>,
    /// File of the current command.
    script: PathBuf,
}

impl Terminal {
    /// Opens a shell in a folder, with the program under test as `meridian`.
    pub(super) fn open(name: &str, folder: &Path, environment: &[(&str, String)]) -> Terminal {
        let program = Path::new(env!("CARGO_BIN_EXE_meridian")).parent().unwrap().to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path =
            std::env::join_paths(std::iter::once(program).chain(std::env::split_paths(&path))).unwrap();
        let mut shell = Command::new("bash");
        for name in VARIABLES {
            shell.env_remove(name);
        }
        shell.args(["--noprofile", "--norc"]).current_dir(folder).env("PATH", path);
        shell.envs(environment.iter().map(|(name, value)| (name, value)));
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = shell.stdin.take().unwrap();
        writeln!(input, "exec 2>&1; export {PARENT_VARIABLE}=$$").unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap()).lines();
        let (send, output) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Terminal { shell, input, output, script: folder.join(format!("{name}.command")) }
    }

    /// Runs a command, and returns its output.
    ///
    /// # Errors
    ///
    /// Its exit status, or a timeout, with the output.
    pub(super) fn run(&mut self, command: &str) -> Result<String, String> {
        std::fs::write(&self.script, command).unwrap();
        let script = self.script.display();
        writeln!(self.input, "source '{script}' < /dev/null; printf '\\n{END} %s\\n' \"$?\"").unwrap();
        let (begun, mut output) = (Instant::now(), String::new());
        loop {
            let remaining = TIMEOUT.saturating_sub(begun.elapsed());
            let Ok(line) = self.output.recv_timeout(remaining) else {
                return Err(format!("its end was not seen in {:.0?}: {output}", begun.elapsed()));
            };
            match line.strip_prefix(END) {
                Some(" 0") => return Ok(output),
                Some(status) => return Err(format!("status{status}: {output}")),
                None => output = output + &line + "\n",
            }
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.shell.kill().ok();
        self.shell.wait().ok();
    }
}

#[test]
fn a_terminal_keeps_its_state_and_reports_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::open("host", folder.path(), &[("GIVEN", "1".to_owned())]);
    assert_eq!(terminal.run("mkdir a && cd a\nVARIABLE=2\n"), Ok("\n".to_owned()));
    let output = terminal.run("echo \"$GIVEN $VARIABLE\" $(basename \"$PWD\")\ncat\n").unwrap();
    assert_eq!(output.trim(), "1 2 a");
    let problem = terminal.run("echo reason >&2\nfalse\n").unwrap_err();
    assert!(problem.starts_with("status 1") && problem.contains("reason"), "{problem}");
    assert!(terminal.run("exit 3\n").unwrap_err().contains("was not seen"));
}
