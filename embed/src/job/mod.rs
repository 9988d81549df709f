//! Job: reads texts, computes vectors and writes them, so that a run that was interrupted at any moment continues.
//!
//! The loop handles one window of rows after another: read, compute, append to the partial file, write a checkpoint. All
//! data of a window is on the disk before its checkpoint is, and a checkpoint replaces the one before atomically. So at any
//! moment the files are those of the last checkpoint, followed by bytes that the next run cuts off. When all rows are
//! done, a last checkpoint says so, and the final name appears by a rename.
//!
//! A window is computed as a whole because the order in a window is that of the batches: the texts are sorted by length.
//! It bounds the memory and the work that a kill can lose.

mod error;
#[cfg(test)]
mod tests;
mod window;

use std::io::{self, Read};

pub use error::JobError;
pub use window::WindowLimits;

use self::window::WindowReader;
use crate::backend::{EmbeddingBackend, WindowVectors};
use crate::checkpoint::{Checkpoint, JobSettings};
use crate::input::TextReader;
use crate::output::{OutputFormat, columnar, encode_error, npy};
use crate::row::{ParsedRow, RowProblem};
use crate::storage::{OutputFile, OutputStorage};

/// Job of one input and one output.
#[derive(Clone, Debug)]
pub struct EmbedJob {
    /// Name of the input, for messages.
    pub input: String,
    /// Format of the output.
    pub format: OutputFormat,
    /// Whether rows have ids.
    pub has_ids: bool,
    /// Options that decide the result.
    pub settings: JobSettings,
    /// Limits of a window.
    pub window: WindowLimits,
    /// Whether an interrupted run and an existing output are discarded.
    pub restarts: bool,
}

/// Progress after a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbedJobProgress {
    /// Rows that are done, those of earlier runs included.
    pub rows: u64,
    /// Rows that were done before this run.
    pub rows_before: u64,
    /// Rows that were skipped.
    pub skipped: u64,
    /// Share of the input that has been read, if it is known.
    pub fraction: Option<f64>,
}

/// Receiver of progress.
pub trait JobObserver {
    /// Is called once at the start and after each window.
    fn progress(&mut self, progress: EmbedJobProgress);

