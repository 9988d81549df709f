//! `meridian verify-residency`: options, output and exit code of the audit in `gateway_core::receipt::audit`. It reads only
//! the directories and the catalogue, so it can be run anywhere and by anyone. With an auditor's key it maintains a signed
//! checkpoint of the chains' heads, which the next audit compares.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | no findings; requests that regions rejected are listed and are not findings |
//! | 3 | a residency violation, or receipts that do not prove its absence: `verdict` tells which |
//! | 1, 2 | a file cannot be read; invalid usage |

mod checkpoint;
mod time;

use crate::cli::VerifyOptions;
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, fail};
use checkpoint::{CheckpointFile, CheckpointFileError};
use gateway_core::receipt::PseudonymKey;
use gateway_core::receipt::audit::{
    AuditOptions, AuditVerdict, ChainSummary, FINDINGS_LISTED_MAX, Filter, Finding, Report,
};
use indicatif::{ProgressBar, ProgressStyle};
use regions::catalogue::Catalogue;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the command. Exit code 0 if the audit has no findings, 3 otherwise.
pub(crate) fn main(options: VerifyOptions) -> ExitCode {
    let VerifyOptions { receipts, regions, heads, receipt_ids, partial, settle, json, .. } = &options;
    let mut problems = Vec::new();
    let catalogue = regions.as_deref().map_or_else(|| Ok(Catalogue::builtin()), read_catalogue);
    let catalogue = catalogue.map_err(|found| problems.extend(found)).ok();
    let demands =
        AuditOptions { partial: *partial, settle_ms: settle.saturating_mul(1000), ..AuditOptions::default() };
    let mut demands = AuditOptions { filter: filter(&options, &mut problems), ..demands };
    demands.receipts.extend(receipt_ids.iter().cloned());
    for head in heads {
        match head.parse() {
            Ok(head) => drop(demands.heads.insert(head)),
            Err(error) => problems.push(format!("--head {head}: {error}")),
        }
    }
    let checkpoint = match options.checkpoint.as_deref().zip(options.checkpoint_key_file.as_deref()) {
        None => None,
        Some((file, key)) => match CheckpointFile::read(file, key, options.init_checkpoint) {
            Ok(checkpoint) => Some(checkpoint),
            Err(CheckpointFileError::Tampered(problem)) => return fail(EXIT_CHECK_FAILED, &[problem]),
            Err(CheckpointFileError::Problem(problem)) => {
                problems.push(problem);
                None
            }
        },
    };
    demands.checkpoint = checkpoint.as_ref().and_then(|checkpoint| checkpoint.last.clone());
    match catalogue {
        Some(catalogue) if problems.is_empty() => verify(receipts, &catalogue, demands, checkpoint, *json),
        _ => fail(EXIT_USAGE, &problems),
    }
}

/// Returns the scope of the audit.
fn filter(options: &VerifyOptions, problems: &mut Vec<String>) -> Filter {
    let VerifyOptions { tenant, pseudonym_key_file, deployment, from, until, .. } = options;
    let mut at = |option: &str, text: &Option<String>| {
        let read = time::read(text.as_ref()?);
        if read.is_none() {
            let text = text.as_deref().unwrap_or_default();
            problems.push(format!(
                "{option} {text} is not a time; write 2026-03-01T00:00:00Z (in UTC), 2026-03-01, or milliseconds since \
                 1970"
            ));
        }
        read
    };
    let (from_ms, until_ms) = (at("--from", from), at("--until", until));
    if let (Some(from), Some(until)) = (from_ms, until_ms)
        && from >= until
    {
        problems.push("--from is not before --until, so no request is selected; swap them".to_owned());
    }
    let tenant = tenant.as_ref().and_then(|tenant| match pseudonym_key_file {
        Some(file) => match pseudonym_key(file) {
            Ok(key) => Some(key.pseudonym(tenant)),
            Err(problem) => {
                problems.push(problem);
                None
            }
        },
        None if tenant.len() == 32
            && tenant.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) =>
        {
            Some(tenant.clone())
        }
        None => {
            problems.push(format!(
                "--tenant {tenant} is not a pseudonym (32 hexadecimal digits); give a name together with \
                 --pseudonym-key-file"
            ));
            None
        }
    });
    Filter { tenant, deployment: deployment.clone(), from_ms, until_ms }
}

