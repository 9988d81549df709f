//! `meridian generate`: writes the shell completions and man pages of this command line, for packages.

use crate::cli::{Cli, GenerateOptions};
use crate::{EXIT_FAILED, fail};
use clap::CommandFactory as _;
use clap_complete::Shell;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Shells with completions.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Runs the command.
pub(crate) fn main(options: &GenerateOptions) -> ExitCode {
    match generate(&options.dir) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(EXIT_FAILED, &[format!("{} cannot be written: {error}", options.dir.display())]),
    }
}

fn generate(dir: &Path) -> io::Result<()> {
    let [completions, man] = ["completions", "man"].map(|name| dir.join(name));
    std::fs::create_dir_all(&completions)?;
    std::fs::create_dir_all(&man)?;
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut Cli::command(), "meridian", &completions)?;
    }
    clap_mangen::generate_to(Cli::command(), &man)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_man_page_and_a_completion() {
        let dir = tempfile::tempdir().expect("a folder");
        generate(dir.path()).expect("written");
        let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect(name);
        let completions = ["meridian.bash", "_meridian", "meridian.fish"];
        let completions = completions.map(|name| text(&format!("completions/{name}")));
        let command = Cli::command();
        for visible in command.get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = visible.get_name();
            let page = text(&format!("man/meridian-{name}.1"));
            assert!(
                page.contains(".SH SYNOPSIS") && page.contains(env!("CARGO_PKG_VERSION")),
                "{name}: {page}"
            );
            assert!(completions.iter().all(|text| text.contains(name)), "{name}");
        }
        assert!(text("man/meridian.1").contains("verify\\-residency"), "{}", text("man/meridian.1"));
        assert!(text("man/meridian-pki-token.1").contains("\\-\\-ttl"));
    }
}
