//! `meridian verify-residency`: the audit is in `gateway_core::receipt::audit`; here are its bar, its tables and its exit
//! code. Nothing but the folders and the catalogue is looked at, so it can be run anywhere and by anybody.

use crate::cli::VerifyOptions;
use crate::{DID_NOT_HOLD, FAILED, WRONG_USAGE, fail};
use gateway_core::receipt::audit::{ChainSummary, Demands, FINDINGS_TOLD_MAX, Finding, Report};
use indicatif::{ProgressBar, ProgressStyle};
use regions::catalogue::Catalogue;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the command: 0 if everything holds, 3 if something does not.
pub(crate) fn main(options: VerifyOptions) -> ExitCode {
    let VerifyOptions { receipts, regions, heads, held, partial, settle, json } = options;
    let mut problems = Vec::new();
    let catalogue = regions.as_deref().map_or_else(|| Ok(Catalogue::builtin()), read_catalogue);
    let catalogue = catalogue.map_err(|found| problems.extend(found)).ok();
    let mut demands = Demands { partial, settle_ms: settle.saturating_mul(1000), ..Demands::default() };
    demands.receipts.extend(held);
    for head in heads {
        match head.parse() {
            Ok(head) => drop(demands.heads.insert(head)),
            Err(error) => problems.push(format!("--head {head}: {error}")),
        }
    }
    match catalogue {
        Some(catalogue) if problems.is_empty() => verify(&receipts, &catalogue, demands, json),
        _ => fail(WRONG_USAGE, &problems),
    }
}

fn read_catalogue(file: &Path) -> Result<Catalogue, Vec<String>> {
    let named = |problem: String| format!("{}: {problem}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| vec![named(error.to_string())])?;
    Catalogue::parse(&text).map_err(|found| found.iter().map(|problem| named(problem.to_string())).collect())
}

fn verify(dirs: &[PathBuf], catalogue: &Catalogue, demands: Demands, json: bool) -> ExitCode {
    let unreadable = |(path, error): (PathBuf, std::io::Error)| {
        fail(FAILED, &[format!("{} cannot be read: {error}", path.display())])
    };
    let files = match gateway::receipts::files_in(dirs) {
        Ok(files) if files.is_empty() => {
            return fail(
                FAILED,
                &["there are no receipts in these folders, and nothing to verify".to_owned()],
            );
        }
        Ok(files) => files,
        Err(problem) => return unreadable(problem),
    };
    let bar = bar(files.len(), json);
    let report = match gateway::receipts::audit(&files, catalogue, demands, || bar.inc(1)) {
        Ok(report) => report,
        Err(problem) => return unreadable(problem),
    };
    bar.finish_and_clear();
    let text = if json {
        serde_json::to_string_pretty(&report).expect("a report serialises to JSON")
    } else {
        told(&report)
    };
    // Whoever reads it may have closed their end; the exit code still says it.
    writeln!(std::io::stdout(), "{}", text.trim_end()).ok();
    if report.holds { ExitCode::SUCCESS } else { ExitCode::from(DID_NOT_HOLD) }
}

fn bar(files: usize, json: bool) -> ProgressBar {
    if json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} files").expect("a constant template");
    ProgressBar::new(files as u64).with_style(style)
}