fn pseudonym_key(file: &Path) -> Result<PseudonymKey, String> {
    let named = |problem: String| format!("--pseudonym-key-file {}: {problem}", file.display());
    let secret = std::fs::read_to_string(file).map_err(|error| named(error.to_string()))?;
    let min = PseudonymKey::SECRET_BYTES_MIN;
    PseudonymKey::new(secret.trim().as_bytes())
        .ok_or_else(|| named(format!("it has fewer than {min} bytes, so it is not the key of a gateway")))
}

fn read_catalogue(file: &Path) -> Result<Catalogue, Vec<String>> {
    let named = |problem: String| format!("{}: {problem}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| vec![named(error.to_string())])?;
    Catalogue::parse(&text).map_err(|found| configuration::named(file, found))
}

fn verify(
    dirs: &[PathBuf],
    catalogue: &Catalogue,
    demands: AuditOptions,
    checkpoint: Option<CheckpointFile>,
    json: bool,
) -> ExitCode {
    let unreadable = |(path, error): (PathBuf, std::io::Error)| {
        fail(EXIT_FAILED, &[format!("{} cannot be read: {error}", path.display())])
    };
    let files = match gateway::receipts::files_in(dirs) {
        Ok(files) if files.is_empty() => {
            return fail(EXIT_FAILED, &["no receipts in these directories".to_owned()]);
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
        format_text(&report)
    };
    // The reader may have closed the pipe; the exit code has the result, too.
    writeln!(std::io::stdout(), "{}", text.trim_end()).ok();
    match checkpoint.as_ref().map(|checkpoint| checkpoint.update(&report)) {
        None => {}
        Some(Ok(Some(next))) => {
            eprintln!("signed checkpoint {} of {} chains", next.number, next.chains.len())
        }
        Some(Ok(None)) => eprintln!("checkpoint not updated, because a chain is damaged"),
        Some(Err(error)) => {
            return fail(EXIT_FAILED, &[format!("the checkpoint cannot be written: {error}")]);
        }
    }
    if report.holds { ExitCode::SUCCESS } else { ExitCode::from(EXIT_CHECK_FAILED) }
}

fn bar(files: usize, json: bool) -> ProgressBar {
    if json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} files").expect("a constant template");
    ProgressBar::new(files as u64).with_style(style)
}

/// Formats the report as text.
fn format_text(report: &Report) -> String {
    let Report { holds, chains, attempts, arrivals, confirmed, never_arrived, too_young, both_ends, .. } =
        report;
    let Report { missing, counts, findings, verdict, refused, refusals, rejected, without_outcome, .. } =
        report;
    let mut lines = vec![format!(
        "{:<22} {:<6} {:<24} {:>6} {:>10}  head",
        "chain", "role", "region", "files", "entries"
    )];
    for ChainSummary { chain, role, region, files, entries, head, closed, unfinished_bytes, .. } in chains {
        let role = format!("{role:?}").to_lowercase();
        let open = if *closed { "" } else { "  (not closed)" };
        let torn = match unfinished_bytes {
            0 => String::new(),
            bytes => format!("  ({bytes} bytes of an unfinished line)"),
        };
        lines
            .push(format!("{chain:<22} {role:<6} {region:<24} {files:>6} {entries:>10}  {head}{open}{torn}"));
    }
    lines.push(format!(
        "\n{attempts} attempts, {arrivals} arrivals: {confirmed} confirmed by both ends, {never_arrived} never arrived, \
         {too_young} too recent to judge, {missing} missing"
    ));
    if *refused + *rejected + *without_outcome > 0 {
        lines.push(format!(
            "{refused} refused by regions (no violation), {rejected} rejected without a receipt, {without_outcome} \
             without an outcome"
        ));
    }
    lines.extend(refusals.iter().map(|refusal| format!("refused: {refusal}")));
    if !report.filter.is_empty() {
        lines.push("only the selected receipts are judged; all chains were checked completely".to_owned());
    }
    if !both_ends {
        lines.push("receipts of one end only: not confirmed by the other end".to_owned());
    }
    for Finding { kind, file, line, message } in findings {
        let location = if *line == 0 { String::new() } else { format!("{file}:{line}: ") };
        lines.push(format!("{}: {location}{message}", snake(kind)));
    }
    let all: u64 = counts.values().sum();
    if all > findings.len() as u64 {
        lines.push(format!("and {} more ({FINDINGS_LISTED_MAX} are listed)", all - findings.len() as u64));
    }
    lines.push(if *holds {
        "\nholds: every chain is intact, and every request stayed in its allowed regions".to_owned()
    } else {
        let counts: Vec<_> = counts.iter().map(|(kind, n)| format!("{n} {}", snake(kind))).collect();
        let what = match verdict {
            AuditVerdict::Violated => "residency was violated",
            AuditVerdict::NotProven | AuditVerdict::Holds => {
                "no violation was found, but the receipts do not prove that there was none"
            }
        };
        format!("\ndoes not hold: {}: {what}", counts.join(", "))
    });
    lines.join("\n")
}

/// Returns the name of a kind as in JSON.
fn snake(kind: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(kind).expect("a kind serialises to a string");
    value.as_str().expect("a kind serialises to a string").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gateway_core::receipt::chain::ChainHash;
    use gateway_core::receipt::entry::{Entry, GapReason, Role, VERSION};

    /// Creates a directory with a chain of these entries after its first.
    fn folder(entries: &[Entry<'_>]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        let (mut head, mut file) = (ChainHash::default(), Vec::new());
        let begins = Entry::File {
            version: VERSION,
            chain: "01".into(),
            role: Role::Edge,
            region: "aws/us-east-1".into(),
            number: 1,
            before: ChainHash::default().to_string().into(),
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
            receipt_ids: Vec::new(),
            partial: false,
            tenant: None,
            pseudonym_key_file: None,
            deployment: None,
            from: None,
            until: None,
            checkpoint: None,
            checkpoint_key_file: None,
            init_checkpoint: false,
            settle: 0,
            json: true,
        }
    }

    /// Compares exit codes by their debug output, because `ExitCode` does not implement equality.
    #[track_caller]
    fn check(options: VerifyOptions, expected: u8) {
        let shown = format!("{options:?}");
        assert_eq!(format!("{:?}", main(options)), format!("{:?}", ExitCode::from(expected)), "{shown}");
    }

    #[test]
    fn a_checkpoint_is_created_on_request_and_detects_a_rolled_back_chain() {
        let closed = |at_ms| Entry::Closed { at_ms };
        let resumed = Entry::Resumed { at_ms: 3, clean: true, torn_bytes: 0 };
        let before = folder(&[closed(2)]);
        let after = folder(&[closed(2), resumed, closed(4)]);
        let dir = tempfile::tempdir().expect("a folder");
        let (file, key) = (dir.path().join("checkpoint"), dir.path().join("key"));
        std::fs::write(&key, "0123456789abcdef").expect("written");
        let with = |receipts: &Path| VerifyOptions {
            checkpoint: Some(file.clone()),
            checkpoint_key_file: Some(key.clone()),
            ..options(receipts)
        };
        check(with(before.path()), 2);
        check(VerifyOptions { init_checkpoint: true, ..with(before.path()) }, 0);
        check(VerifyOptions { init_checkpoint: true, ..with(before.path()) }, 2);
        check(with(before.path()), 0);
        check(with(after.path()), 0);
        let signed = std::fs::read_to_string(&file).expect("a checkpoint");
        assert!(signed.starts_with("{\"version\":1,\"number\":3,"), "{signed}");
        check(with(before.path()), 3);
        assert_eq!(std::fs::read_to_string(&file).expect("a checkpoint"), signed, "it is not updated");
        let empty = folder(&[]);
        check(with(empty.path()), 3);
        std::fs::write(&file, signed.replace("\"line\":4", "\"line\":2")).expect("written");
        check(with(before.path()), 3);
        std::fs::write(&file, &signed).expect("written");
        std::fs::write(&key, "0123456789abcdeX").expect("written");
        check(with(after.path()), 3);
        std::fs::write(&key, "short").expect("written");
        check(with(after.path()), 2);
    }

    #[test]
    fn the_scope_of_the_audit_can_be_limited_and_invalid_limits_are_rejected() {
        let gap =
            folder(&[Entry::Gap { missing: 1, reason: GapReason::Disk, since_ms: 1_000, at_ms: 2_000 }]);
        let path = gap.path();
        let key = path.join("key");
        std::fs::write(&key, "0123456789abcdef").expect("written");
        let text = |text: &str| Some(text.to_owned());
        check(VerifyOptions { from: text("2001"), ..options(path) }, 0);
        check(VerifyOptions { from: text("2000"), ..options(path) }, 3);
        check(VerifyOptions { until: text("1000"), ..options(path) }, 0);
        check(VerifyOptions { from: text("yesterday"), ..options(path) }, 2);
        check(VerifyOptions { from: text("2026-03-01"), until: text("2026-02-01"), ..options(path) }, 2);
        check(VerifyOptions { tenant: text("acme"), ..options(path) }, 2);
        check(VerifyOptions { tenant: text(&"a".repeat(32)), ..options(path) }, 3);
        check(VerifyOptions { tenant: text("acme"), pseudonym_key_file: Some(key), ..options(path) }, 3);
        check(
            VerifyOptions { tenant: text("acme"), pseudonym_key_file: Some("no".into()), ..options(path) },
            2,
        );
    }

    #[test]
    fn the_exit_code_distinguishes_findings_unreadable_files_and_usage_errors() {
        let intact = folder(&[Entry::Closed { at_ms: 2 }]);
        let gap = folder(&[Entry::Gap { missing: 1, reason: GapReason::Disk, since_ms: 1, at_ms: 2 }]);
        check(options(intact.path()), 0);
        check(options(gap.path()), 3);
        check(VerifyOptions { receipt_ids: vec!["00".to_owned()], ..options(intact.path()) }, 3);
        check(VerifyOptions { heads: vec!["0".repeat(64)], ..options(intact.path()) }, 3);
        check(VerifyOptions { heads: vec!["short".to_owned()], ..options(intact.path()) }, 2);
        check(VerifyOptions { regions: Some("nowhere.toml".into()), ..options(intact.path()) }, 2);
        let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
        check(
            VerifyOptions {
                regions: Some(repository.join("configs/regions.toml")),
                ..options(intact.path())
            },
            0,
        );
        check(options(&intact.path().join("nowhere")), 1);
        check(options(tempfile::tempdir().expect("a folder").path()), 1);
    }

    #[test]
    fn the_text_lists_findings_with_their_locations() {
        let gap = folder(&[Entry::Gap { missing: 4, reason: GapReason::QueueFull, since_ms: 1, at_ms: 2 }]);
        let files = gateway::receipts::files_in(&[gap.path().to_owned()]).expect("a file");
        let report = gateway::receipts::audit(&files, &Catalogue::builtin(), AuditOptions::default(), || {});
        let text = format_text(&report.expect("readable"));
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
