//! Runs that are interrupted after every operation on the files, and what remains of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Cursor, Read, Write};
use std::sync::{Arc, Mutex};

use super::*;
use crate::backend::{BackendError, RejectedText};
use crate::input::{FieldNames, InputFormat, stream};

/// Length of the vectors of the test backend.
const DIMENSION: usize = 3;

/// Files in memory, with the number of operations until they fail.
#[derive(Clone, Default)]
struct MemoryFiles(Arc<Mutex<MemoryState>>);

#[derive(Clone, Default)]
struct MemoryState {
    /// Content, and the number of bytes that a power failure does not lose.
    files: BTreeMap<OutputFile, (Vec<u8>, usize)>,
    /// Operations until every one fails; `None`: no failure.
    operations_left: Option<u64>,
    operations: u64,
}

impl MemoryState {
    /// Counts an operation; it fails if none is left.
    fn operate(&mut self) -> io::Result<()> {
        self.operations += 1;
        match &mut self.operations_left {
            Some(0) => Err(io::ErrorKind::StorageFull.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn file(&mut self, file: OutputFile) -> io::Result<&mut (Vec<u8>, usize)> {
        self.files.get_mut(&file).ok_or(io::ErrorKind::NotFound.into())
    }

    /// Appends bytes, or a half of them if the operation fails.
    fn append(&mut self, file: OutputFile, bytes: &[u8]) -> io::Result<()> {
        let operated = self.operate();
        let written = if operated.is_ok() { bytes.len() } else { bytes.len() / 2 };
        self.file(file)?.0.extend_from_slice(&bytes[..written]);
        operated
    }
}

impl MemoryFiles {
    fn state(&self) -> std::sync::MutexGuard<'_, MemoryState> {
        self.0.lock().expect("no panic")
    }

    fn failing_after(operations: u64) -> MemoryFiles {
        let files = MemoryFiles::default();
        files.state().operations_left = Some(operations);
        files
    }

    fn content(&self, file: OutputFile) -> Option<Vec<u8>> {
        self.state().files.get(&file).map(|(content, _)| content.clone())
    }

    fn names(&self) -> BTreeSet<OutputFile> {
        self.state().files.keys().copied().collect()
    }

    /// Returns the files after a kill, or after a power failure, which loses what is not on the disk.
    fn after(&self, power_failure: bool) -> MemoryFiles {
        let mut state = self.state().clone();
        state.operations_left = None;
        if power_failure {
            state.files.values_mut().for_each(|(content, synced)| content.truncate(*synced));
        }
        MemoryFiles(Arc::new(Mutex::new(state)))
    }
}

impl OutputStorage for MemoryFiles {
    fn name(&self, file: OutputFile) -> String {
        format!("{file:?}")
    }

    fn length(&self, file: OutputFile) -> io::Result<Option<u64>> {
        Ok(self.state().files.get(&file).map(|(content, _)| content.len() as u64))
    }

    fn reader(&self, file: OutputFile) -> io::Result<Box<dyn Read>> {
        Ok(Box::new(Cursor::new(self.content(file).ok_or(io::ErrorKind::NotFound)?)))
    }

    fn replace(&mut self, file: OutputFile, content: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.files.insert(file, (content.to_vec(), content.len()));
        Ok(())
    }

    fn truncate(&mut self, file: OutputFile, length: u64) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let (content, synced) = state.files.entry(file).or_default();
        content.resize(length as usize, 0);
        *synced = (*synced).min(content.len());
        Ok(())
    }

    fn append(&mut self, file: OutputFile, bytes: &[u8]) -> io::Result<()> {
        self.state().append(file, bytes)
    }

    fn write_at(&mut self, file: OutputFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.file(file)?.0[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&mut self, file: OutputFile) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let (content, synced) = state.file(file)?;
        *synced = content.len();
        Ok(())
    }

    fn create(&mut self, file: OutputFile) -> io::Result<Box<dyn Write + Send>> {
        let mut state = self.state();
        state.operate()?;
        state.files.insert(file, (Vec::new(), 0));
        Ok(Box::new(MemoryWriter { files: self.clone(), file }))
    }

    fn publish(&mut self, from: OutputFile, to: OutputFile) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let (content, _) = state.files.remove(&from).ok_or(io::ErrorKind::NotFound)?;
        let synced = content.len();
        state.files.insert(to, (content, synced));
        Ok(())
    }