    /// Returns whether the job should stop at its next checkpoint.
    fn is_cancelled(&self) -> bool;
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobEnd {
    /// The output is complete.
    Complete {
        /// Rows of the input.
        rows: u64,
        /// Rows that were skipped.
        skipped: u64,
    },
    /// The run was cancelled; the next one continues.
    Cancelled {
        /// Rows that are done.
        rows: u64,
    },
}

/// Runs a job until its end or until the observer cancels it.
pub fn run(
    job: &EmbedJob,
    reader: &mut dyn TextReader,
    backend: &mut dyn EmbeddingBackend,
    storage: &mut dyn OutputStorage,
    observer: &mut dyn JobObserver,
) -> Result<JobEnd, JobError> {
    let mut checkpoint = begin(job, storage)?;
    if !checkpoint.is_complete {
        let mut windows = WindowReader::new(reader, job.window);
        let skipped = windows.skip(checkpoint.rows, || observer.is_cancelled())?;
        if observer.is_cancelled() {
            return Ok(JobEnd::Cancelled { rows: checkpoint.rows });
        }
        check_input(job, &checkpoint, skipped, &windows.digest.hex())?;
        let rows_before = checkpoint.rows;
        loop {
            let Checkpoint { rows, skipped, .. } = checkpoint;
            observer.progress(EmbedJobProgress { rows, rows_before, skipped, fraction: windows.fraction() });
            if observer.is_cancelled() {
                return Ok(JobEnd::Cancelled { rows });
            }
            let window = windows.next_window()?;
            if window.is_empty() {
                break;
            }
            let encoded = compute(job, &checkpoint, &window, backend)?;
            commit(&mut checkpoint, &encoded, &window, windows.digest.hex(), storage)?;
        }
        complete(job, &mut checkpoint, backend.dimension(), storage)?;
    }
    publish(job, &checkpoint, storage)?;
    Ok(JobEnd::Complete { rows: checkpoint.rows, skipped: checkpoint.skipped })
}

/// Adds the file to an error of the storage.
fn failed(storage: &dyn OutputStorage, file: OutputFile) -> impl Fn(io::Error) -> JobError + use<> {
    let file = storage.name(file);
    move |reason| JobError::Storage { file: file.clone(), reason }
}

/// Returns the checkpoint to continue from, with the files truncated to it.
fn begin(job: &EmbedJob, storage: &mut dyn OutputStorage) -> Result<Checkpoint, JobError> {
    let mut checkpoint = match read_checkpoint(storage)? {
        Some(checkpoint) if !job.restarts => checkpoint?,
        found => {
            let at_final = failed(storage, OutputFile::Final);
            if found.is_none()
                && !job.restarts
                && storage.length(OutputFile::Final).map_err(at_final)?.is_some()
            {
                return Err(JobError::OutputExists { output: storage.name(OutputFile::Final) });
            }
            let digest = crate::row::RowDigest::default().hex();
            let fresh = Checkpoint::new(job.settings.clone(), digest, job.format.reserved_bytes());
            // The checkpoint comes first: without it, the other files have no meaning.
            write_checkpoint(&fresh, storage)?;
            for file in [OutputFile::Converted, OutputFile::Errors, OutputFile::Partial] {
                storage.remove(file).map_err(failed(storage, file))?;
            }
            fresh
        }
    };
    let differences = job.settings.differences(&checkpoint.settings, checkpoint.skipped);
    if !differences.is_empty() {
        return Err(JobError::SettingsChanged { output: storage.name(OutputFile::Final), differences });
    }
    if !checkpoint.is_complete {
        open(&checkpoint, job, storage)?;
    }
    checkpoint.settings = job.settings.clone();
    Ok(checkpoint)
}

fn read_checkpoint(storage: &dyn OutputStorage) -> Result<Option<Result<Checkpoint, JobError>>, JobError> {
    let failed = failed(storage, OutputFile::Checkpoint);
    if storage.length(OutputFile::Checkpoint).map_err(&failed)?.is_none() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    storage
        .reader(OutputFile::Checkpoint)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(failed)?;
    let parsed = Checkpoint::parse(&bytes)
        .map_err(|reason| JobError::Checkpoint { checkpoint: storage.name(OutputFile::Checkpoint), reason });
    Ok(Some(parsed))
}

fn write_checkpoint(checkpoint: &Checkpoint, storage: &mut dyn OutputStorage) -> Result<(), JobError> {
    let content = checkpoint.to_json();
    storage.replace(OutputFile::Checkpoint, &content).map_err(failed(storage, OutputFile::Checkpoint))
}

/// Opens the files for appending, truncated to a checkpoint.
fn open(checkpoint: &Checkpoint, job: &EmbedJob, storage: &mut dyn OutputStorage) -> Result<(), JobError> {
    let mut files = vec![(OutputFile::Partial, checkpoint.partial_bytes)];
    if job.settings.skips_invalid {
        files.push((OutputFile::Errors, checkpoint.errors_bytes));
    } else {
        // That of a discarded run: no row of this one was skipped.
        storage.remove(OutputFile::Errors).map_err(failed(storage, OutputFile::Errors))?;
    }
    for (file, expected) in files {
        let failed = failed(storage, file);
        let found = storage.length(file).map_err(&failed)?.unwrap_or(0);
        // Before the first row, the reserved bytes may not have been written yet.
        if found < expected && checkpoint.rows > 0 {
            return Err(JobError::PartialChanged { file: storage.name(file), found, expected });
        }
        storage.truncate(file, expected).map_err(&failed)?;
    }
    Ok(())
}

fn check_input(job: &EmbedJob, checkpoint: &Checkpoint, skipped: u64, digest: &str) -> Result<(), JobError> {
    let changed =
        |detail: String| JobError::InputChanged { input: job.input.clone(), rows: checkpoint.rows, detail };
    if skipped < checkpoint.rows {
        return Err(changed(format!(": it has only {skipped} rows")));
    }
    if digest != checkpoint.digest {
        return Err(changed(String::new()));
    }
    Ok(())
}

/// Bytes of a window for the files.
struct EncodedWindow {
    output: Vec<u8>,
    errors: Vec<u8>,
    skipped: u64,
    dimension: usize,
}

/// Computes a window. `checkpoint` is the state before it.
fn compute(
    job: &EmbedJob,
    checkpoint: &Checkpoint,
    window: &[ParsedRow],
    backend: &mut dyn EmbeddingBackend,
) -> Result<EncodedWindow, JobError> {
    let mut problems: Vec<Option<RowProblem>> = window.iter().map(|row| row.content.clone().err()).collect();
    let invalid =
        |at: usize, problem: &RowProblem| invalid_row(job, checkpoint.rows + at as u64, &window[at], problem);
    if !job.settings.skips_invalid
        && let Some((at, problem)) =
            problems.iter().enumerate().find_map(|(at, found)| Some((at, found.as_ref()?)))
    {
        return Err(invalid(at, problem));
    }
    let valid: Vec<usize> = (0..window.len()).filter(|at| problems[*at].is_none()).collect();
    let texts: Vec<&str> =
        window.iter().filter_map(|row| Some(row.content.as_ref().ok()?.text.as_str())).collect();
    let WindowVectors { values, rejected } = if texts.is_empty() {
        WindowVectors::default()
    } else {
        let (first, last) = (checkpoint.rows, checkpoint.rows + window.len() as u64 - 1);
        backend.embed(&texts).map_err(|error| JobError::Backend { first, last, error })?
    };
    for text in rejected {
        let (at, problem) = (valid[text.index], RowProblem::new(text.reason));
        if !job.settings.skips_invalid {
            return Err(invalid(at, &problem));
        }
        problems[at] = Some(problem);
    }
    let dimension = backend.dimension();
    let mut vectors = values.chunks_exact(dimension);
    let mut encoded = EncodedWindow { output: Vec::new(), errors: Vec::new(), skipped: 0, dimension };
    for (at, (row, problem)) in window.iter().zip(&problems).enumerate() {
        let number = checkpoint.rows + at as u64;
        match (&row.content, problem) {
            (Ok(text), None) => {
                let vector = vectors.next().ok_or_else(|| JobError::InvalidVector {
                    row: number,
                    reason: format!(
                        "the computation returned fewer vectors of {dimension} numbers than texts"
                    ),
                })?;
                if !vector.iter().all(|value| value.is_finite()) {
                    let reason = "the vector has a number that is not finite".to_owned();
                    return Err(JobError::InvalidVector { row: number, reason });
                }
                job.format.encode(number, text.id.as_ref(), vector, &mut encoded.output);
            }
            (_, Some(RowProblem { column, reason })) => {
                encode_error(number, row.line, *column, reason, &mut encoded.errors);
                encoded.skipped += 1;
            }
            (Err(_), None) => unreachable!("a row without content has a problem"),
        }
    }
    Ok(encoded)
}

fn invalid_row(job: &EmbedJob, number: u64, row: &ParsedRow, problem: &RowProblem) -> JobError {
    let RowProblem { column, reason } = problem;
    let position = match (row.line, column) {
        (Some(line), Some(column)) => format!("{}:{line}:{column}", job.input),
        (Some(line), None) => format!("{}:{line}", job.input),
        (None, _) => format!("{}: row {number}", job.input),
    };
    JobError::InvalidRow { position, reason: reason.clone() }
}

/// Stores a window and the checkpoint after it.
fn commit(
    checkpoint: &mut Checkpoint,
    window: &EncodedWindow,
    rows: &[ParsedRow],
    digest: String,
    storage: &mut dyn OutputStorage,
) -> Result<(), JobError> {
    let EncodedWindow { output, errors, skipped, dimension } = window;
    for (file, bytes) in [(OutputFile::Partial, output), (OutputFile::Errors, errors)] {
        if !bytes.is_empty() {
            let stored = storage.append(file, bytes).and_then(|()| storage.sync(file));
            stored.map_err(failed(storage, file))?;
        }
    }
    checkpoint.rows += rows.len() as u64;
    checkpoint.skipped += skipped;
    checkpoint.digest = digest;
    checkpoint.dimension = Some(*dimension);
    checkpoint.partial_bytes += output.len() as u64;
    checkpoint.errors_bytes += errors.len() as u64;
    write_checkpoint(checkpoint, storage)
}

/// Finishes the partial file, and marks the checkpoint as complete.
fn complete(
    job: &EmbedJob,
    checkpoint: &mut Checkpoint,
    dimension: usize,
    storage: &mut dyn OutputStorage,
) -> Result<(), JobError> {
    checkpoint.dimension = Some(dimension);
    if job.format == OutputFormat::Npy {
        let header = npy::header(checkpoint.rows_written(), dimension);
        let written = storage.write_at(OutputFile::Partial, 0, &header);
        written.map_err(failed(storage, OutputFile::Partial))?;
    }
    storage.sync(OutputFile::Partial).map_err(failed(storage, OutputFile::Partial))?;
    checkpoint.is_complete = true;
    write_checkpoint(checkpoint, storage)
}

/// Makes a complete partial file the output, and removes the checkpoint.
fn publish(job: &EmbedJob, checkpoint: &Checkpoint, storage: &mut dyn OutputStorage) -> Result<(), JobError> {
    let at_partial = failed(storage, OutputFile::Partial);
    let found = storage.length(OutputFile::Partial).map_err(&at_partial)?;
    let expected = checkpoint.partial_bytes;
    // Without a partial file, an earlier run was interrupted after the rename.
    if let Some(found) = found {
        if found != expected {
            let file = storage.name(OutputFile::Partial);
            return Err(JobError::PartialChanged { file, found, expected });
        }
        if job.format == OutputFormat::Parquet {
            let dimension = checkpoint.dimension.unwrap_or(0);
            let at_converted = failed(storage, OutputFile::Converted);
            let records = storage.reader(OutputFile::Partial).map_err(&at_partial)?;
            let converted = storage.create(OutputFile::Converted).map_err(&at_converted)?;
            columnar::convert(records, converted, dimension, job.has_ids)
                .map_err(columnar::into_io)
                .map_err(&at_converted)?;
            let at_final = failed(storage, OutputFile::Final);
            storage.publish(OutputFile::Converted, OutputFile::Final).map_err(at_final)?;
            storage.remove(OutputFile::Partial).map_err(&at_partial)?;
        } else {
            let at_final = failed(storage, OutputFile::Final);
            storage.publish(OutputFile::Partial, OutputFile::Final).map_err(at_final)?;
        }
    } else if storage.length(OutputFile::Final).map_err(failed(storage, OutputFile::Final))?.is_none() {
        let file = storage.name(OutputFile::Partial);
        return Err(JobError::PartialChanged { file, found: 0, expected });
    }
    storage.remove(OutputFile::Checkpoint).map_err(failed(storage, OutputFile::Checkpoint))
}