/// The report for a person.
fn told(report: &Report) -> String {
    let Report { holds, chains, attempts, arrivals, confirmed, never_arrived, too_young, both_ends, .. } =
        report;
    let Report { missing, counts, findings, .. } = report;
    let mut lines =
        vec![format!("{:<22} {:<6} {:<24} {:>6} {:>10}  head", "chain", "role", "place", "files", "entries")];
    for ChainSummary { chain, role, place, files, entries, head, closed, unfinished_bytes } in chains {
        let role = format!("{role:?}").to_lowercase();
        let open = if *closed { "" } else { "  (not closed)" };
        let torn = match unfinished_bytes {
            0 => String::new(),
            bytes => format!("  ({bytes} bytes of an unfinished line)"),
        };
        lines.push(format!("{chain:<22} {role:<6} {place:<24} {files:>6} {entries:>10}  {head}{open}{torn}"));
    }
    lines.push(format!(
        "\n{attempts} attempts, {arrivals} arrivals: {confirmed} confirmed by both ends, {never_arrived} never arrived, \
         {too_young} too young to tell, {missing} missing"
    ));
    if !both_ends {
        lines.push("receipts of one end only: what they say was not confirmed by the other".to_owned());
    }
    for Finding { kind, file, line, message } in findings {
        let place = if *line == 0 { String::new() } else { format!("{file}:{line}: ") };
        lines.push(format!("{}: {place}{message}", snake(kind)));
    }
    let all: u64 = counts.values().sum();
    if all > findings.len() as u64 {
        lines.push(format!("and {} more ({FINDINGS_TOLD_MAX} are told)", all - findings.len() as u64));
    }
    lines.push(if *holds {
        "\nholds: every chain is whole, and no request was sent to where it was not allowed to be".to_owned()
    } else {
        let counts: Vec<_> = counts.iter().map(|(kind, n)| format!("{n} {}", snake(kind))).collect();
        format!("\ndoes not hold: {}", counts.join(", "))
    });
    lines.join("\n")
}

/// As JSON has it.
fn snake(kind: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(kind).expect("a kind serialises to a string");
    value.as_str().expect("a kind serialises to a string").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_core::receipt::chain::Head;
    use gateway_core::receipt::entry::{EntryV1, Role, VERSION, Why};

    /// A folder with a chain of these entries after its first.
    fn folder(entries: &[EntryV1<'_>]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        let (mut head, mut file) = (Head::default(), Vec::new());
        let begins = EntryV1::File {
            version: VERSION,
            chain: "01".into(),
            role: Role::Edge,
            place: "aws/us-east-1".into(),
            number: 1,
            before: Head::default().to_string().into(),
            at_ms: 1,
        };
        std::iter::once(&begins).chain(entries).for_each(|entry| head.append(entry, &mut file));
        std::fs::write(dir.path().join("receipts-01-00000001.log"), file).expect("written");
        dir
    }

    fn options(dir: &Path) -> VerifyOptions {
        VerifyOptions {
            receipts: vec![dir.to_owned()],
            regions: None,
            heads: Vec::new(),
            held: Vec::new(),
            partial: false,
            settle: 0,
            json: true,
        }
    }

    #[test]
    fn the_exit_code_says_whether_it_holds_cannot_be_told_or_was_asked_wrongly() {
        let check = |options: VerifyOptions, expected: u8| {
            let asked = format!("{options:?}");
            // An ExitCode can be compared with another only by what it is printed as.
            assert_eq!(format!("{:?}", main(options)), format!("{:?}", ExitCode::from(expected)), "{asked}");
        };
        let sound = folder(&[EntryV1::Closed { at_ms: 2 }]);
        let gap = folder(&[EntryV1::Gap { missing: 1, why: Why::Disk, since_ms: 1, at_ms: 2 }]);
        check(options(sound.path()), 0);
        check(options(gap.path()), 3);
        check(VerifyOptions { held: vec!["00".to_owned()], ..options(sound.path()) }, 3);
        check(VerifyOptions { heads: vec!["0".repeat(64)], ..options(sound.path()) }, 3);
        check(VerifyOptions { heads: vec!["short".to_owned()], ..options(sound.path()) }, 2);
        check(VerifyOptions { regions: Some("nowhere.toml".into()), ..options(sound.path()) }, 2);
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        check(
            VerifyOptions { regions: Some(repository.join("configs/regions.toml")), ..options(sound.path()) },
            0,
        );
        check(options(&sound.path().join("nowhere")), 1);
        check(options(tempfile::tempdir().expect("a folder").path()), 1);
    }

    #[test]
    fn a_person_is_told_what_does_not_hold_and_where() {
        let gap = folder(&[EntryV1::Gap { missing: 4, why: Why::QueueFull, since_ms: 1, at_ms: 2 }]);
        let files = gateway::receipts::files_in(&[gap.path().to_owned()]).expect("a file");
        let report = gateway::receipts::audit(&files, &Catalogue::builtin(), Demands::default(), || {});
        let text = told(&report.expect("readable"));
        for part in [
            "gap: ",
            "receipts-01-00000001.log:2: 4 receipts are missing",
            "does not hold: 1 gap",
            "(not closed)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
