//! `meridian load`: the generator is in `loadtest`; here are its bar, its table and its exit code.

use crate::cli::LoadOptions;
use crate::{FAILED, WRONG_USAGE, fail};
use indicatif::{ProgressBar, ProgressStyle};
use loadtest::record::Snapshot;
use loadtest::{Options, RawOptions};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

/// Between two lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Runs the command. It fails when a request failed.
pub(crate) fn main(options: LoadOptions) -> ExitCode {
    let LoadOptions { url, key, model, rate, arrival, duration, texts, inputs, timeout, seed, geo, json } =
        options;
    let key = Some(key).filter(|key| !key.is_empty());
    let raw = RawOptions { url, key, model, rate, arrival, duration, texts, inputs, timeout, seed, geo };
    let options = match Options::check(raw) {
        Ok(options) => options,
        Err(problems) => return fail(WRONG_USAGE, &problems),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(FAILED, &[format!("no runtime: {error}")]),
    };
    let mut view = View::new(options.profile.lasts());
    let interrupted = async {
        // Without the signal a run simply goes on to its end.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let report = match runtime.block_on(loadtest::run(options, |snapshot| view.show(snapshot), interrupted)) {
        Ok(report) => report,
        Err(problem) => return fail(FAILED, &[problem.to_string()]),
    };
    view.clear();
    println!("{}", if json { report.to_json() } else { report.table() });
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILED) }
}

/// How far a run is: a bar on a terminal, lines elsewhere.
struct View {
    bar: Option<ProgressBar>,
    next_line: Duration,
}

impl View {
    fn new(duration: Duration) -> View {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg}").expect("a constant template");
            ProgressBar::new(duration.as_millis() as u64).with_style(style)
        });
        View { bar, next_line: LINE_EVERY }
    }

    fn show(&mut self, snapshot: &Snapshot) {
        let millis =
            |duration: Option<Duration>| duration.map_or(0.0, |duration| duration.as_secs_f64() * 1e3);
        let Snapshot { elapsed, in_flight, ok, failed, p50, p99, .. } = snapshot;
        let (p50, p99) = (millis(*p50), millis(*p99));
        let line =
            format!("{ok} ok, {failed} failed, {in_flight} in flight, p50 {p50:.1} ms, p99 {p99:.1} ms");
        match &self.bar {
            Some(bar) => {
                bar.set_position(elapsed.as_millis() as u64);
                bar.set_message(line);
            }
            None if *elapsed >= self.next_line => {
                eprintln!("{:>4} s  {line}", elapsed.as_secs());
                self.next_line += LINE_EVERY;
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
