//! Validated options of `meridian embed`: where texts come from, where vectors go, and what computes them.

use crate::cli::{EmbedCommandOptions, InputFormatOption};
use embed::input::{FieldNames, InputFormat};
use embed::job::WindowLimits;
use embed::output::OutputFormat;
use loadtest::client::settings::{IN_FLIGHT_MAX, REQUEST_TEXTS_MAX};
use regions::{EngineKind, Precision};
use replica::cache::ModelSource;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Field of the text if none is given.
const DEFAULT_FIELD: &str = "text";
/// Inputs per request if none is given: the default of the client.
const DEFAULT_INPUTS: usize = 64;
/// Requests in flight if none is given: a few for each of several replicas.
const DEFAULT_CONCURRENCY: usize = 16;

/// Limits of a window for the local engine: dozens of batches of 512 tokens, some seconds of work on two cores.
const LOCAL_WINDOW: WindowLimits = WindowLimits { rows: 1024, bytes: 256 << 10 };
/// Rounds of concurrent requests in a window. The last round of a window is not full, which costs about half a round.
const REMOTE_ROUNDS: usize = 8;
/// Limits of the rows of a window for an endpoint: a window of vectors with 1024 values has at most 128 MiB.
const REMOTE_ROWS: std::ops::RangeInclusive<usize> = 1024..=32_768;
/// Limit of the bytes of a window for an endpoint.
const REMOTE_BYTES: usize = 16 << 20;

/// Source of the texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TextSource {
    File(PathBuf),
    StandardInput,
}

impl TextSource {
    pub(super) fn name(&self) -> String {
        match self {
            TextSource::File(path) => path.display().to_string(),
            TextSource::StandardInput => "standard input".to_owned(),
        }
    }
}

/// Computation of the vectors.
#[derive(Clone, Debug)]
pub(super) enum ComputePlan {
    Local {
        source: ModelSource,
        precision: Precision,
        threads: Option<NonZeroUsize>,
        prompt_name: Option<String>,
    },
    Remote {
        url: String,
        key: Option<String>,
        cacert: Option<PathBuf>,
        model: String,
        inputs: usize,
        concurrency: usize,
    },
}

impl ComputePlan {
    /// Returns the limits of a window.
    pub(super) fn window(&self) -> WindowLimits {
        match self {
            ComputePlan::Local { .. } => LOCAL_WINDOW,
            ComputePlan::Remote { inputs, concurrency, .. } => {
                let rows =
                    (inputs * concurrency * REMOTE_ROUNDS).clamp(*REMOTE_ROWS.start(), *REMOTE_ROWS.end());
                WindowLimits { rows, bytes: REMOTE_BYTES }
            }
        }
    }
}

/// Validated options.
#[derive(Clone, Debug)]
pub(super) struct EmbedPlan {
    pub(super) source: TextSource,
    pub(super) input_format: InputFormat,
    pub(super) fields: FieldNames,
    pub(super) output: PathBuf,
    pub(super) output_format: OutputFormat,
    pub(super) compute: ComputePlan,
    pub(super) dimensions: Option<u64>,
    pub(super) truncate: bool,
    pub(super) skip_invalid: bool,
    pub(super) restart: bool,
}

/// Validates the options; returns all problems on failure. `environment_key` is the API key of the environment.
pub(super) fn check(
    options: &EmbedCommandOptions,
    environment_key: Option<String>,
) -> Result<EmbedPlan, Vec<String>> {
    let EmbedCommandOptions {
        file,
        output,
        format,
        field,
        id_field,
        model,
        dimensions,
        truncate,
        skip_invalid,
        restart,
        ..
    } = options;
    let mut problems = Vec::new();
    let source =
        if file == Path::new("-") { TextSource::StandardInput } else { TextSource::File(file.clone()) };
    let input_format = note(&mut problems, input_format(&source, *format));
    let output_format = note(&mut problems, OutputFormat::of(output));
    if input_format == Some(InputFormat::Lines) {
        for (option, given) in [("--field", field), ("--id-field", id_field)] {
            if given.is_some() {
                problems.push(format!("{option}: lines of plain text have no fields; omit it"));
            }
        }
    }
    if output_format == Some(OutputFormat::Npy) {
        if *skip_invalid {
            problems.push(
                "--skip-invalid: without the skipped rows, the rows of .npy are not those of the input; write .jsonl or \
                 .parquet, which have row numbers"
                    .to_owned(),
            );
        }
        if id_field.is_some() {
            problems.push("--id-field: .npy has no ids; write .jsonl or .parquet, or omit it".to_owned());
        }
    }
    if file != Path::new("-") && is_same_file(file, output) {
        problems.push(format!("--output {} is the input; choose another name", output.display()));
    }
    if *dimensions == Some(0) {
        problems.push("--dimensions 0 is out of range; give at least 1, or omit it".to_owned());
    }
    let compute = match &options.url {
        Some(url) => remote(options, url, model, environment_key, &mut problems),
        None => local(options, model, &mut problems),
    };
    match (input_format, output_format, compute) {
        (Some(input_format), Some(output_format), Some(compute)) if problems.is_empty() => Ok(EmbedPlan {
            source,
            input_format,
            fields: FieldNames {
                text: field.clone().unwrap_or_else(|| DEFAULT_FIELD.to_owned()),
                id: id_field.clone(),
            },
            output: output.clone(),
            output_format,
            compute,
            dimensions: *dimensions,
            truncate: *truncate,
            skip_invalid: *skip_invalid,
            restart: *restart,
        }),
        _ => Err(problems),
    }
}

