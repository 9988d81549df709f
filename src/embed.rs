//! `meridian embed`: options, signals, backends and exit code of the job in the crate `embed`.

mod local;
mod plan;
mod progress;
mod remote;

use crate::cli::EmbedCommandOptions;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
use embed::backend::EmbeddingBackend;
use embed::checkpoint::JobSettings;
use embed::input::{self, TextReader};
use embed::job::{self, EmbedJob, JobEnd};
use embed::storage::DiskStorage;
use local::LocalBackend;
use plan::{ComputePlan, EmbedPlan, TextSource};
use progress::{EmbedProgress, ReceivedSignal};
use remote::{RemoteBackend, RemoteOptions};
use replica::offline::OfflineOptions;
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a process that ends because of a signal: this, plus the number of the signal.
const EXIT_SIGNAL: u8 = 128;

/// Runs the command.
pub(crate) fn main(options: &EmbedCommandOptions) -> ExitCode {
    let plan = match plan::check(options, std::env::var("MERIDIAN_KEY").ok()) {
        Ok(plan) => plan,
        Err(problems) => return fail(EXIT_USAGE, &problems),
    };
    let signal = ReceivedSignal::default();
    let run = runtime(&signal).and_then(|runtime| run(&plan, &runtime, &signal));
    let output = plan.output.display();
    match run {
        Ok(JobEnd::Complete { rows, skipped: 0 }) => {
            eprintln!("{output}: complete, {rows} rows");
            ExitCode::SUCCESS
        }
        Ok(JobEnd::Complete { rows, skipped }) => {
            eprintln!(
                "{output}: complete, {} rows; {skipped} skipped, see {output}.errors.jsonl",
                rows - skipped
            );
            ExitCode::SUCCESS
        }
        Ok(JobEnd::Cancelled { rows }) => {
            let problem = format!("interrupted after {rows} rows; run the same command again to continue");
            let number = u8::try_from(signal.load(Ordering::Relaxed)).unwrap_or(0);
            fail(EXIT_SIGNAL.saturating_add(number), &[without_restart(&plan, problem)])
        }
        Err(problem) => fail(EXIT_FAILED, &[problem]),
    }
}

fn without_restart(plan: &EmbedPlan, problem: String) -> String {
    if plan.restart { format!("{problem}, without --restart") } else { problem }
}

/// Starts the async runtime: one thread for signals and, with an endpoint, for connections.
fn runtime(received: &ReceivedSignal) -> Result<Runtime, String> {
    let failed = |error: std::io::Error| format!("cannot start the async runtime: {error}");
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(failed)?;
    let entered = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    drop(entered);
    let received = received.clone();
    runtime.spawn(async move {
        loop {
            let kind = tokio::select! {
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = terminate.recv() => SignalKind::terminate(),
            };
            let number = kind.as_raw_value();
            if received.swap(number, Ordering::Relaxed) != 0 {
                // The checkpoint is valid at any moment, so nothing has to be cleaned up.
                std::process::exit(i32::from(EXIT_SIGNAL) + number);
            }
            eprintln!("stops after the rows in progress; repeat the signal to stop at once");
        }
    });
    Ok(runtime)
}

fn run(plan: &EmbedPlan, runtime: &Runtime, signal: &ReceivedSignal) -> Result<JobEnd, String> {
    // The lock comes first, so that a second process is rejected before it loads a model.
    let mut storage = DiskStorage::lock(&plan.output).map_err(|error| error.to_string())?;
    let mut reader = open(plan)?;
    let (mut backend, backend_settings) = backend(plan, runtime)?;
    let job = EmbedJob {
        input: plan.source.name(),
        format: plan.output_format,
        has_ids: plan.fields.id.is_some(),
        settings: settings(plan, backend_settings),
        window: plan.compute.window(),
        restarts: plan.restart,
    };
    let mut progress = EmbedProgress::new(signal.clone());
    let end = job::run(&job, &mut *reader, &mut *backend, &mut storage, &mut progress);
    progress.clear();
    end.map_err(|error| error.to_string())
}

fn open(plan: &EmbedPlan) -> Result<Box<dyn TextReader>, String> {
    let EmbedPlan { source, input_format, fields, .. } = plan;
    let opened = match source {
        TextSource::File(path) => input::open(path, *input_format, fields.clone()),
        TextSource::StandardInput => {
            input::stream(source.name(), std::io::stdin(), None, *input_format, fields.clone())
        }
    };
    opened.map_err(|error| error.to_string())
}

/// Backend, and the options of it that decide the result.
type BackendWithSettings = (Box<dyn EmbeddingBackend>, BTreeMap<String, String>);

fn backend(plan: &EmbedPlan, runtime: &Runtime) -> Result<BackendWithSettings, String> {
    let EmbedPlan { compute, dimensions, truncate, skip_invalid, .. } = plan;
    let (dimensions, truncate, skip_invalid) = (*dimensions, *truncate, *skip_invalid);
    match compute {
        ComputePlan::Local { source, precision, threads, prompt_name } => {
            let (precision, threads, prompt_name) = (*precision, *threads, prompt_name.clone());
            let options = OfflineOptions { precision, threads, dimensions, prompt_name, truncate };
            let (backend, settings) = LocalBackend::load(source, &options, skip_invalid)?;
            Ok((Box::new(backend), settings))
        }
        ComputePlan::Remote { url, key, cacert, model, inputs, concurrency } => {
            let options = RemoteOptions {
                url,
                key: key.as_deref(),
                cacert: cacert.as_deref(),
                model,
                inputs: *inputs,
                concurrency: *concurrency,
                dimensions,
                truncate,
                skip_invalid,
            };
            let (backend, settings) = RemoteBackend::connect(runtime.handle().clone(), &options)?;
            Ok((Box::new(backend), settings))
        }
    }
}

fn settings(plan: &EmbedPlan, mut exact: BTreeMap<String, String>) -> JobSettings {
    let EmbedPlan { input_format, fields, output_format, truncate, skip_invalid, .. } = plan;
    let mut add = |name: &str, value: &str| drop(exact.insert(name.to_owned(), value.to_owned()));
    add("format of the input", input_format.name());
    add("format of --output", output_format.name());
    add("--field", &fields.text);
    if let Some(id) = &fields.id {
        add("--id-field", id);
    }
    JobSettings { exact, skips_invalid: *skip_invalid, truncates: *truncate }
}
