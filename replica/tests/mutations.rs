//! Mutation tests: one key of a checkpoint's files is changed, and the replica computes what the libraries compute
//! then, or rejects the checkpoint with the name of that key.
//!
//! The references are in `golden/mutations/`, made by `golden/make_mutations.py` with transformers and
//! sentence-transformers: for every family, every key of every file, one at a time. A served checkpoint must reproduce
//! the numbers of the reference; so a key that is ignored here but not by the libraries is detected. Changes that make
//! the libraries fail, or compute with random numbers, must be rejected here too.
//!
//! A rejection counts if its message contains the name of the changed key, that is, the last part of its path that is
//! not a number. Where the libraries fail, any message counts.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use replica::engine::cpu::{CpuEngine, CpuOptions, Isa};
use replica::engine::{BatchBuffer, Engine, Output};
use replica::model::ModelDir;
use replica::tokenize::{EncodeOptions, TextInput, TextTokenizer, TokenizeError, TokenizerPool};
use replica_api::input::{
    InvalidInput, OverlongPolicy, PairTruncation, Readable, TruncationMethod, TruncationSide,
};
use replica_api::prompt::PromptChoice;
use replica_core::{DeploymentTask, Precision};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Tolerance. Both sides compute in f32 and sum in different orders. A difference is relative to the largest number of
/// the row. `golden_families` compares the unchanged models with 2e-5; some changes (another activation, wider windows)
/// make intermediate sums larger than the result.
const TOLERANCE: f64 = 1e-4;

/// Number of tested families; each has references.
const FAMILIES: usize = 15;

#[derive(Deserialize)]
struct Reference {
    fixture: String,
    #[serde(default)]
    files: Map<String, Value>,
    task: String,
    inputs: Vec<Value>,
    #[serde(default)]
    prompt_names: Vec<Option<String>>,
    base: RowsView,
    cases: Vec<Case>,
}

#[derive(Clone, Deserialize)]
struct RowsView {
    rows: [usize; 2],
    offset: usize,
    /// Names of the labels, if they differ from those of the unchanged checkpoint.
    labels: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct Case {
    file: String,
    key: String,
    #[serde(default, deserialize_with = "given")]
    value: Option<Value>,
    #[serde(default)]
    remove: bool,
    outcome: String,
    #[serde(flatten)]
    rows: Option<RowsView>,
}

/// Deserializes null as a value.
fn given<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    ServedEqual,
    RefusedByName,
    /// Rejected where the libraries fail: with the key's name or with another message.
    RefusedAsTheLibrary {
        named: bool,
    },
    Wrong,
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// References of a fixture, and its files.
struct Fixture {
    name: String,
    reference: Reference,
    numbers: Vec<f32>,
    /// The unchanged JSON files.
    files: BTreeMap<String, Value>,
    /// Other files, which are linked.
    weights: Vec<PathBuf>,
}

impl Fixture {
    fn read(path: &Path) -> Fixture {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let reference: Reference = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let numbers = fs::read(path.with_extension("f32")).unwrap();
        let numbers = numbers.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let folder = golden().join("families").join(&reference.fixture);
        let (mut files, mut weights) = (BTreeMap::new(), Vec::new());
        let mut folders = vec![PathBuf::new()];
        while let Some(below) = folders.pop() {
            for entry in fs::read_dir(folder.join(&below)).unwrap() {
                let entry = entry.unwrap();
                let path = below.join(entry.file_name());
                let name = path.to_str().unwrap().to_owned();
                if entry.path().is_dir() {
                    folders.push(path);
                } else if ["golden.json", "golden.f32", "tokens.json", "pairs.json"].contains(&name.as_str())
                {
                } else if name.ends_with(".json") {
                    files.insert(name, serde_json::from_slice(&fs::read(entry.path()).unwrap()).unwrap());
                } else {
                    weights.push(path);
                }
            }
        }
        for (name, file) in &reference.files {
            files.insert(name.clone(), file.clone());
        }
        Fixture { name, reference, numbers, files, weights }
    }

