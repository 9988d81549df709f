//! `meridian load`: progress display, output files and exit code of the load generator in `loadtest`.

use crate::cli::{CompareOptions, LoadCommand, LoadOptions};
use crate::{EXIT_CHECK_FAILED, EXIT_FAILED, EXIT_USAGE, fail};
use indicatif::{ProgressBar, ProgressStyle};
use loadtest::find_capacity::{CapacitySearchOptions, find_capacity};
use loadtest::record::RunSnapshot;
use loadtest::report::PageContext;
use loadtest::report::compare::Comparison;
use loadtest::{Options, RawOptions, Report};
use std::future::Future;
use std::io::IsTerminal;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// Period of progress lines without a terminal, of this command and of `meridian embed`.
pub(crate) const PROGRESS_LINE_PERIOD: Duration = Duration::from_secs(5);

/// Output files of a report, in addition to stdout.
struct Outputs {
    json: bool,
    html: Option<PathBuf>,
    hgrm: Option<PathBuf>,
    hdr_log: Option<PathBuf>,
}

/// Runs the command. Exit code 1 if a request failed, 3 if the latency objective was missed.
pub(crate) fn main(options: LoadOptions) -> ExitCode {
    let LoadOptions { command, find_capacity, json, html, hgrm, hdr_log, .. } = &options;
    if let Some(LoadCommand::Compare(options)) = command {
        return compare(options);
    }
    let outputs = Outputs { json: *json, html: html.clone(), hgrm: hgrm.clone(), hdr_log: hdr_log.clone() };
    let find_capacity = *find_capacity;
    let mut problems = outputs.problems();
    let options =
        Options::check(raw(options)).map_err(|found| problems.splice(0..0, found).for_each(drop)).ok();
    let Some(options) = options.filter(|_| problems.is_empty()) else { return fail(EXIT_USAGE, &problems) };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_FAILED, &[format!("cannot start the async runtime: {error}")]),
    };
    if find_capacity {
        return match CapacitySearchOptions::check(options) {
            Ok(search_options) => runtime.block_on(capacity(search_options, outputs.json)),
            Err(problems) => fail(EXIT_USAGE, &problems),
        };
    }
    let (mut view, began) = (LoadProgress::new(options.duration()), SystemTime::now());
    let report = match runtime.block_on(loadtest::run(options, |snapshot| view.show(snapshot), interrupted()))
    {
        Ok(report) => report,
        Err(problem) => return fail(EXIT_FAILED, &[problem.to_string()]),
    };
    view.clear();
    println!("{}", if outputs.json { report.to_json() } else { report.table() });
    if let Err(problems) = outputs.write(&report, began) {
        return fail(EXIT_FAILED, &problems);
    }
    match (report.holds(), report.failed()) {
        (false, _) => ExitCode::from(EXIT_CHECK_FAILED),
        // The objective includes the permitted share of failures.
        (true, _) if report.options.slo.is_some() => ExitCode::SUCCESS,
        (true, 0) => ExitCode::SUCCESS,
        (true, _) => ExitCode::from(EXIT_FAILED),
    }
}

fn raw(options: LoadOptions) -> RawOptions {
    let LoadOptions {
        command: _,
        url,
        cacert,
        key,
        model,
        workload,
        tasks,
        rate,
        arrival,
        callers,
        trace,
        duration,
        texts,
        expect,
        tolerance,
        inputs,
        documents,
        timeout,
        slo,
        find_capacity: _,
        seed,
        geo,
        http2,
        json: _,
        html: _,
        hgrm: _,
        hdr_log: _,
    } = options;
    let key = Some(key).filter(|key| !key.is_empty());
    RawOptions {
        url,
        cacert,
        key,
        model,
        workload,
        tasks,
        rate,
        arrival,
        callers,
        trace,
        duration,
        texts,
        expect,
        tolerance,
        inputs,
        documents,
        timeout,
        slo,
        seed,
        geo,
        http2,
    }
}

async fn interrupted() {
    // Without a signal handler, a run continues to its end.
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn capacity(search_options: CapacitySearchOptions, json: bool) -> ExitCode {
    let view = std::cell::RefCell::new(LoadProgress::new(search_options.duration()));
    let on_trial = |trial: &loadtest::find_capacity::Trial| {
        let mut view = view.borrow_mut();
        view.reset();
        view.print_line(&trial.line());
    };
    let found: std::pin::Pin<Box<dyn Future<Output = _>>> =
        Box::pin(find_capacity(search_options, on_trial, |snapshot| view.borrow_mut().show(snapshot)));
    let found = tokio::select! {
        found = found => found,
        () = interrupted() => return fail(EXIT_FAILED, &["interrupted before a capacity was found".to_owned()]),
    };
    view.borrow().clear();
    match found {
        Ok(found) => {
            println!("{}", if json { found.to_json() } else { found.sentence() });
            if found.held_per_s.is_some() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_CHECK_FAILED) }
        }
        Err(problem) => fail(EXIT_FAILED, &[problem.to_string()]),
    }
}

