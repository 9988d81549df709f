//! `meridian tune`: arguments, progress display and output of the search in `replica::tune`.

use crate::cli::TuneOptions;
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, fail, models};
use indicatif::{ProgressBar, ProgressStyle};
use regions::{EngineKind, Precision};
use replica::cache::ModelSource;
use replica::tune::{OTHERS_MAX, SECONDS_MAX, SECONDS_MIN, TuneEvent, TuneRequest};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Maximum latency target: one hour.
const TARGET_MOST_MS: u64 = 3_600_000;

/// Runs the command. Exit code 3 if nothing was kept because the machine was busy, and `--keep` is absent.
pub(crate) fn main(options: TuneOptions) -> ExitCode {
    let json = options.json;
    let (source, checked) = match check(&options) {
        Ok(checked) => checked,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let cache = match models::ensure(&options.model).and_then(|()| models::cache()) {
        Ok(cache) => cache,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    let model = match cache.resolve(&source) {
        Ok(model) => model,
        Err(error) => return fail(EXIT_FAILED, &[error.to_string()]),
    };
    let TuneSettings { precisions, target_p99, time } = checked;
    let mut view = TuneProgress::new(time);
    let TuneOptions { out, plot, keep, .. } = options;
    let order = TuneRequest {
        model,
        precisions,
        target_p99,
        time,
        out,
        plot,
        others_max: OTHERS_MAX,
        keep_if_busy: keep,
    };
    let report = replica::tune::run(&cache, order, &mut |progress| view.show(&progress));
    view.clear();
    let report = match report {
        Ok(report) => report,
        Err(error) => return fail(EXIT_FAILED, &[error.to_string()]),
    };
    if json {
        println!("{}", report.to_json());
    } else {
        println!("{}", report.table());
    }
    if report.file.is_some() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_CHECK_FAILED) }
}

struct TuneSettings {
    precisions: Vec<Precision>,
    target_p99: Option<Duration>,
    time: Duration,
}

/// Validates the options; returns all problems on failure.
fn check(options: &TuneOptions) -> Result<(ModelSource, TuneSettings), Vec<String>> {
    let TuneOptions { model, precision, target_p99_ms, seconds, json: _, out: _, plot: _, keep: _ } = options;
    let mut problems = Vec::new();
    let source = model.parse().map_err(|error| problems.push(format!("--model: {error}"))).ok();
    let mut precisions: Vec<Precision> = Vec::new();
    for name in precision.split(',').map(str::trim) {
        match name.parse() {
            Ok(precision) if precisions.contains(&precision) => {
                problems.push(format!("--precision lists {name} twice; list it once"));
            }
            Ok(precision) if !EngineKind::Cpu.precisions().contains(&precision) => {
                problems
                    .push(format!("--precision: the engine `cpu`, which is tuned, does not support {name}"));
            }
            Ok(precision) => precisions.push(precision),
            Err(error) => problems.push(format!("--precision: {error}")),
        }
    }
    if !(SECONDS_MIN..=SECONDS_MAX).contains(seconds) {
        problems.push(format!("--seconds {seconds} is out of range; give {SECONDS_MIN} to {SECONDS_MAX}"));
    }
    if target_p99_ms.is_some_and(|millis| millis == 0 || millis > TARGET_MOST_MS) {
        let given = target_p99_ms.unwrap_or_default();
        problems
            .push(format!("--target-p99-ms {given} is out of range; give 1 to {TARGET_MOST_MS}, or omit it"));
    }
    match source {
        Some(source) if problems.is_empty() => {
            let target_p99 = target_p99_ms.map(Duration::from_millis);
            Ok((source, TuneSettings { precisions, target_p99, time: Duration::from_secs(*seconds) }))
        }
        _ => Err(problems),
    }
}

/// Progress display: a bar on a terminal, a line per change elsewhere.
struct TuneProgress {
    bar: Option<ProgressBar>,
    last: String,
}

impl TuneProgress {
    fn new(time: Duration) -> TuneProgress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg}").expect("a constant template");
            ProgressBar::new(time.as_millis() as u64).with_style(style)
        });
        TuneProgress { bar, last: String::new() }
    }

    fn show(&mut self, progress: &TuneEvent) {
        let (line, elapsed) = match progress {
            TuneEvent::Quality(precision, quality) => {
                let (mean, min) = (quality.mean_cosine, quality.min_cosine);
                (format!("{precision} compared with f32: mean cosine {mean:.4}, minimum {min:.4}"), None)
            }
            TuneEvent::Measured { point, elapsed } => {
                let setting = point.setting;
                let line = format!(
                    "{} {} threads, {} tokens: {:.0} tokens/s",
                    setting.precision, setting.threads, setting.batch_tokens, point.tokens_per_second
                );
                // Without a bar, only first measurements are printed.
                (
                    if point.runs > 1 && self.bar.is_none() {
                        "repeated measurements".to_owned()
                    } else {
                        line
                    },
                    Some(elapsed),
                )
            }
            TuneEvent::Comparing { elapsed } => ("comparison before and after".to_owned(), Some(elapsed)),
        };
        match &self.bar {
            Some(bar) => {
                if let Some(elapsed) = elapsed {
                    bar.set_position(elapsed.as_millis() as u64);
                }
                bar.set_message(line);
            }
            None if line != self.last => {
                eprintln!("{line}");
                self.last = line;
            }
            None => {}
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser;

    fn options(words: &str) -> TuneOptions {
        let words = format!("meridian tune {words}");
        match Cli::try_parse_from(words.split(' ')).expect(&words).command {
            CliCommand::Tune(options) => options,
            other => panic!("{other:?}"),
        }
    }

    fn problems(words: &str) -> Vec<String> {
        check(&options(words)).err().expect(words)
    }

    #[test]
    fn only_the_model_is_required() {
        let (_, TuneSettings { precisions, target_p99, time }) =
            check(&options("--model pypi://a")).unwrap_or_else(|problems| panic!("{problems:?}"));
        assert_eq!((precisions, target_p99), (EngineKind::Cpu.precisions().to_vec(), None));
        assert_eq!(time, Duration::from_secs(replica::tune::SECONDS));
    }

    #[test]
    fn values_at_the_limits_are_accepted_and_past_them_rejected() {
        for words in ["--seconds 5", "--seconds 3600", "--target-p99-ms 1", "--target-p99-ms 3600000"] {
            assert!(check(&options(&format!("--model pypi://a {words}"))).is_ok(), "{words}");
        }
        for words in ["--seconds 4", "--seconds 3601", "--target-p99-ms 0", "--target-p99-ms 3600001"] {
            assert_eq!(problems(&format!("--model pypi://a {words}")).len(), 1, "{words}");
        }
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let problems = problems("--model ftp://a --precision f32,f31,f32 --seconds 0");
        for (problem, part) in problems.iter().zip(["ftp://a", "f31", "f32 twice", "--seconds 0"]) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
        assert_eq!(problems.len(), 4, "{problems:?}");
    }
}