    /// Writes the checkpoint with this change.
    fn write(&self, to: &Path, case: Option<&Case>) {
        let from = golden().join("families").join(&self.reference.fixture);
        for path in &self.weights {
            fs::create_dir_all(to.join(path).parent().unwrap()).unwrap();
            if !self.files.contains_key(path.to_str().unwrap()) {
                std::os::unix::fs::symlink(from.join(path), to.join(path)).unwrap();
            }
        }
        for (name, file) in &self.files {
            let changed = case.filter(|case| case.file == *name);
            let file = changed.map_or_else(|| file.clone(), |case| case.change(file.clone()));
            write_file(&to.join(name), &file);
        }
        if let Some(case) = case.filter(|case| !self.files.contains_key(&case.file)) {
            write_file(&to.join(&case.file), &case.change(Value::Object(Map::new())));
        }
    }

    fn rows(&self, rows: &RowsView) -> &[f32] {
        &self.numbers[rows.offset..rows.offset + rows.rows[0] * rows.rows[1]]
    }
}

fn write_file(path: &Path, file: &Value) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let text = match file.get("$text") {
        Some(text) => text.as_str().unwrap().to_owned(),
        None => file.to_string(),
    };
    fs::write(path, text).unwrap();
}

impl Case {
    /// Returns the file with the key changed.
    fn change(&self, mut file: Value) -> Value {
        let mut parts: Vec<&str> = self.key.split('/').collect();
        let last = parts.pop().unwrap();
        let mut place = &mut file;
        for part in parts {
            place = match place {
                Value::Array(all) => &mut all[part.parse::<usize>().unwrap()],
                Value::Object(all) => all.entry(part).or_insert(Value::Object(Map::new())),
                other => panic!("{}: {other}", self.key),
            };
        }
        match (place, &self.value) {
            (Value::Object(all), None) if self.remove => drop(all.remove(last)),
            (Value::Object(all), Some(value)) => drop(all.insert(last.to_owned(), value.clone())),
            (Value::Array(all), None) if self.remove => drop(all.remove(last.parse().unwrap())),
            (Value::Array(all), Some(value)) => match last.parse::<usize>().unwrap() {
                index if index < all.len() => all[index] = value.clone(),
                _ => all.push(value.clone()),
            },
            (place, value) => panic!("{}: {place} {value:?}", self.key),
        }
        file
    }

    /// Returns the name that a rejection must contain.
    fn name(&self) -> &str {
        let is_name = |part: &&str| part.parse::<usize>().is_err() && !part.is_empty();
        self.key.rsplit('/').find(is_name).unwrap_or(&self.file)
    }

    fn description(&self) -> String {
        let value = if self.remove { "removed".to_owned() } else { self.value.clone().unwrap().to_string() };
        format!("{} {} = {value} ({})", self.file, self.key, self.outcome)
    }
}