fn compare(options: &CompareOptions) -> ExitCode {
    let CompareOptions { a, b, seed, json } = options;
    let names = [a, b].map(|path| path.display().to_string());
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).map_err(|error| format!("{}: cannot be read: {error}", path.display()))
    };
    let (first, second) = match (read(a), read(b)) {
        (Ok(first), Ok(second)) => (first, second),
        (first, second) => {
            let problems: Vec<String> = [first.err(), second.err()].into_iter().flatten().collect();
            return fail(EXIT_USAGE, &problems);
        }
    };
    match Comparison::of((&names[0], &first), (&names[1], &second), *seed) {
        Ok(comparison) => {
            println!("{}", if *json { comparison.to_json() } else { comparison.table() });
            ExitCode::SUCCESS
        }
        Err(problems) => fail(EXIT_USAGE, &problems),
    }
}

impl Outputs {
    /// Returns the files that cannot be written, before a run starts.
    fn problems(&self) -> Vec<String> {
        let named = [("--html", &self.html), ("--hgrm", &self.hgrm), ("--hdr-log", &self.hdr_log)];
        let named = named.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?)));
        named
            .filter_map(|(option, path)| {
                let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
                Some(format!("{option} {}: cannot be written: {}", path.display(), opened.err()?))
            })
            .collect()
    }

    fn write(&self, report: &Report, began: SystemTime) -> Result<(), Vec<String>> {
        let mut problems = Vec::new();
        let mut write = |path: &Option<PathBuf>, content: std::io::Result<Vec<u8>>| {
            let Some(path) = path else { return };
            if let Err(error) = content.and_then(|content| std::fs::write(path, content)) {
                problems.push(format!("{}: cannot be written: {error}", path.display()));
            }
        };
        write(&self.html, Ok(report.to_html(&page_context(began)).into_bytes()));
        write(&self.hgrm, Ok(report.to_hgrm().into_bytes()));
        write(&self.hdr_log, report.to_hdr_log(began));
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

/// Returns the circumstances of a run that began at `began`, for its page.
pub(crate) fn page_context(began: SystemTime) -> PageContext {
    let began = humantime::format_rfc3339_seconds(began).to_string().replace('T', " ").replace('Z', " UTC");
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let noun = if cores == 1 { "core" } else { "cores" };
    PageContext {
        date: began,
        version: format!("meridian {}", env!("CARGO_PKG_VERSION")),
        machine: format!("{}, {cores} {noun}", replica::tune::file::processor_model()),
    }
}

/// Progress display: a bar on a terminal, lines elsewhere.
struct LoadProgress {
    bar: Option<ProgressBar>,
    next_line: Duration,
    /// Time and number of ended requests at the last rate computation, and the rate.
    counted: (Duration, u64, f64),
}

impl LoadProgress {
    fn new(duration: Duration) -> LoadProgress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg}").expect("a constant template");
            ProgressBar::new(duration.as_millis() as u64).with_style(style)
        });
        LoadProgress { bar, next_line: PROGRESS_LINE_PERIOD, counted: (Duration::ZERO, 0, 0.0) }
    }

    fn show(&mut self, snapshot: &RunSnapshot) {
        let millis =
            |duration: Option<Duration>| duration.map_or(0.0, |duration| duration.as_secs_f64() * 1e3);
        let RunSnapshot { elapsed, in_flight, ok, failed, p50, p99, .. } = snapshot;
        let (p50, p99) = (millis(*p50), millis(*p99));
        let rate = self.rate(*elapsed, ok + failed);
        let line = format!(
            "{rate:.0}/s, {ok} ok, {failed} failed, {in_flight} in flight, p50 {p50:.1} ms, p99 {p99:.1} ms"
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(elapsed.as_millis() as u64);
                bar.set_message(line);
            }
            None if *elapsed >= self.next_line => {
                eprintln!("{:>4} s  {line}", elapsed.as_secs());
                self.next_line += PROGRESS_LINE_PERIOD;
            }
            None => {}
        }
    }

    /// Resets the display for the next run.
    fn reset(&mut self) {
        self.next_line = PROGRESS_LINE_PERIOD;
        self.counted = (Duration::ZERO, 0, 0.0);
    }

    /// Returns the rate of ended requests per second over about the last second.
    fn rate(&mut self, elapsed: Duration, ended: u64) -> f64 {
        let (since, before, rate) = self.counted;
        let span = elapsed.saturating_sub(since).as_secs_f64();
        if span < 1.0 && rate > 0.0 || span <= 0.0 {
            return rate;
        }
        let rate = ended.saturating_sub(before) as f64 / span;
        self.counted = (elapsed, ended, rate);
        rate
    }

    /// Prints a line above the bar.
    fn print_line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
