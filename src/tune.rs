//! `meridian tune`: the search is in `replica`; here are its arguments, its bar, and where its words go.

use crate::cli::TuneOptions;
use crate::{FAILED, WRONG_USAGE, fail, models};
use indicatif::{ProgressBar, ProgressStyle};
use regions::{EngineKind, Precision};
use replica::cache::ModelSource;
use replica::tune::{SECONDS_MAX, SECONDS_MIN, TuneEvent, TuneRequest};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// A target of an hour is no target.
const TARGET_MOST_MS: u64 = 3_600_000;

/// Runs the command.
pub(crate) fn main(options: TuneOptions) -> ExitCode {
    let json = options.json;
    let (source, checked) = match check(&options) {
        Ok(checked) => checked,
        Err(problems) => return fail(WRONG_USAGE, &problems),
    };
    let cache = match models::ensure(&options.model).and_then(|()| models::cache()) {
        Ok(cache) => cache,
        Err(problem) => return fail(FAILED, &[problem]),
    };
    let model = match cache.resolve(&source) {
        Ok(model) => model,
        Err(error) => return fail(FAILED, &[error.to_string()]),
    };
    let Checked { precisions, target_p99, time } = checked;
    let mut view = View::new(time);
    let order = TuneRequest { model, precisions, target_p99, time, out: options.out };
    let report = replica::tune::run(&cache, order, &mut |progress| view.show(&progress));
    view.clear();
    match report {
        Ok(report) if json => println!("{}", report.to_json()),
        Ok(report) => println!("{}", report.table()),
        Err(error) => return fail(FAILED, &[error.to_string()]),
    }
    ExitCode::SUCCESS
}

struct Checked {
    precisions: Vec<Precision>,
    target_p99: Option<Duration>,
    time: Duration,
}

/// All that is wrong with what was typed, at once.
fn check(options: &TuneOptions) -> Result<(ModelSource, Checked), Vec<String>> {
    let TuneOptions { model, precision, target_p99_ms, seconds, json: _, out: _ } = options;
    let mut problems = Vec::new();
    let source = model.parse().map_err(|error| problems.push(format!("--model: {error}"))).ok();
    let mut precisions: Vec<Precision> = Vec::new();
    for name in precision.split(',').map(str::trim) {
        match name.parse() {
            Ok(precision) if precisions.contains(&precision) => {
                problems.push(format!("--precision has {name} twice; give it once"));
            }
            Ok(precision) if !EngineKind::Cpu.precisions().contains(&precision) => {
                problems.push(format!("--precision: {name} is not of the engine `cpu`, which is tuned here"));
            }
            Ok(precision) => precisions.push(precision),
            Err(error) => problems.push(format!("--precision: {error}")),
        }
    }
    if !(SECONDS_MIN..=SECONDS_MAX).contains(seconds) {
        problems.push(format!("--seconds {seconds}: give {SECONDS_MIN} to {SECONDS_MAX}"));
    }
    if target_p99_ms.is_some_and(|millis| millis == 0 || millis > TARGET_MOST_MS) {
        let given = target_p99_ms.unwrap_or_default();
        problems.push(format!("--target-p99-ms {given}: give 1 to {TARGET_MOST_MS}, or leave it out"));
    }
    match source {
        Some(source) if problems.is_empty() => {
            let target_p99 = target_p99_ms.map(Duration::from_millis);
            Ok((source, Checked { precisions, target_p99, time: Duration::from_secs(*seconds) }))
        }
        _ => Err(problems),
    }
}

/// How far it is: a bar on a terminal, a line for each thing that is new elsewhere.
struct View {
    bar: Option<ProgressBar>,
    last: String,
}

impl View {
    fn new(time: Duration) -> View {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg}").expect("a constant template");
            ProgressBar::new(time.as_millis() as u64).with_style(style)
        });
        View { bar, last: String::new() }
    }

    fn show(&mut self, progress: &TuneEvent) {
        let (line, elapsed) = match progress {
            TuneEvent::Quality(precision, quality) => {
                let (mean, least) = (quality.mean_cosine, quality.min_cosine);
                (format!("{precision} beside f32: mean cosine {mean:.4}, least {least:.4}"), None)
            }
            TuneEvent::Measured { point, elapsed } => {
                let setting = point.setting;
                let line = format!(
                    "{} {} threads, {} tokens: {:.0} tokens/s",
                    setting.precision, setting.threads, setting.batch_tokens, point.tokens_per_second
                );
                // Elsewhere than on a bar only what is measured for the first time is news.
                (
                    if point.runs > 1 && self.bar.is_none() { "again, in turn".to_owned() } else { line },
                    Some(elapsed),
                )
            }
            TuneEvent::Comparing { elapsed } => ("before and after, in turn".to_owned(), Some(elapsed)),
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
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn options(words: &str) -> TuneOptions {
        let words = format!("meridian tune {words}");
        match Cli::try_parse_from(words.split(' ')).expect(&words).command {
            Command::Tune(options) => options,
            other => panic!("{other:?}"),
        }
    }

    fn problems(words: &str) -> Vec<String> {
        check(&options(words)).err().expect(words)
    }

    #[test]
    fn the_model_is_enough() {
        let (_, Checked { precisions, target_p99, time }) =
            check(&options("--model pypi://a")).unwrap_or_else(|problems| panic!("{problems:?}"));
        assert_eq!((precisions, target_p99), (EngineKind::Cpu.precisions().to_vec(), None));
        assert_eq!(time, Duration::from_secs(replica::tune::SECONDS));
    }

    #[test]
    fn limits_are_taken_and_one_past_them_is_refused() {
        for words in ["--seconds 5", "--seconds 3600", "--target-p99-ms 1", "--target-p99-ms 3600000"] {
            assert!(check(&options(&format!("--model pypi://a {words}"))).is_ok(), "{words}");
        }
        for words in ["--seconds 4", "--seconds 3601", "--target-p99-ms 0", "--target-p99-ms 3600001"] {
            assert_eq!(problems(&format!("--model pypi://a {words}")).len(), 1, "{words}");
        }
    }

    #[test]
    fn everything_that_is_wrong_is_said_at_once() {
        let said = problems("--model ftp://a --precision f32,f31,f32 --seconds 0");
        for (problem, part) in said.iter().zip(["ftp://a", "f31", "f32 twice", "--seconds 0"]) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
        assert_eq!(said.len(), 4, "{said:?}");
    }
}
