//! `meridian model`: command-line interface and progress display of the model cache in `replica::cache`. `build` runs
//! NVIDIA's tools, `verify` compares the resulting engines with the reference.

mod build;
mod verify;

use crate::cli::ModelCommand;
use crate::{EXIT_FAILED, EXIT_USAGE, fail};
use indicatif::{ProgressBar, ProgressStyle};
use replica::cache::{CachedModel, ModelCache, ModelSource, Phase, PullObserver, default_root};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs the command.
pub(crate) fn main(command: ModelCommand) -> ExitCode {
    match command {
        ModelCommand::Pull { source } => pull(&source),
        ModelCommand::List { json } => list(json),
        ModelCommand::Build(options) => build::main(&options),
        ModelCommand::Verify(options) => verify::main(&options),
    }
}

/// Returns the current user's model cache.
pub(crate) fn cache() -> Result<ModelCache, String> {
    let root = default_root().ok_or("none of MERIDIAN_CACHE, XDG_CACHE_HOME and HOME is set; set one")?;
    Ok(ModelCache::new(root))
}

/// Ensures that a model is in the cache, without network access if it already is.
pub(crate) fn ensure(source: &str) -> Result<(), String> {
    let parsed: ModelSource = source.parse().map_err(|error| format!("{error}"))?;
    let cache = cache()?;
    if cache.resolve(&parsed).is_err() {
        fetch(&cache, &parsed)?;
    }
    Ok(())
}

fn pull(source: &str) -> ExitCode {
    let parsed: ModelSource = match source.parse() {
        Ok(parsed) => parsed,
        Err(error) => return fail(EXIT_USAGE, &[format!("{error}")]),
    };
    let path = match cache().and_then(|cache| fetch(&cache, &parsed)) {
        Ok(path) => path,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    let problems = replica::validate::problems(&path);
    if problems.is_empty() {
        eprintln!("{source}: a replica can load it");
        return ExitCode::SUCCESS;
    }
    fail(EXIT_FAILED, &problems)
}

/// Fetches a model into the cache and returns its directory.
fn fetch(cache: &ModelCache, source: &ModelSource) -> Result<PathBuf, String> {
    let mut view = PullProgress::new(source.to_string());
    let pulled = cache.pull(source, &mut view);
    view.clear();
    let pulled = pulled.map_err(|error| error.to_string())?;
    let CachedModel { source, path, bytes, digest } = pulled.model;
    let state = if pulled.downloaded { "fetched" } else { "cached" };
    eprintln!("{source}: {state}, {} MB in {}, sha256 {}", bytes / 1_000_000, path.display(), &digest[..16]);
    Ok(path)
}

fn list(json: bool) -> ExitCode {
    let models = match cache().and_then(|cache| cache.list().map_err(|error| error.to_string())) {
        Ok(models) => models,
        Err(problem) => return fail(EXIT_FAILED, &[problem]),
    };
    if json {
        let rows: Vec<_> = models
            .iter()
            .map(
                |CachedModel {
                     source,
                     path,
                     bytes,
                     digest,
                 }| {
                    serde_json::json!({"source": source, "path": path, "bytes": bytes, "sha256": digest})
                },
            )
            .collect();
        println!("{}", serde_json::Value::from(rows));
    } else {
        for CachedModel { source, path, bytes, digest } in &models {
            println!("{source}  {} MB  {}  {}", bytes / 1_000_000, &digest[..16], path.display());
        }
    }
    ExitCode::SUCCESS
}

/// Progress display of a download: a bar on a terminal, a line per phase elsewhere.
struct PullProgress {
    model: String,
    bar: Option<ProgressBar>,
}

impl PullProgress {
    fn new(model: String) -> PullProgress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
                    .expect("a constant template");
            ProgressBar::new(0).with_style(style)
        });
        PullProgress { model, bar }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl PullObserver for PullProgress {
    fn phase(&mut self, phase: Phase) {
        let line = format!("{}: {}", self.model, phase.as_str());
        match &self.bar {
            Some(bar) => bar.set_message(line),
            None => eprintln!("{line}"),
        }
    }

    fn bytes(&mut self, done: u64, total: Option<u64>) {
        if let Some(bar) = &self.bar {
            bar.set_length(total.unwrap_or(done));
            bar.set_position(done);
        }
    }
}