    fn remove(&mut self, file: OutputFile) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.files.remove(&file);
        Ok(())
    }
}

struct MemoryWriter {
    files: MemoryFiles,
    file: OutputFile,
}

impl Write for MemoryWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.files.state().append(self.file, bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Backend whose vectors are those of the text alone; it rejects texts that contain "reject".
struct TestBackend {
    failure: Option<String>,
}

impl EmbeddingBackend for TestBackend {
    fn embed(&mut self, texts: &[&str]) -> Result<WindowVectors, BackendError> {
        if let Some(failure) = texts.iter().find(|text| Some(**text) == self.failure.as_deref()) {
            return Err(BackendError(format!("failed at {failure}")));
        }
        let mut vectors = WindowVectors::default();
        for (index, text) in texts.iter().enumerate() {
            if text.contains("reject") {
                vectors.rejected.push(RejectedText { index, reason: "too long".to_owned() });
                continue;
            }
            let sum: u32 = text.bytes().map(u32::from).sum();
            vectors.values.extend([sum as f32, text.len() as f32, 0.1]);
        }
        Ok(vectors)
    }

    fn dimension(&self) -> usize {
        DIMENSION
    }
}

/// Observer that cancels after a number of windows.
#[derive(Default)]
struct TestObserver {
    seen: Vec<EmbedJobProgress>,
    cancel_after: Option<usize>,
}

impl JobObserver for TestObserver {
    fn progress(&mut self, progress: EmbedJobProgress) {
        self.seen.push(progress);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel_after.is_some_and(|after| self.seen.len() > after)
    }
}

fn job(format: OutputFormat, skips_invalid: bool) -> EmbedJob {
    EmbedJob {
        input: "f.jsonl".to_owned(),
        format,
        has_ids: false,
        settings: JobSettings { skips_invalid, ..JobSettings::default() },
        window: WindowLimits { rows: 4, bytes: 40 },
        restarts: false,
    }
}

fn run_on(
    job: &EmbedJob,
    input: &str,
    files: &MemoryFiles,
    observer: &mut TestObserver,
) -> Result<JobEnd, JobError> {
    let fields = FieldNames { text: "text".to_owned(), id: None };
    let input = Cursor::new(input.as_bytes().to_vec());
    let mut reader = stream(job.input.clone(), input, None, InputFormat::JsonLines, fields)?;
    run(job, &mut *reader, &mut TestBackend { failure: None }, &mut files.clone(), observer)
}

fn run_once(job: &EmbedJob, input: &str, files: &MemoryFiles) -> Result<JobEnd, JobError> {
    run_on(job, input, files, &mut TestObserver::default())
}

/// Input of several windows, with a text longer than a window and, if wanted, rows that cannot be used.
fn input(with_invalid: bool) -> String {
    let mut lines: Vec<String> = (0..14).map(|row| format!("{{\"text\": \"text {row}\"}}")).collect();
    lines[6] = format!("{{\"text\": \"{}\"}}", "long ".repeat(20));
    if with_invalid {
        lines[3] = "{\"text\": 3}".to_owned();
        lines[9] = "\"reject\"".to_owned();
        (10..14).for_each(|row| lines[row] = "broken".to_owned());
    }
    lines.join("\n")
}

const FORMATS: [OutputFormat; 3] = [OutputFormat::JsonLines, OutputFormat::Npy, OutputFormat::Parquet];

/// Jobs with their inputs: every format, and skipped rows where the format permits them.
fn cases() -> impl Iterator<Item = (EmbedJob, String)> {
    let with_invalid = FORMATS.into_iter().filter(|format| *format != OutputFormat::Npy);
    FORMATS
        .into_iter()
        .map(|format| (job(format, false), input(false)))
        .chain(with_invalid.map(|format| (job(format, true), input(true))))
}

fn complete_files(job: &EmbedJob, input: &str) -> MemoryFiles {
    let files = MemoryFiles::default();
    run_once(job, input, &files).expect("a complete run");
    files
}

fn assert_same(files: &MemoryFiles, expected: &MemoryFiles, context: &str) {
    assert_eq!(files.names(), expected.names(), "{context}");
    for file in [OutputFile::Final, OutputFile::Errors] {
        assert!(files.content(file) == expected.content(file), "{file:?} differs: {context}");
    }
}

#[test]
fn a_complete_run_leaves_the_output_and_the_errors_only() {
    for (job, input) in cases() {
        let files = MemoryFiles::default();
        let end = run_once(&job, &input, &files).expect("a complete run");
        let skipped = if job.settings.skips_invalid { 6 } else { 0 };
        assert_eq!(end, JobEnd::Complete { rows: 14, skipped });
        let mut names = BTreeSet::from([OutputFile::Final]);
        if job.settings.skips_invalid {
            names.insert(OutputFile::Errors);
        }
        assert_eq!(files.names(), names);
    }
}

#[test]
fn rows_are_in_the_order_of_the_input_and_skipped_ones_are_listed() {
    let files = complete_files(&job(OutputFormat::JsonLines, true), &input(true));
    let lines = |file| -> Vec<serde_json::Value> {
        let content = String::from_utf8(files.content(file).expect("a file")).expect("text");
        content.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let rows = |lines: &[serde_json::Value]| -> Vec<u64> {
        lines.iter().map(|line| line["row"].as_u64().expect("a row")).collect()
    };
    let (output, errors) = (lines(OutputFile::Final), lines(OutputFile::Errors));
    assert_eq!(rows(&output), [0, 1, 2, 4, 5, 6, 7, 8]);
    assert_eq!(rows(&errors), [3, 9, 10, 11, 12, 13]);
    assert_eq!(output[3]["embedding"][1], 6.0, "the length of `text 4`");
    assert_eq!((&errors[0]["line"], &errors[1]["reason"]), (&4.into(), &"too long".into()));
    assert_eq!(errors[2]["column"], 1);

    let npy = complete_files(&job(OutputFormat::Npy, false), &input(false)).content(OutputFile::Final);
    let npy = npy.expect("a file");
    assert_eq!(npy.len(), npy::HEADER_BYTES + 14 * DIMENSION * 4);
    assert_eq!(npy[..npy::HEADER_BYTES], npy::header(14, DIMENSION));
}

#[test]
fn a_run_that_is_killed_after_any_operation_continues_to_the_same_output() {
    for (job, input) in cases() {
        let expected = complete_files(&job, &input);
        let operations = expected.state().operations;
        for killed_after in 0..operations {
            let killed = MemoryFiles::failing_after(killed_after);
            run_once(&job, &input, &killed).expect_err("killed");
            for power_failure in [false, true] {
                let files = killed.after(power_failure);
                let context = format!("{:?}, operation {killed_after} of {operations}", job.format);
                run_once(&job, &input, &files).unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_same(&files, &expected, &context);
            }
        }
    }
}

#[test]
fn a_run_that_is_killed_again_and_again_continues_to_the_same_output() {
    for (job, input) in cases() {
        let expected = complete_files(&job, &input);
        // The smallest number of operations with which a run makes progress, whatever state it starts from.
        for operations in 8..14 {
            let mut files = MemoryFiles::failing_after(operations);
            let mut runs = 1;
            while run_once(&job, &input, &files).is_err() {
                files = files.after(runs % 2 == 0);
                files.state().operations_left = Some(operations);
                runs += 1;
                assert!(runs < 100, "{:?} makes no progress with {operations} operations", job.format);
            }
            assert_same(&files, &expected, &format!("{:?}, {runs} runs", job.format));
            assert!(runs > 1, "{operations} operations are a whole run");
        }
    }
}

#[test]
fn bytes_after_the_checkpoint_are_cut_off_and_missing_bytes_are_an_error() {
    for (job, input) in cases() {
        let expected = complete_files(&job, &input);
        let interrupted = MemoryFiles::default();
        let mut observer = TestObserver { cancel_after: Some(2), ..TestObserver::default() };
        let end = run_on(&job, &input, &interrupted, &mut observer).expect("cancelled");
        assert!(matches!(end, JobEnd::Cancelled { rows: 1.. }), "{end:?}");
        let length = interrupted.content(OutputFile::Partial).expect("a file").len();
        let bytes = length + 60;
        for length_found in 0..bytes {
            let files = interrupted.after(false);
            files.state().file(OutputFile::Partial).expect("a file").0.resize(length_found, 0xaa);
            let result = run_once(&job, &input, &files);
            if length_found < length {
                let error = result.expect_err("a changed file").to_string();
                assert!(error.contains("Partial has") && error.contains("--restart"), "{error}");
            } else {
                result.expect("a complete run");
                assert_same(&files, &expected, &format!("{:?}, {length_found} bytes", job.format));
            }
        }
    }
}

#[test]
fn a_cancelled_run_continues_and_reports_the_rows_before_it() {
    let (job, input) = (job(OutputFormat::JsonLines, false), input(false));
    let expected = complete_files(&job, &input);
    for windows in 0..5 {
        let files = MemoryFiles::default();
        let mut observer = TestObserver { cancel_after: Some(windows), ..TestObserver::default() };
        let end = run_on(&job, &input, &files, &mut observer).expect("a checkpoint");
        let JobEnd::Cancelled { rows } = end else { panic!("{windows} windows: {end:?}") };
        assert_eq!(files.content(OutputFile::Final), None);
        let mut observer = TestObserver::default();
        run_on(&job, &input, &files, &mut observer).expect("a complete run");
        assert_eq!(observer.seen.first().map(|progress| progress.rows_before), Some(rows));
        assert_eq!(observer.seen.last().map(|progress| progress.rows), Some(14));
        assert_same(&files, &expected, &format!("{windows} windows"));
    }
}

/// Returns the files of a run that was cancelled after two windows.
fn interrupted(job: &EmbedJob, input: &str) -> MemoryFiles {
    let files = MemoryFiles::default();
    let mut observer = TestObserver { cancel_after: Some(2), ..TestObserver::default() };
    run_on(job, input, &files, &mut observer).expect("cancelled");
    files
}

#[test]
fn a_changed_input_and_changed_options_are_errors_and_restart_is_the_fix() {
    let (mut job, input) = (job(OutputFormat::JsonLines, false), input(false));
    job.settings.exact.insert("--model".to_owned(), "a".to_owned());
    let error = |job: &EmbedJob, input: &str, files: &MemoryFiles| {
        let before = files.content(OutputFile::Partial);
        let error = run_once(job, input, files).expect_err("an error").to_string();
        assert_eq!(files.content(OutputFile::Partial), before, "all rows are complete");
        error
    };
    let files = interrupted(&job, &input);
    let changed = input.replace("text 1\"", "text one\"");
    assert!(error(&job, &changed, &files).contains("f.jsonl differ from those of the interrupted run;"));
    let shorter: Vec<&str> = input.lines().take(3).collect();
    assert!(error(&job, &shorter.join("\n"), &files).contains("only 3 rows; restore the input"));
    let mut other = job.clone();
    other.settings.exact.insert("--model".to_owned(), "b".to_owned());
    let message = error(&other, &input, &files);
    assert!(message.contains("--model was \"a\" and is \"b\"") && message.contains("--restart"), "{message}");

    other.restarts = true;
    run_once(&other, &changed, &files).expect("a complete run");
    assert_eq!(files.names(), BTreeSet::from([OutputFile::Final]));
}

#[test]
fn rows_that_are_appended_to_the_input_are_computed() {
    let (job, input) = (job(OutputFormat::Npy, false), input(false));
    let longer = format!("{input}\n\"one more\"\n");
    let files = interrupted(&job, &input);
    run_once(&job, &longer, &files).expect("a complete run");
    assert_same(&files, &complete_files(&job, &longer), "a longer input");
}

#[test]
fn an_existing_output_is_kept_unless_the_run_restarts() {
    let (mut job, input) = (job(OutputFormat::JsonLines, false), input(false));
    let files = complete_files(&job, &input);
    let error = run_once(&job, &input, &files).expect_err("an error").to_string();
    assert!(error.contains("Final exists; give --restart"), "{error}");
    job.restarts = true;
    run_once(&job, "\"other\"", &files).expect("a complete run");
    assert!(files.content(OutputFile::Final).is_some_and(|content| content.starts_with(b"{\"row\":0")));
}

#[test]
fn a_restart_that_is_killed_continues_without_the_option() {
    let (job, input) = (job(OutputFormat::Npy, false), input(false));
    let old = complete_files(&job, "\"old\"");
    let expected = complete_files(&job, &input);
    let restart = EmbedJob { restarts: true, ..job.clone() };
    for killed_after in 1..20 {
        let files = old.after(false);
        files.state().operations_left = Some(killed_after);
        if run_once(&restart, &input, &files).is_ok() {
            return;
        }
        let files = files.after(false);
        run_once(&job, &input, &files).unwrap_or_else(|error| panic!("{killed_after}: {error}"));
        assert_same(&files, &expected, &format!("operation {killed_after}"));
    }
}

#[test]
fn the_first_broken_row_stops_the_run_with_its_position_and_the_fixed_input_continues() {
    let (job, good) = (job(OutputFormat::Parquet, false), input(false));
    let files = MemoryFiles::default();
    let error = run_once(&job, &good.replace("\"text 9\"", "9"), &files).expect_err("an error").to_string();
    assert!(
        error.starts_with("f.jsonl:10: the field \"text\" is an integer") && error.contains("--skip-invalid")
    );
    let checkpoint = files.content(OutputFile::Checkpoint).expect("a checkpoint");
    let rows = Checkpoint::parse(&checkpoint).expect("a checkpoint").rows;
    assert!(rows > 0 && rows <= 9, "{rows}");
    run_once(&job, &good, &files).expect("the row was fixed");
    assert_same(&files, &complete_files(&job, &good), "fixed");

    let error =
        run_once(&job, &good.replace("text 9", "reject"), &MemoryFiles::default()).expect_err("an error");
    assert_eq!(
        error.to_string(),
        "f.jsonl:10: too long; fix the row, or give --skip-invalid to skip such rows"
    );
}

#[test]
fn a_failure_of_the_backend_and_a_full_disk_say_how_to_continue() {
    let (job, input) = (job(OutputFormat::JsonLines, false), input(false));
    let fields = FieldNames { text: "text".to_owned(), id: None };
    let mut reader = stream("f".to_owned(), Cursor::new(input.clone()), None, InputFormat::JsonLines, fields)
        .expect("a stream");
    let files = MemoryFiles::default();
    let mut backend = TestBackend { failure: Some("text 5".to_owned()) };
    let error = run(&job, &mut *reader, &mut backend, &mut files.clone(), &mut TestObserver::default());
    assert!(error.expect_err("an error").to_string().contains("failed at text 5"));
    run_once(&job, &input, &files).expect("a complete run");
    assert_same(&files, &complete_files(&job, &input), "after a failure");

    let error = run_once(&job, &input, &MemoryFiles::failing_after(10)).expect_err("an error").to_string();
    assert!(error.contains("free space and run the same command again"), "{error}");
}

#[test]
fn an_empty_input_gives_an_empty_output() {
    for format in FORMATS {
        let files = MemoryFiles::default();
        let end = run_once(&job(format, false), "\n\n", &files).expect("a complete run");
        assert_eq!(end, JobEnd::Complete { rows: 0, skipped: 0 });
        let content = files.content(OutputFile::Final).expect("an output");
        match format {
            OutputFormat::JsonLines => assert!(content.is_empty()),
            OutputFormat::Npy => assert_eq!(content, npy::header(0, DIMENSION)),
            OutputFormat::Parquet => assert!(content.ends_with(b"PAR1")),
        }
    }
}

#[test]
fn a_vector_with_a_number_that_is_not_finite_is_an_error() {
    struct NotFiniteBackend;
    impl EmbeddingBackend for NotFiniteBackend {
        fn embed(&mut self, texts: &[&str]) -> Result<WindowVectors, BackendError> {
            Ok(WindowVectors { values: vec![f32::NAN; texts.len() * DIMENSION], rejected: Vec::new() })
        }

        fn dimension(&self) -> usize {
            DIMENSION
        }
    }
    let fields = FieldNames { text: "text".to_owned(), id: None };
    let mut reader =
        stream("f".to_owned(), Cursor::new("\"a\""), None, InputFormat::JsonLines, fields).expect("a stream");
    let (job, mut files) = (job(OutputFormat::JsonLines, false), MemoryFiles::default());
    let error = run(&job, &mut *reader, &mut NotFiniteBackend, &mut files, &mut TestObserver::default())
        .expect_err("an error");
    assert!(error.to_string().starts_with("row 0: the vector has a number that is not finite"), "{error}");
}