/// Serves the inputs as a replica does, from the files to the numbers of a response.
fn serve(folder: &Path, reference: &Reference) -> Result<ServeResult, String> {
    let task: DeploymentTask = reference.task.parse().unwrap();
    let model = ModelDir::open_for(folder, Some(task)).map_err(|error| error.to_string())?;
    let options = CpuOptions {
        threads: NonZeroUsize::MIN,
        precision: Precision::F32,
        packed: None,
        isa: Some(Isa::best()),
    };
    let engine = CpuEngine::load(&model, options).map_err(|error| error.to_string())?;
    let described = engine.describe();
    let readable = Readable { max_input_tokens: described.max_tokens, vocabulary: described.vocabulary };
    let tokenizer =
        TextTokenizer::load(&model, readable, described.token_types).map_err(|error| error.to_string())?;
    let pool = TokenizerPool::start(tokenizer, 1).unwrap();
    // As in the libraries, the end of an input that is too long is cut off. With a chat template it is rejected: there
    // the libraries cut off the end of the template, and the replica cuts the document.
    let overlong = match &model.template {
        None => OverlongPolicy::Truncate(TruncationMethod {
            side: TruncationSide::Right,
            pair: PairTruncation::LongestFirst,
        }),
        Some(_) => OverlongPolicy::Reject,
    };
    let mut rows = Vec::new();
    let prompts: &[Option<String>] =
        if reference.prompt_names.is_empty() { &[None] } else { &reference.prompt_names };
    for name in prompts {
        let choice = name.clone().map_or(PromptChoice::Default, PromptChoice::Named);
        let is_plain = model.template.is_none();
        let resolved = choice.resolve(&model.prompts.by_name, model.prompts.default.as_deref());
        let prompt = resolved.map_err(|refusal| format!("{refusal:?}"))?.filter(|_| is_plain);
        if prompt.is_some() && !model.sentence.include_prompt && model.head.is_none() {
            return Err("`include_prompt` is false, which is refused of a request with a prompt".to_owned());
        }
        let texts: Vec<TextInput> = reference
            .inputs
            .iter()
            .map(|input| match input {
                Value::String(text) => TextInput::One(text.clone()),
                Value::Array(pair) => {
                    TextInput::Pair(pair[0].as_str().unwrap().into(), pair[1].as_str().unwrap().to_owned())
                }
                other => panic!("{other}"),
            })
            .collect();
        let reading = EncodeOptions { prompt: prompt.map(Into::into), overlong, most: None };
        let encoded = runtime().block_on(pool.encode(texts, reading));
        let encoded = encoded.map_err(|error| match error {
            TokenizeError::Unreadable { reason: InvalidInput::TooLong { limit, given }, .. } => format!(
                "{given} tokens are more than the {limit} that `max_seq_length`, `model_max_length` and \
                 `max_position_embeddings` allow"
            ),
            other => format!("{other:?}"),
        });
        for tokens in encoded? {
            let mut buffer = BatchBuffer::default();
            buffer.push(&tokens.ids, tokens.types.as_deref());
            let mut out = vec![f32::NAN; described.width];
            engine.compute(&buffer.batch(), Output::Pooled, &mut out).map_err(|error| error.to_string())?;
            match &model.head {
                Some(head) => head.activate(&mut out),
                None => out = model.sentence.serve(out, described.width),
            }
            rows.push(out);
        }
    }
    let labels = model.head.map(|head| head.labels.into_iter().map(Value::from).collect());
    Ok(ServeResult { rows, labels })
}

/// Served numbers and labels.
struct ServeResult {
    rows: Vec<Vec<f32>>,
    labels: Option<Vec<Value>>,
}

fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap())
}

/// Rows with fewer numbers are compared relative to the largest number of all rows: a single number may be close to
/// zero.
const FEW: usize = 8;

/// Returns the largest difference, relative to the largest number of the row.
fn difference(found: &[Vec<f32>], expected: &[f32], [rows, width]: [usize; 2]) -> f64 {
    if found.len() != rows || found.iter().any(|row| row.len() != width) {
        return f64::INFINITY;
    }
    let largest = |numbers: &[f32]| {
        numbers.iter().map(|number| f64::from(number.abs())).fold(f64::MIN_POSITIVE, f64::max)
    };
    let largest_of_all = largest(expected);
    let each = found.iter().zip(expected.chunks_exact(width)).map(|(found, expected)| {
        let size = if width < FEW { largest_of_all } else { largest(expected) };
        let error = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
        error.fold(0.0, |most, error| if error > most || error.is_nan() { error } else { most }) / size
    });
    each.fold(0.0, |most, error| if error > most || error.is_nan() { error } else { most })
}

fn check_outcome(fixture: &Fixture, case: &Case, served: Result<ServeResult, String>) -> (Outcome, String) {
    let named = |message: &str| message.contains(case.name());
    match (case.outcome.as_str(), served) {
        ("same" | "different", Err(message)) if named(&message) => (Outcome::RefusedByName, message),
        ("same" | "different", Err(message)) => {
            (Outcome::Wrong, format!("refused by another name: {message}"))
        }
        ("same" | "different", Ok(ServeResult { rows, labels })) => {
            let expected =
                if case.outcome == "same" { &fixture.reference.base } else { case.rows.as_ref().unwrap() };
            let error = difference(&rows, fixture.rows(expected), expected.rows);
            let names = expected.labels.as_ref().or(fixture.reference.base.labels.as_ref());
            if error > TOLERANCE || error.is_nan() {
                (Outcome::Wrong, format!("served, off by {error:e}"))
            } else if names.is_some_and(|names| Some(names) != labels.as_ref()) {
                (Outcome::Wrong, format!("served with the labels {labels:?}"))
            } else {
                (Outcome::ServedEqual, String::new())
            }
        }
        (_, Err(message)) => (Outcome::RefusedAsTheLibrary { named: named(&message) }, message),
        (outcome, Ok(_)) => (Outcome::Wrong, format!("served, and the library's outcome is {outcome}")),
    }
}