/// Returns whether two names are those of one file, also as different paths to it.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let canonical = |path: &Path| std::fs::canonicalize(path).ok();
    one == other || canonical(one).is_some_and(|one| canonical(other) == Some(one))
}

fn note<T>(problems: &mut Vec<String>, result: Result<T, String>) -> Option<T> {
    result.map_err(|problem| problems.push(problem)).ok()
}

fn input_format(source: &TextSource, given: Option<InputFormatOption>) -> Result<InputFormat, String> {
    let given = given.map(|format| match format {
        InputFormatOption::Jsonl => InputFormat::JsonLines,
        InputFormatOption::Csv => InputFormat::Csv,
        InputFormatOption::Parquet => InputFormat::Parquet,
        InputFormatOption::Lines => InputFormat::Lines,
    });
    match (source, given) {
        (TextSource::StandardInput, Some(InputFormat::Parquet)) => {
            Err("--format parquet: Parquet cannot be read from standard input, because its index is at the end; give a \
                 file"
                .to_owned())
        }
        (_, Some(format)) => Ok(format),
        (TextSource::StandardInput, None) => Ok(InputFormat::JsonLines),
        (TextSource::File(path), None) => InputFormat::of(path),
    }
}

fn local(options: &EmbedCommandOptions, model: &str, problems: &mut Vec<String>) -> Option<ComputePlan> {
    let EmbedCommandOptions { precision, threads, prompt_name, key, cacert, inputs, concurrency, .. } =
        options;
    let given = [
        ("--key", key.is_some()),
        ("--cacert", cacert.is_some()),
        ("--inputs", inputs.is_some()),
        ("--concurrency", concurrency.is_some()),
    ];
    for (option, _) in given.iter().filter(|(_, given)| *given) {
        problems.push(format!("{option} is for a remote endpoint; give --url, or omit it"));
    }
    let source = note(problems, model.parse::<ModelSource>().map_err(|error| format!("--model: {error}")));
    let precision = match precision.as_deref().map(str::parse::<Precision>) {
        None => Some(Precision::F32),
        Some(Ok(precision)) if EngineKind::Cpu.precisions().contains(&precision) => Some(precision),
        Some(Ok(precision)) => {
            problems.push(format!("--precision {precision}: the local engine computes in f32 or int8"));
            None
        }
        Some(Err(error)) => {
            problems.push(format!("--precision: {error}"));
            None
        }
    };
    let (threads, prompt_name) = (*threads, prompt_name.clone());
    Some(ComputePlan::Local { source: source?, precision: precision?, threads, prompt_name })
}

