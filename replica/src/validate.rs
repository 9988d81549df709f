//! Whether a replica could load a model: everything that would keep it from starting, reported together.
//!
//! A start stops at the first thing that is wrong. Whoever prepares a model wants to know all of it, and before a region
//! waits for it. The parts are read as [`crate::server`] reads them; what depends on a part that is broken is left out.

use std::path::Path;

use replica_core::input::Readable;

use crate::cache::check_folder;
use crate::engine::cpu::CpuEngine;
use crate::model::{Checkpoint, ModelDir, ModelError};
use crate::tokenize::TextTokenizer;

/// Returns every problem of the model in this folder; none if a replica can load it.
pub fn problems(folder: &Path) -> Vec<String> {
    if let Err(error) = check_folder(folder) {
        return vec![error.to_string()];
    }
    let model = match ModelDir::open(folder) {
        Ok(model) => model,
        Err(error) => {
            // It stopped at the first file that it did not understand. The weights stand by themselves.
            let mut problems = told(error);
            let weights = Checkpoint::open(folder).err().into_iter().flat_map(told);
            problems.extend(weights);
            problems.dedup();
            return problems;
        }
    };
    let mut problems: Vec<String> =
        CpuEngine::check_weights(&model).err().into_iter().flat_map(told).collect();
    let readable =
        Readable { max_input_tokens: model.sentence.max_tokens, vocabulary: model.architecture.vocabulary };
    if let Err(error) = TextTokenizer::load(&model, readable, model.architecture.token_types) {
        problems.push(error.to_string());
    }
    problems
}

fn told(error: ModelError) -> Vec<String> {
    error.into_all().iter().map(ToString::to_string).collect()
}