#[test]
fn a_changed_key_is_served_like_the_libraries_or_rejected_by_name() {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(golden().join("mutations")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    if let Ok(only) = std::env::var("MUTATIONS_OF") {
        paths.retain(|path| path.file_stem().unwrap().to_string_lossy() == only);
    }
    paths.sort();
    let fixtures: Vec<Fixture> = paths.iter().map(|path| Fixture::read(path)).collect();
    let mut wrong = Vec::new();
    for fixture in &fixtures {
        let folder = tempfile::tempdir().unwrap();
        fixture.write(folder.path(), None);
        let base = &fixture.reference.base;
        match serve(folder.path(), &fixture.reference) {
            Ok(ServeResult { rows, .. }) => {
                let error = difference(&rows, fixture.rows(base), base.rows);
                if error > TOLERANCE || error.is_nan() {
                    wrong.push(format!("{}: the unchanged checkpoint is off by {error:e}", fixture.name));
                }
            }
            Err(error) => {
                wrong.push(format!("{}: the unchanged checkpoint is refused: {error}", fixture.name))
            }
        }
    }
    let cases: Vec<(&Fixture, &Case)> = fixtures
        .iter()
        .flat_map(|fixture| fixture.reference.cases.iter().map(move |case| (fixture, case)))
        .collect();
    let next = AtomicUsize::new(0);
    let fates = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, NonZeroUsize::get) {
            scope.spawn(|| {
                while let Some((fixture, case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let folder = tempfile::tempdir().unwrap();
                    fixture.write(folder.path(), Some(case));
                    let served = serve(folder.path(), &fixture.reference);
                    let (fate, message) = check_outcome(fixture, case, served);
                    // The folder's name is random, and could contain the key's.
                    let message = message.replace(&*folder.path().to_string_lossy(), "FOLDER");
                    fates.lock().unwrap().push((fixture.name.as_str(), *case, fate, message));
                }
            });
        }
    });
    let fates = fates.into_inner().unwrap();
    let count =
        |expected: fn(&Outcome) -> bool| fates.iter().filter(|(_, _, fate, _)| expected(fate)).count();
    let keys: BTreeSet<(&str, &str, &str)> = cases
        .iter()
        .map(|(fixture, case)| (fixture.name.as_str(), case.file.as_str(), case.key.as_str()))
        .collect();
    wrong.extend(
        fates
            .iter()
            .filter(|(_, _, fate, _)| *fate == Outcome::Wrong)
            .map(|(name, case, _, message)| format!("{name}: {}: {message}", case.description())),
    );
    wrong.sort();
    let families: BTreeSet<&str> =
        fixtures.iter().filter_map(|fixture| fixture.files["config.json"]["model_type"].as_str()).collect();
    println!(
        "{} families in {} fixtures, {} keys × fixtures in {} cases: {} served equal, {} refused by name, {} refused \
         where the library fails ({} of them by name), served wrongly: {}",
        families.len(),
        fixtures.len(),
        keys.len(),
        cases.len(),
        count(|fate| *fate == Outcome::ServedEqual),
        count(|fate| *fate == Outcome::RefusedByName),
        count(|fate| matches!(fate, Outcome::RefusedAsTheLibrary { .. })),
        count(|fate| *fate == Outcome::RefusedAsTheLibrary { named: true }),
        wrong.len()
    );
    for line in &wrong {
        println!("{}", line.chars().take(400).collect::<String>());
    }
    assert!(std::env::var_os("MUTATIONS_OF").is_some() || families.len() == FAMILIES, "{families:?}");
    assert!(wrong.is_empty(), "{} cases have wrong results or name another key", wrong.len());
}