fn remote(
    options: &EmbedCommandOptions,
    url: &str,
    model: &str,
    environment_key: Option<String>,
    problems: &mut Vec<String>,
) -> Option<ComputePlan> {
    let EmbedCommandOptions { precision, threads, prompt_name, key, cacert, inputs, concurrency, .. } =
        options;
    let given = [
        ("--precision", precision.is_some()),
        ("--threads", threads.is_some()),
        ("--prompt-name", prompt_name.is_some()),
    ];
    for (option, _) in given.iter().filter(|(_, given)| *given) {
        problems.push(format!("{option} is for the local engine; omit --url or the option"));
    }
    if cacert.is_some() && !url.starts_with("https:") {
        problems.push(format!("--cacert: {url:?} is not https; remove --cacert or use https"));
    }
    let limits = [("--inputs", inputs, REQUEST_TEXTS_MAX), ("--concurrency", concurrency, IN_FLIGHT_MAX)];
    for (option, value, most) in limits {
        if let Some(value) = value.filter(|value| !(1..=most).contains(value)) {
            problems.push(format!("{option} {value} is out of range; give 1 to {most}"));
        }
    }
    let key = key.clone().or(environment_key).unwrap_or_else(|| "local".to_owned());
    Some(ComputePlan::Remote {
        url: url.to_owned(),
        key: Some(key).filter(|key| !key.is_empty()),
        cacert: cacert.clone(),
        model: model.to_owned(),
        inputs: inputs.unwrap_or(DEFAULT_INPUTS),
        concurrency: concurrency.unwrap_or(DEFAULT_CONCURRENCY),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser;

    fn checked(words: &str) -> Result<EmbedPlan, Vec<String>> {
        let line = format!("meridian embed {words}");
        match Cli::try_parse_from(line.split(' ')).expect(&line).command {
            CliCommand::Embed(options) => check(&options, Some("secret".to_owned())),
            other => panic!("{other:?}"),
        }
    }

    fn problem(words: &str, part: &str) {
        let problems = checked(words).expect_err(words);
        assert!(problems.len() == 1 && problems[0].contains(part), "{words}: {problems:?}");
    }

    #[test]
    fn input_output_and_model_are_enough() {
        let plan = checked("a.csv --output b.npy --model pypi://m").expect("options");
        assert_eq!((plan.input_format, plan.output_format), (InputFormat::Csv, OutputFormat::Npy));
        assert_eq!(plan.fields, FieldNames { text: "text".to_owned(), id: None });
        assert!(matches!(plan.compute, ComputePlan::Local { precision: Precision::F32, threads: None, .. }));
        let plan = checked("- --output b.jsonl --model m --url http://h").expect("options");
        assert_eq!((plan.source, plan.input_format), (TextSource::StandardInput, InputFormat::JsonLines));
        let ComputePlan::Remote { key, inputs, concurrency, .. } = &plan.compute else { panic!("remote") };
        assert_eq!((key.as_deref(), *inputs, *concurrency), (Some("secret"), 64, 16));
        assert_eq!(plan.compute.window().rows, 64 * 16 * 8);
    }

    #[test]
    fn an_option_without_effect_is_rejected() {
        let local = "a.jsonl --output b.jsonl --model pypi://m";
        for option in ["--key k", "--cacert f", "--inputs 3", "--concurrency 3"] {
            problem(&format!("{local} {option}"), "is for a remote endpoint");
        }
        let remote = "a.jsonl --output b.jsonl --model m --url http://h";
        for option in ["--precision f32", "--threads 2", "--prompt-name query"] {
            problem(&format!("{remote} {option}"), "is for the local engine");
        }
        problem(&format!("{remote} --cacert f"), "is not https");
        for option in ["--field x", "--id-field x"] {
            problem(&format!("a.txt --output b.jsonl --model pypi://m {option}"), "have no fields");
        }
        let npy = "a.jsonl --output b.npy --model pypi://m";
        problem(&format!("{npy} --skip-invalid"), "--skip-invalid");
        problem(&format!("{npy} --id-field id"), "--id-field");
    }

    #[test]
    fn values_at_the_limits_are_accepted_and_past_them_rejected() {
        let remote = "a.jsonl --output b.jsonl --model m --url http://h";
        for (option, most) in [("--inputs", REQUEST_TEXTS_MAX), ("--concurrency", IN_FLIGHT_MAX)] {
            assert!(checked(&format!("{remote} {option} 1")).is_ok());
            assert!(checked(&format!("{remote} {option} {most}")).is_ok());
            problem(&format!("{remote} {option} 0"), "out of range");
            problem(&format!("{remote} {option} {}", most + 1), "out of range");
        }
        let most = format!("{remote} --inputs {REQUEST_TEXTS_MAX} --concurrency {IN_FLIGHT_MAX}");
        assert_eq!(checked(&most).expect("options").compute.window().rows, *REMOTE_ROWS.end());
    }

    #[test]
    fn the_output_is_not_the_input_by_another_path() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(dir.path().join("sub")).expect("a folder");
        let (file, link) = (dir.path().join("a.jsonl"), dir.path().join("b.jsonl"));
        std::fs::write(&file, "\"a text\"\n").expect("a file");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        for other in [link, dir.path().join("sub/../a.jsonl")] {
            let words = format!("{} --output {} --model pypi://m --restart", file.display(), other.display());
            problem(&words, "is the input");
        }
    }

    #[test]
    fn formats_models_and_names_are_checked() {
        problem("a.json --output b.jsonl --model pypi://m", "a.json: the format does not follow");
        problem("a.jsonl --output b.json --model pypi://m", "--output b.json");
        problem("a.jsonl --output a.jsonl --model pypi://m", "is the input");
        problem("a.jsonl --output b.jsonl --model ftp://m", "ftp://m");
        problem("a.jsonl --output b.jsonl --model pypi://m --precision fp8", "f32 or int8");
        problem("- --format parquet --output b.jsonl --model pypi://m", "give a file");
        problem("a.jsonl --output b.jsonl --model pypi://m --dimensions 0", "--dimensions 0");
        assert!(checked("a.json --format jsonl --output b.jsonl --model pypi://m").is_ok());
        let problems = checked("a --output b --model ftp://m --key k").expect_err("problems");
        assert_eq!(problems.len(), 4, "{problems:?}");
    }
}
