//! Small models of `families/`, and the results of transformers for them.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use replica::engine::cpu::{CpuEngine, CpuLoadError, CpuOptions, Isa};
use replica::engine::{BatchBuffer, Engine, Output};
use replica::model::ModelDir;
use replica_core::Precision;
use serde::Deserialize;

use super::compare::{difference, larger, size, within};

/// Tolerance. Both sides compute in f32 and sum in different orders, with some hundred terms per sum, which changes the
/// sixth digit. For the script that made the references, f32 is within 4e-6 of f64.
const TOLERANCE: f64 = 2e-5;

/// Returns the folder of the fixture with this name.
pub(crate) fn folder(name: &str) -> PathBuf {
    families().join(name)
}

/// Returns the folder of all fixtures.
pub(crate) fn families() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families")
}

/// Sequence of tokens.
#[derive(Clone, Deserialize)]
pub(crate) struct Case {
    pub(crate) ids: Vec<u32>,
    pub(crate) types: Vec<u32>,
}

/// Sequences, and their reference outputs.
pub(crate) struct Reference {
    pub(crate) cases: Vec<Case>,
    outputs: Vec<(String, Vec<Vec<f32>>)>,
}

#[derive(Deserialize)]
struct RawReference {
    cases: Vec<Case>,
    outputs: Vec<RawOutput>,
}

#[derive(Deserialize)]
struct RawOutput {
    name: String,
    width: usize,
}

impl Reference {
    pub(crate) fn read(name: &str) -> Reference {
        let text = fs::read_to_string(folder(name).join("golden.json")).unwrap();
        let raw: RawReference = serde_json::from_str(&text).unwrap();
        let file = fs::read(folder(name).join("golden.f32")).unwrap();
        let mut numbers = file.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let tokens: usize = raw.cases.iter().map(|case| case.ids.len()).sum();
        let outputs = raw
            .outputs
            .into_iter()
            .map(|RawOutput { name, width }| {
                let rows = if name == "tokens" { tokens } else { raw.cases.len() };
                let rows = (0..rows).map(|_| numbers.by_ref().take(width).collect()).collect();
                (name, rows)
            })
            .collect();
        assert_eq!(numbers.next(), None, "{name}: all numbers of the file belong to an output");
        Reference { cases: raw.cases, outputs }
    }

    /// Returns the reference rows of one output, by its name.
    pub(crate) fn rows(&self, output: &str) -> &[Vec<f32>] {
        let (_, rows) =
            self.outputs.iter().find(|(name, _)| name == output).expect("an output of the reference");
        rows
    }

    /// Compares an engine with the reference rows of this name.
    ///
    /// Differences are relative to the largest number of the row: all numbers of a row are sums of similar size and
    /// have similar errors, even if one of them is nearly zero. A classification head has too few numbers for that;
    /// there the differences are relative to the largest number of all sequences.
    pub(crate) fn check(&self, engine: &dyn Engine, output: &str) -> Result<(), String> {
        let kind = if output == "tokens" { Output::Tokens } else { Output::Pooled };
        let (found, expected) = (compute(engine, &self.cases, kind), self.rows(output));
        if found.len() != expected.len() || found[0].len() != expected[0].len() {
            return Err(format!(
                "{output}: {} rows of {}, not {} of {}",
                found.len(),
                found[0].len(),
                expected.len(),
                expected[0].len()
            ));
        }
        let largest = expected.iter().map(|row| size(row)).fold(0.0, larger);
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let size = if output == "logits" { largest } else { size(expected) };
            let difference = difference(found, expected, size);
            if !within(difference, TOLERANCE) {
                return Err(format!(
                    "{output}: row {index} of {} is off by {difference:e}",
                    self.rows(output).len()
                ));
            }
        }
        Ok(())
    }
}

/// Computes the rows of all sequences in one batch.
pub(crate) fn compute(engine: &dyn Engine, cases: &[Case], output: Output) -> Vec<Vec<f32>> {
    let mut buffer = BatchBuffer::default();
    for case in cases {
        // The reference of a model without types has zeros.
        let types = Some(case.types.as_slice()).filter(|_| engine.describe().token_types > 1);
        buffer.push(&case.ids, types);
    }
    let batch = buffer.batch();
    let description = engine.describe();
    let width = match output {
        Output::Pooled => description.width,
        Output::Tokens => description.hidden,
    };
    let mut out = vec![f32::NAN; description.numbers(&batch, output)];
    engine.compute(&batch, output, &mut out).unwrap();
    out.chunks_exact(width).map(<[f32]>::to_vec).collect()
}

/// Loads an engine for the model, without packed weights on disk.
pub(crate) fn engine(
    model: &ModelDir,
    precision: Precision,
    isa: Isa,
    threads: usize,
) -> Result<CpuEngine, CpuLoadError> {
    let threads = NonZeroUsize::new(threads).unwrap();
    CpuEngine::load(model, CpuOptions { threads, precision, packed: None, isa: Some(isa) })
}
