//! Validation of a model: every problem that would keep a replica from starting, reported together.
//!
//! Startup stops at the first problem. An operator who prepares a model needs all of them before deploying it. The
//! parts are read as [`crate::server`] reads them; checks that depend on a broken part are skipped.

use std::path::Path;

use replica_api::input::Readable;

use crate::cache::check_folder;
use crate::engine::cpu::CpuEngine;
use crate::model::{ModelCheckpoint, ModelDir, ModelError};
use crate::tokenize::TextTokenizer;

/// Returns every problem of the model in this folder; none if a replica can load it.
pub fn problems(folder: &Path) -> Vec<String> {
    if let Err(error) = check_folder(folder) {
        return vec![error.to_string()];
    }
    let model = match ModelDir::open(folder) {
        Ok(model) => model,
        Err(error) => {
            // Opening stopped at the first invalid file. The weights are checked independently of it.
            let mut problems = messages(error);
            let weights = ModelCheckpoint::open(folder).err().into_iter().flat_map(messages);
            problems.extend(weights);
            problems.dedup();
            return problems;
        }
    };
    let mut problems: Vec<String> =
        CpuEngine::check_weights(&model).err().into_iter().flat_map(messages).collect();
    let readable =
        Readable { max_input_tokens: model.sentence.max_tokens, vocabulary: model.architecture.vocabulary };
    if let Err(error) = TextTokenizer::load(&model, readable, model.architecture.token_types) {
        problems.push(error.to_string());
    }
    problems
}

fn messages(error: ModelError) -> Vec<String> {
    error.into_all().iter().map(ToString::to_string).collect()
}
